"""The proposer for vLLM: with every stop rule the output, verified as vLLM verifies such tokens,
has the target's distribution, enumerated; a draft depends on the text of its request alone,
whatever requests come, go, change places or are put off; what it cannot do is refused in a line."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.draft import GivenStates
from decoding.models.table_lm import TableLM
from decoding.sampling import Sampler
from decoding.stopping.confidence import Confidence
from decoding.structures.chain import Chain
from decoding.structures.sources import Sources
from decoding.together import Together
from runtime.errors import UserError
from serving.vllm import KEPT, Bound, Drafter, Parts, Proposer
from tests.contract.engines import PROMPT, STOP_CASES, stop_rule, toy_pair
from tests.contract.enumeration import autoregressive_distribution, distribution_of, largest_error
from tests.helpers.models.tiny_pair import save_tiny_pair

STRUCTURES = {"chain": Chain(2), "sources": Sources(2, 2, 1, 1)}
VOCAB, LENGTH = 3, 3
TREE = {"_target_": "decoding.structures.static_tree.WidthTree", "widths": [2]}
LOOKUP, COPIES = "decoding.structures.lookup.following", "decoding.structures.lookup.Copies"
VALUE = "decoding.stopping.value.ValueStop"


def tokens_of(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """As vLLM keeps them: counts, and rows with something behind their end."""
    rows = np.full((len(texts), 64), -7, dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return np.array([len(text) for text in texts], dtype=np.int32), rows


def verified(draft: Sequence[int], text: list[int], target: TableLM, sampler: Sampler) -> list[int]:
    """What vLLM's rejection sampler makes of point masses."""
    new = list[int]()
    for token in draft:
        p = target.distribution((*text, *new))
        if not sampler.accept(p[token].item(), 1.0):
            rest = p.clone()
            rest[token] = 0
            return [*new, sampler.draw(rest / rest.sum()).token]
        new.append(token)
    return [*new, sampler.draw(target.distribution((*text, *new))).token]


class Seen:
    """In place of a `Watch`: the states of the one text that is decoded."""

    def __init__(self, target: TableLM) -> None:
        self._target = target

    def run(self, text: Sequence[int]) -> None:
        self._target.reset()
        hidden = self._target.forward(torch.tensor(text), hidden=[0, 1, 2]).hidden
        assert hidden is not None
        self._states = hidden.transpose(0, 1)

    def of(self, row: int) -> tuple[int, Tensor]:
        return 0, self._states


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("stop", "values"), STOP_CASES, ids=str)
def test_distribution_under_every_stop_rule(
    stop: str, values: dict, structure: str, tmp_path: Path
) -> None:
    pair = toy_pair(VOCAB, 31)
    target, table = pair.target, pair.draft.table
    rule, lengths = stop_rule(stop, tmp_path, values, 2), set[int]()
    depth, seen = target.shape[0], Seen(TableLM(target.table))

    def decoded(sampler: Sampler) -> tuple[int, ...]:
        drafts, layers = STRUCTURES[structure], range(depth - 1)
        parts = Parts(
            lambda states: TableLM(table), Together(Any), drafts, rule, 2, 99, frozenset(), layers
        )
        parts.depth, parts.embed = depth, target.embed
        drafter = Drafter(parts, seen)
        text = list(PROMPT)
        seen.run(text)
        text += verified([], text, target, sampler)
        while len(text) < len(PROMPT) + LENGTH:
            (draft,) = drafter.propose([text[-1:]], *tokens_of([text]))
            lengths.add(len(draft))
            seen.run([*text, *draft])
            text += verified(draft, text, target, sampler)
        return tuple(text[len(PROMPT) :][:LENGTH])

    right = autoregressive_distribution(target.distribution, VOCAB, LENGTH, PROMPT)
    assert largest_error(distribution_of(decoded), right) < 1e-9 and max(lengths) > 0


# Requests that come and go -----------------------------------------------------------------------


def tiny_draft(folder: Path) -> CachedLM:
    from decoding.pair import open_pair

    pair = save_tiny_pair(folder)
    return open_pair(str(pair / "target"), str(pair / "draft"), dtype="float32").draft


def drafter_of(lm: CachedLM, made: list[CachedLM]) -> Drafter:
    together = Together(lm.network)

    def fresh(target: GivenStates) -> CachedLM:
        made.append(lm.fresh(target))
        made[-1].network = together.joined(0)
        return made[-1]

    return Drafter(Parts(fresh, together, Sources(4, 3, 2, 1), Confidence(0.2), 5, 60))


