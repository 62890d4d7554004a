"""pairs/distill_draft.py from its command line, with a tiny target, also of a draft that reads it:
it makes a draft, goes on after an interruption, refuses the rest."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import evaluation.evaluate
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.draft_vocabulary import write_vocabulary
from decoding.models.eagle.draft import EagleDraft
from decoding.models.loading import ModelPair
from pairs import distill_draft
from pairs.chats import Chat, load_chats, save_chats
from pairs.embedded import EAGLE_LAYERS, EAGLE_PROVENANCE
from pairs.self_chat import written_tokens
from pairs.training import DraftTraining
from scripts import evaluate
from tests.helpers.models.tiny_pair import CONFIG, save_talking_target, tiny_models, tiny_tokenizer
from tests.helpers.programs.programs import GREEDY, JSONL, models, refused, run, write_prompts

SETTINGS = (
    "pair.target=target pair.dtype=float32 draft.layers=[0,3] out=made chats.folder=chats"
    " chats.tokens=500 chats.shard_tokens=100 chats.slots=3 chats.prompt_tokens=4 logger=none"
    " chats.response_tokens=6 chats.held_out=5 training.tokens=1500 training.batch_tokens=200"
).split()


distill = partial(run, distill_draft, *SETTINGS)
refuse = partial(refused, distill_draft, *SETTINGS)


@pytest.fixture
def target(here: Path) -> None:
    save_talking_target(here / "target")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_both_budgets_are_used_and_no_more(target: None) -> None:
    distill()
    # the last shard may exceed chats.tokens
    assert 500 <= written_tokens(Path("chats")) < 500 + 100 + 6
    record = json.loads(Path("made/training.json").read_text())
    assert record["progress"]["tokens"] >= 1500
    assert 0 < record["held_out_chats"]["acceptance after 0 drafted"] < 1
    weights = load_file("made/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    chats = contents(Path("chats"))
    distill("training.tokens=1700")
    assert contents(Path("chats")) == chats
    longer = load_file("made/model.safetensors")
    assert not torch.equal(longer["model.norm.weight"], weights["model.norm.weight"])


def interrupted(monkeypatch: pytest.MonkeyPatch, steps: int, *arguments: str) -> None:
    """Train, and stop after so many steps."""
    step = DraftTraining.train_step

    def some(run: DraftTraining, batch: list[Chat]) -> dict:
        if run.progress["step"] == steps:
            raise KeyboardInterrupt
        return step(run, batch)

    with monkeypatch.context() as stopped, pytest.raises(SystemExit) as ending:
        stopped.setattr(DraftTraining, "train_step", some)
        run(distill_draft, *arguments)
    assert ending.value.code == 130


@pytest.mark.slow
def test_stages_and_a_start_from_a_trained_draft(
    target: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "holds no chats" in refuse("stage=train")
    distill("stage=generate", "chats.tokens=300")
    message = refuse("stage=generate", "chats.feature_layers=[1]")
    assert "chats.feature_layers: expected [], as of the chats in chats, got [1]" in message
    assert "no trained state" in refuse("stage=finish")
    interrupted(monkeypatch, 3, *SETTINGS, "stage=train")
    assert not Path("made").exists()
    state, settings = Path("made.run/state.safetensors"), Path("made.run/settings.json")
    assert "interrupted with draft.layers" in refuse("stage=train", "draft.layers=[0]")
    whole, note = state.read_bytes(), settings.read_text()
    settings.unlink()
    assert "other layers" in refuse("stage=train", "draft.layers=[0]")
    state.write_bytes(whole[:-3])
    assert "state.safetensors is damaged" in refuse("stage=train")
    state.write_bytes(whole)
    settings.write_text(note)
    distill("stage=finish")
    record = json.loads(Path("made/training.json").read_text())
    assert record["progress"]["step"] == 3 and not Path("made.run").exists()


@pytest.mark.slow
def test_what_was_trained_is_shipped_and_trained_further(target: None) -> None:
    distill("training.tokens=400")
    distill("ship=shipped")
    layers = load_file("shipped/draft_layers.safetensors")
    made = load_file("made/model.safetensors")
    own = {name for name in made if name.startswith(("model.layers.", "model.norm."))}
    assert layers.keys() == own and all(torch.equal(layers[name], made[name]) for name in own)
    more = ["stage=train", "training.tokens=200", "out=more"]
    found = []
    for start in ("shipped/draft_layers.safetensors", "made"):
        distill(*more, f"draft.start={start}")
        record = json.loads(Path("more/training.json").read_text())
        assert record["started_from"] == start
        assert [run["started_from"] for run in record["earlier_runs"]] == ["target layers [0, 3]"]
        found.append(Path("more/model.safetensors").read_bytes())
    assert found[0] == found[1]


@pytest.mark.slow
def test_every_given_prompt_is_used_before_any_other(target: None) -> None:
    """Also when chats are written in several turns, between which the draft is trained."""
    prompts = [f"w{a} w{b} w{c}" for a in range(4, 7) for b in range(2, 10) for c in (20, 21)]
    write_prompts({"prompt": text} for text in prompts)
    distill("chats.prompts=prompts.jsonl", "chats.responses=1")
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
    target: None, template: str | None, message: str, stage: str
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    Path("target/chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained("target")
    Path("target/model.safetensors").unlink()
    line = refuse(f"stage={stage}")
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
def test_bad_settings_are_one_line(target: None, argument: str, message: str) -> None:
    save_file({"x": torch.zeros(9)}, "whole.safetensors")
    Path("half.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-3])
    if argument.startswith("draft.start"):
        distill("stage=generate", "chats.tokens=300")
        argument += " stage=train"
    assert message in refuse(*argument.split())


# A draft that reads its target --------------------------------------------------------------------

SMALL = (
    "draft=eagle stage=train chats.folder=chats chats.held_out=4 training.tokens=300"
    " training.batch_tokens=60 logger=none out=made"
).split()


@pytest.fixture
def pair(tiny_pair_dir: Path, here: Path) -> list[str]:
    """The arguments that name it, in a folder with chats, a vocabulary beside them, and prompts."""
    Path("chats").mkdir()
    write_prompts(1)
    lm, chats = CachedLM(tiny_models()[0].float()), []
    lm.record([1, 3])
    generator = torch.Generator().manual_seed(2)
    for number in range(30):
        tokens = torch.randint(1, 32, (8 + number % 5,), generator=generator, dtype=torch.int32)
        lm.reset()
        lm.forward(tokens.long())
        chats.append(Chat(tokens, 3, lm.states[: len(tokens) - 1].bfloat16().clone()))
    save_chats(Path("chats/0.safetensors"), chats, [1, 3])
    write_vocabulary(Path("chats") / VOCABULARY, torch.arange(1, 31), {})
    return [*models(tiny_pair_dir), "pair.dtype=float64"]


@pytest.mark.slow
def test_a_draft_is_trained_goes_on_and_decodes(
    pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*pair, *SMALL, f"vocabulary=chats/{VOCABULARY}"]
    interrupted(monkeypatch, 1, *given)
    assert not Path("made").exists()
    message = refused(distill_draft, *given, "draft.steps=1")
    assert "interrupted with draft.steps=2, here 1" in message
    assert "resuming after" in run(distill_draft, *given) and not Path("made.run").exists()
    assert [path.name for path in Path("made").glob("*.safetensors")] == ["model.safetensors"]

    seen: list[ModelPair] = []
    load = evaluation.evaluate.prepare

    def watched(cfg):
        compared = load(cfg)
        seen.append(compared.pair)
        return compared

    monkeypatch.setattr("evaluation.evaluate.prepare", watched)
    decoded = [*pair[:1], "pair.draft=made", "pair.dtype=float64", *JSONL, *GREEDY]
    few = ["split=all", "repeats=1", "methods=[confidence]", "max_new_tokens=12", "logger=none"]
    equal = "confidence: 1 of 1 outputs equal plain decoding (equal)"
    assert equal in run(evaluate, *decoded, *few, "out=runs")
    draft = seen[0].draft
    assert isinstance(draft, EagleDraft) and draft.maps.layers == (1, 3)
    # the tokens it was trained to say, and the end
    assert draft.vocabulary is not None and draft.vocabulary.tolist() == list(range(31))


@pytest.mark.slow
def test_what_was_trained_in_two_runs_is_shipped_with_the_story_of_both(pair: list[str]) -> None:
    run(distill_draft, *pair, *SMALL, "+notes.prompts=random words")
    second = [word for word in (*pair, *SMALL) if not word.startswith(("pair.draft", "out="))]
    run(distill_draft, *second, "pair.draft=made", "out=again")
    run(distill_draft, *pair, "draft=eagle", "ship=shipped", "out=again", "+notes.why=a test")
    record = json.loads(Path("shipped", EAGLE_PROVENANCE).read_text())
    assert record["started_from"] == "made" and record["shipped"]
    assert record["notes"] == {"why": "a test"}
    assert [earlier["notes"] for earlier in record["earlier_runs"]] == [{"prompts": "random words"}]
    trained = load_file("again/model.safetensors")
    shipped = load_file(Path("shipped", EAGLE_LAYERS))
    maps = load_file("again/speculation/target_features.safetensors")
    layers = ("model.layers.", "model.norm.")
    own = {name: tensor for name, tensor in trained.items() if name.startswith(layers)}
    assert shipped.keys() == own.keys() | maps.keys() and len(own) < len(trained)
    assert all(torch.equal(tensor, (own | maps)[name]) for name, tensor in shipped.items())
    Path("again/training.json").write_text("{")
    for argument, message in (
        ("out=again", "training.json is damaged"),
        ("out=chats", "out: expected the folder of a trained draft, got chats"),
        ("notes=5", "notes: expected settings by name, got 5"),
    ):
        assert message in refused(distill_draft, *pair, "draft=eagle", "ship=shipped", argument)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("chats.folder=none", "chats.folder: none holds no chats"),
        ("chats.held_out=30", "chats.folder: chats holds no chats"),
        ("vocabulary=5", "vocabulary: expected a path or null, got 5"),
        ("draft.steps=0", "draft.steps: expected a whole number from 1 to 100, got 0"),
        ("training.tokens=0", "training.tokens: expected a whole number from 1 on, got 0"),
        ("training.batch_tokens=-1", "training.batch_tokens: expected a whole number from 1 on"),
        ("training.lr=abc", "training.lr: expected a number above 0, got 'abc'"),
        ("~training.lr", "training.lr: expected a number above 0, got null"),
        ("+training.foo=1", "training.foo: expected one of tokens, batch_tokens, "),
        ("training.lr=-1", "training.lr: expected a number above 0, got -1"),
        ("training.decay=nan", "training.decay: expected a number from 0 to 1, got nan"),
        ("training.positions=7", "training.positions: expected a number above 0, at most 1, got 7"),
        ("training.dtype=float12", "training.dtype: expected float32 or bfloat16, got 'float12'"),
        ("save_seconds=abc", "save_seconds: expected a number from 0 on, got 'abc'"),
        ("seed=abc", "seed: expected a whole number from 0 to 4294967295, got 'abc'"),
        ("pair.draft=other", "pair.draft: expected hidden states of size 24, as the target's"),
        ("pair.draft=wider", "pair.draft: expected an output layer of 32 tokens, as the target"),
        ("out=chats", "out: "),
    ],
)
@pytest.mark.slow
def test_what_cannot_work_is_one_line(argument: str, message: str, pair: list[str]) -> None:
    for name, size in (("other", {"hidden_size": 16}), ("wider", {"vocab_size": 40})):
        if argument == f"pair.draft={name}":
            LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), **size})).save_pretrained(name)
    given = [word for word in (*pair, *SMALL) if word.split("=")[0] != argument.split("=")[0]]
    assert refused(distill_draft, *given, argument).startswith(f"error: {message}")
    assert not Path("made").exists() and not Path("made.run").exists()


@pytest.mark.slow
def test_jobs_of_a_sweep_do_not_overwrite_each_other(pair: list[str]) -> None:
    run(distill_draft, "-m", *pair, *SMALL, "draft.steps=1,2")
    assert len(list(Path("made").glob("*/training.json"))) == 2


@pytest.mark.slow
def test_the_order_of_training_is_the_seeds(pair: list[str]) -> None:
    made = []
    for seed in (1, 1, 2):
        torch.rand(seed + len(made))  # whatever was drawn before
        run(distill_draft, *pair, *SMALL, f"seed={seed}")
        made.append(Path("made/model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]
