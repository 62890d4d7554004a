"""The verifiers under test: one per YAML, and the second rule `parallel` can be set to. Two YAMLs
that say the same are one verifier under two names, and enumerated once. What is known to be biased
is not among them; it says so itself and is refused by default."""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from decoding.draft import Draft, Verdict
from decoding.interfaces import Verifier
from decoding.sampling import Sampler

CONF = Path(__file__).parents[2] / "conf" / "verifier"


def load(name: str, **values: str | bool) -> Verifier:
    return instantiate(OmegaConf.load(CONF / f"{name}.yaml"), **values)


LOSSY = ("hsd_released",)
CONFIGS = {
    path.stem: OmegaConf.load(path)
    for path in sorted(CONF.glob("*.yaml"))
    if path.stem not in LOSSY
}
FIRST = {
    name: next(other for other in CONFIGS if CONFIGS[other] == config)
    for name, config in CONFIGS.items()
}
RULES: dict[str, Verifier] = {name: load(name) for name, first in FIRST.items() if name == first}
RULES["parallel_token"] = load("parallel", rule="token")


def outcome(draft: Draft, verdict: Verdict) -> tuple[int, int | None]:
    """Where the path ended and what followed; checks the bookkeeping on the way."""
    follows = verdict.token is not None
    assert verdict.path == draft.path(verdict.row)
    assert len(verdict.emitted) == verdict.accepted + follows
    assert follows == (verdict.row <= draft.closed)
    return verdict.row, verdict.token


def walked(verifier: Verifier, draft: Draft, p: Tensor, sampler: Sampler) -> tuple[int, int | None]:
    return outcome(draft, verifier.verify(draft, p, sampler))