def test_a_draft_depends_on_its_text_alone(tmp_path: Path) -> None:
    lm, random = tiny_draft(tmp_path), np.random.default_rng(0)
    made: list[CachedLM] = []
    drafter, waiting = drafter_of(lm, made), list[list[int]]()
    batch: list[list[int]] = []
    most = 0
    for _ in range(60):
        if random.random() < 0.5 and len(batch) < 5:
            batch.append(random.integers(0, lm.vocab_size, random.integers(1, 9)).tolist())
        if waiting and random.random() < 0.5:
            batch.append(waiting.pop())
        random.shuffle(batch)
        if batch and random.random() < 0.2:
            waiting.append(batch.pop())
        batch = [text for text in batch if len(text) < 59 and random.random() > 0.05]
        reading = [random.random() < 0.2 for _ in batch]  # its prompt is not read to the end
        drafts = drafter.propose(
            [[] if r else t[-1:] for r, t in zip(reading, batch, strict=True)], *tokens_of(batch)
        )
        most = max(most, len(batch))
        for text, draft, puts_off in zip(batch, drafts, reading, strict=True):
            (right,) = drafter_of(lm, []).propose([text[-1:]], *tokens_of([text]))
            assert draft == ([] if puts_off else right)
            if not puts_off:
                text += [*draft[: random.integers(0, 6)], int(random.integers(0, lm.vocab_size))]
    assert most > 2 and len(made) <= most + 1


def test_one_that_begins_as_an_ended_one_did_starts_anew(tmp_path: Path) -> None:
    """The next turn of a conversation."""
    drafter = drafter_of(tiny_draft(tmp_path), [])
    drafter.propose([[6]], *tokens_of([[4, 5, 6]]))
    (request,) = drafter._requests
    drafter.propose([[7]], *tokens_of([[4, 5, 6, 7]]))
    assert (request.rounds, len(request.verdicts)) == (2, 1)
    drafter.propose([[9]], *tokens_of([[4, 5, 6, 7, 8, 9]]))
    assert drafter._requests == [request] and (request.rounds, request.verdicts) == (1, [])


def test_one_that_takes_the_row_of_an_aborted_one_keeps_its_cache(tmp_path: Path) -> None:
    drafter = drafter_of(tiny_draft(tmp_path), [])
    drafter.propose([[], [6]], *tokens_of([[9, 8], [4, 5, 6]]))  # the first is still read
    going = drafter._requests[1]
    drafter.propose([[7]], *tokens_of([[4, 5, 6, 7]]))
    assert drafter._requests == [going]


def test_a_text_with_a_token_that_the_draft_does_not_know_gets_none(tmp_path: Path) -> None:
    drafter = drafter_of(tiny_draft(tmp_path), [])
    drafter._parts.vocab = 8
    drafts = drafter.propose([[6], [6]], *tokens_of([[4, 8, 6], [4, 5, 6]]))
    assert drafts[0] == [] and drafts[1]


def test_few_caches_are_kept_of_requests_that_ended(tmp_path: Path) -> None:
    made: list[CachedLM] = []
    drafter = drafter_of(tiny_draft(tmp_path), made)
    texts = [[number, 5, 6] for number in range(1, 13)]
    for _ in range(2):
        drafter.propose([[6]] * 12, *tokens_of(texts))
        drafter.propose([[3]], *tokens_of([[2, 3]]))
        assert len(drafter._free) <= KEPT
    assert len(made) > 12


def test_a_draft_and_a_rule_that_read_other_layers(tmp_path: Path) -> None:
    """The draft gets its own, in its own order."""
    rule = Confidence(0.0)
    rule.target_layers = (-1, -2)
    parts = Parts(Any, Together(Any), Chain(2), rule, 2, 99, layers=[3, 1], depth=5)
    assert parts.watched == [1, 3]
    states = GivenStates(parts.columns([*parts.layers, -1]))
    states.write(0, torch.tensor([[[1.0], [3.0], [4.0]]]))
    assert states.recorded([0]).tolist() == [[[3.0], [1.0], [4.0]]]
    assert parts.columns(rule.target_layers) == [2, 1]


def test_a_request_whose_text_is_that_of_another(tmp_path: Path) -> None:
    drafter = drafter_of(tiny_draft(tmp_path), [])
    texts = [[5, 6, 7], [5, 6, 7]]
    first = drafter.propose([[7], [7]], *tokens_of(texts))
    assert first[0] == first[1]
    texts[1] += [3]
    drafts = drafter.propose([[7], [3]], *tokens_of(texts))
    assert drafts[0] == first[0]


