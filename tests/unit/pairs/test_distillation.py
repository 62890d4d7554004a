"""Distillation: the written-out gradients, the optimiser, chats on disk, and a run that stops and
goes on."""

import os
import random
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.models.draft_model import copied_layers, draft_from_layers
from pairs.chats import Chat, ChatPool, batches, load_chats, save_chats
from pairs.ordinary import OrdinaryInTraining
from pairs.self_chat import SelfChat
from pairs.training import (
    DraftTraining,
    TrainingConfig,
    head_gradient,
    measure_overlap,
    orthogonalised,
)
from tests.helpers.damage.refusals import refuses

EOS = 2


class ByteTokenizer:
    """Just enough of a tokenizer for SelfChat: one id per character, `<e>` ends a turn."""

    eos_token, eos_token_id, chat_template = "<e>", EOS, "its own"
    all_special_ids, added_tokens_decoder, unk_token_id = (EOS,), dict[int, Any](), None

    def apply_chat_template(self, turns: list[dict[str, str]], **kwargs: object) -> str:
        return f"ab{turns[0]['content']}<e>cd"

    def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 20 for c in text]}


def talk(target: LlamaForCausalLM, *rest: Any, **settings: Any) -> SelfChat:
    """rest: seed, prompts, openings."""
    given = {"slots": 2, "prompt_tokens": 5, "response_tokens": 4, "responses": 1}
    given |= {"prompt_temperature": 1.0, "temperatures": [1.0, 0.6], "feature_layers": []}
    return SelfChat(target, ByteTokenizer(), SimpleNamespace(**given | settings), *rest)


@pytest.fixture
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    tied = {"tie_word_embeddings": True, "initializer_range": 0.3}
    config = LlamaConfig(eos_token_id=EOS, **sizes, **heads, **tied)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def chats(target: LlamaForCausalLM) -> list[Chat]:
    sizes = {"slots": 3, "response_tokens": 7, "responses": 2}
    return list(islice(talk(target, 1, temperatures=[1.0, 0.5], **sizes), 24))


def ordinary(target: LlamaForCausalLM) -> OrdinaryInTraining:
    return OrdinaryInTraining(draft_from_layers(target, copied_layers(target, [0, 2])))


def config(**changes: float | str) -> TrainingConfig:
    values = dict(tokens=10_000, batch_tokens=60, lr=0.005, warmup=2, decay=0.5, momentum=0.95)
    values |= dict(positions=0.5, regression=1.0, total_variation=0.0)
    return TrainingConfig(**values | changes)


