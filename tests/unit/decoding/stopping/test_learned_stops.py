"""SpecDec++ and H-RAD as stop rules, on predictors whose output is known, and the states an engine
hands a rule."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftTree
from decoding.engines.serial import SerialEngine
from decoding.interfaces import DraftStructure, LMOutput, RowsWanted
from decoding.models.table_lm import TableLM, mixed_table, random_table
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.hrad import HRADStop
from decoding.stopping.never import Never
from decoding.stopping.specdecpp import SpecDecPPStop
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.static_tree import WidthTree
from decoding.trace import Stopwatch
from decoding.verifiers.rrsw import RrswVerifier
from predictors.calibration import Calibration
from predictors.survival import Survival
from runtime.errors import UserError
from tests.helpers.training.checkpoints import write_checkpoint, write_logistic

VOCAB = 4
CONTEXT = RoundContext(committed=torch.tensor([0]), max_new=100)


class ScriptedLM:
    """Uniform distributions; the hidden state of the i-th drafted token is the logit of
    accept[i]."""

    vocab_size, max_length, seconds = VOCAB, 1000, 0.0
    device = output_device = torch.device("cpu")

    def __init__(self, accept: Sequence[float]) -> None:
        self.states = [0.0, *(math.log(f / (1 - f)) for f in accept)]
        self.length = self.forwards = 0

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor | None = None,
        *,
        extend: bool = False,
        hidden: Sequence[int] = (),
        hidden_rows: RowsWanted = "all",
        logits: RowsWanted = "all",
    ) -> LMOutput:
        self.length += len(tokens)
        self.forwards += 1
        state = torch.tensor([self.states[self.length - 1]]).reshape(1, 1, 1)
        return LMOutput(torch.zeros(1, VOCAB), state if hidden else None)

    def crop(self, length: int) -> None: ...
    def keep_path(self, rows: list[int]) -> None: ...
    def reset(self) -> None: ...
    def embed(self, token: int) -> Tensor:
        return torch.zeros(1)


def drafted(stop: SpecDecPPStop, accept: Sequence[float]) -> tuple[int, int]:
    """Tokens drawn and draft forwards spent in one round."""
    lm = ScriptedLM([*accept, *[0.5] * 30])
    tree = DraftTree(lm, CONTEXT, Warp(), Stopwatch(), layers=(-1,), stop=stop)
    stop.begin_round(CONTEXT)
    Chain(25).grow(tree)
    return len(tree.token), lm.forwards


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_logistic(tmp_path / "specdecpp")


def test_paper_order_scores_the_last_token_and_pays_one_forward_more(head: Path) -> None:
    stop = SpecDecPPStop(head, threshold=0.5, bounds=[1, 20], order="paper")
    # products .9, .81, .405: 1 - .405 > .5 after the third token; features are rounded to bfloat16
    assert drafted(stop, [0.9, 0.9, 0.5]) == (3, 4)
    assert stop.predicted == pytest.approx([0.9, 0.9, 0.5], abs=1e-3)


def test_code_order_sends_one_token_more_without_scoring_it(head: Path) -> None:
    stop = SpecDecPPStop(head, threshold=0.5, bounds=[1, 20], order="code")
    assert drafted(stop, [0.9, 0.9, 0.5]) == (4, 4)
    assert stop.predicted == pytest.approx([0.9, 0.9, 0.5], abs=1e-3)


@pytest.mark.parametrize("order", ["paper", "code"])
def test_bounds(head: Path, order: str) -> None:
    assert drafted(SpecDecPPStop(head, 0.0, [3, 20], order), [0.1] * 9)[0] == 3  # type: ignore[arg-type]
    count, forwards = drafted(SpecDecPPStop(head, 1.0, [2, 5], order), [0.9] * 9)  # type: ignore[arg-type]
    assert (count, forwards) == (5, 5)  # the upper bound needs no score


def test_rounds_are_independent(head: Path) -> None:
    stop = SpecDecPPStop(head, 0.5, [1, 20], "paper")
    assert drafted(stop, [0.4]) == drafted(stop, [0.4]) == (1, 2)


def test_calibrated_survival_takes_the_place_of_the_product(tmp_path: Path) -> None:
    """Products .9, .81, .729: log-odds 2.2, 1.45, .99 less 2, i.e. survival .55, .37, .27."""
    head = write_logistic(tmp_path / "head", Calibration(survival=Survival(bias=-2.0)))
    assert drafted(SpecDecPPStop(head, 0.5, [1, 20], "paper"), [0.9] * 9)[0] == 2
    assert drafted(SpecDecPPStop(head, 0.7, [1, 20], "paper"), [0.9] * 9)[0] == 3
    stop = SpecDecPPStop(head, 0.5, [1, 20], "code")
    assert drafted(stop, [0.9] * 9) == (3, 3)
    assert stop.predicted == pytest.approx(
        [0.9, 0.9], abs=1e-3
    )  # the trace keeps what the head said


def test_an_untuned_threshold_of_a_calibrated_head_is_said(head: Path, tmp_path: Path) -> None:
    """The paper's threshold is for the head as it is trained."""
    assert not SpecDecPPStop(head, 0.7, [1, 20], "paper").caution
    for calibration in (Calibration("temperature"), Calibration(survival=Survival(bias=-2.0))):
        calibrated = write_logistic(tmp_path / "calibrated", calibration)
        stop = SpecDecPPStop(calibrated, 0.7, [1, 20], "paper")
        assert stop.caution.startswith("threshold 0.7 is not tuned") and "tune.py" in stop.caution


