"""Conversations whose turns the target answers itself: each is asked after its answers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_gen.harvest import Progress, harvest, plan
from data_gen.prompts import Prompt
from data_gen.prompts.jsonl import load_jsonl
from data_gen.prompts.render import as_asked
from data_gen.requests import make_requests, said
from data_gen.responses.external import GoingOn, ResponseFile, fetched, with_responses
from data_gen.run import finish
from data_gen.storage.dataset import Harvest
from decoding.models.loading import ModelPair
from tests.helpers.damage.refusals import refuses
from tests.helpers.data.datasets import RECIPE, SETTINGS, rows
from tests.helpers.models.tiny_pair import EOS, tiny_pair

THINKING = (  # as templates of models that think: what was thought is left out of earlier answers
    "{% if tools %}w9 {% for t in tools %}{{ t.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }} "
    "{{ m.content if m.role == 'user' else m.content.split('w7')[-1] }} {% endfor %}"
    "{% if add_generation_prompt %}a {{ 'w7 ' if enable_thinking }}{% endif %}"
)
CHATS = {  # "target": its own answer stands there
    "long": [("user", "w3 w4"), ("target", ""), ("user", "w5"), ("target", ""), ("user", "w6 w8")],
    "one": [("user", "w11")],
    "system": [("system", "w20"), ("user", "w21"), ("target", ""), ("user", "w21")],
    "given": [("user", "w12"), ("assistant", ""), ("user", "w13"), ("target", ""), ("user", "w14")],
    "tools": [("user", "w15"), ("target", ""), ("user", "w16")],
}
TOOLS = {"tools": [{"name": "w17"}]}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    made = tiny_pair()
    made.tokenizer.chat_template = THINKING
    return made


def prompts(folder: Path, **template: Any) -> list[Prompt]:
    file = folder / "prompts.jsonl"
    with file.open("w") as lines:
        for name, chat in CHATS.items():
            own = [{"role": role, "content": text} for role, text in chat if role != "target"]
            row = {"id": name, "messages": own, "tools": TOOLS.get(name)}
            lines.write(json.dumps(row) + "\n")
    return load_jsonl("mine", str(file), "prompt", None, True, template)


def harvested(pair: ModelPair, some: list[Prompt], folder: Path, batch: int = 2) -> dict[str, Any]:
    recipe = replace(RECIPE, batch_size=batch)
    requests = make_requests(some, pair, recipe.max_new_tokens + recipe.gamma, 0.2, 0.2)
    harvest(pair, requests, recipe, folder, Progress())
    finish(plan(pair, requests, recipe), 0, folder, *SETTINGS.values())
    found = {row["prompt_id"]: row for row in rows(folder, "responses")}
    assert Harvest.open(folder).manifest.prompts.count == len(found)
    return found


@pytest.mark.parametrize("template", [{}, {"enable_thinking": True}])
def test_each_turn_is_rendered_after_the_answers_to_those_before(
    pair: ModelPair, tmp_path: Path, template: dict[str, Any]
) -> None:
    found = harvested(pair, prompts(tmp_path, **template), tmp_path / "data")
    tokenizer: Any = pair.tokenizer
    for name, chat in CHATS.items():
        before, turn, answer = list[dict[str, str]](), 0, ""
        for role, text in chat:
            own = {"role": "assistant", "content": answer}
            before.append(own if role == "target" else {"role": role, "content": text})
            if role == "user":
                turn += 1
                row = found.pop(name if len(chat) == 1 else f"{name}#turn{turn}")
                rendered = tokenizer.apply_chat_template(
                    before, TOOLS.get(name), add_generation_prompt=True, tokenize=False, **template
                )
                assert row["prompt_tokens"] == tokenizer(rendered)["input_ids"]
                answer = said(row["response_tokens"], pair)
    assert not found


def test_responses_do_not_depend_on_the_chunks(pair: ModelPair, tmp_path: Path) -> None:
    some = prompts(tmp_path)
    first, second = (harvested(pair, some, tmp_path / str(size), size) for size in (1, 4))
    assert {name: row["response_tokens"] for name, row in first.items()} == {
        name: row["response_tokens"] for name, row in second.items()
    }
    assert len({row["split"] for name, row in first.items() if name.startswith("long")}) == 1


def test_a_template_that_renders_later_turns_otherwise_makes_another_harvest(
    pair: ModelPair, tmp_path: Path
) -> None:
    new_tokens = RECIPE.max_new_tokens + RECIPE.gamma
    requests = make_requests(prompts(tmp_path), pair, new_tokens, 0.2, 0.2)
    other = tiny_pair()
    other.tokenizer.chat_template = THINKING.replace("[-1]", "[0]")
    anew = make_requests(prompts(tmp_path), other, new_tokens, 0.2, 0.2)
    assert [each.tokens.tolist() for each in anew] == [each.tokens.tolist() for each in requests]
    assert plan(pair, requests, RECIPE)["prompts"] != plan(other, anew, RECIPE)["prompts"]


def test_a_conversation_ends_before_the_turn_that_does_not_fit(
    pair: ModelPair, tmp_path: Path
) -> None:
    new_tokens = RECIPE.max_new_tokens + RECIPE.gamma
    tight = replace(prompts(tmp_path)[0], then=[[{"role": "user", "content": "w5 " * 80}]])
    says = r"^pair.max_length: the conversation long#turn1 may come to .* dataset.too_long=skip"
    refuses(says, make_requests, [tight, *prompts(tmp_path)[1:]], pair, new_tokens, 0.2, 0.2)
    left = [replace(tight, too_long="skip"), *prompts(tmp_path)[1:]]
    requests = make_requests(left, pair, new_tokens, 0.2, 0.2)
    harvest(pair, requests, RECIPE, tmp_path / "data", Progress())
    made = finish(plan(pair, requests, RECIPE), 0, tmp_path / "data", *SETTINGS.values())
    names = [row["prompt_id"] for row in rows(made.folder, "responses")]
    assert "long#turn1" in names and "long#turn2" not in names and made.manifest.left_out == 1


def test_answers_of_a_file_go_on_as_those_of_the_target(pair: ModelPair, tmp_path: Path) -> None:
    some, answers = prompts(tmp_path), tmp_path / "answers.jsonl"
    generated = harvested(pair, some, tmp_path / "generated")
    lines = [
        {"id": name, "response_tokens": [*row["response_tokens"], EOS, 5, 6]}
        for name, row in generated.items()
    ]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def render(wave: Any) -> list[Prompt]:
        return as_asked(wave, pair.tokenizer, "2026-01-31", True)

    on = GoingOn(render, lambda: pair.tokenizer, lambda: pair.eos_ids, RECIPE.max_new_tokens, 80)
    asked, given = fetched(ResponseFile(str(answers)), some, RECIPE, tmp_path, True, on)
    requests = make_requests(asked, pair, RECIPE.max_new_tokens + RECIPE.gamma, 0.2, 0.2)
    requests = with_responses(requests, given, pair, RECIPE.max_new_tokens)
    assert {each.prompt_id: each.tokens.tolist() for each in requests} == {
        name: row["prompt_tokens"] for name, row in generated.items()
    }
    harvest(pair, requests, RECIPE, tmp_path / "data", Progress())
    for row in rows(tmp_path / "data", "responses"):
        assert row["response_tokens"] == generated.pop(row["prompt_id"])["response_tokens"]
    assert not generated
