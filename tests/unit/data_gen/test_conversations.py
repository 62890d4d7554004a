"""Conversations in prompt files: every turn of the user is asked after what was said before it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data_gen.prompts import Prompt
from data_gen.prompts.jsonl import load_jsonl
from data_gen.prompts.render import prompt_ids, rendered, turns
from data_gen.requests import fitted, repeats, split_prompts
from runtime.errors import UserError
from tests.helpers.damage.refusals import refuses
from tests.helpers.models.tiny_pair import tiny_tokenizer

SYSTEM = {"role": "system", "content": "w1 w2"}
CHAT = [
    SYSTEM,
    {"role": "user", "content": "w3"},
    {"role": "assistant", "content": "w4 w5"},
    {"role": "user", "content": "w6"},
    {"role": "assistant", "content": "w7"},
]
SHARED = [
    {"from": "system", "value": "w1 w2"},
    {"from": "human", "value": "w3"},
    {"from": "gpt", "value": "w4 w5"},
    {"from": "human", "value": "w6"},
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


def read(folder: Path, *rows: dict[str, Any], chat: bool = True) -> list[Prompt]:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_jsonl("mine", str(file), "prompt", None, chat)


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    made = tiny_tokenizer()
    made.chat_template = template
    return made


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"conversations": SHARED}, {"prompt": CHAT}])
def test_every_turn_of_the_user_is_a_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    first, second = read(tmp_path, {"id": "c", **row})
    assert (first.id, second.id) == ("c#turn1", "c#turn2")
    assert turns(first) == CHAT[:2] and turns(second) == CHAT[:4]
    for prompt, count in ((first, 2), (second, 4)):
        own = tokenizer()
        expected = own.apply_chat_template(CHAT[:count], add_generation_prompt=True, tokenize=False)
        assert rendered(prompt, own)[0] == expected
        ids = own(expected, add_special_tokens=False)["input_ids"]
        assert prompt_ids(prompt, own, 99).tolist() == ids


def test_a_single_turn_keeps_its_id(tmp_path: Path) -> None:
    rows = {"turns": ["w3"], "id": "t"}, {"messages": CHAT[:2], "id": "m"}, {"prompt": "w3"}
    prompts = read(tmp_path, *rows)
    assert [prompt.id for prompt in prompts] == ["t", "m", "mine-3"]
    assert [prompt.text for prompt in prompts] == ["w3"] * 3 and repeats(prompts) == 1


def test_the_turns_of_a_conversation_share_a_split(tmp_path: Path) -> None:
    rows = [
        {"id": str(n), "messages": [{**each, "content": f"{each['content']} {n}"} for each in CHAT]}
        for n in range(30)
    ]
    prompts = read(tmp_path, *rows)
    split = split_prompts(prompts, 0.2, 0.2)
    assert len(prompts) == 60 and repeats(prompts) == 0 and len(set(split.values())) == 3
    assert all(split[f"{n}#turn1"] == split[f"{n}#turn2"] for n in range(30))


def test_what_is_cut_still_belongs_to_its_conversation(tmp_path: Path) -> None:
    long = {"role": "user", "content": "w8 " * 30}
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [*CHAT[:3], long]}))
    prompts = load_jsonl("mine", str(file), "prompt", None, True, None, "cut")
    kept, counts = fitted(prompts, tokenizer(), 30)
    assert counts["cut"] == 1 and [each.whole for each in kept] == ["", "w3"]


def test_parts_are_those_of_all_messages(tmp_path: Path) -> None:
    listed = TEMPLATE.replace("{{ m.content }}", "{{ m.content[0].text }}")
    second = read(tmp_path, {"messages": CHAT})[1]
    text, parts = rendered(second, tokenizer(listed))
    assert parts and "w1 w2" in text and "w4 w5" in text and "w6" in text


def test_a_template_that_leaves_out_the_system_prompt_is_refused(tmp_path: Path) -> None:
    silent = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages[1:] %}")
    prompt = read(tmp_path, {"messages": CHAT})[0]
    with pytest.raises(UserError, match=r"^dataset.chat: the chat template does not show the text"):
        rendered(prompt, tokenizer(silent))


image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
GAP = [*CHAT[:2], *CHAT[3:]]
FAULTS: list[tuple[str, dict[str, Any]]] = [
    (r"message 2 is no message of .*image_url", {"messages": [SYSTEM, image]}),
    (r"message 1 is no message", {"messages": [{"role": "narrator", "content": "w1"}]}),
    (r"message 1 is no message", {"messages": [{"role": "user", "content": " "}]}),
    (r"message 1 is no message", {"messages": [3]}),
    (r"has no turn of a user", {"messages": [SYSTEM]}),
    (r"has no turn of a user", {"messages": []}),
    (r"two turns of the user and no answer between them, but one behind", {"messages": GAP}),
    (r"has tools that are no list of objects", {"messages": CHAT, "tools": ["w1"]}),
    (r"ends in a message of tool", {"messages": [*CHAT[:2], {"role": "tool", "content": "w9"}]}),
    (r"message 1 is no message", {"messages": [{"role": "assistant", "tool_calls": [5]}]}),
    (r"holds half a character", {"messages": [{"role": "user", "content": "w3 \ud800"}]}),
    (r"has no text under 'prompt'", {"messages": "w1"}),
]


@pytest.mark.parametrize(("says", "row"), FAULTS)
def test_what_is_no_conversation_is_refused(says: str, row: dict[str, Any], tmp_path: Path) -> None:
    refuses(rf"^dataset.field: .*line 1.* {says}", read, tmp_path, row)


def test_what_datasets_write_into_messages_besides_is_left_away(tmp_path: Path) -> None:
    call = {"function": {"name": "f"}, "id": None}
    more = {"tool_calls": None, "timestamp": "1", "name": "w1"}
    first = {"role": "user", "content": "w3", **more}
    chat = [first, {"role": "assistant", "content": None, "tool_calls": [call]}, CHAT[3]]
    prompts = read(tmp_path, {"messages": chat, "tools": [{"name": "w9", "strict": None}]})
    assert prompts[1].tools == [{"name": "w9"}]
    assert turns(prompts[1])[:2] == [
        {"role": "user", "content": "w3", "name": "w1"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
    ]
    with pytest.raises(UserError, match="the chat template does not show the tools of"):
        rendered(prompts[0], tokenizer())
    with pytest.raises(UserError, match="the chat template does not show the tool calls of"):
        rendered(replace(prompts[1], tools=()), tokenizer())
    alone = read(tmp_path, {"prompt": "w3", "tools": [{"name": "w9"}]})
    assert alone[0].tools == [{"name": "w9"}]


def test_an_id_is_not_taken_for_that_of_a_turn(tmp_path: Path) -> None:
    refuses(r"has the id 'a#turn2'", read, tmp_path, {"id": "a#turn2", "prompt": "w3"})


def test_a_conversation_is_not_continued_as_text(tmp_path: Path) -> None:
    refuses(
        r"a conversation, .* dataset.chat=true, or write its text under 'prompt'",
        read,
        tmp_path,
        {"messages": CHAT},
        chat=False,
    )
