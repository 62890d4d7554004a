"""Speculative decoding inside `generate`: what it says, streams and leaves behind is as without it,
with drafts of any number of tokens; what cannot be kept so is one line."""

import copy
import gc
import random
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TextIteratorStreamer,
)
from transformers.generation import StoppingCriteriaList, TopKLogitsWarper
from transformers.generation.streamers import TextStreamer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import serving.generate
from decoding.engines.overlapped import OverlappedEngine
from decoding.engines.serial import SerialEngine
from decoding.models.cached_lm import CachedLM
from decoding.models.draft_vocabulary import FILE, write_vocabulary
from decoding.models.identity import draft_fingerprint, model_fingerprint
from decoding.models.kv_cache import ATTENTION
from decoding.pair import open_pair
from decoding.sampling import Sampler, Warp
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
from serving.models import DRAFTS, SLOT, opened
from tests.contract.enumeration import distribution_of, largest_error
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.tiny_pair import (
    CONFIG,
    EOS,
    VOCAB,
    save_tiny_pair,
    tiny_models,
    tiny_pair,
    tiny_tokenizer,
)
from tests.helpers.training.checkpoints import columns, write_checkpoint

PROMPT = torch.tensor([[3, 7, 1, 9, 4]])
Models = tuple[LlamaForCausalLM, LlamaForCausalLM]
PROMPTS = [torch.tensor([[3 + i, 7, 1, 9, 4 + i]]) for i in range(4)]


def own_configs() -> Models:
    """The tiny models, which share a config that other tests change, with one each."""
    made = tiny_models()
    for model in made:
        config = copy.deepcopy(model.config)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config = config
        model.set_attn_implementation("sdpa")
    return made


models = pytest.fixture(own_configs)


def plain(model: LlamaForCausalLM, **asked) -> Tensor:
    return model.generate(**{"inputs": PROMPT, "max_new_tokens": 20, "do_sample": False, **asked})


def ours(model: LlamaForCausalLM, draft, **asked):
    return plain(model, custom_generate=speculate, draft=draft, **asked)


def sized(words: int, seed: int = 1, **fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    values = {**CONFIG.to_dict(), "vocab_size": words, **fields}
    return LlamaForCausalLM(CONFIG.__class__(**values)).double().eval()


def saved(folder: Path, words: int) -> Path:
    sized(words).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.smoke
def test_greedy_is_what_generate_says_and_the_model_stays_as_it_is(models):
    target, draft = models
    expected, attention = plain(target), target.config._attn_implementation
    assert torch.equal(ours(target, draft), expected)
    assert torch.equal(ours(target, draft), expected), "with the models made ready before"
    assert torch.equal(plain(target), expected), "afterwards"
    assert target.config._attn_implementation == attention != ATTENTION
    target.set_attn_implementation("eager")
    for model in models:
        model.train()
    target.model.norm.eval()
    ours(target, draft)
    assert target.config._attn_implementation == "eager"
    assert target.training and draft.training and not target.model.norm.training


@pytest.mark.filterwarnings("ignore:pair.draft. its context holds")
def test_a_draft_of_less_context_does_not_limit_generate(models):
    draft = sized(VOCAB, max_position_embeddings=12)
    draft.load_state_dict(models[1].state_dict())
    found = ours(models[0], draft, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain(models[0]))
    assert {round_.beyond_draft for round_ in found.traces[0].rounds} == {False, True}


def test_a_draft_folder_has_the_ends_that_open_pair_gives_it(tmp_path):
    folder = save_tiny_pair(tmp_path)
    write_vocabulary(folder / "draft" / FILE, torch.tensor([3, 5, 7]), {})
    for target_ends in (EOS, [9, EOS], None):
        target = tiny_models()[0]
        target.generation_config.eos_token_id = target_ends
        target.save_pretrained(folder / "target")
        pair = open_pair(str(folder / "target"), str(folder / "draft"), dtype="float64")
        whole = LlamaForCausalLM.from_pretrained(folder / "target")
        made = opened(whole, str(folder / "draft")).draft
        assert made.vocabulary.tolist() == pair.draft.vocabulary.tolist()
        assert EOS in made.vocabulary
        assert draft_fingerprint(made) == draft_fingerprint(pair.draft)


def test_it_speculates_and_says_what_happened(models):
    found = ours(*models, return_dict_in_generate=True, stop=Fixed(3))
    assert isinstance(found, SpeculativeOutput)
    [trace] = found.traces
    assert found.sequences[0, 5:].tolist() == trace.tokens
    assert len(trace.tokens) > len(trace.rounds), "more than a token a round"


def test_rows_of_a_batch_are_what_they_are_alone(models):
    ids = torch.tensor([[EOS, EOS, 3, 7, 1], [2, 6, 5, 3, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    asked = {"inputs": ids, "attention_mask": mask, "pad_token_id": EOS}
    assert torch.equal(ours(*models, **asked), plain(models[0], **asked))


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[4], [7, 1]]},
    "sequence_bias": {"sequence_bias": [[[5], 1.0], [[3, 7], -4.0]]},
    "min_length": {"min_length": 15},
    "min_new_tokens": {"min_new_tokens": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 4},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.3)},
    "suppress_tokens": {"suppress_tokens": [8, 9]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(20))},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
}


