"""Logits processors of transformers, each a function of the text so far, enumerated: the output
distribution is that of the processed target, with every structure and verifier that draws or
copies, whether the draft is processed, too, or not."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    TemperatureLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ForcedEOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)

from decoding.engines.autoregressive import AutoregressiveEngine
from decoding.engines.lookahead import LookaheadEngine
from decoding.engines.serial import SerialEngine
from decoding.processors import Forced, LeastNew, Processed, Said
from decoding.sampling import Sampler, Warp
from decoding.stopping.never import Never
from decoding.structures.chain import Chain
from decoding.verification import WarpedRows
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from tests.contract.covering import covering, crossed
from tests.contract.engines import (
    OFF,
    PROMPT,
    THREE_WORDS,
    Case,
    checked,
    decoded_distribution,
    engine,
    rule_of,
    structure_of,
    target_distribution,
    toy_pair,
)
from tests.contract.enumeration import largest_error
from tests.contract.overlaps import PEARL, POLICIES, PRIOR, Policy, named

EOS, LENGTH = 2, len(PROMPT)


@cache
def processors() -> dict[str, list[Any]]:
    """Those that change something after the prompt or what may follow it."""
    longest = LENGTH + 3
    return {
        "repetition": [RepetitionPenaltyLogitsProcessor(1.6)],
        "presence": [Said(0.9, 0.0)],
        "frequency": [Said(-0.2, 0.7)],
        "fewest new": [LeastNew(2)],
        "forced": [Forced([1])],
        "n-grams": [NoRepeatNGramLogitsProcessor(3)],
        "bad words": [NoBadWordsLogitsProcessor([[0, 1], [2, 2]], eos_token_id=None)],
        "bias": [SequenceBiasLogitsProcessor([[[1], 0.8], [[0, 2], -1.5], [[2, 1], 2.0]])],
        "least length": [MinLengthLogitsProcessor(LENGTH + 2, EOS)],
        "least new": [MinNewTokensLengthLogitsProcessor(LENGTH, 2, EOS)],
        "decay": [ExponentialDecayLengthPenalty((0, 1.4), EOS, LENGTH)],
        "forced end": [ForcedEOSTokenLogitsProcessor(longest, EOS)],
        "begin": [SuppressTokensAtBeginLogitsProcessor([0], LENGTH)],
        "min-p": [MinPLogitsWarper(0.4)],
        "typical": [TypicalLogitsWarper(0.6)],
        "epsilon": [EpsilonLogitsWarper(0.25)],
        "eta": [EtaLogitsWarper(0.3)],
        "several": [
            RepetitionPenaltyLogitsProcessor(1.3),
            SequenceBiasLogitsProcessor([[[1, 0], 1.0]]),
            TemperatureLogitsWarper(0.7),
            MinPLogitsWarper(0.2),
        ],
    }


@pytest.mark.parametrize(
    ("case", "name", "both"),
    covering(
        crossed(THREE_WORDS, list(processors()), [True, False]),
        lambda case, name, both: (case.builds, name),
        lambda case, name, both: (rule_of(case), name),
        lambda case, name, both: (rule_of(case), both),
    ),
)
@pytest.mark.few(24)
def test_engine_distribution_of_processed_logits(
    case: Case, name: str, both: bool, tmp_path: Path
) -> None:
    warp = Processed(processors=processors()[name])
    eos = frozenset({EOS})
    draft_warp = warp if both else OFF
    decoder = engine(toy_pair(3, 5), case, tmp_path, None, warp, draft_warp, eos)
    checked(decoder, case.size.length)


@pytest.mark.parametrize("name", processors())
def test_processors_change_the_distribution(name: str) -> None:
    pair, eos, length = toy_pair(3, 5), frozenset({EOS}), 3
    plain = target_distribution(pair, OFF, length, eos)
    warp = Processed(processors=processors()[name])
    assert largest_error(target_distribution(pair, warp, length, eos), plain) > 0.01
    checked(AutoregressiveEngine(pair, warp, eos), length)


@pytest.mark.parametrize("case", covering(THREE_WORDS, structure_of, rule_of))
@pytest.mark.few(6)
def test_a_greedy_target_of_processed_logits(case: Case, tmp_path: Path) -> None:
    pair, length, ends = toy_pair(3, 5), case.size.length, frozenset({EOS})
    for_output = [Said(0.9, 0.4), LeastNew(2)]
    warp = Processed(0.0, processors=[*processors()["several"], *for_output])
    plain = AutoregressiveEngine(pair, warp, ends).decode(PROMPT, length, Sampler.seeded(0)).tokens
    traces = checked(engine(pair, case, tmp_path, warp=warp, eos_ids=ends), length)
    assert all(trace.tokens == plain for trace in traces)


def test_what_stands_before_the_prompt_is_seen() -> None:
    """As padding is by the processors of `generate`."""
    pair, penalty = toy_pair(3, 5), [RepetitionPenaltyLogitsProcessor(1.6)]
    found = [
        target_distribution(pair, Processed(processors=penalty, before=before), 2)
        for before in ((), (2, 2))
    ]
    assert largest_error(*found) > 0.01
    decoder = SerialEngine(
        pair, Chain(2), Never(), TokenVerifier(), Processed(processors=penalty, before=(2, 2)), OFF
    )
    assert largest_error(decoded_distribution(decoder, 2)[0], found[1]) < 1e-9
    for of_output in (Said(0.5, 0.5), LeastNew(1)):
        found = [
            target_distribution(pair, Processed(processors=[of_output], before=before), 2)
            for before in ((), (2, 2))
        ]
        assert found[0] == found[1], "but not by those of the output"


def test_the_text_of_the_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biased: all rows of a draft are processed as the first is."""
    kept = WarpedRows.__init__

    def first(self: WarpedRows, logits: object, warp: Warp, text: object) -> None:
        kept(self, logits, warp, lambda row: text(0))  # type: ignore[arg-type, operator]

    monkeypatch.setattr(WarpedRows, "__init__", first)
    pair, warp = toy_pair(3, 5), Processed(processors=processors()["repetition"])
    decoder = SerialEngine(pair, Chain(2), Never(), TokenVerifier(), warp, OFF)
    found, _ = decoded_distribution(decoder, 3)
    assert largest_error(found, target_distribution(pair, warp, 3)) > 1e-3


