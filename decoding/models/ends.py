"""The tokens that end a response, and the one that closes an answer given as text."""

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from runtime.errors import UserError

MARK = "b7e1c4"  # an answer that no template changes


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Return the ids that end a response, increasing: those of the generation config, of the
    model's config and that of its text part, of the tokenizer, where there is one, and the token
    with which its chat template ends an assistant's turn. Raises UserError where they are no
    ids."""
    config = model.config
    holders = (model.generation_config, config, config.get_text_config(), tokenizer)
    ids = set[int]()
    for holder in holders:
        named = getattr(holder, "eos_token_id", None)
        each = named if isinstance(named, list | tuple) else [] if named is None else [named]
        if any(type(token) is not int for token in each):
            raise UserError(
                f"pair.target: its eos_token_id is {named}, expected a token id or a list of them."
                " Mend generation_config.json or config.json"
            )
        ids.update(each)
    if tokenizer is not None:
        ids.update(turn_end(tokenizer))
    return tuple(sorted(token for token in ids if token >= 0))


def turn_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special token that the chat template writes first after an answer, which nothing
    but blanks may precede; none where it writes no such token."""
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(each for each in added if added[each].special)}
    first = after_answer(tokenizer)[:1]
    return [token for token in first if token in special - {tokenizer.unk_token_id}]


def after_answer(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the chat template writes after an answer, without blanks in front;
    none where it cannot be told."""
    contents: list[Any] = [MARK, [{"type": "text", "text": MARK}]]  # plain, and as a list of parts
    for content in contents if tokenizer.chat_template else []:
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        try:
            text = str(tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception:  # a template may raise anything
            continue
        if text.count(MARK) > 1:
            after = text.rpartition(MARK)[2].lstrip()
            return list(tokenizer(after, add_special_tokens=False)["input_ids"])
    return []


def closing_id(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> int:
    """Return the one of `ends` that closes an answer given as text: that with which the chat
    template ends an assistant's turn, else the tokenizer's eos, else the only one.

    Raises UserError where none of these can be told."""
    for token in [*after_answer(tokenizer), tokenizer.eos_token_id]:
        if token in ends:
            return int(token)
    if len(ends) == 1:
        return next(iter(ends))
    raise UserError(
        f"pair.target: which of the tokens {sorted(ends)} ends an answer given as text cannot be"
        " told: neither its chat template nor eos_token of its tokenizer names any of them. Set"
        " eos_token there, or give token ids (response_tokens, return_token_ids)"
    )
