import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation import StoppingCriteriaList, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.streamers import BaseStreamer, TextStreamer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import serving.generate
from decoding.engines.overlapped import OverlappedEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import FILE, write_vocabulary
from decoding.models.identity import draft_fingerprint, model_fingerprint
from decoding.models.kv_cache import ATTENTION
from decoding.pair import open_pair
from decoding.sampling import Warp
from decoding.stopping.confidence import Confidence
from decoding.stopping.fixed import Fixed
from decoding.stopping.never import Never
from decoding.structures.branch_point import BranchPoint
from decoding.structures.chain import Chain
from decoding.structures.dyspec import DySpecHeap
from decoding.verifiers.rrsw import RrswVerifier
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from serving.generate import SpeculativeOutput, speculate
from serving.models import opened
from tests.contract.enumeration import distribution_of, largest_error
from tests.helpers.models.tiny_pair import (
    CONFIG,
    EOS,
    save_tiny_pair,
    tiny_models,
    tiny_pair,
    tiny_tokenizer,
)
from tests.helpers.training.checkpoints import columns, write_checkpoint

PROMPT = torch.tensor([[3, 7, 1, 9, 4]])
Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


@pytest.fixture
def models() -> Models:
    found = tiny_models()
    for model in found:  # they share a config, which other tests change
        model.set_attn_implementation("sdpa")
    return found


def plain(model: LlamaForCausalLM, **asked) -> torch.Tensor:
    return model.generate(**{"inputs": PROMPT, "max_new_tokens": 20, "do_sample": False, **asked})


def ours(model: LlamaForCausalLM, draft, **asked):
    return plain(model, custom_generate=speculate, draft=draft, **asked)


@pytest.mark.smoke
def test_greedy_is_what_generate_says(models: Models) -> None:
    target, draft = models
    expected = plain(target)

    assert torch.equal(ours(target, draft), expected)
    assert torch.equal(ours(target, draft), expected), "with the models made ready before"
    assert torch.equal(plain(target), expected), "afterwards"


@pytest.mark.filterwarnings("ignore:pair.draft. its context holds")
def test_a_draft_of_less_context_does_not_limit_generate(models: Models) -> None:
    fields = {**CONFIG.to_dict(), "max_position_embeddings": 12}
    target, draft = models[0], LlamaForCausalLM(CONFIG.__class__(**fields)).double()
    draft.load_state_dict(models[1].state_dict())
    found = ours(target, draft, return_dict_in_generate=True)

    assert torch.equal(found.sequences, plain(target))
    assert {round_.beyond_draft for round_ in found.traces[0].rounds} == {False, True}


def test_a_draft_folder_has_the_ends_that_open_pair_gives_it(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path)
    write_vocabulary(folder / "draft" / FILE, torch.tensor([3, 5, 7]), {})
    for target_ends in (EOS, [9, EOS], None):
        target = tiny_models()[0]
        target.generation_config.eos_token_id = target_ends
        target.save_pretrained(folder / "target")
        pair = open_pair(str(folder / "target"), str(folder / "draft"), dtype="float64")
        whole = LlamaForCausalLM.from_pretrained(folder / "target")
        made = opened(whole, str(folder / "draft"))
        assert made.draft.vocabulary.tolist() == pair.draft.vocabulary.tolist()
        assert EOS in made.draft.vocabulary and draft_fingerprint(made.draft) == draft_fingerprint(
            pair.draft
        )


def test_it_speculates_and_says_what_happened(models: Models) -> None:
    target, draft = models
    found = ours(target, draft, return_dict_in_generate=True, stop=Fixed(3))

    assert isinstance(found, SpeculativeOutput)
    [trace] = found.traces
    assert found.sequences[0, 5:].tolist() == trace.tokens
    assert len(trace.tokens) > len(trace.rounds), "more than a token a round"


