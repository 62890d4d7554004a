"""What is settled before a comparison: tuned thresholds and tried settings go into a copy of a
method, never into the config."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from evaluation.methods import (
    CHOSEN_HERE,
    Method,
    alternatives,
    cautions,
    chosen,
    chosen_here,
    configured,
    refuse_unused,
    tuned_elsewhere,
    tuned_methods,
)
from evaluation.replay import thresholds
from evaluation.replay.read import REPLAYED
from runtime.errors import UserError
from tests.helpers.programs.programs import composed
from tests.unit.evaluation.replay.test_thresholds import CHOICE, FOUND, STOP

KEY = "method.adaedl.stop.threshold"
METHOD = {
    **{part: {"_target_": target} for part, target in REPLAYED.items()},
    "structure": {"_target_": REPLAYED["structure"], "gamma_max": 8},
    "stop": STOP,
}
AUTOREGRESSIVE = "decoding.engines.autoregressive.AutoregressiveEngine"
PLAIN = {"_target_": AUTOREGRESSIVE, "warp": {"temperature": 0.0}}
F32 = "torch.float32"
MIXED = {"target": "torch.bfloat16", "draft": F32}
HERE = {
    "hardware": {"target": "Xeon", "draft": "Xeon"},
    "dtypes": {"target": F32, "draft": F32},
    "threads": 2,
    "versions": {"torch": "2.9"},
}
LEFT_OUT = (None, "adaedl: built otherwise than it was tuned, thresholds left out")
TUNED = (0.25, "adaedl: stop.threshold=0.25, tuned: 1.500x modelled")


def config(**changed: Any) -> DictConfig:
    method = copy.deepcopy(METHOD) | changed
    methods = {"autoregressive": {"engine": PLAIN}, "adaedl": method}
    return OmegaConf.create({"thresholds": "x.json", "method": methods, "tried": {}})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, TUNED),
        ({"stop": STOP | {"threshold": 0.9}}, TUNED),
        ({"structure": METHOD["structure"] | {"gamma_max": 20}}, TUNED),
        ({"engine": {"_target_": "decoding.engines.lookahead.LookaheadEngine"}}, LEFT_OUT),
        ({"verifier": {"_target_": "decoding.verifiers.block.BlockVerifier"}}, LEFT_OUT),
        ({"structure": METHOD["structure"] | {"gamma_max": 7}}, LEFT_OUT),
        ({"stop": STOP | {"kappa": 0.3}}, LEFT_OUT),
        ({"stop": {**STOP, "_target_": "decoding.stopping.confidence.Confidence"}}, LEFT_OUT),
    ],
)
def test_a_method_like_the_tuned_one_gets_its_threshold(changed, expected):
    cfg = config(**changed)
    before = copy.deepcopy(cfg)
    methods, lines = tuned_methods(cfg, ["adaedl"], FOUND, [])
    assert lines[0] == "thresholds: x.json, for cost a100, whose advice is: adaedl"
    assert cfg == before, "the config is not rewritten"
    threshold = methods["adaedl"].settings.stop.threshold if methods else None
    assert (threshold, lines[1]) == expected


def test_a_part_that_the_engine_does_not_take_is_no_setting_of_the_custom_method():
    engines = {"lookahead": ["engine"], "serial": ["engine", "structure", "verifier", "stop"]}
    for engine, parts in engines.items():
        cfg = composed("evaluate", "methods=[custom]", f"engine={engine}")
        assert list(configured(cfg, "custom")) == parts


@pytest.mark.parametrize("name", ["evaluate", "evaluate_served", "evaluate_expected"])
@pytest.mark.parametrize("part", ["engine=lookahead", "stop.gamma=3"])
def test_a_part_that_no_method_takes_is_refused(name, part):
    cfg = composed(name, part)
    with pytest.raises(UserError, match=rf"{part.split('=')[0].split('.')[0]}: no method of"):
        refuse_unused(cfg, cfg.methods, [part])
    cfg = composed(name, "stop.gamma=3")
    refuse_unused(cfg, [*cfg.methods, "custom"], ["stop.gamma=3"])


def test_what_does_not_pay_is_plain_decoding_and_says_so_unless_it_is_asked_for():
    file, cfg = copy.deepcopy(FOUND), config()
    file["results"]["chosen"] = {
        "advice": thresholds.NO_ADVICE,
        "rules": {"adaedl": CHOICE | {"speculate": False, "speedup": 0.9}},
    }
    methods, lines = tuned_methods(cfg, ["adaedl"], file, [])
    assert lines[0].endswith("whose advice is: do not speculate")
    method = methods["adaedl"]
    assert method.settings == {"engine": PLAIN} and not method.speculates
    assert method.note == (
        "do not speculate, so plain decoding; tuned: the best, stop.threshold=0.25, is 0.900x"
        " modelled"
    )
    assert cfg.method.adaedl == METHOD
    methods, lines = tuned_methods(cfg, ["adaedl"], file, [f"{KEY}=0.4"])
    assert lines[1].endswith("as given") and not methods


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({}, None),
        ({"versions": {"torch": "2.5"}, "machine": "another"}, None),
        ({"threads": 1}, "threads 1, here 2"),
        ({"hardware": {"target": "H200", "draft": "H200"}}, "hardware H200, here Xeon"),
        ({"dtypes": MIXED}, f"dtypes target torch.bfloat16, draft {F32}, here {F32}"),
    ],
)
def test_thresholds_of_another_machine_come_with_a_warning(there, words):
    command = "python scripts/tune.py cost=measured pair.dtype=auto seed=1"
    file = FOUND | {"measured_on": HERE | there, "command": command}
    warnings = tuned_elsewhere(config(), file, ["pair.dtype=float32", "limit=9"], HERE)
    anew = "python scripts/tune.py seed=1 pair.dtype=float32"
    line = f"warning: x.json was tuned on another machine: {words}. Tune anew: {anew}"
    assert warnings == ([line] if words else [])


def test_every_combination_is_tried_and_the_fastest_chosen():
    cfg = config()
    cfg.tried = {"adaedl": {"stop": {"threshold": [0.1, 0.2], "kappa": [1]}}}
    ways = alternatives(cfg, "adaedl", [])
    assert list(ways) == [f"stop.threshold={eps} stop.kappa=1" for eps in (0.1, 0.2)]
    assert [one.settings.stop.threshold for one in ways.values()] == [0.1, 0.2]
    assert cfg.method.adaedl == METHOD
    best = chosen(ways, dict(zip(ways, (3.0, 4.0), strict=True)), "on 2 prompts")
    assert best.settings.stop.threshold == 0.2
    assert best.note == "stop.threshold=0.2 stop.kappa=1, the fastest of 2 on 2 prompts"
    assert not alternatives(cfg, "adaedl", [f"{KEY}=0.4"]), "what is given is not tried"
    assert not alternatives(cfg, "autoregressive", [])


def test_a_method_that_nothing_was_chosen_for_says_its_caution():
    careful, plain = SimpleNamespace(caution="not tuned"), SimpleNamespace(caution="")
    engines = {"untuned": careful, "tuned": careful, "plain": plain}
    empty = OmegaConf.create({})
    methods = {name: Method(name, empty) for name in engines}
    methods["tuned"] = Method("tuned", empty, note="stop.threshold=0.4, tuned")
    assert cautions(methods, engines) == ["warning: untuned: not tuned"]


def test_what_was_chosen_on_its_own_prompts_comes_with_the_commands_to_choose_on_others():
    methods = {"autoregressive": {"engine": PLAIN}, "adaedl": METHOD, "sources": {"engine": PLAIN}}
    command = "python scripts/evaluate.py limit=4 pair=mine warp=greedy warp.top_k=5 out=x"
    shared = "pair=mine warp=greedy warp.top_k=5"
    assert chosen_here(methods, command) == (
        f"{CHOSEN_HERE}. To choose on others: python scripts/gen_data.py {shared} anchors.stride=1"
        f" out=data/mine-greedy; python scripts/tune.py {shared} data=data/mine-greedy"
        " 'methods=[adaedl]'. scripts/tune.py cannot tune sources: choose with split=calibration,"
        " then judge with split=test"
    )