def test_one_that_fails_fails_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(tiny_draft(tmp_path), [])

    def broken(step: Any) -> bool:
        raise UserError("stop: broken")

    monkeypatch.setattr(drafter._parts.stop, "should_stop", broken)
    with pytest.raises(UserError, match="broken"):
        drafter.propose([[1], [2], [3]], *tokens_of([[1], [2], [3]]))


@pytest.mark.parametrize(
    ("seconds", "best"), [({0: 1.0, 2: 1.1, 8: 2.0}, 2), ({0: 1.0, 2: 2.0, 8: 3.5}, 0), ({}, 8)]
)
def test_the_bound_that_is_fastest_is_mostly_taken(seconds: dict[int, float], best: int) -> None:
    """Where a step of so many draft tokens takes so long and brings 1, 1.6 or 2.2 tokens."""
    bound, random, taken = Bound(8), np.random.default_rng(1), list[int]()
    for _ in range(2000):
        for requests in (1, 4):
            length = bound.choose(requests)
            tokens = requests * int(1 + random.binomial(2, {0: 0.0, 2: 0.3, 8: 0.6}[length]))
            spent = seconds.get(length, 1.0) * random.uniform(0.8, 1.2)
            bound.note(requests, length, tokens, requests * spent)
            taken.append(length)
    assert np.mean(np.array(taken) == best) > 0.9


# What vLLM is told -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_pair(tmp_path)


def config_of(folder: Path, change: Callable[[dict], object] = lambda settings: None) -> Any:
    settings = {
        "format_version": 1,
        "draft": str(folder / "draft"),
        "dtype": "float32",
        "structure": {"_target_": "decoding.structures.chain.Chain", "gamma_max": 4},
        "stop": {"_target_": "decoding.stopping.confidence.Confidence", "threshold": 0.1},
        "adaptive": True,
    }
    change(settings)
    (folder / "proposer.json").write_text(json.dumps(settings))
    model = SimpleNamespace(
        tokenizer=str(folder / "target"),
        max_model_len=64,
        hf_text_config=AutoConfig.from_pretrained(folder / "target"),
        try_get_generation_config=lambda: {"eos_token_id": [2, 3]},
        get_vocab_size=lambda: json.loads((folder / "target/config.json").read_text())[
            "vocab_size"
        ],
    )
    return SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        additional_config={"draftpredict": str(folder / "proposer.json")},
    )


def test_what_vllm_makes(folder: Path) -> None:
    proposer = Proposer(config_of(folder))
    proposer.load_model(torch.nn.Identity())
    drafts = proposer.propose([[4], [5]], *tokens_of([[1, 4], [1, 4, 5]]), slot_mappings=None)
    assert len(drafts) == 2 and all(0 < len(draft) <= 3 for draft in drafts)


def test_drafts_follow_a_schedule(folder: Path) -> None:
    config = config_of(folder, lambda settings: settings["stop"].update(threshold=0.0))
    config.speculative_config.num_speculative_tokens_per_batch_size = [(2, 2, 0), (1, 1, 2)]
    proposer = Proposer(config)
    for texts, length in (([[1, 4]], 2), ([[1, 4], [1, 4, 5]], 0), ([[1], [2], [3]], 0)):
        drafts = proposer.propose([[4]] * len(texts), *tokens_of(texts))
        assert [len(draft) for draft in drafts] == [length] * len(texts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(draft="/nowhere"), "/nowhere"),
        (lambda s: s["stop"].update(_target_="os.system"), "stop: expected classes of"),
        (lambda s: s["stop"].update(threshold=[{"_target_": "os.system"}]), "stop: expected class"),
        (lambda s: s.update(structure={"_target_": LOOKUP}), "structure: expected classes of"),
        (lambda s: s.update(structure={"_target_": COPIES}), "structure: expected a DraftStruct"),
        (lambda s: s["stop"].update(_partial_=True), "stop: expected a StopRule"),
        (lambda s: s.update(draft="${oops}"), "interpolation"),
        (lambda s: s.pop("stop"), "stop"),
        (lambda s: s.update(format_version=9), "format version 9"),
        (lambda s: s["structure"].update(gamma_max="x"), "structure.gamma_max: expected"),
        (lambda s: s.update(structure=TREE), "structure: expected a chain"),
        (
            lambda s: s.update(stop={"_target_": VALUE, "checkpoint": "/no", "threshold": 0.1}),
            "/no",
        ),
    ],
)
def test_refused(folder: Path, change: Callable[[dict], object], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        Proposer(config_of(folder, change))
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)


def test_refused_without_a_file(folder: Path) -> None:
    config = config_of(folder)
    config.additional_config = {}
    with pytest.raises(UserError, match="additional_config.draftpredict"):
        Proposer(config)
