"""`distill_draft.py draft=eagle` from its command line: it makes a draft, goes on after an
interruption, refuses the rest."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import evaluation.evaluate
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.draft_vocabulary import write_vocabulary
from decoding.models.eagle.draft import EagleDraft
from decoding.models.loading import ModelPair
from pairs import distill_draft
from pairs.chats import Chat, save_chats
from pairs.embedded import EAGLE_LAYERS, EAGLE_PROVENANCE
from pairs.training import DraftTraining
from scripts import evaluate
from tests.helpers.models.tiny_pair import CONFIG, tiny_models
from tests.helpers.programs.programs import GREEDY, JSONL, models, refused, run, write_prompts

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
    step = DraftTraining.train_step

    def once(run: DraftTraining, batch: list[Chat]) -> dict:
        if run.progress["step"]:
            raise KeyboardInterrupt
        return step(run, batch)

    with monkeypatch.context() as stopped, pytest.raises(SystemExit) as ending:
        stopped.setattr(DraftTraining, "train_step", once)
        run(distill_draft, *given)
    assert ending.value.code == 130 and not Path("made").exists()
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
    equal = "confidence: 1 of 1 outputs equal autoregressive decoding (equal)"
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
