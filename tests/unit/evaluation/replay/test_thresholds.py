"""The file of tuned thresholds: what is used of it, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from evaluation.replay import thresholds
from runtime.errors import UserError

STOP = {"_target_": "decoding.stopping.adaedl.AdaEDL", "threshold": 0.4, "kappa": 0.2}
PAIR, WARP = {"name": "toy", "target": "aa"}, {"temperature": 0.0}
RUN = {"pair": PAIR, "warp": WARP, "draft_warp": WARP}
CHOICE = {"threshold": 0.25, "speculate": True, "speedup": 1.5, "interval": [None, None]}
FOUND: dict[str, Any] = {
    "format_version": thresholds.FORMAT_VERSION,
    **RUN,
    "gamma": 8,
    "cost": "a100",
    "measured_on": None,
    "data": {"folder": "data/toy", "sha256": "00"},
    "command": "python scripts/tune.py",
    "rules": {
        "adaedl": {"setting": "threshold", "stop": {**STOP, "threshold": None}, "checkpoint": None}
    },
    "results": {"chosen": {"advice": "adaedl", "rules": {"adaedl": CHOICE}}},
}
METHOD = {
    **{part: {"_target_": target} for part, target in thresholds.REPLAYED.items()},
    "structure": {"_target_": thresholds.REPLAYED["structure"], "gamma_max": 8},
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


def applied(**changed: Any) -> tuple[float, str]:
    """The threshold of the method with other parts, and what is said of it."""
    cfg = config(**changed)
    lines = thresholds.apply(cfg, FOUND, [], HERE)
    assert lines[0] == "thresholds: x.json, for cost a100, whose advice is: adaedl"
    return cfg.method.adaedl.stop.threshold, lines[1]


def config(**changed: Any) -> DictConfig:
    method = copy.deepcopy(METHOD) | changed
    methods = {"autoregressive": {"engine": PLAIN}, "adaedl": method}
    return OmegaConf.create({"thresholds": "x.json", "methods": ["adaedl"], "method": methods})


def test_a_method_like_the_tuned_one_gets_its_threshold() -> None:
    assert applied() == (
        0.25,
        "adaedl: method.adaedl.stop.threshold=0.25, tuned: 1.500x (-) modelled",
    )
    assert applied(stop=STOP | {"threshold": 0.9})[0] == 0.25
    assert applied(structure=METHOD["structure"] | {"gamma_max": 20})[0] == 0.25


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
    assert applied(**changed) == (
        0.4,
        "adaedl: built otherwise than it was tuned, thresholds left out",
    )


def test_what_does_not_pay_becomes_plain_decoding_unless_it_is_asked_for() -> None:
    found, key = copy.deepcopy(FOUND), "method.adaedl.stop.threshold"
    found["results"]["chosen"] = {
        "advice": thresholds.NO_ADVICE,
        "rules": {"adaedl": CHOICE | {"speculate": False, "speedup": 0.9}},
    }
    cfg = config()
    said = thresholds.apply(cfg, found, [], HERE)
    assert said[0].endswith("whose advice is: do not speculate")
    assert (
        said[1] == f"adaedl: do not speculate, tuned: the best, {key}=0.25, is 0.900x (-) modelled"
    )
    assert cfg.method.adaedl == cfg.method.autoregressive == {"engine": PLAIN}
    cfg = config()
    assert thresholds.apply(cfg, found, [f"{key}=0.4"], HERE)[1].endswith("as given")
    assert cfg.method.adaedl == METHOD


def test_thresholds_are_for_a_pair_and_its_distributions() -> None:
    renamed = {"name": "mine", "target": "aa"}
    assert (
        thresholds.misfit(FOUND, RUN) is None
        and thresholds.misfit(FOUND, RUN | {"pair": renamed}) is None
    )
    assert thresholds.misfit(FOUND, RUN | {"pair": {"name": "toy", "target": "bb"}}) == "pair"
    assert thresholds.misfit(FOUND, RUN | {"draft_warp": {"temperature": 1.0}}) == "draft_warp"


@pytest.mark.parametrize("same", [{}, {"versions": {"torch": "2.5"}, "machine": "another"}])
def test_thresholds_of_this_machine_come_without_a_warning(same: dict[str, Any]) -> None:
    lines = thresholds.apply(config(), FOUND | {"measured_on": HERE | same}, [], HERE)
    assert not any("warning" in line for line in lines)


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
def test_thresholds_of_another_machine_are_used_with_a_warning(
    there: dict[str, Any], words: str
) -> None:
    cfg = config()
    found = FOUND | {
        "measured_on": HERE | there,
        "command": "python scripts/tune.py cost=measured pair.dtype=auto seed=1",
    }
    *_, warning = thresholds.apply(cfg, found, ["pair.dtype=float32", "limit=9"], HERE)
    anew = "python scripts/tune.py seed=1 pair.dtype=float32"
    assert warning == f"warning: x.json was tuned on another machine: {words}. Tune anew: {anew}"
    assert cfg.method.adaedl.stop.threshold == 0.25


@pytest.mark.parametrize(
    "missing",
    [
        *(
            ["cost"],
            ["gamma"],
            ["measured_on"],
            ["rules", "adaedl", "stop"],
            ["results", "chosen", "advice"],
        ),
        ["results", "chosen", "rules", "adaedl", "speculate"],
    ],
)
def test_a_damaged_file_ends_with_one_line(missing: list[str], tmp_path: Path) -> None:
    thresholds.write(tmp_path / "x.json", FOUND)
    assert thresholds.read(tmp_path / "x.json") == FOUND
    found = copy.deepcopy(FOUND)
    node = found
    for key in missing[:-1]:
        node = node[key]
    del node[missing[-1]]
    (tmp_path / "x.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match=r"thresholds: .*cannot be read .*python scripts/tune\.py"):
        thresholds.read(tmp_path / "x.json")


def test_a_checkpoint_without_weights_ends_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rules\.hrad\.checkpoint: .*incomplete or damaged"):
        thresholds.checkpoint_hash(tmp_path, "rules.hrad.checkpoint")
