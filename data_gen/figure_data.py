"""What figures are drawn from, read from harvests and checkpoints."""

from collections.abc import Iterator, Sequence

import torch

from data_gen.dataset import read_records, read_responses
from decoding.figures.confidence import DraftTokens
from decoding.figures.evidence import Harvest
from decoding.figures.theory import Rounds
from predictors.base import Records

DRAWN = ("known", "drafted", "accepted", "draft_q", "draft_max_q", "draft_entropy", "accept_prob")


def draft_tokens(harvests: Sequence[Harvest]) -> list[DraftTokens]:
    """The draft tokens of every dataset of every harvest that a verdict was given on."""
    return [tokens for harvest in harvests for tokens in _draft_tokens(harvest)]


def _draft_tokens(harvest: Harvest) -> Iterator[DraftTokens]:
    records = read_records(harvest.folder, "rounds", "all", DRAWN)
    warps = harvest.manifest["warp"], harvest.manifest["draft_warp"]
    target, draft = (float(warp["temperature"]) for warp in warps)
    names = [response["dataset"] for response in read_responses(harvest.folder, "all")]
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
        yield DraftTokens(name, target, draft, **{column: values[rows] for column, values in columns.items()})


def verdicts(records: Records) -> tuple[torch.Tensor, torch.Tensor]:
    """[rounds, gamma] bool each: tokens a verdict was given on, and those of them that were accepted."""
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
        found.setdefault(temperature, []).append(Rounds(temperature, records["accepted"], most, records["group"]))
    return found
