"""What the built-in plug-ins take is what their constructors say: a value of another kind, or out
of range, is refused before anything is made."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from runtime.settings.check import part

CONF = Path(__file__).parents[4] / "conf"
NO_NUMBERS = ["abc", None, True, [], {}, float("nan"), float("inf"), -float("inf")]
NO_COUNTS = [*NO_NUMBERS, 0, -1, 1.5, 2**64]
NO_SWITCHES = ["no", "yes", "true", 0, 1, None]
NO_SHARES = [*NO_NUMBERS, -0.1, 1.1, 5]
NO_TEXTS = [None, 5, "", " ", "a\nb", True, ["a"]]
NO_PATHS = [None, 5, "", " ", "a\nb", True, ["a"]]
NO_LAYERS = [[], [-1.5], [-1, -1], [0], [1], "-1", -1, [True], [None], ["a"]]
REFUSED: dict[str, dict[str, list[Any]]] = {
    "warp/default": {
        "temperature": [*NO_NUMBERS, -1, 1e-9, 1e9],
        "top_k": [*NO_NUMBERS, -1, 1.5, 2**64],
        "top_p": [*NO_SHARES, 0, 1e-46],
    },
    "stop/fixed": {"gamma": [*NO_COUNTS, 1001]},
    "stop/confidence": {"threshold": NO_SHARES},
    "stop/product": {"threshold": NO_SHARES},
    "stop/confidence_before": {"threshold": NO_SHARES},
    "stop/adaedl": {
        "kappa": [*NO_NUMBERS, 0, -1],
        **dict.fromkeys(["threshold", "target_rate", "step", "rate_memory"], NO_SHARES),
        "threshold_memory": NO_SHARES,
    },
    "stop/hrad": {
        "checkpoint": NO_PATHS,
        "balance": [*NO_NUMBERS, 1e9],
        "none": ["abc", True, 1.5, -0.1],
        "confidence": [None, 5, "confidence", {}, {"_target_": "decoding.stopping.Nobody"}],
        "confidence.threshold": NO_SHARES,
    },
    "stop/specdecpp": {
        "checkpoint": NO_PATHS,
        "threshold": NO_SHARES,
        "bounds": [5, [], [5], [1, 2, 3], [0, 20], [1, 1e9], [1, 2.5], ["a", "b"], "12", None],
        "order": ["both", "", None, 5, True],
    },
    "stop/stop_loss": {"cost": NO_PATHS, "loss": [*NO_SHARES, 0], "rule.threshold": NO_SHARES},
    "structure/chain": {"gamma_max": [*NO_COUNTS, 1001]},
    "structure/branch_point": {"gamma_max": [*NO_COUNTS, 1001], "candidates": [*NO_COUNTS, 65]},
    "structure/parallel_paths": {"paths": [*NO_COUNTS, 65], "gamma": [*NO_COUNTS, 65]},
    "structure/tree": {"widths": [[], 3, "22", [0], [2.5], [True], [5000], [64, 64], [2] * 12]},
    "structure/specinfer": {"widths": [[], [2, 0]]},
    "structure/dyspec": {"budget": [*NO_COUNTS, 100_000]},
    "structure/dyspec_layers": {"threshold": [*NO_SHARES, 0, 1], "cap": [*NO_COUNTS, 100_000]},
    "structure/lookup": {
        **dict.fromkeys(["ngram_max", "ngram_min"], [*NO_COUNTS, 257]),
        "gamma": [*NO_COUNTS, 1001],
    },
    "structure/sources": {
        **dict.fromkeys(["ngram_max", "ngram_min"], [*NO_COUNTS, 257]),
        **dict.fromkeys(["gamma_max", "stretch"], [*NO_COUNTS, 1001]),
    },
    "verifier/parallel": {"rule": ["hub", "", None, 5]},
    "engine/lookahead": {
        **dict.fromkeys(["window", "guesses"], [*NO_COUNTS, 129]),
        "ngram": [*NO_COUNTS, 1, 17],
        "prompt_pool": NO_SWITCHES,
    },
    "engine/overlapped": {
        **dict.fromkeys(["overlap", "pre_verify", "a_priori"], NO_SWITCHES),
        "draft_threads": ["a", True, 0, -1, 1.5, 5000],
        "structure": [None, 5, "chain"],
    },
    "dataset/jsonl": {
        "path": NO_PATHS,
        **dict.fromkeys(["name", "field"], NO_TEXTS),
        "limit": [value for value in NO_COUNTS if value is not None],
        "chat": NO_SWITCHES,
    },
    "dataset/starter": {"limit": [0, 1.5, "abc"], "chat": ["no"]},
    "dataset/hub": {
        **dict.fromkeys(["name", "hub_id", "split", "field"], NO_TEXTS),
        "subset": [5, "", True],
        "limit": [0, 1.5, "abc"],
        "chat": ["no"],
    },
    "responses/file": {"path": NO_PATHS},
    "responses/server": {
        "url": [None, 5, "", "127.0.0.1", "ftp://a/b", "http://a/v1?key=x", "http://a@b/v1"],
        "model": NO_TEXTS,
        "concurrency": [*NO_COUNTS, 1001],
        "timeout": [*NO_NUMBERS, 0, -1, 1e6],
        "retries": [*NO_NUMBERS, -1, 1.5, 1001],
        "key_variable": [5, "", "a b", True],
        "extra": [None, 5, "a", [1]],
    },
    "cost/a100": {
        "draft": [*NO_NUMBERS, 0, -1],
        "target": [
            *["abc", None, True, [], 0, -1, float("nan")],
            *[{1: 1.0, 4: float("inf")}, {1: 1.0, 2.5: 1.0}, {0: 1.0}, {"1": 1.0}, {1: "a"}],
        ],
        "autoregressive": [-1, 0, "a", True],
        "calls": [{"any": -0.1}, {"any": "a"}, 5, "a", []],
    },
    "cost/measured": {"file": NO_PATHS},
    "predictor/specdecpp": {
        "context": ["both", None, 5],
        "depth": [*NO_NUMBERS, -1, 1.5, 65, 100_000],
        "tie_blocks": NO_SWITCHES,
        **dict.fromkeys(["w_rej", "w_acc"], [*NO_NUMBERS, 0, -1]),
        "inputs": [None, 5, "q_stats", [1], ["depth", "depth"], {"_target_": "x.Y"}],
        "layers": NO_LAYERS,
    },
    "predictor/hrad": {
        "gamma": [*NO_COUNTS, 1001],
        "age": [*NO_NUMBERS, -1, 1.5, 9],
        "predicts": ["tokens", "", None, 5],
        "labels": ["hard", "", None, 5],
        **dict.fromkeys(["dropout", "label_smoothing"], [*NO_SHARES, 1]),
        "smote_neighbours": [*NO_NUMBERS, -1, 1.5, 2**64],
        **dict.fromkeys(["standardise", "token"], NO_SWITCHES),
        "layers": NO_LAYERS,
    },
    "trainer/hrad": {
        "epochs": [*NO_COUNTS, 10**9],
        **dict.fromkeys(["batch_size", "accumulate", "patience"], NO_COUNTS),
        **dict.fromkeys(["lr", "clip"], [*NO_NUMBERS, 0, -1]),
        "weight_decay": [*NO_NUMBERS, -1],
        "schedule": ["linear", "", None],
        "warmup_ratio": NO_SHARES,
        "validation_fraction": [*NO_SHARES, 0, 1],
    },
    "draft/eagle": {"steps": [*NO_COUNTS, 101]},
    "draft/ordinary": {
        "layers": [[], [-1], [0, 0], [1.5], "0", 0, None, [True]],
        "start": [5, "", True],
    },
    "logger/wandb": {"project": NO_TEXTS, "folder": NO_PATHS, "timeout": [*NO_NUMBERS, 0, -1, 1e6]},
    "engine/assisted": {"models": [None, 5, "a"], "assistant": [5, "", True]},
    "engine/prompt_lookup": {"settings": [None, 5, "a", []]},
}
CASES = [
    (choice, key, value)
    for choice, settings in REFUSED.items()
    for key, values in settings.items()
    for value in values
]


def composed(choice: str) -> Any:
    values: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{choice}.yaml"))
    values = values.get("draft", values) if choice.startswith("draft/") else values
    values.pop("defaults", None)
    return values


def faults(values: Any) -> dict[str, str]:
    """By key, but for what only a whole config can say."""
    found = {fault.key: fault for fault in part(values, "x")}
    said = {key: str(fault) for key, fault in found.items()}
    return {k: v for k, v in said.items() if "${" not in v and str(found[k].value) != "???"}


@pytest.mark.parametrize(("choice", "key", "value"), CASES, ids=str)
@pytest.mark.few(60)
def test_what_no_constructor_takes_is_refused(choice: str, key: str, value: Any) -> None:
    values = composed(choice)
    inner = values
    *above, name = key.split(".")
    for group in above:
        inner = inner[group]
    inner[name] = value
    ((refused, said),) = faults(values).items()
    assert refused.startswith(f"x.{key}") and "\n" not in said


@pytest.mark.parametrize("choice", REFUSED)
def test_what_the_configs_say_is_taken(choice: str) -> None:
    assert faults(composed(choice)) == {}


def test_a_setting_that_nobody_has_is_refused() -> None:
    assert "gama" in faults({**composed("stop/fixed"), "gama": 3})["x.gama"]