def test_wrong_settings_and_checkpoints(head: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stop\.bounds: expected the smaller number first"):
        SpecDecPPStop(head, 0.5, [20, 2], "paper")
    with pytest.raises(UserError, match=r"stop\.checkpoint: no checkpoint.*python train\.py"):
        SpecDecPPStop(tmp_path / "nowhere", 0.5, [2, 20], "paper")
    hrad = write_checkpoint(tmp_path / "hrad", "hrad", 2)
    with pytest.raises(UserError, match="does not score draft tokens"):
        SpecDecPPStop(hrad, 0.5, [2, 20], "paper")
    with pytest.raises(UserError, match="does not predict a round"):
        HRADStop(head, Confidence(0.2))


class FixedClass:
    """A predictor that always answers `outcome`."""

    def __init__(self, outcome: int, like: HRADStop) -> None:
        self.outcome, self.inputs, self.calibration = (
            outcome,
            like.predictor.inputs,
            Calibration(),
        )

    def predict_proba(self, x: Tensor) -> Tensor:
        assert x.shape == (1, 3)  # one layer of width 2 and the embedding of width 1
        return torch.nn.functional.one_hot(torch.tensor([self.outcome]), 3).float()


@pytest.mark.parametrize(
    ("outcome", "eps", "count"), [(0, 0.0, 0), (1, 0.5, 1), (1, 0.1, 4), (2, 0.5, 4)]
)
def test_hrad_class_decides(tmp_path: Path, outcome: int, eps: float, count: int) -> None:
    """The scripted distributions are uniform on 4 tokens: confidence 0.25 is below eps 0.5 and
    above 0.1."""
    stop = HRADStop(write_checkpoint(tmp_path, "hrad", 3, gamma=4), Confidence(eps))
    stop.predictor = FixedClass(outcome, stop)  # type: ignore[assignment]
    context = RoundContext(
        CONTEXT.committed, 100, target_hidden=torch.zeros(1, 2), embed=lambda token: torch.zeros(1)
    )
    assert hrad_drafted(stop, context) == count
    assert stop.predicted == [outcome]


@pytest.mark.parametrize(("balance", "outcome"), [(1.0, 2), (0.5, 2), (0.0, 0)])
def test_hrad_weighs_classes_by_the_priors_it_was_calibrated_with(
    tmp_path: Path, balance: float, outcome: int
) -> None:
    """Balanced posterior (.25, .25, .5), priors 3 : 1 : 1: posterior (.5, .17, .33)."""
    priors = Calibration("offset", offset=(math.log(3), 0.0, 0.0))
    stop = HRADStop(
        write_checkpoint(tmp_path, "hrad", 3, calibration=priors), Confidence(0.5), balance
    )
    last = stop.predictor.head.layers[-1]
    last.load_state_dict(
        {"weight": torch.zeros(3, 64), "bias": torch.tensor([0.0, 0.0, math.log(2)])}
    )
    context = RoundContext(
        CONTEXT.committed, 100, target_hidden=torch.zeros(1, 2), embed=lambda token: torch.zeros(1)
    )
    assert stop.classify(context) == outcome


@pytest.mark.parametrize(("none", "count"), [(0.69, 0), (0.71, 1)])
def test_hrad_drafts_nothing_where_none_is_probable(
    tmp_path: Path, none: float, count: int
) -> None:
    """Else as the confidence rule says, though "all" may be more probable than "some"."""
    stop = HRADStop(write_checkpoint(tmp_path, "hrad", 3), Confidence(0.5), none=none)
    last = stop.predictor.head.layers[-1]
    chances = torch.tensor([0.7, 0.1, 0.2])
    last.load_state_dict({"weight": torch.zeros(3, 64), "bias": chances.log()})
    context = RoundContext(
        CONTEXT.committed, 100, target_hidden=torch.zeros(1, 2), embed=lambda token: torch.zeros(1)
    )
    assert hrad_drafted(stop, context) == count


def test_balance_is_refused_where_it_would_do_nothing(tmp_path: Path) -> None:
    head = write_checkpoint(tmp_path, "hrad", 3)
    with pytest.raises(UserError, match=r"^stop\.balance: "):
        HRADStop(head, Confidence(0.5), 0.5)


def test_a_head_of_older_states_is_not_asked_in_turns(tmp_path: Path) -> None:
    """Neither while decoding nor in replay."""
    older = write_checkpoint(tmp_path, "hrad", 3, settings={"age": 1})
    stop = HRADStop(older, Confidence(0.5))
    for ask in (lambda: stop.begin_round(CONTEXT), lambda: stop.policy(None)):  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"^stop\.checkpoint: .*engine\.a_priori=true$"):
            ask()


