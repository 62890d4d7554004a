import pytest
import torch

from predictors.inputs import FeatureSpec, checked_layers, extract, narrowed
from runtime.errors import UserError

HIDDEN = torch.arange(4 * 2 * 3, dtype=torch.float32).view(4, 2, 3)  # [n_layers + 1, n, H]


def test_layers_are_concatenated_in_order_then_the_embedding() -> None:
    embedding = torch.full((2, 2), -1.0)
    rows = extract(HIDDEN[-2:], FeatureSpec("target", [-2, -1], embedding=True), embedding)
    assert torch.equal(rows, torch.cat([HIDDEN[2], HIDDEN[3], embedding], dim=1))


def test_values_have_the_precision_of_the_harvested_files() -> None:
    hidden = torch.randn(2, 5, 7)
    rows = extract(hidden[-1:], FeatureSpec("draft", [-1]))
    assert rows.dtype == torch.float32
    assert torch.equal(rows, hidden[-1].bfloat16().float())


def test_bfloat16_and_float32_models_mix() -> None:
    rows = extract(
        HIDDEN[-1:].bfloat16(), FeatureSpec("target", [-1], embedding=True), torch.ones(2, 3)
    )
    assert rows.dtype == torch.float32 and rows.shape == (2, 6)


@pytest.mark.parametrize("embedding, expected", [(False, 12), (True, 17)])
def test_dim(embedding: bool, expected: int) -> None:
    assert (
        FeatureSpec("target", [-2, -1], embedding).dim(hidden_size=6, embedding_size=5) == expected
    )


def test_round_trip() -> None:
    spec = FeatureSpec("target", [-4, -1], embedding=True)
    assert FeatureSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    "arguments, key",
    [(("both", [-1]), "side"), (("draft", [0]), "layers"), (("draft", []), "layers")],
)
def test_bad_specs_are_refused(arguments: tuple[str, list[int]], key: str) -> None:
    with pytest.raises(UserError, match=f"features.{key}"):
        FeatureSpec(*arguments)


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("layers", [[-3, -1], [-2], [-3, -2, -1]])
def test_harvested_columns_of_some_layers_are_what_decoding_extracts(
    layers: list[int], embedding: bool
) -> None:
    hidden, token = torch.randn(4, 2, 3), torch.randn(2, 3)
    harvested, wanted = (
        FeatureSpec("target", [-3, -2, -1], embedding),
        FeatureSpec("target", layers, embedding),
    )
    rows = extract(hidden[-3:], harvested, token)
    assert torch.equal(narrowed(rows, harvested, wanted), extract(hidden[layers], wanted, token))
    rounds = rows[:, None].expand(2, 5, -1)
    assert narrowed(rounds, harvested, wanted).shape == (2, 5, wanted.dim(3, 3))


@pytest.mark.parametrize(
    "wanted",
    [FeatureSpec("target", [-4]), FeatureSpec("target", [-1, -2]), FeatureSpec("draft", [-1])],
)
def test_what_was_not_harvested_is_refused(wanted: FeatureSpec) -> None:
    with pytest.raises(
        UserError, match=r"^predictor\.layers: .*not some of the harvested layers \[-2, -1\]"
    ):
        narrowed(torch.zeros(1, 4), FeatureSpec("target", [-2, -1]), wanted)


@pytest.mark.parametrize("layers", [3, "-1", [0], [True], [-1.0]])
def test_layers_that_are_none_are_refused(layers: object) -> None:
    with pytest.raises(UserError, match=r"^predictor\.layers: .*are no layers"):
        checked_layers(layers)