def test_rows_of_a_batch_are_what_they_are_alone(models: Models) -> None:
    target, draft = models
    ids = torch.tensor([[EOS, EOS, 3, 7, 1], [2, 6, 5, 3, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    asked = {"inputs": ids, "attention_mask": mask, "pad_token_id": EOS}

    assert torch.equal(ours(target, draft, **asked), plain(target, **asked))


def test_every_row_of_several_sequences_is_sampled(models: Models) -> None:
    torch.manual_seed(0)
    asked = {"do_sample": True, "num_return_sequences": 3, "eos_token_id": None}
    found = ours(*models, **asked)

    assert found.shape == (3, 25) and len({tuple(row) for row in found.tolist()}) == 3


def test_the_seed_is_that_of_torch(models: Models) -> None:
    def sampled() -> torch.Tensor:
        torch.manual_seed(5)
        return ours(*models, do_sample=True)

    assert torch.equal(sampled(), sampled())


WARPS = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.8},
    {"temperature": 1.5, "top_k": 4, "top_p": 0.7},
]


def small() -> Models:
    """Five words, the first of which ends a response."""
    torch.manual_seed(3)
    config = CONFIG.__class__(**{**CONFIG.to_dict(), "vocab_size": 5})
    target, draft = LlamaForCausalLM(config).double(), LlamaForCausalLM(config).double()
    return target.eval(), draft.eval()


def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither our logits nor transformers' norms are rounded to float32, as they always are."""
    as_they_are = lambda lm, logits, dtype: logits[..., : lm.vocab_size]  # noqa: E731
    monkeypatch.setattr(CachedLM, "spread", as_they_are)

    def norm(self: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(variance + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)


@pytest.mark.smoke
@pytest.mark.parametrize(("warp", "tree"), [*((warp, False) for warp in WARPS), (WARPS[-1], True)])
@pytest.mark.few(2)
def test_the_distribution_is_that_of_generate(
    warp: dict, tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = small()
    in_float64(monkeypatch)
    parts = (
        {"structure": DySpecHeap(3), "verifier": RrswVerifier(), "stop": Never()} if tree else {}
    )

    def decoded(sampler) -> tuple[int, ...]:
        seeded = SimpleNamespace(seeded=lambda seed: sampler)
        monkeypatch.setattr(serving.generate, "Sampler", seeded)
        asked = {"inputs": PROMPT % 5, "max_new_tokens": 3, "do_sample": True, **warp, **parts}
        return tuple(ours(target, draft, **asked)[0, 5:].tolist())

    assert largest_error(distribution_of(decoded), generated(target, warp, 3)) < 1e-9


def generated(model: LlamaForCausalLM, warp: dict, length: int) -> dict[tuple[int, ...], float]:
    """The distribution that `generate` samples, from the processors it makes."""
    config = GenerationConfig(do_sample=True, **warp)
    processors = model._get_logits_processor(config)
    assert len(processors) == len(warp)
    found, open_texts = {}, [((), 1.0)]
    while open_texts:
        text, probability = open_texts.pop()
        if len(text) == length or EOS in text:
            found[text] = probability
            continue
        ids = torch.cat([PROMPT % 5, torch.tensor([text], dtype=torch.long)], 1)
        with torch.no_grad():
            logits = model(ids).logits[:, -1]
        probs = processors(ids, logits)[0].softmax(-1)
        open_texts += [
            ((*text, token), probability * p) for token, p in enumerate(probs.tolist()) if p
        ]
    return found


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_stream_hears_what_a_streamer_of_generate_hears(models: Models) -> None:
    heard, theirs = Heard(), Heard()
    ours(*models, stream=heard)
    plain(models[0], streamer=theirs)

    assert heard.tokens == theirs.tokens and heard.ended


def test_a_stream_that_skips_the_prompt_says_the_first_token(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ours(*models, stream=TextStreamer(tiny_tokenizer(), skip_prompt=True))
    assert capsys.readouterr().out.split() == [f"w{token}" for token in found[0, 5:].tolist()]


def test_stopping_criteria_end_where_they_end_generate(models: Models) -> None:
    target, draft = models
    whole = plain(target)[0].tolist()
    word = whole[12]
    criteria = StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] == word])
    asked = {"stopping_criteria": criteria}

    found = ours(target, draft, **asked)
    assert torch.equal(found, plain(target, **asked)) and found.shape[1] <= 13


def test_another_engine(models: Models) -> None:
    engine = partial(OverlappedEngine, branch_verifier=RrswVerifier(), overlap=False)
    found = ours(*models, engine=engine, structure=BranchPoint(4, 2), stop=Confidence(0.4))
    assert torch.equal(found, plain(models[0]))


@pytest.mark.smoke
def test_a_draft_from_its_folder_and_a_pair(tmp_path: Path) -> None:
    save_tiny_pair(tmp_path)
    target = LlamaForCausalLM.from_pretrained(tmp_path / "target").double()
    pair = tiny_pair()

    assert torch.equal(ours(target, tmp_path / "draft"), plain(target))
    assert torch.equal(ours(pair.target.model, pair), plain(pair.target.model))


def test_a_model_attends_afterwards_as_before(models: Models) -> None:
    target, draft = models
    before = target.config._attn_implementation
    ours(target, draft)
    assert target.config._attn_implementation == before != ATTENTION


def test_a_model_in_training_is_in_training_afterwards(models: Models) -> None:
    target, draft = (model.train() for model in models)
    target.model.norm.eval()
    ours(target, draft)
    assert target.training and draft.training and not target.model.norm.training


def test_an_attention_set_between_calls_stays(models: Models) -> None:
    ours(*models)
    models[0].set_attn_implementation("eager")
    ours(*models)
    assert models[0].config._attn_implementation == "eager"


@pytest.mark.parametrize("change", [copy.deepcopy, lambda model: model.double()])
def test_a_model_in_plain_code_stays_a_plain_model(change, models: Models) -> None:
    target, draft = (model.float() for model in models)
    expected = ours(target, draft)
    assert {type(module) for module in target.modules() if isinstance(module, nn.Linear)} == {
        nn.Linear
    }
    assert torch.equal(plain(change(target)), expected)


def test_changed_weights_are_seen(models: Models) -> None:
    target, draft = (model.float() for model in models)
    ours(target, draft)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))

    found = ours(target, draft)
    assert torch.equal(found, plain(target))
    fresh = LlamaForCausalLM(CONFIG)
    fresh.load_state_dict(target.state_dict())
    assert torch.equal(found, plain(fresh))


