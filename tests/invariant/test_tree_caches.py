"""Real models under every draft, and under lookahead: what they return is what a fresh cache gives,
whatever was kept and dropped before."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from tests.contract.engines import STRUCTURES, THREE_WORDS, Size, engine
from tests.helpers.models.tiny_pair import tiny_pair

ONE_EACH = {
    case.builds: case
    for (case,) in (param.values for param in THREE_WORDS)
    if case.rule in ("rrs", "rrsw") or case.builds == "reranked"
}
PROMPT = [3, 4, 5, 3, 4]
VALUES = {"branch_point": {"gamma_max": 1}}  # short enough for its open leaves to be reached


class WatchedEngine(SerialEngine):
    """Compares every row that draft and target were run on with the same path in a cache of its
    own."""

    def _draft(self, context, watch, sampler):
        assert self.pair.target.length == len(context.committed) - 1
        tree, draft, output = super()._draft(context, watch, sampler)
        for row in range(draft.closed + 1):
            text = torch.tensor([*context.committed.tolist(), *draft.path(row)])
            torch.testing.assert_close(output.logits[row], uncached(self.pair.target, text))
            drawn = row in draft.parent and draft.q[row].max() < 1  # copied tokens are point masses
            if self.structure.uses_draft and drawn:
                q = self.draft_warp.probs(uncached(self.pair.draft, text))
                torch.testing.assert_close(draft.q[row], q)
        return tree, draft, output


def uncached(lm: CachedLM, text: torch.Tensor) -> torch.Tensor:
    """[V], by a cache that has seen nothing else."""
    return CachedLM(lm.model).forward(text, logits="last").logits[-1]


@pytest.fixture(scope="module")
def llamas() -> ModelPair:
    return tiny_pair()


@pytest.mark.parametrize("warp", [Warp(0.0), Warp()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("builds", ONE_EACH)
@pytest.mark.few(6)
def test_caches_of_a_real_model_follow_every_draft(
    builds: str, warp: Warp, llamas: ModelPair, tmp_path: Path
) -> None:
    """Drafts of their YAML's size (but for `VALUES`), several rounds; a greedy decode is the
    autoregressive one."""
    assert set(ONE_EACH) == set(STRUCTURES)
    case = ONE_EACH[builds]._replace(size=Size(32, 20, VALUES.get(builds, {})))
    parts = engine(llamas, case, tmp_path)
    watched = WatchedEngine(llamas, parts.structure, parts.stop, parts.verifier, warp, Warp())
    trace = watched.decode(PROMPT, 20, Sampler.seeded(1))
    assert len(trace.tokens) == 20 and llamas.target.length == len(PROMPT) + 19
    if builds == "branch_point":
        taken = [len(round_.tokens) == round_.accepted for round_ in trace.rounds]
        assert any(taken), "no open leaf was accepted"
    if warp.temperature == 0:
        plain = AutoregressiveEngine(llamas, warp).decode(PROMPT, 20, Sampler.seeded(0))
        assert trace.tokens == plain.tokens
        assert sum(round_.accepted for round_ in trace.rounds) > 0


SETTINGS = [(1, 2, 1), (5, 2, 3), (1, 4, 2), (4, 4, 4), (7, 5, 7)]


class WatchedLookahead(LookaheadEngine):
    """Compares the logits of draft and window with a plain forward of the committed text and each
    row's path."""

    def _round(self, request, *rest):
        target, forward = self.pair.target, self.pair.target.forward
        assert target.length == len(request.committed) - 1
        committed = request.committed[:-1].tolist()

        def watched(tokens, parents, logits):
            output, texts = forward(tokens, parents, logits=logits), list[list[int]]()
            for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
                texts.append([*(committed if parent < 0 else texts[parent]), token])
            for row, following in zip(logits, output.logits, strict=True):
                plain = uncached(target, torch.tensor(texts[row]))
                torch.testing.assert_close(following, plain, atol=1e-4, rtol=1e-4)
            return output

        with patch.object(target, "forward", watched):
            return super()._round(request, *rest)


@pytest.mark.parametrize("warp", [Warp(0.0), Warp()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.few(3)
def test_rows_equal_plain_forwards(
    settings: tuple[int, int, int], warp: Warp, llamas: ModelPair
) -> None:
    engine = WatchedLookahead(llamas, *settings, prompt_pool=True, warp=warp)
    before = llamas.draft.forwards
    trace = engine.decode(PROMPT, 24, Sampler.seeded(1))
    assert len(trace.tokens) == 24 and llamas.target.length == len(PROMPT) + 23
    assert llamas.target.forwards == len(trace.rounds) + 1 and llamas.draft.forwards == before
    plain = AutoregressiveEngine(llamas, warp).decode(PROMPT, 24, Sampler.seeded(0))
    assert warp.temperature or trace.tokens == plain.tokens


@pytest.mark.parametrize("prompt_pool", [True, False])
def test_greedy_to_the_end_of_the_context(prompt_pool: bool, llamas: ModelPair) -> None:
    greedy = Warp(0.0)
    expected = AutoregressiveEngine(llamas, greedy).decode(PROMPT, 200, Sampler.seeded(0))
    engine = LookaheadEngine(llamas, 7, 5, 7, prompt_pool, greedy)
    trace = engine.decode(PROMPT, 200, Sampler.seeded(0))
    assert trace.tokens == expected.tokens
    assert len(PROMPT) + len(trace.tokens) == llamas.target.max_length
    assert sum(round_.accepted for round_ in trace.rounds) > 10
