"""`distill_draft.py draft=eagle3` from its command line: what it writes decodes, and is what was
trained."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decoding.models.draft_vocabulary import FILE as VOCABULARY
from decoding.models.eagle.speculators import Proposal
from decoding.pair import open_pair
from drafts.chats import ChatPool, save_chats
from drafts.eagle3 import Eagle3InTraining, first_draft, unrolled
from drafts.training import DraftTraining, TrainingConfig
from scripts import distill_draft, evaluate
from tests.e2e.test_distill_eagle_draft import SMALL, pair  # noqa: F401
from tests.helpers.models.tiny_pair import tiny_models
from tests.helpers.programs.programs import GREEDY, base, refused, run

GIVEN = [*(word for word in SMALL if word != "draft=eagle"), "draft=eagle3"]


def test_a_draft_is_trained_saved_and_decodes(
    pair: list[str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs: list[DraftTraining] = []
    save = DraftTraining.save
    monkeypatch.setattr(DraftTraining, "save", lambda run: (runs.append(run), save(run)))
    target = Path(pair[0].removeprefix("pair.target="))
    monkeypatch.setenv("HOME", str(target.parent))  # the file that engines read has no ~
    home = f'pair.target="~/{target.name}"'
    given = [home, *pair[1:], *GIVEN, f"vocabulary=chats/{VOCABULARY}", "training.tokens=3000"]
    run(distill_draft, monkeypatch, *given)
    config = json.loads(Path("made/config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 31
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3] and config["fc_norm"] is True
    assert not Path("made", VOCABULARY).exists(), "vLLM reads every safetensors file"
    tensors = load_file("made/model.safetensors")
    assert (torch.arange(31) + tensors["d2t"]).tolist() == list(range(31))
    same_logits(runs[-1].draft, pair)
    decoded = [*pair[:1], "pair.draft=made", "pair.dtype=float64", *base(Path())[3:], *GREEDY]
    more = ["split=all", "repeats=1", "methods=[confidence]", "max_new_tokens=12", "logger=none"]
    run(evaluate, monkeypatch, *decoded, *more, "out=runs")
    assert "1 of 1 outputs equal autoregressive decoding (equal)" in capsys.readouterr().out
    line = refused(distill_draft, monkeypatch, capsys, *pair, *GIVEN, "ship=shipped", "out=made")
    assert "ship: expected a draft that scripts/build_pair.py can make, got an EAGLE-3" in line


@torch.no_grad()
def same_logits(trained: Eagle3InTraining, arguments: list[str]) -> None:
    """Of the draft that was written and is read again, and of what was trained, in bfloat16."""
    target = arguments[0].removeprefix("pair.target=")
    found, text = open_pair(target, "made", dtype="float64"), torch.arange(3, 12)
    found.target.forward(text)
    logits = found.draft.forward(text).logits
    model = trained.model.double()
    model.rotary_emb = LlamaRotaryEmbedding(model.config)  # writing rounded the old one's angles
    states = found.target.states[None, : len(text)]
    (own,) = unrolled(model, text[None], states, 1)
    expected = model.lm_head(own[0])
    torch.testing.assert_close(logits[:, :31].double(), expected[:, :31], rtol=1e-5, atol=1e-5)


def test_training_raises_acceptance(pair: list[str], tmp_path: Path) -> None:  # noqa: F811
    target = tiny_models()[0].float()
    draft = Eagle3InTraining(first_draft(target, (1, 3), 1.0), Proposal("t", "L", 3), {0})
    config = TrainingConfig(
        tokens=12_000,
        batch_tokens=60,
        lr=0.004,
        warmup=2,
        decay=0.5,
        momentum=0.95,
        positions=0.7,
        regression=0.5,
        total_variation=0.3,
    )
    training = DraftTraining(draft, ChatPool(Path("chats"), 4), config, tmp_path / "run", seed=0)
    records = list(training.run(9000, save_seconds=1e9))
    assert records[-1]["acceptance"] > records[0]["acceptance"] + 0.05


def test_chats_without_inner_states_are_refused(
    pair: list[str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats = ChatPool(Path("chats"), 1).chats
    Path("other").mkdir()
    save_chats(Path("other/0.safetensors"), chats, ())
    line = refused(distill_draft, monkeypatch, capsys, *pair, *GIVEN, "chats.folder=other")
    assert line.startswith("error: chats.feature_layers: expected layers from 0 to 3, got []")