NO_BANNED_END = {"min_length": 0, "min_new_tokens": None, "forced_eos_token_id": None}
"""With which a decay makes a number of its logit."""


@pytest.mark.parametrize("name", [*PROCESSED, "all"])
def test_processed_rows_are_what_generate_says(name, models):
    every = {
        key: value for each in PROCESSED.values() for key, value in each.items()
    } | NO_BANNED_END
    asked = every if name == "all" else PROCESSED[name]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for first in (EOS, 6):
        ids = torch.tensor([[EOS, EOS, 3, 7, 1], [first, 6, 5, 3, 8]])
        for seen in (mask, torch.ones_like(mask)):
            given = {"inputs": ids, "attention_mask": seen, "pad_token_id": EOS, **asked}
            for parts in ({}, TREE, {"draft_warp": Warp(0.7)}):
                assert torch.equal(ours(*models, **given, **parts), plain(models[0], **given))


LATER = [
    {"prefix_allowed_tokens_fn": lambda _, ids: [1]},
    {"logits_processor": LogitsProcessorList([lambda ids, scores: scores])},
    {"logits_processor": LogitsProcessorList([type("Own", (TopKLogitsWarper,), {})(3)])},
]


@pytest.mark.parametrize("asked", LATER)
def test_processors_are_refused_behind_others_too(asked, models):
    refuses(r"^logits_processor: \w+ is not supp", ours, *models, repetition_penalty=1.2, **asked)


def test_lengths_of_rows_are_those_of_each_row(models):
    ids = torch.tensor([[6, 5, 3, 7, 1], [2, 6, 5, 3, 8]])
    for lengths in ([0, 5], [5, 0], [3, 3]):
        penalty = RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor(lengths))
        asked = {"inputs": ids, "logits_processor": LogitsProcessorList([penalty])}
        assert torch.equal(ours(*models, **asked), plain(models[0], **asked))
    penalty = RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor([1, 2, 3]))
    asked = {"inputs": ids, "logits_processor": LogitsProcessorList([penalty])}
    refuses("^logits_processor: expected prompt_ignore_length of 2", ours, *models, **asked)


@pytest.mark.slow
def test_400_random_calls_with_processors_are_what_generate_says(models):
    draw = random.Random(0)
    for _ in range(400):
        asked = {}
        for name in draw.sample(list(PROCESSED), draw.randint(1, 5)):
            asked |= PROCESSED[name]
        if "exponential_decay_length_penalty" in asked:
            asked |= NO_BANNED_END
        ids = torch.tensor([[draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]])
        given = {"inputs": ids, "max_new_tokens": draw.randint(2, 24), **asked}
        stop = Confidence(draw.random())
        assert torch.equal(ours(*models, stop=stop, **given), plain(models[0], **given)), asked


def test_every_row_of_several_sequences_is_sampled_with_the_seed_of_torch(models):
    def sampled() -> Tensor:
        torch.manual_seed(5)
        return ours(*models, do_sample=True, num_return_sequences=3, eos_token_id=None)

    found = sampled()
    assert found.shape == (3, 25) and len({tuple(row) for row in found.tolist()}) == 3
    assert torch.equal(sampled(), found)


ALL = {"temperature": 1.5, "top_k": 4, "top_p": 0.7}
WARPS = [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, ALL]
TREE = {"structure": DySpecHeap(3), "verifier": RrswVerifier(), "stop": Never()}
CASES = [*(((5, 5, 3), warp, {}) for warp in WARPS), ((5, 5, 3), ALL, TREE)]
CASES += [((6, 4, 2), {"temperature": 1.5}, {})]
PENALTIES = {"repetition_penalty": 1.4, "min_p": 0.1}
CASES += [((5, 5, 3), PENALTIES, {}), ((5, 5, 3), {"typical_p": 0.8} | PENALTIES, TREE)]


