"""A pair of Llamas with 32 words that agree about half of the time. Float64: results do not depend
on batch shapes."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decoding.models.loading import CachedLM, ModelPair

EOS = 0
VOCAB = 32
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    initializer_range=0.35,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=EOS,
    pad_token_id=None,
)


def tiny_models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A target, and the same with noise on its weights."""
    torch.manual_seed(1)
    target, draft = LlamaForCausalLM(CONFIG), LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for theirs, ours in zip(draft.parameters(), target.parameters(), strict=True):
            theirs.copy_(ours + 0.02 * torch.randn_like(ours))
    return target.double(), draft.double()


def random_words(n: int, seed: int) -> torch.Tensor:
    """None of them the end token."""
    return torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {"</s>": EOS, **{f"w{number}": number for number in range(1, VOCAB)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="w1")


def tiny_pair() -> ModelPair:
    target, draft = (CachedLM(model) for model in tiny_models())
    return ModelPair(target, draft, tiny_tokenizer(), "tiny", (EOS,))


def save_tiny_pair(folder: Path) -> Path:
    """As Hugging Face folders `target` and `draft`."""
    for name, model in zip(("target", "draft"), tiny_models(), strict=True):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


def save_talking_target(folder: Path) -> None:
    """A target with a chat template, which can write chats with itself."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for turn in messages %}w1 w2 {{ turn['content'] }}</s> w3{% endfor %}"
    )
    tiny_models()[0].float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
