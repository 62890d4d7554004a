"""What the built-in plug-ins take is what their constructors say: a value out of range is refused
before anything is made (of another kind: tests/conf/test_hostile_settings.py)."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from runtime.settings.check import part

CONF = Path(__file__).parents[4] / "conf"
REFUSED = {
    "warp/default": "temperature=-1 temperature=1e-9 temperature=1e9 top_k=-1 top_k=1.5"
    " top_p=0 top_p=1e-46 top_p=1.1 top_p=.nan",
    "stop/fixed": "gamma=0 gamma=1001 gamma=1.5 gamma=null",
    "stop/confidence": "threshold=-0.1 threshold=1.1 threshold=.nan",
    "stop/product": "threshold=-0.1 threshold=1.1",
    "stop/confidence_before": "threshold=-0.1 threshold=1.1",
    "stop/adaedl": "kappa=0 kappa=-1 threshold=1.1 target_rate=1.1 step=1.1 rate_memory=5"
    " threshold_memory=-0.1",
    "stop/hrad": "checkpoint= balance=1e9 none=abc none=true none=-0.1 none=1.5 confidence=null"
    " confidence={} confidence={_target_:decoding.stopping.Nobody} confidence.threshold=1.1",
    "stop/specdecpp": "checkpoint=null threshold=1.1 bounds=5 bounds=[] bounds=[5] bounds=[1,2,3]"
    " bounds=[0,20] bounds=[1,1e9] bounds=[1,2.5] bounds=[a,b] order=both order=",
    "stop/stop_loss": "cost=5 loss=0 loss=1.1 rule.threshold=1.1",
    "structure/chain": "gamma_max=0 gamma_max=1001",
    "structure/branch_point": "gamma_max=0 gamma_max=1001 candidates=0 candidates=65",
    "structure/parallel_paths": "paths=0 paths=65 gamma=0 gamma=65",
    "structure/tree": "widths=[] widths=3 widths=[0] widths=[2.5] widths=[true] widths=[5000]"
    " widths=[64,64] widths=[2,2,2,2,2,2,2,2,2,2,2,2]",
    "structure/specinfer": "widths=[] widths=[2,0]",
    "structure/dyspec": "budget=0 budget=100000",
    "structure/dyspec_layers": "threshold=0 threshold=1 cap=0 cap=100000",
    "structure/lookup": "ngram_max=0 ngram_max=257 ngram_min=257 gamma=0 gamma=1001",
    "structure/sources": "ngram_max=257 ngram_min=0 gamma_max=1001 stretch=0 stretch=1001",
    "verifier/parallel": "rule=hub rule= rule=null",
    "engine/lookahead": "window=0 window=129 guesses=129 ngram=1 ngram=17 prompt_pool=0",
    "engine/overlapped": "overlap=maybe pre_verify=0 a_priori=null draft_threads=0"
    " draft_threads=5000 draft_threads=true structure=null structure=chain",
    "dataset/jsonl": "path=null path= name=5 field=[a] limit=0 chat=maybe",
    "dataset/starter": "limit=0 limit=1.5 chat=maybe",
    "dataset/hub": "name= hub_id=null split=5 field= subset=5 subset= limit=0 chat=maybe",
    "responses/file": "path=null",
    "responses/server": "url=127.0.0.1 url=ftp://a/b url=http://a@b/v1 model= concurrency=0"
    " concurrency=1001 timeout=0 timeout=1e6 retries=-1 retries=1001 key_variable=5 extra=[1]",
    "cost/a100": "draft=0 target=0 target={1:1.0,4:.inf} target={1:1.0,2.5:1.0} target={0:1.0}"
    " target={'1':1.0} target={1:a} autoregressive=0 calls={any:-0.1} calls={any:a} calls=5",
    "cost/measured": "file=null",
    "predictor/specdecpp": "context=both depth=-1 depth=65 tie_blocks=maybe w_rej=0 w_acc=-1"
    " inputs=q_stats inputs=[depth,depth] layers=[] layers=[0] layers=[-1,-1] layers=-1",
    "predictor/hrad": "gamma=0 gamma=1001 age=-1 age=9 predicts=tokens labels=hard dropout=1"
    " label_smoothing=1 smote_neighbours=-1 standardise=maybe token=1 layers=[1]",
    "trainer/hrad": "epochs=0 epochs=1000000000 batch_size=0 accumulate=0 patience=0 lr=0 clip=0"
    " weight_decay=-1 schedule=linear warmup_ratio=1.1 validation_fraction=0 validation_fraction=1",
    "draft/eagle": "steps=0 steps=101",
    "draft/ordinary": "layers=[] layers=[-1] layers=[0,0] layers=0 layers=null start=5",
    "logger/wandb": "project= folder=5 timeout=0 timeout=1e6",
    "engine/assisted": "models=null assistant=5",
    "engine/prompt_lookup": "settings=null settings=[]",
}
CASES = [(choice, one) for choice, settings in REFUSED.items() for one in settings.split()]


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


@pytest.mark.parametrize(("choice", "setting"), CASES, ids=str)
@pytest.mark.few(60, rest="slow")
def test_what_no_constructor_takes_is_refused(choice, setting):
    values = inner = composed(choice)
    key, _, written = setting.partition("=")
    *above, name = key.split(".")
    for group in above:
        inner = inner[group]
    loaded = yaml.safe_load(written.replace(":", ": ") if written[:1] == "{" else written)
    inner[name] = float(written) if isinstance(loaded, str) and "1e" in written else loaded
    inner[name] = "" if not written else inner[name]
    ((refused, said),) = faults(values).items()
    assert refused.startswith(f"x.{key}") and "\n" not in said


@pytest.mark.parametrize("choice", REFUSED)
def test_what_the_configs_say_is_taken(choice):
    assert faults(composed(choice)) == {}


def test_a_setting_that_nobody_has_is_refused():
    assert "gama" in faults({**composed("stop/fixed"), "gama": 3})["x.gama"]