def test_hrad_without_features_asks_the_confidence_rule(tmp_path: Path) -> None:
    stop = HRADStop(write_checkpoint(tmp_path, "hrad", 3), Confidence(0.5))
    assert hrad_drafted(stop, CONTEXT) == 1
    stop.end_round(Verdict(0, [], 1, 1))


def hrad_drafted(stop: HRADStop, context: RoundContext) -> int:
    tree = DraftTree(ScriptedLM([0.5] * 30), context, Warp(), Stopwatch(), stop=stop)
    stop.begin_round(context)
    Chain(25).grow(tree)
    return len(tree.token)


class Watching(Never):
    """Reads the target, as H-RAD does, and keeps what it is shown."""

    target_layers = (-3, -2, -1)

    def begin_round(self, context: RoundContext) -> None:
        self.predicted = [float(len(context.committed))]
        self.seen = [*getattr(self, "seen", []), context]


@pytest.mark.parametrize("structure", [BranchPoint(2, 3), BranchPoint(1, 2), WidthTree([2, 2, 1])])
def test_rules_see_the_last_verified_position_after_any_draft(structure: DraftStructure) -> None:
    """That of committed[-2], also where the last token is an open leaf, against a target that
    decodes from scratch."""
    table, stop = random_table(5, seed=1, concentration=0.5), Watching()
    pair = SimpleNamespace(
        target=TableLM(table), draft=TableLM(mixed_table(table, random_table(5, seed=2), 0.6))
    )
    trace = SerialEngine(pair, structure, stop, RrswVerifier(), Warp(), Warp()).decode(
        [1, 2], 60, Sampler.seeded(4)
    )
    rows = TableLM(table).forward(torch.tensor([1, 2, *trace.tokens]), hidden=range(-3, 0)).hidden
    for context in stop.seen:
        assert torch.equal(context.target_hidden, rows[:, len(context.committed) - 2])
    after_leaf = sum(len(round_.tokens) == round_.accepted for round_ in trace.rounds[:-1])
    assert after_leaf > 3 or structure.shape == "tree"
    assert len({round_.accepted for round_ in trace.rounds}) >= 3 - (
        structure.shape == "branch_point"
    )