def test_chats_hold_what_a_plain_forward_says(target, chats):
    target.set_attn_implementation("sdpa")
    for chat in chats:
        assert chat.tokens[:2].tolist() == [3 + ord(c) % 20 for c in "ab"]
        turn = chat.tokens[chat.start - 3 : chat.start].tolist()
        assert turn == [EOS, *(3 + ord(c) % 20 for c in "cd")]
        assert 1 <= len(chat.tokens) - chat.start <= 7 and EOS not in chat.tokens[chat.start : -1]
        with torch.no_grad():
            hidden = target.model(input_ids=chat.tokens[None].long()).last_hidden_state[0]
        near = {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(chat.hidden.float(), hidden[chat.start - 1 : -1], **near)


def test_given_prompts_come_first_and_own_ones_complete_an_opening(target):
    prompts = [[10, 11], [12, 13, 14, 15, 16, 17, 18]]
    first, second, own = islice(talk(target, 0, prompts, slots=1, temperatures=[1.0]), 3)
    assert first.tokens[2:4].tolist() == [10, 11] and first.start == 7
    assert second.tokens[2:7].tolist() == [12, 13, 14, 15, 16], "cut at prompt_tokens"
    assert own.start <= 2 + 5 + 3
    openings = [[10, 11], [12, 13, 14, 15, 16, 17, 18]]
    chats = list(islice(talk(target, 0, (), openings), 12))
    begun = {tuple(chat.tokens[2:4].tolist()) for chat in chats}
    assert begun == {(10, 11), (12, 13)}
    # at least one more, at most 5
    assert all(3 <= chat.start - 2 - 3 <= 5 or EOS in chat.tokens[4:7] for chat in chats)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_head_gradient_is_autograd_s(share):
    torch.manual_seed(1)
    own, states, head = torch.randn(6, 8), torch.randn(6, 8), torch.randn(11, 8)
    own.requires_grad_()
    p, log_q = (states @ head.T).softmax(-1), (own @ head.T).log_softmax(-1)
    acceptance = torch.minimum(p, log_q.exp()).sum(-1).mean()
    ((1 - share) * (p * (p.log() - log_q)).sum(-1).mean() + share * (1 - acceptance)).backward()
    gradient, accepted = head_gradient(own.detach(), states, head, share)
    torch.testing.assert_close(gradient, own.grad)
    assert accepted == pytest.approx(acceptance.item())


def test_products_in_bfloat16_change_little_and_orthogonalised_values_are_near_one():
    torch.manual_seed(1)
    own, states, head = torch.randn(300, 8), torch.randn(300, 8), torch.randn(11, 8)
    exact, acceptance = head_gradient(own, states, head, 0.7)
    rounded, accepted = head_gradient(own, states, head.bfloat16(), 0.7)
    assert rounded.dtype == torch.float32 and accepted == pytest.approx(acceptance, abs=0.01)
    assert (rounded - exact).norm() < 0.02 * exact.norm()
    torch.manual_seed(2)
    for shape in [(8, 20), (20, 8)]:
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
        assert values.min() > 0.6 and values.max() < 1.3


def test_batches_hold_every_chat_once(chats):
    cut = list(batches(chats, 40, random.Random(0)))
    assert sorted(id(chat) for batch in cut for chat in batch) == sorted(id(chat) for chat in chats)
    several = [batch for batch in cut if len(batch) > 1]
    assert all(len(batch) * max(len(chat.tokens) for chat in batch) <= 40 for batch in several)


def test_shards_round_trip_and_damage_is_named(chats, tmp_path):
    path = tmp_path / "a.safetensors"
    save_chats(path, chats)
    for ours, theirs in zip(chats, load_chats(path), strict=True):
        assert torch.equal(ours.tokens, theirs.tokens) and ours.start == theirs.start
        assert torch.equal(ours.hidden, theirs.hidden)
    path.write_bytes(path.read_bytes()[:-9])
    refuses("a.safetensors is damaged", load_chats, path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_raises_acceptance_and_resumes(target, chats, tmp_path, dtype):
    (tmp_path / "chats").mkdir()
    save_chats(tmp_path / "chats" / "0.safetensors", chats)

    def start() -> DraftTraining:
        pool = ChatPool(tmp_path / "chats", 4)
        return DraftTraining(ordinary(target), pool, config(dtype=dtype), tmp_path, seed=0)

    def states(chats: list[Chat]) -> tuple[torch.Tensor, torch.Tensor]:
        return run.draft.states(chats, torch.float32)[0]

    run = start()
    before = measure_overlap(states, run.pool.training, run.head)
    for _ in run.run(1500, save_seconds=1e9):
        pass
    after = measure_overlap(states, run.pool.training, run.head)
    assert after.acceptance > before.acceptance and after.kl < before.kl
    again = start()
    assert again.resume() and again.progress == run.progress
    for ours, theirs in (
        (run.draft.model.state_dict(), again.draft.model.state_dict()),
        (run.optimiser.state, again.optimiser.state),
    ):
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    # embeddings stay the target's
    ours, theirs = (model.get_input_embeddings().weight for model in (run.draft.model, target))
    assert torch.equal(ours, theirs)


def test_own_states_ignore_padding(target, chats):
    draft = ordinary(target)
    together, _ = draft.states(chats[:5])[0]
    alone = torch.cat([draft.states([chat])[0][0] for chat in chats[:5]])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_later_shards_leave_the_held_out_chats_alone(chats, tmp_path):
    for second, (name, part) in enumerate([("b", chats[:10]), ("a", chats[10:])]):
        save_chats(tmp_path / f"{name}.safetensors", part)
        os.utime(tmp_path / f"{name}.safetensors", (second, second))
    pool = ChatPool(tmp_path, held_out=4)
    for ours, theirs in zip(pool.validation, chats[:4], strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)


def test_only_answers_have_the_temperatures(target):
    """The first slot has a given prompt, the second writes its own."""
    assert talk(target, 0, [[5]], temperatures=[0.5, 0.7])._temperatures().tolist() == [0.5, 1.0]
