import pytest
import torch

from predictors.errors import UserError
from predictors.features import FeatureSpec, extract

HIDDEN = torch.arange(4 * 2 * 3, dtype=torch.float32).view(4, 2, 3)  # [n_layers + 1, n, H]


def test_layers_are_concatenated_in_order_then_the_embedding() -> None:
    embedding = torch.full((2, 2), -1.0)
    rows = extract(HIDDEN, FeatureSpec("target", [-2, -1], embedding=True), embedding)
    assert torch.equal(rows, torch.cat([HIDDEN[2], HIDDEN[3], embedding], dim=1))


def test_values_have_the_precision_of_the_harvested_files() -> None:
    hidden = torch.randn(2, 5, 7)
    rows = extract(hidden, FeatureSpec("draft", [-1]))
    assert rows.dtype == torch.float32
    assert torch.equal(rows, hidden[-1].bfloat16().float())


def test_bfloat16_and_float32_models_mix() -> None:
    rows = extract(HIDDEN.bfloat16(), FeatureSpec("target", [-1], embedding=True), torch.ones(2, 3))
    assert rows.dtype == torch.float32 and rows.shape == (2, 6)


@pytest.mark.parametrize("embedding, expected", [(False, 12), (True, 17)])
def test_dim(embedding: bool, expected: int) -> None:
    assert FeatureSpec("target", [-2, -1], embedding).dim(hidden_size=6, embedding_size=5) == expected


def test_round_trip() -> None:
    spec = FeatureSpec("target", [-4, -1], embedding=True)
    assert FeatureSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    "arguments, key", [(("both", [-1]), "side"), (("draft", [0]), "layers"), (("draft", []), "layers")]
)
def test_bad_specs_are_refused(arguments: tuple[str, list[int]], key: str) -> None:
    with pytest.raises(UserError, match=f"features.{key}"):
        FeatureSpec(*arguments)


def test_more_layers_than_the_model_has_are_refused() -> None:
    with pytest.raises(UserError, match="features.layers.*4 hidden states"):
        extract(HIDDEN, FeatureSpec("draft", [-5]))
