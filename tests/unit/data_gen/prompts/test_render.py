import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_gen.prompts import Prompt
from data_gen.prompts.render import prompt_ids
from runtime.errors import UserError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<user>", "<assistant>", "hello", "world", "complete", "?"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    made.chat_template = TEMPLATE
    return made


def words(prompt: Prompt, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return tokenizer.convert_ids_to_tokens(prompt_ids(prompt, tokenizer, 10).tolist())


def test_chat_prompt_is_a_user_turn_and_the_assistant_header(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = Prompt("a", "d", "c", "hello world", instruction="complete")
    assert words(prompt, tokenizer) == ["<user>", "complete", "hello", "world", "<assistant>"]


def test_raw_prompt_is_only_its_text(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = Prompt("a", "d", "c", "hello world", instruction="complete", chat=False)
    assert words(prompt, tokenizer) == ["hello", "world"]


def test_prompt_longer_than_the_context_is_refused_by_name(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = Prompt("long-one", "d", "c", "hello world", chat=False)
    assert len(prompt_ids(prompt, tokenizer, 2)) == 2
    with pytest.raises(
        UserError, match=r"pair\.max_length: the prompt long-one has 2 tokens, there is room for 1"
    ):
        prompt_ids(prompt, tokenizer, 1)


def test_chat_without_a_template_says_what_to_set(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"dataset\.chat: .* Set dataset\.chat=false"):
        prompt_ids(Prompt("a", "d", "c", "hello"), tokenizer, 10)