def checkpoint(folder: Path, pair: Models, name: str, **context) -> Path:
    target, draft = pair
    identity = {
        "name": "tiny",
        "target": model_fingerprint(target),
        "draft": draft_fingerprint(tiny_pair().draft),
        "tokenizer": "",
    }
    warp = Warp(temperature=0).to_dict()
    facts = {"pair": identity, "warp": warp, "draft_warp": warp, **context}
    return write_checkpoint(folder, name, columns(name, CONFIG.hidden_size), context=facts)


@pytest.mark.parametrize("name", ["specdecpp", "hrad", "value"])
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_a_predictor_is_asked(
    name: str, threshold: float | None, models: Models, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / name, models, name)
    found = ours(*models, predictor=str(folder), threshold=threshold, return_dict_in_generate=True)

    assert torch.equal(found.sequences, plain(models[0]))
    assert any(round_.predicted for round_ in found.traces[0].rounds)


def sampled(warper: LogitsProcessor) -> dict:
    return {"do_sample": True, "top_k": 0, "logits_processor": LogitsProcessorList([warper])}


REFUSED = {
    "max_new_tokens": {"max_new_tokens": 120},
    "num_beams": {"num_beams": 2},
    "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.2},
    "MinPLogitsWarper": {"do_sample": True, "min_p": 0.1},
    "function": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores])},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "threshold": {"threshold": 0.5},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True},
    "stop: expected a stop rule": {"stop": 0.4},
    "structure: expected": {"structure": 3},
    "verifier: expected": {"verifier": 3},
    "engine: expected": {"engine": 3},
    "draft_warp: expected": {"draft_warp": 0.5},
    "stream: expected": {"stream": 5},
    "stop: expected a stop rule, such": {"stop": Confidence},
    "structure: expected a": {"structure": Chain},
    "verifier: expected a": {"verifier": TokenVerifier},
    "predictor: expected its": {"predictor": ""},
    "predictor: expected": {"predictor": 3},
    "threshold: expected": {"predictor": "x", "threshold": float("nan")},
    "threshold: expected a number": {"predictor": "x", "threshold": "0.5"},
    "stop, predictor": {"stop": Fixed(2), "predictor": "x"},
    "predictor: no checkpoint": {"predictor": "nowhere/at/all"},
    "attention_mask": {"attention_mask": torch.tensor([[1, 1, 1, 0, 0]])},
    "attention_mask: expected shape [1, 5]": {"attention_mask": torch.tensor([[0, 1, 1]])},
    "holds the pad token": {"pad_token_id": 1},
    "position_ids: expected": {"position_ids": torch.tensor([[5, 6, 7, 8, 9]])},
    "position_ids: expected those": {"position_ids": torch.tensor([[0, 1, 2]])},
    "input_ids: expected a prompt": {"inputs": torch.zeros(1, 0, dtype=torch.long)},
    "prompt: empty": {"attention_mask": torch.zeros(1, 5, dtype=torch.long)},
    "min_tokens_to_keep=1": sampled(TopPLogitsWarper(0.1, min_tokens_to_keep=5)),
    "filter_value=-inf": sampled(TopKLogitsWarper(3, filter_value=-1.0)),
    "structure, verifier": {"structure": DySpecHeap(3)},
    "inputs_embeds": {"inputs": None, "inputs_embeds": torch.zeros(1, 2, 24, dtype=torch.float64)},
}


