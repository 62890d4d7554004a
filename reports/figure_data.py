"""What figures are drawn from, read from harvests and checkpoints."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from data_gen.samples import of_prompts, records_of
from data_gen.storage.chunks import MANIFEST
from data_gen.storage.dataset import read_records, read_responses
from predictors.base import Predictor, Records, load_predictor
from predictors.calibration import balanced
from predictors.hrad import HRAD
from predictors.inputs import FeatureSpec
from predictors.training.trainer import logits_in_chunks
from reports.artifacts import Checkpoint, Harvest
from reports.figure import Missing
from reports.figures.calibration import Predicted
from reports.figures.confidence import DraftTokens, merged
from reports.figures.heads import POINTS, Activations, Aged
from reports.figures.theory import Rounds
from runtime.files import file_hash

DRAWN = ("known", "drafted", "accepted", "draft_q", "draft_max_q", "draft_entropy", "accept_prob")
AGES = (0, 1, 2, 3, 4, 6, 8)  # positions


def by_pair(harvests: Sequence[Harvest]) -> list[list[Harvest]]:
    """Harvests of one pair together, whatever it was called."""
    found: dict[str, list[Harvest]] = {}
    for harvest in harvests:
        found.setdefault(models(harvest.manifest["pair"]), []).append(harvest)
    return list(found.values())


def of_pair(pair: Mapping[str, str], harvests: Sequence[Harvest]) -> list[Harvest]:
    return [harvest for harvest in harvests if models(harvest.manifest["pair"]) == models(pair)]


def models(pair: Mapping[str, str]) -> str:
    """Of a pair, whatever it is called."""
    return json.dumps({**pair, "name": ""}, sort_keys=True)


def draft_tokens(harvests: Sequence[Harvest]) -> list[DraftTokens]:
    """The draft tokens that a verdict was given on, by dataset and distributions."""
    return merged(tokens for harvest in harvests for tokens in _draft_tokens(harvest))


def _draft_tokens(harvest: Harvest) -> Iterator[DraftTokens]:
    records = read_records(harvest.folder, "rounds", "all", DRAWN)
    warps = harvest.manifest["warp"], harvest.manifest["draft_warp"]
    target, draft = (float(warp["temperature"]) for warp in warps)
    pair, names = (
        harvest.manifest["pair"]["name"],
        [response["dataset"] for response in read_responses(harvest.folder, "all")],
    )
    kept, accepted = verdicts(records)
    columns = {
        "q": records["draft_q" if draft else "draft_max_q"],
        "max_q": records["draft_max_q"],
        "entropy": records["draft_entropy"],
        "accept": records["accept_prob"],
        "accepted": accepted,
        "group": records["group"][:, None].expand_as(kept),
    }
    for name in dict.fromkeys(names):
        of_dataset = torch.tensor([other == name for other in names])
        rows = kept & of_dataset[records["group"]][:, None]
        yield DraftTokens(
            pair,
            name,
            target,
            draft,
            **{column: values[rows] for column, values in columns.items()},
        )


def verdicts(records: Records) -> tuple[torch.Tensor, torch.Tensor]:
    """[rounds, gamma] bool each: tokens a verdict was given on, and those of them that were
    accepted."""
    depth = torch.arange(records["accept_prob"].shape[1])
    accepted = depth < records["accepted"][:, None]
    most = torch.minimum(records["drafted"], records["known"])[:, None]
    return (depth <= records["accepted"][:, None]) & (depth < most), accepted


def rounds(harvests: Sequence[Harvest]) -> dict[float, list[Rounds]]:
    """Accepted lengths by the target's temperature."""
    found: dict[float, list[Rounds]] = {}
    for harvest in harvests:
        records = read_records(harvest.folder, "rounds", "all", ("known", "drafted", "accepted"))
        temperature = float(harvest.manifest["warp"]["temperature"])
        most = torch.minimum(records["drafted"], records["known"])
        found.setdefault(temperature, []).append(
            Rounds(temperature, records["accepted"], most, records["group"])
        )
    return found


# Checkpoints on harvests --------------------------------------------------------------------------


def predicted(checkpoint: Checkpoint, harvests: Sequence[Harvest]) -> list[Predicted]:
    """What a checkpoint says of every harvest it fits, of prompts it was not trained on; that of
    its training first.

    Empty where the harvest it was trained on is not among them: nothing says then which prompts it
    has seen. Harvests of other pairs, distributions or features are left out, and those that stored
    no features."""
    predictor, fitting = _on_harvests(checkpoint, harvests)
    return [_predicted(checkpoint, predictor, harvest, fitting[0]) for harvest in fitting]


def _on_harvests(
    checkpoint: Checkpoint, harvests: Sequence[Harvest]
) -> tuple[Predictor, list[Harvest]]:
    """The predictor and the harvests it fits, that of its training first."""
    predictor, home = load_predictor(checkpoint.folder, key="run"), trained_on(checkpoint, harvests)
    if home is None or not home.manifest["features_stored"]:
        return predictor, []
    return predictor, [
        home,
        *(other for other in harvests if other is not home and _fits(other, home, predictor)),
    ]


