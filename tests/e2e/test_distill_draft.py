"""pairs/distill_draft.py from its command line, with a tiny target."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pairs import distill_draft
from pairs.chats import Chat, load_chats
from pairs.self_chat import written_tokens
from pairs.training import DraftTraining
from tests.helpers.models.tiny_pair import save_talking_target, tiny_tokenizer
from tests.helpers.programs import programs
from tests.helpers.programs.programs import write_prompts

SETTINGS = (
    "pair.target=target pair.dtype=float32 draft.layers=[0,3] out=made chats.folder=chats"
    " chats.tokens=500 chats.shard_tokens=100 chats.slots=3 chats.prompt_tokens=4 logger=none"
    " chats.response_tokens=6 chats.held_out=5 training.tokens=1500 training.batch_tokens=200"
).split()


run = partial(programs.run, distill_draft, *SETTINGS)
refused = partial(programs.refused, distill_draft, *SETTINGS)


@pytest.fixture(autouse=True)
def target(here: Path) -> None:
    save_talking_target(here / "target")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_both_budgets_are_used_and_no_more() -> None:
    run()
    # the last shard may exceed chats.tokens
    assert 500 <= written_tokens(Path("chats")) < 500 + 100 + 6
    record = json.loads(Path("made/training.json").read_text())
    assert record["progress"]["tokens"] >= 1500
    assert 0 < record["held_out_chats"]["acceptance after 0 drafted"] < 1
    weights = load_file("made/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    chats = contents(Path("chats"))
    run("training.tokens=1700")
    assert contents(Path("chats")) == chats
    longer = load_file("made/model.safetensors")
    assert not torch.equal(longer["model.norm.weight"], weights["model.norm.weight"])


def interrupted(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Train, and stop after three steps."""
    step = DraftTraining.train_step

    def some(run: DraftTraining, batch: list[Chat]) -> dict:
        if run.progress["step"] == 3:
            raise KeyboardInterrupt
        return step(run, batch)

    with monkeypatch.context() as stopped, pytest.raises(SystemExit) as ending:
        stopped.setattr(DraftTraining, "train_step", some)
        run(*arguments)
    assert ending.value.code == 130


@pytest.mark.slow
def test_stages_and_a_start_from_a_trained_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "holds no chats" in refused("stage=train")
    run("stage=generate", "chats.tokens=300")
    message = refused("stage=generate", "chats.feature_layers=[1]")
    assert "chats.feature_layers: expected [], as of the chats in chats, got [1]" in message
    assert "no trained state" in refused("stage=finish")
    interrupted(monkeypatch, "stage=train")
    assert not Path("made").exists()
    state, settings = Path("made.run/state.safetensors"), Path("made.run/settings.json")
    assert "interrupted with draft.layers" in refused("stage=train", "draft.layers=[0]")
    whole, note = state.read_bytes(), settings.read_text()
    settings.unlink()
    assert "other layers" in refused("stage=train", "draft.layers=[0]")
    state.write_bytes(whole[:-3])
    assert "state.safetensors is damaged" in refused("stage=train")
    state.write_bytes(whole)
    settings.write_text(note)
    run("stage=finish")
    record = json.loads(Path("made/training.json").read_text())
    assert record["progress"]["step"] == 3 and not Path("made.run").exists()


@pytest.mark.slow
def test_what_was_trained_is_shipped_and_trained_further() -> None:
    run("training.tokens=400")
    run("ship=shipped")
    layers = load_file("shipped/draft_layers.safetensors")
    made = load_file("made/model.safetensors")
    own = {name for name in made if name.startswith(("model.layers.", "model.norm."))}
    assert layers.keys() == own and all(torch.equal(layers[name], made[name]) for name in own)
    more = ["stage=train", "training.tokens=200", "out=more"]
    found = []
    for start in ("shipped/draft_layers.safetensors", "made"):
        run(*more, f"draft.start={start}")
        record = json.loads(Path("more/training.json").read_text())
        assert record["started_from"] == start
        assert [run["started_from"] for run in record["earlier_runs"]] == ["target layers [0, 3]"]
        found.append(Path("more/model.safetensors").read_bytes())
    assert found[0] == found[1]


