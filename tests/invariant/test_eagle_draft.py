"""A draft that reads its target's states: what decodes is what was trained, whatever was kept and
dropped before."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from decoding.draft import RoundContext
from decoding.draft_tree import DraftTree
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.request import prefill
from decoding.engines.serial import SerialEngine
from decoding.interfaces import DraftStructure, Verifier
from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.draft import EagleDraft, read_maps
from decoding.models.loading import ModelPair
from decoding.picking import Draw
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.trace import Stopwatch
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from evaluation.baselines.generate import assistant_of
from evaluation.expect import Plan, Text, along
from evaluation.replay.check import draft_logits
from evaluation.speedup_bound import match
from pairs.chats import Chat, ChatPool, save_chats
from pairs.eagle import Maps, unrolled
from runtime.errors import UserError
from tests.helpers.models.tiny_pair import random_words as words
from tests.helpers.models.tiny_pair import tiny_models, tiny_pair, tiny_tokenizer

LAYERS = (1, 3)


def maps(scale: float = 0.3) -> Maps:
    torch.manual_seed(5)
    found = Maps(LAYERS, 24, 24).double()
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return found


def eagle_pair() -> ModelPair:
    models = tiny_models()
    target = CachedLM(models[0])
    draft = EagleDraft(models[1], target, maps().finished(torch.float64))
    return ModelPair(target, draft, tiny_tokenizer(), "tiny", (0,))


@torch.no_grad()
def test_rows_are_those_of_the_training() -> None:
    """Seven tokens verified, three drafted: steps 1 to 4 of the unrolled draft."""
    pair, text = eagle_pair(), words(10, 3)
    pair.target.forward(text)
    steps = unrolled(pair.draft.model, maps(), text[None], pair.target.states[None, :10], 4)
    pair.target.crop(6)
    found = [pair.draft.forward(text[:7], hidden=(-1,)).hidden[-1]]
    for drafted, row in enumerate(range(7, 10)):
        asked = {"extend": drafted > 0, "hidden": (-1,)}
        output = pair.draft.forward(text[row, None], torch.tensor([drafted - 1]), **asked)
        found.append(output.hidden[-1])
    expected = [steps[0][0, :7], *(steps[step][0, [row]] for step, row in ((1, 7), (2, 8), (3, 9)))]
    for ours, theirs in zip(found, expected, strict=True):  # whose norms are float32
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_match_by_depth_is_that_of_drafting() -> None:
    """P(response's token is the draft's) after 0, 1, 2 drafted tokens, from every place, drafting
    one after another."""
    pair, prompt, response = eagle_pair(), torch.tensor([3, 4, 5]), words(9, 3).tolist()
    found = match(pair, prompt, response, Warp(), Warp(0.7), longest=3).chance
    text = torch.cat([prompt, torch.tensor(response)])
    pair.target.reset()
    p = pair.target.forward(text).logits.softmax(-1)
    for place in range(len(response)):
        known = len(prompt) + place
        for lm in (pair.target, pair.draft):
            lm.reset()
        pair.target.forward(text[: known - 1])
        logits = pair.draft.forward(text[:known]).logits[-1]
        for depth in range(min(3, len(response) - place)):
            token = int(text[known + depth])
            expected = Warp(0.7).probs(logits[None])[0, token] / p[known + depth - 1, token]
            assert float(found[depth, place + depth]) == pytest.approx(
                min(1.0, float(expected)), rel=1e-4
            )
            drafted, parent = text[known + depth, None], torch.tensor([depth - 1])
            logits = pair.draft.forward(drafted, parent, extend=depth > 0).logits[-1]
    assert found.shape == (3, 9) and not torch.allclose(found[0, 2:], found[1, 2:])


class WatchedEngine(SerialEngine):
    """After each round: the target's states are those of a fresh forward, the draft holds verified
    rows only."""

    def _context(self, request, round_, hidden):
        target, committed = self.pair.target, request.committed
        fresh = CachedLM(target.model)
        fresh.record(LAYERS)
        if len(committed) > 1:
            fresh.forward(committed[:-1])
        torch.testing.assert_close(target.states[: target.length], fresh.states[: target.length])
        assert self.pair.draft.length <= len(committed) - 1
        return super()._context(request, round_, hidden)


SHAPES = [(Chain(3), TokenVerifier()), (DySpecHeap(6), RrswVerifier())]


@pytest.mark.parametrize(("builds", "verifier"), SHAPES)
def test_greedy_output_is_the_targets_and_states_follow_every_roll_back(
    builds: DraftStructure, verifier: Verifier
) -> None:
    pair = eagle_pair()
    for seed in range(3):
        prompt = words(1 + 3 * seed, seed)
        engine = WatchedEngine(pair, builds, Never(), verifier, Warp(0.0), Warp())
        found = engine.decode(prompt, 20, Sampler.seeded(0))
        text = prompt
        for _ in found.tokens:
            last = CachedLM(pair.target.model).forward(text, logits="last").logits[-1]
            text = torch.cat([text, last.argmax()[None]])
        assert found.tokens == text[len(prompt) :].tolist()


def cache(lm: CachedLM) -> list[torch.Tensor]:
    """All that a model remembers, but for what it would write over."""
    rows = [part for layer in lm._cache.rows() for part in layer]
    return [part[..., : lm.length, :].clone() for part in rows] + [lm.states[: lm.length].clone()]


@pytest.mark.parametrize("length", [1, 2, 6])
@pytest.mark.parametrize(("builds", "verifier"), SHAPES)
def test_caches_after_an_expectation_are_those_before(
    builds: DraftStructure, verifier: Verifier, length: int
) -> None:
    """And a decode from there has the first round that it would have had."""
    pair, text = eagle_pair(), torch.arange(3, 3 + length)
    engine = SerialEngine(pair, builds, Never(), verifier, Warp(), Warp())
    first = engine.decode(text, 10, Sampler.seeded(4)).rounds[0]
    for lm in (pair.target, pair.draft):
        lm.reset()
        prefill(lm, text)
    before = cache(pair.target), cache(pair.draft)
    for seed in (1, 2, 4):
        found = engine.expected(RoundContext(text, 10), Sampler.seeded(seed))
        after = cache(pair.target), cache(pair.draft)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert (found.draft.token, found.draft.parent) == (first.draft_tokens, first.draft_parents)


def test_contexts_of_one_prefill_are_those_of_a_prefill_each() -> None:
    pair, text = eagle_pair(), torch.arange(3, 15)
    engine = SerialEngine(pair, Chain(3), Never(), TokenVerifier(), Warp(), Warp())
    plan = Plan(4, 1, 0)
    found = dict(along({"a": engine}, pair, Text("toy", "a", text, 3), plan))
    for length, one in found.items():
        alone = Text("toy", "a", text[: length + 1], length)
        again = dict(along({"a": engine}, pair, alone, Plan(1, 1, 0)))
        assert again[length]["a"].accepted == pytest.approx(one["a"].accepted, rel=1e-6)


def test_chats_of_other_layers_are_refused(tmp_path: Path) -> None:
    chats = [Chat(torch.arange(8, dtype=torch.int32), 3, torch.zeros(7, 3, 24).bfloat16())]
    save_chats(tmp_path / "a.safetensors", chats, LAYERS)
    save_chats(tmp_path / "b.safetensors", chats, (2, 3))
    with pytest.raises(UserError, match=r"^chats: .*layers \[2, 3\], the others of \[1, 3\]"):
        ChatPool(tmp_path, 1)


def test_damaged_maps_are_refused(tmp_path: Path) -> None:
    target, draft = tiny_models()
    assert read_maps(tmp_path, draft, target.config) is None
    (tmp_path / "target_features.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"^pair\.draft: .*target_features\.safetensors is damaged"):
        read_maps(tmp_path, draft, target.config)


def test_siblings_below_verified_rows_read_the_states_of_their_parents() -> None:
    """As cost measurements run them: a tree after text that the target has read on from."""
    pair, text = eagle_pair(), torch.arange(1, 9)
    pair.target.forward(text)
    pair.draft.forward(text[:4])
    found = pair.draft.forward(text[:1].expand(3), torch.full((3,), -1)).logits
    torch.testing.assert_close(found, found[:1].expand(3, -1))


def test_it_may_be_run_outside_of_inference_mode_after_a_decode() -> None:
    pair = eagle_pair()
    engine = SerialEngine(pair, Chain(2), Never(), TokenVerifier(), Warp(), Warp())
    engine.decode([1, 2, 3], 8, Sampler.seeded(0))
    pair.target.reset()
    pair.draft.reset()
    pair.target.forward(torch.tensor([4, 5]))
    assert pair.draft.forward(torch.tensor([4, 5, 6])).logits.shape == (3, 32)


@pytest.mark.parametrize("known", [1, 2, 4])
def test_check_replay_has_the_logits_of_the_decode(known: int) -> None:
    """After one committed token, too, before which the target has seen nothing."""
    pair, text, drafted = eagle_pair(), torch.tensor([3, 4, 5, 6, 7, 8]), [9, 10]
    found = [draft_logits(pair, text[:known], drafted[:depth]) for depth in range(3)]
    pair.target.reset()
    pair.draft.reset()
    prefill(pair.target, text[:known])
    tree = DraftTree(pair.draft, RoundContext(text[:known], 9), Warp(), Stopwatch())
    row = 0
    for expected, token in zip(found, [*drafted, 0], strict=True):
        torch.testing.assert_close(tree.q(row), Warp().probs(expected))
        row = tree.add(row, Draw(token, tree.q(row)[token].item()))


def test_what_cannot_feed_it_says_which_draft_to_use() -> None:
    pair = eagle_pair()
    parts = BranchPoint(2, 2), Never(), TokenVerifier(), RrswVerifier(), Warp(), Warp()
    with pytest.raises(UserError, match=r"^engine, pair\.draft: .*pair=smollm2$"):
        OverlappedEngine(pair, *parts)
    models = OmegaConf.create({"draft": "reading", "assistant": "ordinary"})
    assert assistant_of(None, models, pair) == "ordinary"
    assert assistant_of(None, models, tiny_pair()) is None, "an ordinary draft is its own assistant"
    for each in (pair, tiny_pair()):
        assert assistant_of("given", models, each) == "given"
    models.assistant = None
    with pytest.raises(UserError, match=r"^assistant: expected an ordinary draft.* assistant="):
        assistant_of(None, models, pair)
