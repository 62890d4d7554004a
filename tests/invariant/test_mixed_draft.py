"""A draft mixed with its target: cached as uncached, trees as paths, batches as one by one, in
every structure, engine and harvest."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from data_gen.settings import HarvestSettings
from decoding.engines.overlapped import OverlappedEngine
from decoding.models.batched_lm import BatchedLM
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import keep_rows
from decoding.models.loading import ModelPair
from decoding.models.mixed import mix_in
from decoding.sampling import Sampler, Warp
from decoding.structures.branch_point import BranchPoint
from decoding.verifiers.point_mass import PointMassVerifier
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from tests.contract import test_eagle_distribution
from tests.contract.engines import Case
from tests.helpers.models.tiny_pair import tiny_models, tiny_pair
from tests.invariant import test_harvest, test_plain_harvest, test_replay, test_tree_caches
from tests.invariant.test_cached_lm import build, path_to, random_parents, random_tokens
from tests.invariant.test_eagle_draft import eagle_pair
from tests.invariant.test_eagle_harvest import WARPS
from tests.unit.decoding.engines.test_overlapped import ByTarget

MIX = 0.6
PAIRS = {"ordinary": tiny_pair, "reading": eagle_pair}


def mixed_pair(kind: str = "ordinary") -> ModelPair:
    pair = PAIRS[kind]()
    mix_in(pair.draft, pair.target, MIX)
    return pair


def narrow_lm(kinds: tuple[str, str]) -> CachedLM:
    """A draft of some tokens mixed with a target of another size, of a padded vocabulary."""
    tokens, models = torch.tensor([3, 1, 40, 7, 22]), [build(kind) for kind in kinds]
    del models[0].model.layers[2:]
    models[0].config.num_hidden_layers = 2
    keep_rows(models[0], tokens)
    draft = CachedLM(models[0], vocab_size=60, vocabulary=tokens)
    mix_in(draft, CachedLM(models[1], vocab_size=60), MIX)
    return draft


KINDS = [("llama", "llama"), ("qwen2", "gemma2"), ("gemma2", "qwen2")]


@pytest.fixture(params=KINDS, ids="-".join)
def lm(request: pytest.FixtureRequest) -> CachedLM:
    return narrow_lm(request.param)


def alone(lm: CachedLM, text: torch.Tensor) -> torch.Tensor:
    """[n, V] by a forward of each model on its own and a cache that has seen nothing else."""
    network = lm.network
    draft, target = CachedLM(lm.model), CachedLM(network._target.model)
    q0, p = (one.forward(text).logits for one in (draft, target))
    q = torch.zeros(len(text), 60).index_copy(1, network.vocabulary, q0.softmax(-1))
    return (MIX * q + (1 - MIX) * p[:, :60].softmax(-1)).log()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_trees_are_paths_and_it_goes_on_after_keep_path(lm: CachedLM, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prefix, nodes = random_tokens(20, seed) % 60, random_tokens(12, seed + 100) % 60
    parents = random_parents(12, generator)
    lm.forward(prefix[:9], logits="none")
    close(lm.forward(prefix[9:]).logits, alone(lm, prefix)[9:])
    tree = torch.cat(
        [lm.forward(nodes[:5], torch.tensor(parents[:5])).logits,
         lm.forward(nodes[5:], torch.tensor(parents[5:]), extend=True).logits]
    )  # fmt: skip
    for row in range(12):
        close(tree[row], alone(lm, torch.cat([prefix, nodes[path_to(parents, row)]]))[-1])
    kept = path_to(parents, 11)
    lm.keep_path(kept)
    after = torch.cat([prefix, nodes[kept], prefix[:3]])
    close(lm.forward(prefix[:3]).logits, alone(lm, after)[-3:])
    lm.crop(7)
    close(lm.forward(after[7:]).logits, alone(lm, after)[7:])
    held = lm.held()
    lm.crop(4)
    close(lm.forward(nodes).logits, alone(lm, torch.cat([after[:4], nodes]))[4:])
    lm.load(*held)
    close(lm.forward(nodes).logits, alone(lm, torch.cat([after, nodes]))[len(after) :])


def test_a_batch_is_one_by_one_and_goes_on_in_the_single_cache(lm: CachedLM) -> None:
    lengths = (7, 0, 3, 12)
    texts = [random_tokens(length + 4, seed) % 60 for seed, length in enumerate(lengths)]
    batch = BatchedLM(lm, [text[:-4] for text in texts], more=4)
    rows = torch.arange(4)
    for step in range(3):
        if step == 2:
            rows = torch.tensor([1, 3])
            batch.keep(rows)
        found = batch.step(torch.stack([texts[row][lengths[row] + step] for row in rows])).logits
        for place, row in enumerate(rows.tolist()):
            close(found[place], alone(lm, texts[row][: lengths[row] + step + 1])[-1])
    batch.hand_over(1)
    assert lm.length == lengths[3] + 3
    close(lm.forward(texts[3][-1:]).logits[0], alone(lm, texts[3])[-1])


def test_other_dtypes_of_draft_and_target_go_together() -> None:
    """Whose masks have other lowest numbers."""
    target, draft = tiny_models()
    text, parents = torch.arange(1, 9), torch.tensor([-1, -1, 0])
    for narrow in (0, 1):
        models = [target.float(), draft.float()]
        models[narrow] = models[narrow].bfloat16()
        pair = [CachedLM(model) for model in models]
        mix_in(pair[1], pair[0], MIX)
        pair[1].forward(text)
        tree = pair[1].forward(text[:3], parents).logits
        pair[1].crop(len(text))
        path = pair[1].forward(text[[0, 2]]).logits[-1]
        torch.testing.assert_close(tree[2], path, atol=0.1, rtol=0.05)


@cache
def second_pair() -> ModelPair:
    return mixed_pair()


def afresh(model: LlamaForCausalLM) -> CachedLM:
    """Of the two models of `mixed_pair`, with an empty cache: what `test_tree_caches` compares
    with."""
    pair = second_pair()
    own = torch.equal(model.lm_head.weight, pair.draft.model.lm_head.weight)
    found = pair.draft if own else pair.target
    found.reset()
    return found


@pytest.mark.parametrize("warp", [Warp(0.0), Warp()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("builds", test_tree_caches.ONE_EACH)
@pytest.mark.few(2)
def test_both_caches_follow_every_structure(
    builds: str, warp: Warp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_tree_caches, "CachedLM", afresh)
    test_tree_caches.test_caches_of_a_real_model_follow_every_draft(
        builds, warp, mixed_pair(), tmp_path
    )


@pytest.mark.parametrize("case", test_eagle_distribution.CASES)
@pytest.mark.few(1)
def test_the_distribution_is_the_targets(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every outcome enumerated, with a draft that reads its target's states and is mixed."""
    made = test_eagle_distribution.eagle_pair

    def pair(vocab: int) -> ModelPair:
        found = made(vocab)
        mix_in(found.draft, found.target, MIX)
        return found

    monkeypatch.setattr(test_eagle_distribution, "eagle_pair", pair)
    test_eagle_distribution.test_distribution_with_a_draft_that_reads_along(case, tmp_path)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_side_by_side_is_in_turn(temperature: float) -> None:
    warp = Warp(temperature)
    rule = RrswVerifier() if temperature else PointMassVerifier()

    def decode(overlap: bool) -> list[list[int]]:
        parts = BranchPoint(4, 4), ByTarget(), TokenVerifier(), rule, warp, warp
        engine = OverlappedEngine(mixed_pair(), *parts, overlap=overlap)
        return [engine.decode([3, 4, 5], 30, Sampler.seeded(seed)).tokens for seed in range(4)]

    assert decode(overlap=True) == decode(overlap=False)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.few(2)
