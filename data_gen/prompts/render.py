"""From a prompt to the token ids a model is given; harvesting and decoding both come through
here."""

import torch
from transformers import PreTrainedTokenizerBase

from data_gen.prompts.prompt import Prompt
from runtime.errors import UserError


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_length: int) -> torch.Tensor:
    """[n] int64 ids of `prompt`, 1 <= n <= `max_length` (the context less the room for a response).

    A chat prompt becomes a user turn followed by the header of the assistant's; any other is
    encoded as it stands. Raises UserError when there are more ids than `max_length`, or no chat
    template."""
    ids = _chat_ids(prompt, tokenizer) if prompt.chat else tokenizer(prompt.text)["input_ids"]
    if len(ids) > max_length:
        raise UserError(
            f"pair.max_length: the prompt {prompt.id} has {len(ids)} tokens, there is room for"
            f" {max_length}. Raise pair.max_length, ask for shorter responses, or shorten the"
            " prompt"
        )
    return torch.tensor(ids, dtype=torch.long)


def _chat_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        raise UserError(
            "dataset.chat: this model has no chat template. Set dataset.chat=false to continue the"
            " text"
        )
    text = tokenizer.apply_chat_template(turns(prompt), add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)[
        "input_ids"
    ]  # the template writes its own special tokens


def turns(prompt: Prompt) -> list[dict[str, str]]:
    """The chat that asks for a response to `prompt`, as chat templates and servers take it."""
    content = f"{prompt.instruction}\n\n{prompt.text.strip()}".strip()
    return [{"role": "user", "content": content}]