def trained_on(checkpoint: Checkpoint, harvests: Sequence[Harvest]) -> Harvest | None:
    wanted = checkpoint.config["provenance"]["data"]["sha256"]
    return next(
        (harvest for harvest in harvests if file_hash(harvest.folder / MANIFEST) == wanted), None
    )


def _fits(other: Harvest, home: Harvest, predictor: Predictor) -> bool:
    """Whether it differs in its prompts alone, and holds some that `home` does not."""
    theirs, ours = other.manifest, home.manifest
    keys = ("pair", "warp", "draft_warp", "features")
    alike = all({**theirs[key], "name": ""} == {**ours[key], "name": ""} for key in keys)
    whole = theirs["features_stored"] and (predictor.gamma or 0) <= theirs["gamma"]
    return alike and whole and bool(unseen(other, home).any())


def _predicted(
    checkpoint: Checkpoint, predictor: Predictor, harvest: Harvest, home: Harvest
) -> Predicted:
    samples = held_out(predictor, harvest, home)
    logits = logits_in_chunks(predictor.head, samples["features"])
    return Predicted(
        checkpoint=checkpoint.folder.name,
        predictor=predictor.name,
        temperature=float(home.manifest["warp"]["temperature"]),
        trained_on=home.name,
        dataset=harvest.name,
        in_domain=harvest is home,
        as_trained=torch.softmax(logits, -1),
        calibrated=predictor.calibration.apply(logits),
        targets=predictor.targets(samples),
        group=samples["group"],
    )


def held_out(predictor: Predictor, harvest: Harvest, home: Harvest) -> Records:
    """Samples of the test split of the harvest trained on, or of those prompts of another one that
    it does not hold."""
    return predictor.samples(_held_out(predictor, harvest, home, predictor.kind, predictor.columns))


def _held_out(
    predictor: Predictor, harvest: Harvest, home: Harvest, kind: str, columns: Collection[str]
) -> Records:
    if harvest is home:
        return records_of(home.folder, predictor, kind, "test", columns, None)
    return of_prompts(
        records_of(harvest.folder, predictor, kind, "all", columns, None), unseen(harvest, home)
    )


def unseen(harvest: Harvest, home: Harvest) -> torch.Tensor:
    """[prompts] bool: those that `home` does not hold."""
    known = {tuple(response["prompt_tokens"]) for response in read_responses(home.folder, "all")}
    found = [
        tuple(response["prompt_tokens"]) not in known
        for response in read_responses(harvest.folder, "all")
    ]
    return torch.tensor(found)


# H-RAD --------------------------------------------------------------------------------------------


def activations(harvest: Harvest, gamma: int = 3) -> Activations:
    """Features of `POINTS` rounds, with and without the embedding of the next token.

    Raises Missing where the harvest stored none, or none with an embedding.
    """
    spec = FeatureSpec.from_dict(harvest.manifest["features"]["hrad"])
    if not (
        harvest.manifest["features_stored"]
        and spec.embedding
        and harvest.manifest["gamma"] >= gamma
    ):
        raise Missing(
            "needs a harvest with stored features, the embedding among them: python"
            " scripts/gen_data.py"
        )
    predictor = HRAD(gamma=gamma)
    samples = predictor.samples(read_records(harvest.folder, "rounds", "all", predictor.columns))
    order = torch.randperm(len(samples["group"]), generator=torch.Generator().manual_seed(0))[
        :POINTS
    ]
    hybrid = samples["features"][order].float()
    explicit = hybrid.unflatten(1, (len(spec.layers) + 1, -1))[:, :-1].flatten(1)
    return Activations(
        harvest.name,
        gamma,
        {"explicit": explicit, "hybrid": hybrid},
        samples["label"][order],
        samples["group"][order],
    )


def aged(checkpoint: Checkpoint, harvests: Sequence[Harvest]) -> list[Aged]:
    """What an H-RAD checkpoint says of the same rounds of each harvest with one at every position,
    from features of `AGES`; of prompts as in `predicted`."""
    if checkpoint.config["predictor"] != HRAD.name:
        return []
    predictor, fitting = _on_harvests(checkpoint, harvests)
    return [
        _aged(checkpoint, predictor, harvest, fitting[0])
        for harvest in fitting
        if harvest.manifest["anchors"]["stride"] == 1
    ]


def _aged(checkpoint: Checkpoint, predictor: Predictor, harvest: Harvest, home: Harvest) -> Aged:
    records = _held_out(predictor, harvest, home, "rounds", (*predictor.columns, "anchor"))
    gamma = checkpoint.config["gamma"]
    kept = ((records["anchor"] >= max(AGES)) & (records["known"] >= gamma)).nonzero()[:, 0]
    all_probs = predictor.calibration.apply(logits_in_chunks(predictor.head, records["features"]))
    probs = {
        age: all_probs[kept - age] for age in AGES
    }  # rounds of a prompt lie one after the other
    log_prior = predictor.calibration.log_prior
    return Aged(
        checkpoint=checkpoint.folder.name,
        dataset=harvest.name,
        gamma=gamma,
        probs=probs,
        decided={age: balanced(found, log_prior).argmax(1) for age, found in probs.items()},
        targets=predictor.targets(
            predictor.samples({name: values[kept] for name, values in records.items()})
        ),
        group=records["group"][kept],
    )