def test_labels_are_those_of_one_round_at_a_time(
    kind: str, warps: tuple[Warp, Warp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_plain_harvest, "tiny_pair", lambda: mixed_pair(kind))
    test_plain_harvest.test_all_positions_at_once_give_the_labels_of_one_at_a_time(*warps)


@pytest.mark.parametrize("kind", PAIRS)
def test_answers_do_not_depend_on_their_batch(kind: str) -> None:
    test_harvest.test_an_answer_does_not_depend_on_its_batch(mixed_pair(kind))


@pytest.mark.parametrize("kind", PAIRS)
@test_harvest.BOTH
@pytest.mark.few(1)
def test_given_responses_make_the_same_records(
    kind: str, recipe: HarvestSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = test_harvest.test_records_are_those_of_generated_responses
    same(mixed_pair(kind), recipe, 1, tmp_path, monkeypatch)


def test_replay_is_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = mixed_pair("reading")
    pair.eos_ids = (0, 31)
    monkeypatch.setattr(test_replay, "models", lambda: pair)
    how = test_replay.recipe(test_replay.GREEDY, test_replay.MAX_NEW, test_replay.GAMMA)
    found = test_replay.harvested(test_replay.PROMPTS, how, tmp_path)
    for name, values in test_replay.RULES[1::7]:
        stop = test_replay.rule(name, values)
        counts = test_replay.replayed(found, stop, test_replay.GAMMA)
        traces = test_replay.decode(stop, test_replay.MAX_NEW, test_replay.GAMMA)
        for place, prompt in enumerate(found.prompt_ids):
            replayed = test_replay.counts_of(counts, place)
            assert replayed == test_replay.counted(traces[int(prompt)]), (name, values)