def test_a_text_after_which_everything_is_banned_is_named() -> None:
    warp = Processed(processors=[NoBadWordsLogitsProcessor([[0], [1], [2]])])
    with pytest.raises(UserError, match=r"^warp: its processors ban every token .*\[1, 0, 1, 0\]"):
        AutoregressiveEngine(toy_pair(3, 5), warp).decode(PROMPT, 3, Sampler.seeded(0))


def test_where_the_text_is_not_known_processors_are_refused() -> None:
    warp = Processed(processors=processors()["repetition"])
    with pytest.raises(UserError, match=r"^warp: its processors read the text, which is not known"):
        warp.probs(torch.zeros(3))


@pytest.mark.parametrize(
    ("policy", "name", "both"),
    covering(
        crossed(named(POLICIES + PRIOR + PEARL), list(processors()), [True, False]),
        lambda policy, name, both: (policy.chain_rule, policy.branch_rule, name),
        lambda policy, name, both: (policy.outcome, policy.confidence, both),
        lambda policy, name, both: (policy.pre_verify, policy.a_priori, both),
    ),
)
@pytest.mark.few(8)
def test_overlapped_distribution_of_processed_logits(policy: Policy, name: str, both: bool) -> None:
    warp = Processed(processors=processors()[name])
    draft_warp = warp if both else OFF
    checked(policy.engine(toy_pair(3, 5), warp, draft_warp, frozenset({EOS})), 2)


@pytest.mark.parametrize("name", ["repetition", "several"])
def test_lookahead_of_processed_logits(name: str) -> None:
    warp = Processed(processors=processors()[name])
    checked(LookaheadEngine(toy_pair(3, 5), 3, 3, 2, True, warp), 4)