@pytest.mark.smoke
@pytest.mark.parametrize(("sizes", "warp", "parts"), CASES)
@pytest.mark.few(1)
def test_the_distribution_is_that_of_generate(sizes, warp, parts, monkeypatch):
    """sizes: words of the target, of the draft, and tokens that are sampled; the first word ends a
    response. Neither our logits nor transformers' norms are rounded to float32, as they always
    are."""
    spread = CachedLM.spread
    in_float64 = lambda lm, logits, dtype: spread(lm, logits, torch.float64)  # noqa: E731
    monkeypatch.setattr(CachedLM, "spread", in_float64)

    def norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(variance + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
    words, others, length = sizes
    target, draft = sized(words, 3), sized(others, 4)

    def decoded(sampler) -> tuple[int, ...]:
        seeded = SimpleNamespace(seeded=lambda seed: sampler)
        monkeypatch.setattr(serving.generate, "Sampler", seeded)
        asked = {"inputs": PROMPT % 5, "max_new_tokens": length, "do_sample": True, **warp, **parts}
        return tuple(ours(target, draft, **asked)[0, 5:].tolist())

    found = distribution_of(decoded)
    assert any(max(text) >= others for text in found) or words == others
    assert largest_error(found, generated(target, warp, length)) < 1e-9


def generated(model: LlamaForCausalLM, warp: dict, length: int) -> dict[tuple[int, ...], float]:
    """The distribution that `generate` samples, from the processors it makes."""
    processors = model._get_logits_processor(GenerationConfig(do_sample=True, **warp))
    assert len(processors) == len(warp)
    found, open_texts = {}, [((), 1.0)]
    while open_texts:
        text, probability = open_texts.pop()
        if len(text) == length or EOS in text:
            found[text] = probability
            continue
        ids = torch.cat([PROMPT % 5, torch.tensor([text], dtype=torch.long)], 1)
        with torch.no_grad():
            probs = processors(ids, model(ids).logits[:, -1])[0].softmax(-1).tolist()
        open_texts += [((*text, token), probability * p) for token, p in enumerate(probs) if p]
    return found


class Heard:
    def __init__(self) -> None:
        self.tokens = list[int]()

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def test_streams_hear_what_a_streamer_of_generate_hears(models, capsys):
    target, draft = models

    def around(model, input_ids, **given):
        return speculate(model, input_ids, draft=draft, **given)

    heard = [Heard() for _ in range(3)]
    plain(target, streamer=heard[0])
    found = ours(target, draft, stream=heard[1])
    plain(target, custom_generate=around, streamer=heard[2])
    assert heard[0].tokens == heard[1].tokens == heard[2].tokens == [*found[0].tolist(), -1]
    ours(target, draft, stream=TextStreamer(tiny_tokenizer(), skip_prompt=True))
    assert capsys.readouterr().out.split() == [f"w{token}" for token in found[0, 5:].tolist()]
    streamer = TextIteratorStreamer(tiny_tokenizer(), timeout=20)
    thread = Thread(target=lambda: ours(target, draft, streamer=streamer))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == tiny_tokenizer().decode(plain(target)[0]).split()
    for more in ({"stream": streamer}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(UserError, match=r"^streamer: expected one prompt and no stream"):
            ours(target, draft, streamer=Heard(), **more)


def test_stopping_criteria_end_where_they_end_generate(models):
    word = plain(models[0])[0, 12]
    criteria = StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] == word])
    found = ours(*models, stopping_criteria=criteria)
    assert torch.equal(found, plain(models[0], stopping_criteria=criteria))
    assert found.shape[1] <= 13


def test_another_engine(models):
    engine = partial(OverlappedEngine, branch_verifier=RrswVerifier(), overlap=False)
    found = ours(*models, engine=engine, structure=BranchPoint(4, 2), stop=Confidence(0.4))
    assert torch.equal(found, plain(models[0]))


@pytest.mark.smoke
def test_a_draft_from_its_folder_and_a_pair(tmp_path):
    save_tiny_pair(tmp_path)
    target = LlamaForCausalLM.from_pretrained(tmp_path / "target").double()
    pair = tiny_pair()
    assert torch.equal(ours(target, tmp_path / "draft"), plain(target))
    assert torch.equal(ours(pair.target.model, pair), plain(pair.target.model))


