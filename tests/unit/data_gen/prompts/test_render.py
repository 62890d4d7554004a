from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_gen.prompts import Prompt
from data_gen.prompts.render import as_asked, prompt_ids, refuse_arguments, rendered, turns
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


PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
)
STRICT = "{% if messages[0]['content'] is string %}{{ raise_exception('no strings') }}{% endif %}"


@pytest.mark.parametrize("template", [PARTS, STRICT + PARTS])
def test_a_template_that_takes_lists_gets_one(
    template: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    assert words(Prompt("a", "d", "c", "hello user"), tokenizer)[:2] == ["<user>", "hello"]
    asked = as_asked([Prompt("a", "d", "c", "hello")], tokenizer, "2026-01-02", elsewhere=True)
    assert turns(asked[0])[0]["content"] == [{"type": "text", "text": "hello"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("<user>", "does not show the text of the prompt a, given as a string or as a list"),
        ("{{ raise_exception('roles must alternate') }}", r"refuses the prompt a \(roles must"),
        ("{{ messages[0]['content'] + 1 }}", r"refuses the prompt a \(can only concatenate"),
        ("{{ 1 // 0 }}", "refuses the prompt a"),
        ("{{ messages[0].content | nothing }}", "refuses the prompt a"),
        ("{% for m in messages %}", "refuses the prompt a"),
        (STRICT + "{{ messages[0].content }}", r"refuses the prompt a \(no strings"),
        (STRICT + "{{ messages[0].content | tojson }}", r"refuses the prompt a \(no strings"),
    ],
)
def test_a_template_that_fails_is_refused_in_a_line(
    template: str, message: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=rf"^dataset\.chat: the chat template {message}") as error:
        prompt_ids(Prompt("a", "d", "c", "user"), tokenizer, 10)
    assert "\n" not in str(error.value)


def test_blanks_around_a_prompt_are_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = Prompt("a", "d", "c", "    return 1\n", "complete")
    assert "<user> complete\n\n    return 1\n <assistant>" == rendered(prompt, tokenizer)[
        0
    ].replace("  <", " <")
    assert turns(replace(prompt, instruction=""))[0]["content"] == "    return 1\n"


def test_arguments_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATE + "{% if not thinking %} ? {% endif %}"
    thinks = Prompt("a", "d", "c", "hello", template={"thinking": True})
    assert len(words(replace(thinks, template={}), tokenizer)) == len(words(thinks, tokenizer)) + 1
    for bad in (replace(thinks, chat=False), replace(thinks, template={"tokenize": True})):
        with pytest.raises(UserError, match=r"^dataset\.template: "):
            refuse_arguments([bad])


def test_a_template_s_clock_stands_still(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y %H:%M:%S.%f') }} " + TEMPLATE
    prompt = Prompt("a", "d", "c", "hello")
    asked = as_asked([prompt], tokenizer, "2026-01-02", elsewhere=False)[0]
    text = rendered(asked, tokenizer)[0]
    assert text.startswith("02 January 2026 00:00:00.000000") and asked.date == "2026-01-02"
    assert rendered(prompt, tokenizer) == rendered(prompt, tokenizer)
    with pytest.raises(UserError, match=r"^dataset\.chat: .* time of day"):
        as_asked([prompt], tokenizer, "2026-01-02", elsewhere=True)
    tokenizer.chat_template = TEMPLATE
    assert as_asked([prompt], tokenizer, "2026-01-02", elsewhere=True)[0].date is None


@pytest.mark.parametrize("asks", ["%A", "%d %b", "%Z", "%%H %m"])
def test_a_template_that_asks_for_the_date_is_noticed_whatever_it_writes(
    asks: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = f"{{% if strftime_now('{asks}') == 'x' %}}?{{% endif %}}" + TEMPLATE
    prompt = Prompt("a", "d", "c", "hello")
    assert as_asked([prompt], tokenizer, "2026-01-02", elsewhere=True)[0].date == "2026-01-02"
    tokenizer.chat_template = tokenizer.chat_template.replace(asks, "%H")
    with pytest.raises(UserError, match=r"^dataset\.chat: .* time of day"):
        as_asked([prompt], tokenizer, "2026-01-02", elsewhere=True)


def test_a_template_that_draws_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ range(10 ** 5) | random }} " + TEMPLATE
    with pytest.raises(UserError, match=r"^dataset\.chat: .* by chance"):
        as_asked([Prompt("a", "d", "c", "hello")], tokenizer, "2026-01-02", elsewhere=False)


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
