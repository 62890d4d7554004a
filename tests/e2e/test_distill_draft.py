"""scripts/distill_draft.py from its command line, with a tiny target."""

import json
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file, save_file

from drafts.chats import load_chats
from scripts import distill_draft
from tests.tiny_pair import tiny_models, tiny_tokenizer

SETTINGS = (
    "pair.target=target pair.dtype=float32 layers=[0,3] output=out/layers.safetensors folder=run"
    " chats.tokens=500 chats.shard_tokens=100 chats.slots=3 chats.prompt_tokens=4"
    " chats.response_tokens=6 chats.held_out=5 training.tokens=1500 training.batch_tokens=200"
).split()


@pytest.fixture(autouse=True)
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for turn in messages %}w1 w2 {{ turn['content'] }}</s> w3{% endfor %}"
    )
    tiny_models()[0].float().save_pretrained("target")
    tokenizer.save_pretrained("target")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    GlobalHydra.instance().clear()
    monkeypatch.setattr("sys.argv", ["distill_draft.py", *SETTINGS, *arguments])
    distill_draft.main()


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    with pytest.raises(SystemExit) as exit_code:
        run(monkeypatch, *arguments)
    assert exit_code.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


def written() -> int:
    return distill_draft.written_tokens(Path("run/chats"))


def test_both_budgets_are_used_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch)
    assert 500 <= written() < 500 + 100 + 6, "the last shard may exceed chats.tokens"
    record = json.loads(Path("out/provenance.json").read_text())
    assert record["progress"]["tokens"] >= 1500 and 0 < record["held_out_chats"]["acceptance"] < 1
    layers = load_file("out/layers.safetensors")
    assert {tensor.dtype for tensor in layers.values()} == {torch.bfloat16}
    chats = {path.name: path.read_bytes() for path in Path("run/chats").iterdir()}
    run(monkeypatch, "training.tokens=1700")
    assert {path.name: path.read_bytes() for path in Path("run/chats").iterdir()} == chats
    assert not torch.equal(
        load_file("out/layers.safetensors")["model.norm.weight"], layers["model.norm.weight"]
    )


def test_stages_and_a_start_from_trained_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no chats" in refused(monkeypatch, capsys, "stage=train")
    run(monkeypatch, "stage=generate", "chats.tokens=300")
    assert "chats.feature_layers: chats in run/chats keep" in refused(
        monkeypatch, capsys, "stage=generate", "chats.feature_layers=[1]"
    )
    assert "no trained state" in refused(monkeypatch, capsys, "stage=ship")
    assert not Path("out").exists()
    run(monkeypatch, "stage=train", "training.tokens=400")
    run(monkeypatch, "stage=ship")
    state = Path("run/state.safetensors")
    assert "other layers" in refused(monkeypatch, capsys, "stage=train", "layers=[0]")
    state.write_bytes(state.read_bytes()[:-3])
    assert "state.safetensors is damaged" in refused(monkeypatch, capsys, "stage=train")
    state.unlink()
    run(monkeypatch, "stage=train", "training.tokens=200", "start=out/layers.safetensors")
    record = json.loads(Path("out/provenance.json").read_text())
    assert record["started_from"] == "out/layers.safetensors"
    assert [run["started_from"] for run in record["earlier_runs"]] == ["target layers [0, 3]"]


def test_every_given_prompt_is_used_before_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when chats are written in several turns, between which the draft is trained."""
    prompts = [f"w{a} w{b} w{c}" for a in range(4, 7) for b in range(2, 10) for c in (20, 21)]
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in prompts))
    run(monkeypatch, "chats.prompts=prompts.jsonl", "chats.responses=1")
    paths = sorted(Path("run/chats").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    chats = [chat for path in paths for chat in load_chats(path)]
    given = tiny_tokenizer()
    used = [given.decode(chat.tokens[2:5].tolist()) for chat in chats if chat.start == 7]
    assert set(prompts) <= set(used[: len(prompts) + 5])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("stage=some", "stage: some is unknown"),
        ("layers=[0,4]", "layers: [0, 4] must be"),
        ("layers=[]", "layers: [] must be"),
        ("layers=5", "layers: 5 is no list of layers"),
        ("chats.feature_layers=5", "chats.feature_layers: 5 is no list of layers"),
        ("chats.feature_layers=[99]", "chats.feature_layers: [99] must be"),
        ("chats.temperatures=[0]", "chats.temperatures: "),
        ("chats.prompt_temperature=0", "chats.prompt_temperature: "),
        (
            "chats.openings=none.jsonl",
            "chats.openings: there is no file none.jsonl. Set chats.openings=",
        ),
        (
            "chats.openings=none.jsonl chats.prompt_tokens=1",
            "chats.prompt_tokens, chats.openings: 1 token",
        ),
        ("training.dtype=int8", "training.dtype: int8"),
        ("chats.slots=0", "chats.slots: 0"),
        ("training.warmup=0", "training.warmup: 0"),
        ("pair.target=none/at/all", "pair.target: no model in"),
        (
            "chats.prompts=none.jsonl",
            "chats.prompts: there is no file none.jsonl. Set chats.prompts=",
        ),
        ("start=half.safetensors", "start: half.safetensors is damaged"),
        ("training.speed=2", "training.speed"),
    ],
)
def test_bad_settings_are_one_line(
    argument: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"x": torch.zeros(9)}, "whole.safetensors")
    Path("half.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-3])
    assert message in refused(monkeypatch, capsys, *argument.split())