@pytest.mark.parametrize("change", [copy.deepcopy, lambda model: model.double()])
def test_a_model_in_plain_code_stays_a_plain_model(change, models):
    target, draft = (model.float() for model in models)
    expected = ours(target, draft)
    linears = [module for module in target.modules() if isinstance(module, nn.Linear)]
    assert {type(module) for module in linears} == {nn.Linear}
    assert torch.equal(plain(change(target)), expected)


@pytest.mark.parametrize(("target", "draft"), [(40, 32), (32, 40)])
def test_padded_output_layers_of_two_sizes(target, draft, tmp_path):
    """A token that the draft does not have, in prompt and response alike: the draft reads its last
    one."""
    folder = saved(tmp_path / "draft", draft)
    for seed in range(3):
        model = sized(target, seed)
        prompt = torch.tensor([[3, target - 1, 7, target - 2, 1]])
        asked = {"inputs": prompt, "eos_token_id": None, "max_new_tokens": 24}
        expected = plain(model, **asked)
        assert torch.equal(ours(model, folder, **asked), expected)
        assert torch.equal(ours(model, sized(draft), **asked), expected)
        assert target < 33 or expected[0, 5:].max() >= 32 or seed


def test_a_pair_that_was_cut_says_all_that_generate_says(tmp_path):
    folders = [str(saved(tmp_path / str(words), words)) for words in (40, 32)]
    pair = open_pair(*folders, dtype="float64")
    asked = {"eos_token_id": None, "inputs": PROMPT % 5}
    expected = plain(pair.target.model, **asked)
    assert torch.equal(ours(pair.target.model, pair, **asked), expected)
    assert pair.target.vocab_size == pair.draft.vocab_size == 32, "elsewhere as before"


def test_a_draft_of_another_tokenizer_is_refused(tmp_path):
    folder, other = save_tiny_pair(tmp_path), saved(tmp_path / "other", 32)
    words = (other / "tokenizer.json").read_text().replace('"w7"', '"seven"')
    (other / "tokenizer.json").write_text(words)
    target = LlamaForCausalLM.from_pretrained(folder / "target")
    for draft in (other, LlamaForCausalLM.from_pretrained(other)):
        refuses(r"^draft: .*token 7 is 'seven' there, 'w7' here", ours, target, draft)
    target.name_or_path = ""  # whose tokenizer nobody can compare
    vars(target).pop("_speculative")
    assert torch.equal(ours(target, other), plain(target))


def checkpoint(folder: Path, pair: Models, name: str, **context) -> Path:
    identity = {
        "name": "tiny",
        "target": model_fingerprint(pair[0]),
        "draft": draft_fingerprint(tiny_pair().draft),
        "tokenizer": "",
    }
    warp = Warp(temperature=0).to_dict()
    facts = {"pair": identity, "warp": warp, "draft_warp": warp, **context}
    return write_checkpoint(folder, name, columns(name, CONFIG.hidden_size), context=facts)


@pytest.mark.parametrize("name", ["specdecpp", "hrad", "value"])
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_a_predictor_is_asked(name, threshold, models, tmp_path):
    folder = checkpoint(tmp_path / name, models, name)
    found = ours(*models, predictor=str(folder), threshold=threshold, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain(models[0]))
    assert any(round_.predicted for round_ in found.traces[0].rounds)


@pytest.mark.parametrize("file", ["model.safetensors", "calibration.json", "config.json"])
def test_a_damaged_predictor_is_refused(file, models, tmp_path):
    folder = checkpoint(tmp_path / "value", models, "value")
    (folder / file).write_bytes(b"no")
    refuses(r"^predictor: .* damaged", ours, *models, predictor=folder)


def test_a_predictor_of_another_pair_or_warp_is_refused(models, tmp_path):
    other = checkpoint(tmp_path / "a", (sized(5), models[1]), "value")
    refuses("pair.target", ours, *models, predictor=other)
    sampled = checkpoint(tmp_path / "b", models, "value")
    refuses("warp.temperature", ours, *models, predictor=sampled, do_sample=True)


def sampled(warper: LogitsProcessor) -> dict:
    return {"do_sample": True, "top_k": 0, "logits_processor": LogitsProcessorList([warper])}


