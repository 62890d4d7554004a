"""Drafts of fewer or more tokens than their target, of other tokenizers; what `generate` keeps to
itself: the tokenizer of stop strings and the streamer."""

from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TextIteratorStreamer

import serving.generate
from decoding.models.cached_lm import CachedLM
from decoding.pair import open_pair
from runtime.errors import UserError
from serving.generate import speculate
from tests.contract.enumeration import distribution_of, largest_error
from tests.helpers.models.tiny_pair import CONFIG, save_tiny_pair, tiny_models, tiny_tokenizer
from tests.unit.serving.test_generate import generated, in_float64

PROMPT = torch.tensor([[3, 7, 1, 9, 4]])


def sized(words: int, seed: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": words})).double()


def saved(folder: Path, words: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Path:
    sized(words, seed).to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def plain(model: LlamaForCausalLM, **asked) -> torch.Tensor:
    return model.generate(**{"inputs": PROMPT, "max_new_tokens": 24, "do_sample": False, **asked})


def ours(model: LlamaForCausalLM, draft, **asked) -> torch.Tensor:
    return plain(model, custom_generate=speculate, draft=draft, **asked)


@pytest.mark.parametrize(("target", "draft"), [(40, 32), (32, 40)])
def test_padded_output_layers_of_two_sizes(target: int, draft: int, tmp_path: Path) -> None:
    """A token that the draft does not have, in prompt and response alike: the draft reads its last
    one."""
    folder = saved(tmp_path / "draft", draft)
    for seed in range(3):
        model = sized(target, seed)
        prompt = torch.tensor([[3, target - 1, 7, target - 2, 1]])
        asked = {"inputs": prompt, "eos_token_id": None}
        expected = plain(model, **asked)
        assert torch.equal(ours(model, folder, **asked), expected)
        assert torch.equal(ours(model, sized(draft), **asked), expected)
        assert target < 33 or expected[0, 5:].max() >= 32 or seed


def test_padded_tokens_are_sampled_as_generate_samples_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spread = CachedLM.spread
    in_float64(monkeypatch)
    monkeypatch.setattr(
        CachedLM, "spread", lambda lm, logits, dtype: spread(lm, logits, torch.float64)
    )
    target, draft, warp = sized(6), sized(4), {"temperature": 1.5}

    def decoded(sampler) -> tuple[int, ...]:
        monkeypatch.setattr(
            serving.generate, "Sampler", SimpleNamespace(seeded=lambda seed: sampler)
        )
        asked = {"inputs": PROMPT % 5, "max_new_tokens": 2, "do_sample": True, **warp}
        return tuple(ours(target, draft, **asked)[0, 5:].tolist())

    found = distribution_of(decoded)
    assert any(max(text) > 3 for text in found)
    assert largest_error(found, generated(target, warp, 2)) < 1e-9


def test_a_pair_that_was_cut_says_all_that_generate_says(tmp_path: Path) -> None:
    folders = [str(saved(tmp_path / str(words), words)) for words in (40, 32)]
    pair = open_pair(*folders, dtype="float64")
    model = pair.target.model
    asked = {"eos_token_id": None, "inputs": PROMPT % 5}
    expected = plain(model, **asked)
    assert torch.equal(ours(model, pair, **asked), expected)
    assert pair.target.vocab_size == pair.draft.vocab_size == 32, "elsewhere as before"


def test_a_draft_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_pair(tmp_path)
    other = saved(tmp_path / "other", 32)
    words = (other / "tokenizer.json").read_text().replace('"w7"', '"seven"')
    (other / "tokenizer.json").write_text(words)
    target = LlamaForCausalLM.from_pretrained(folder / "target")
    for draft in (other, LlamaForCausalLM.from_pretrained(other)):
        with pytest.raises(UserError, match=r"^draft: .*token 7 is 'seven' there, 'w7' here"):
            ours(target, draft)
    nowhere = LlamaForCausalLM(target.config)  # which nobody can compare
    nowhere.load_state_dict(target.state_dict())
    nowhere.name_or_path = ""
    assert torch.equal(ours(nowhere, other), plain(target))


def test_a_streamer_of_generate_hears_all_and_ends() -> None:
    target, draft = tiny_models()
    streamer = TextIteratorStreamer(tiny_tokenizer(), timeout=20)
    asked = {"streamer": streamer}
    thread = Thread(target=lambda: ours(target, draft, **asked))
    thread.start()
    heard = "".join(streamer)
    thread.join()
    assert heard.split() == tiny_tokenizer().decode(plain(target)[0]).split()

    def around(model, input_ids, **given):
        return speculate(model, input_ids, draft=draft, **given)

    heard = []
    into = SimpleNamespace(put=heard.append, end=lambda: heard.append(torch.tensor([-1])))
    plain(target, custom_generate=around, streamer=into)
    assert torch.cat([*map(torch.flatten, heard)]).tolist() == [*plain(target)[0].tolist(), -1]
    for more in ({"stream": streamer}, {"num_return_sequences": 2, "do_sample": True}):
        quiet = SimpleNamespace(put=lambda value: None, end=lambda: None)
        with pytest.raises(UserError, match=r"^streamer: expected one prompt and no stream"):
            ours(target, draft, streamer=quiet, **more)


def test_stop_strings_say_what_works() -> None:
    target, draft = tiny_models()
    with pytest.raises(UserError, match=r"^stop_strings: .*StopStringCriteria\(tokenizer,"):
        ours(target, draft, stop_strings=["w3"], tokenizer=tiny_tokenizer())