@pytest.mark.slow
def test_every_given_prompt_is_used_before_any_other() -> None:
    """Also when chats are written in several turns, between which the draft is trained."""
    prompts = [f"w{a} w{b} w{c}" for a in range(4, 7) for b in range(2, 10) for c in (20, 21)]
    write_prompts({"prompt": text} for text in prompts)
    run("chats.prompts=prompts.jsonl", "chats.responses=1")
    paths = sorted(Path("chats").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    chats = [chat for path in paths for chat in load_chats(path)]
    given = tiny_tokenizer()
    used = [given.decode(chat.tokens[2:5].tolist()) for chat in chats if chat.start == 7]
    assert set(prompts) <= set(used[: len(prompts) + 5])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "expected a target with a chat template, got one without"),
        ("{{ raise_exception('system first') }}", "chat template does not work (system first)"),
        ("{{ messages[0].content | nothing }}", "chat template does not work (No filter named"),
        ("w1 w2", "the chat template does not show the text of the prompt"),
        ("{{ messages[0].content }} w1", "does not close a user turn with '</s>'"),
        ("{{ messages[0].content }}</s>{{ messages[0].content }}</s>", "does not close a user"),
    ],
)
@pytest.mark.parametrize("stage", ["generate", "all"])
@pytest.mark.slow
def test_a_target_that_cannot_chat_is_refused_before_it_is_loaded(
    template: str | None, message: str, stage: str
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    Path("target/chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained("target")
    Path("target/model.safetensors").unlink()
    line = refused(f"stage={stage}")
    assert line.startswith("error: pair.target: ") and message in line
    assert not Path("chats").exists()


LAYERS = "expected a list of different layers from 0 on, such as"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("stage=some", "stage: expected all, generate, train or finish, got 'some'"),
        ("draft.layers=[0,4]", "target's layers 0 to 3, got [0, 4]"),
        ("draft.layers=[]", f"draft.layers: {LAYERS} [0,29], got []"),
        ("draft.layers=5", f"draft.layers: {LAYERS} [0,29], got 5"),
        ("chats.feature_layers=5", f"chats.feature_layers: {LAYERS} "),
        ("chats.feature_layers=[99]", "chats.feature_layers: expected layers from 0 to 4, got "),
        ("chats.temperatures=[0]", "chats.temperatures: "),
        ("chats.prompt_temperature=0", "chats.prompt_temperature: "),
        ("chats.openings=no.jsonl", "chats.openings: there is no file no.jsonl. Set chats."),
        ("chats.openings=x chats.prompt_tokens=1", "chats.prompt_tokens: expected 2 or more"),
        ("training.dtype=int8", "training.dtype: expected float32 or bfloat16, got 'int8'"),
        ("chats.slots=0", "chats.slots: expected a whole number from 1 on, got 0"),
        ("training.warmup=0", "training.warmup: expected a whole number from 1 on, got 0"),
        ("pair.target=none/at/all", "pair.target: no model in"),
        ("chats.prompts=no.jsonl", "chats.prompts: there is no file no.jsonl. Set chats.prompts="),
        ("draft.start=half.safetensors", "draft.start: half.safetensors is damaged"),
        ("draft.start=none", "draft.start: expected the folder of a draft or a file of layers"),
        ("training.speed=2", "training.speed"),
    ],
)
@pytest.mark.slow
def test_bad_settings_are_one_line(argument: str, message: str) -> None:
    save_file({"x": torch.zeros(9)}, "whole.safetensors")
    Path("half.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-3])
    if argument.startswith("draft.start"):
        run("stage=generate", "chats.tokens=300")
        argument += " stage=train"
    assert message in refused(*argument.split())
