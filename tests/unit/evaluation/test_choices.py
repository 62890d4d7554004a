"""What is settled before a comparison: tuned thresholds and tried settings go into a copy of a
method, never into the config."""

import copy
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from evaluation.methods import alternatives, chosen, tuned_elsewhere, tuned_methods
from evaluation.replay import thresholds
from evaluation.replay.candidates import REPLAYED
from tests.unit.evaluation.replay.test_thresholds import CHOICE, FOUND, STOP

KEY = "method.adaedl.stop.threshold"
METHOD = {
    **{part: {"_target_": target} for part, target in REPLAYED.items()},
    "structure": {"_target_": REPLAYED["structure"], "gamma_max": 8},
    "stop": STOP,
}
PLAIN = {
    "_target_": "decoding.engines.autoregressive.AutoregressiveEngine",
    "warp": {"temperature": 0.0},
}
HERE = {
    "hardware": {"target": "Xeon", "draft": "Xeon"},
    "dtypes": {"target": "torch.float32", "draft": "torch.float32"},
    "threads": 2,
    "versions": {"torch": "2.9"},
}


def config(**changed: Any) -> DictConfig:
    method = copy.deepcopy(METHOD) | changed
    methods = {"autoregressive": {"engine": PLAIN}, "adaedl": method}
    return OmegaConf.create({"thresholds": "x.json", "method": methods, "tried": {}})


def tuned(**changed: Any) -> tuple[float | None, str]:
    """The tuned threshold of the method with other parts, and what is said of it."""
    cfg = config(**changed)
    before = copy.deepcopy(cfg)
    methods, lines = tuned_methods(cfg, ["adaedl"], FOUND, [])
    assert lines[0] == "thresholds: x.json, for cost a100, whose advice is: adaedl"
    assert cfg == before, "the config is not rewritten"
    found = methods["adaedl"].settings.stop.threshold if methods else None
    return found, lines[1]


def test_a_method_like_the_tuned_one_gets_its_threshold() -> None:
    assert tuned() == (0.25, "adaedl: stop.threshold=0.25, tuned: 1.500x (-) modelled")
    assert tuned(stop=STOP | {"threshold": 0.9})[0] == 0.25
    assert tuned(structure=METHOD["structure"] | {"gamma_max": 20})[0] == 0.25


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": {"_target_": "decoding.engines.lookahead.LookaheadEngine"}},
        {"verifier": {"_target_": "decoding.verifiers.block.BlockVerifier"}},
        {"structure": METHOD["structure"] | {"gamma_max": 7}},
        {"stop": STOP | {"kappa": 0.3}},
        {"stop": {**STOP, "_target_": "decoding.stopping.confidence.Confidence"}},
    ],
)
def test_another_method_is_left_as_it_is(changed: dict[str, Any]) -> None:
    assert tuned(**changed) == (
        None,
        "adaedl: built otherwise than it was tuned, thresholds left out",
    )


def test_what_does_not_pay_is_plain_decoding_and_says_so_unless_it_is_asked_for() -> None:
    found, cfg = copy.deepcopy(FOUND), config()
    found["results"]["chosen"] = {
        "advice": thresholds.NO_ADVICE,
        "rules": {"adaedl": CHOICE | {"speculate": False, "speedup": 0.9}},
    }
    methods, lines = tuned_methods(cfg, ["adaedl"], found, [])
    assert lines[0].endswith("whose advice is: do not speculate")
    method = methods["adaedl"]
    assert method.settings == {"engine": PLAIN} and not method.speculates
    assert method.note == (
        "do not speculate, so plain decoding; tuned: the best, stop.threshold=0.25, is 0.900x (-)"
        " modelled"
    )
    assert cfg.method.adaedl == METHOD
    methods, lines = tuned_methods(cfg, ["adaedl"], found, [f"{KEY}=0.4"])
    assert lines[1].endswith("as given") and not methods


@pytest.mark.parametrize("same", [{}, {"versions": {"torch": "2.5"}, "machine": "another"}])
def test_thresholds_of_this_machine_come_without_a_warning(same: dict[str, Any]) -> None:
    assert not tuned_elsewhere(config(), FOUND | {"measured_on": HERE | same}, [], HERE)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"threads": 1}, "threads 1, here 2"),
        ({"hardware": {"target": "H200", "draft": "H200"}}, "hardware H200, here Xeon"),
        (
            {"dtypes": {"target": "torch.bfloat16", "draft": "torch.float32"}},
            "dtypes target torch.bfloat16, draft torch.float32, here torch.float32",
        ),
    ],
)
def test_thresholds_of_another_machine_come_with_a_warning(
    there: dict[str, Any], words: str
) -> None:
    found = FOUND | {
        "measured_on": HERE | there,
        "command": "python scripts/tune.py cost=measured pair.dtype=auto seed=1",
    }
    (warning,) = tuned_elsewhere(config(), found, ["pair.dtype=float32", "limit=9"], HERE)
    anew = "python scripts/tune.py seed=1 pair.dtype=float32"
    assert warning == f"warning: x.json was tuned on another machine: {words}. Tune anew: {anew}"


def test_every_combination_is_tried_and_the_fastest_chosen() -> None:
    cfg = config()
    cfg.tried = {"adaedl": {"stop": {"threshold": [0.1, 0.2], "kappa": [1]}}}
    found = alternatives(cfg, "adaedl", [])
    assert list(found) == [f"stop.threshold={eps} stop.kappa=1" for eps in (0.1, 0.2)]
    assert [one.settings.stop.threshold for one in found.values()] == [0.1, 0.2]
    assert cfg.method.adaedl == METHOD
    speeds = dict(zip(found, (3.0, 4.0), strict=True))
    best = chosen(found, speeds, "on 2 prompts")
    assert best.settings.stop.threshold == 0.2
    assert best.note == "stop.threshold=0.2 stop.kappa=1, the fastest of 2 on 2 prompts"
    assert not alternatives(cfg, "adaedl", [f"{KEY}=0.4"]), "what is given is not tried"
    assert not alternatives(cfg, "autoregressive", [])