REFUSED = {
    "max_new_tokens": {"max_new_tokens": 120},
    "num_beams": {"num_beams": 2},
    "PrefixConstrainedLogitsProcessor": {"prefix_allowed_tokens_fn": lambda _, ids: [1]},
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": {"guidance_scale": 1.5},
    "function": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores])},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "threshold": {"threshold": 0.5},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True},
    "dola_layers: not supported": {"dola_layers": "high"},  # compares layers
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
    "input_ids: expected at least one prompt": {"inputs": PROMPT[:0]},
    "input_ids: expected tokens from 0 to 31, got -1": {"inputs": torch.tensor([[3, -1]])},
    "input_ids: expected tokens from 0 to 31, got 3 to 32": {"inputs": torch.tensor([[3, VOCAB]])},
    "prompt: empty": {"attention_mask": torch.zeros(1, 5, dtype=torch.long)},
    "structure, verifier": {"structure": DySpecHeap(3)},
    "inputs_embeds": {"inputs": None, "inputs_embeds": torch.zeros(1, 2, 24, dtype=torch.float64)},
    "StopStringCriteria(tokenizer,": {"stop_strings": ["w3"], "tokenizer": tiny_tokenizer()},
}


@pytest.mark.parametrize("said", REFUSED)
def test_refusals_are_a_line(said, models):
    refuses(re.escape(said), ours, *models, **REFUSED[said])
    assert models[0].config._attn_implementation != ATTENTION


def test_inputs_that_our_engines_leave_out_are_refused(models):
    config = GPT2Config(vocab_size=32, n_embd=24, n_layer=2, n_head=2, n_positions=96)
    target = GPT2LMHeadModel(config).double().eval()
    asked = {"eos_token_id": EOS, "pad_token_id": EOS}
    assert torch.equal(ours(target, models[1], **asked), plain(target, **asked))
    with pytest.raises(UserError, match="token_type_ids: not supported"):
        ours(target, models[1], token_type_ids=torch.zeros_like(PROMPT), **asked)


def test_what_is_no_draft_of_this_model_or_has_no_weights_is_refused(models):
    target, draft = models
    with torch.device("meta"):
        empty = LlamaForCausalLM(target.config)
    faults: list[tuple[str, Any, dict]] = [
        ("pair has another target", target, {"draft": tiny_pair()}),
        ("draft: expected a model", target, {}),
        ("draft: expected a model", target, {"draft": 123}),
        ("^draft: expected weights, got LlamaForCausalLM on", target, {"draft": empty}),
        ("^model: expected weights, got LlamaForCausalLM on", empty, {"draft": draft}),
    ]
    for line, model, given in faults:
        refuses(line, plain, model, custom_generate=speculate, **given)
    with pytest.raises(UserError, match=r"^input_ids: expected tokens, got a tensor on the meta"):
        config = GenerationConfig(max_length=9)
        speculate(empty, PROMPT.to("meta"), draft=draft, generation_config=config)


def answer(model: LlamaForCausalLM, prompt: Tensor = PROMPTS[0], **asked) -> list[int]:
    return plain(model, inputs=prompt, **asked)[0].tolist()


def spoken(model: LlamaForCausalLM, draft, prompt: Tensor = PROMPTS[0], **asked) -> list[int]:
    return ours(model, draft, inputs=prompt, **asked)[0].tolist()


def at_once(*jobs: Callable[[], list[int]], threads: int = 4) -> list[list[int]]:
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(job) for job in jobs]
        return [future.result() for future in futures]


def test_threads_get_what_each_gets_alone(models):
    target, draft = models
    expected = [answer(target, prompt) for prompt in PROMPTS]
    rule = Confidence(0.3)
    jobs: list[Callable[[], list[int]]] = []
    for prompt in PROMPTS * 3:
        jobs += [partial(spoken, target, draft, prompt, stop=rule)]
        jobs += [partial(spoken, target, target, prompt), partial(answer, target, prompt)]
    found = at_once(*jobs)
    assert found == [answer for answer in expected * 3 for _ in range(3)]


def test_threads_take_turns_with_a_pair_and_share_it_in_generate():
    pair, other = tiny_pair(), tiny_pair()
    expected = [answer(other.target.model, prompt) for prompt in PROMPTS]
    rules = Confidence(0.3), TokenVerifier(), Warp(temperature=0), Warp(temperature=0)
    engine = SerialEngine(pair, Chain(4), *rules, eos_ids=frozenset({0}))

    def decoded(prompt: Tensor) -> list[int]:
        return [*prompt[0].tolist(), *engine.decode(prompt[0], 20, Sampler.seeded(0)).tokens]

    jobs = [partial(decoded, prompt) for prompt in PROMPTS * 2]
    jobs += [partial(spoken, pair.target.model, pair, prompt) for prompt in PROMPTS * 2]
    assert at_once(*jobs) == expected * 4
    with pytest.raises(UserError, match=r"^pair: its caches hold a response"):
        engine.decode([3, 7], 4, Sampler.seeded(0), lambda text: bool(decoded(PROMPTS[0])))
    assert decoded(PROMPTS[0]) == expected[0], "afterwards"