@pytest.mark.parametrize("said", REFUSED)
def test_refusals_are_a_line(said: str, models: Models) -> None:
    with pytest.raises(UserError) as error:
        ours(*models, **REFUSED[said])
    assert said in str(error.value) and "\n" not in str(error.value)
    assert models[0].config._attn_implementation != ATTENTION


def test_inputs_that_our_engines_leave_out_are_refused(models: Models) -> None:
    config = GPT2Config(vocab_size=32, n_embd=24, n_layer=2, n_head=2, n_positions=96)
    target = GPT2LMHeadModel(config).double().eval()
    asked = {"eos_token_id": EOS, "pad_token_id": EOS}
    assert torch.equal(ours(target, models[1], **asked), plain(target, **asked))
    with pytest.raises(UserError, match="token_type_ids: not supported"):
        ours(target, models[1], token_type_ids=torch.zeros_like(PROMPT), **asked)


def test_what_is_no_draft_of_this_model_is_refused(models: Models) -> None:
    with pytest.raises(UserError, match="pair has another target"):
        ours(models[0], tiny_pair())
    with pytest.raises(UserError, match="draft: expected a model"):
        plain(models[0], custom_generate=speculate)
    with pytest.raises(UserError, match="draft: expected a model"):
        ours(models[0], 123)


@pytest.mark.parametrize("file", ["model.safetensors", "calibration.json", "config.json"])
def test_a_damaged_predictor_is_refused(file: str, models: Models, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "value", models, "value")
    (folder / file).write_bytes(b"no")
    with pytest.raises(UserError, match=r"^predictor: .* damaged"):
        ours(*models, predictor=folder)


def test_a_predictor_of_another_pair_or_warp_is_refused(models: Models, tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "a", (small()[0], models[1]), "value")
    with pytest.raises(UserError, match="pair.target"):
        ours(*models, predictor=other)
    sampled = checkpoint(tmp_path / "b", models, "value")
    with pytest.raises(UserError, match="warp.temperature"):
        ours(*models, predictor=sampled, do_sample=True)