def test_a_call_inside_a_stopping_criterion(models):
    target, draft = models
    inner = []

    def asks(ids: Tensor, scores: object, **_: object) -> bool:
        inner.append(spoken(target, draft, PROMPTS[1]))
        return False

    found = spoken(target, draft, stopping_criteria=StoppingCriteriaList([asks]))
    assert found == answer(target)
    assert inner[0] == answer(target, PROMPTS[1]) and len({*map(tuple, inner)}) == 1


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit])
def test_nothing_of_a_call_that_fails_is_left(fault, models):
    target, draft = models
    target.train()

    def fails(ids: Tensor, scores: object, **_: object) -> bool:
        assert target.config._attn_implementation == "sdpa" and target.training
        raise fault

    with pytest.raises(fault):
        spoken(target, draft, stopping_criteria=StoppingCriteriaList([fails]))
    assert target.config._attn_implementation == "sdpa" and target.training
    assert spoken(target.eval(), draft) == answer(target)


def test_drafts_in_turns_are_made_ready_once(models, tmp_path):
    target, draft = models
    other = save_tiny_pair(tmp_path) / "draft"
    first = opened(target, other), opened(target, draft)
    again = opened(target, other), opened(target, draft)
    assert [pair.draft.model for pair in first] == [pair.draft.model for pair in again]
    assert first[0].target.model is again[1].target.model
    for number in range(DRAFTS + 1):
        link = tmp_path / f"draft{number}"
        link.symlink_to(other)
        opened(target, link)
    assert len(vars(target)[SLOT].drafts) == DRAFTS


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_what_changes_between_calls_is_seen(activation, models):
    """Tensors stay where they are: a view of a model shares them with it. What the config calls
    gelu, though it is none, is run by transformers' own forward."""
    target, draft = models
    target.config.hidden_act = activation
    spoken(target, draft)
    addresses = [parameter.data_ptr() for parameter in target.parameters()]
    spoken(target, draft)
    assert addresses == [parameter.data_ptr() for parameter in target.parameters()]

    norm, rotary = target.model.norm, target.model.rotary_emb
    attention = target.model.layers[0].self_attn
    changes: list[Callable[[], object]] = [
        lambda: attention.v_proj.weight.data.mul_(1.5),
        lambda: target.float(),
        lambda: setattr(target.lm_head, "weight", nn.Parameter(target.lm_head.weight * -1)),
        lambda: setattr(rotary, "inv_freq", rotary.inv_freq * 2),
    ]
    if activation == "gelu":
        changes += [
            lambda: norm.register_forward_hook(lambda module, args, out: out.flip(-1)),
            lambda: setattr(attention, "scaling", attention.scaling * 3),
            lambda: setattr(target.model.layers[1], "mlp", nn.Identity()),
            lambda: setattr(norm, "forward", lambda x: x.flip(-1)),
        ]
    before = answer(target)
    for number, change in enumerate(changes):
        change()
        after = answer(target)
        assert after != before or number == 1, number
        assert spoken(target, draft) == after, number
        before = after


def test_new_weights_of_a_pair_are_seen_by_every_later_call():
    pair = tiny_pair()
    model = pair.target.model
    before = spoken(model, pair)
    for part in (model.lm_head, model.model.layers[0].self_attn.v_proj):
        part.weight = nn.Parameter(part.weight.detach().flip(0), requires_grad=False)
    right = answer(model)
    assert right != before
    assert [spoken(model, pair) for _ in range(3)] == [right] * 3


@pytest.mark.slow
def test_what_is_kept_is_released_with_its_model():
    target, draft = own_configs()
    spoken(target, draft)
    copied = copy.deepcopy(target)
    assert not vars(copied)[SLOT], "it is neither copied nor saved"
    assert spoken(copied, draft) == answer(copied) == answer(target)
    gone = [weakref.ref(part) for part in (draft, draft.lm_head.weight)]
    del draft
    gc.collect()
    assert [part() for part in gone] == [None, None], "with the target alive"
    gone = [weakref.ref(part) for part in (target, target.lm_head.weight)]
    del target
    gc.collect()
    assert [part() for part in gone] == [None, None]
