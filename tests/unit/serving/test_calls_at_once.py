"""Calls of `generate` beside each other, inside each other and after each other's faults: each is
what it is alone, and the model stays as it is."""

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation import StoppingCriteriaList

from decoding.engines.serial import SerialEngine
from decoding.sampling import Sampler, Warp
from decoding.stopping.confidence import Confidence
from decoding.structures.chain import Chain
from decoding.verifiers.token import TokenVerifier
from runtime.errors import UserError
from serving.generate import speculate
from serving.models import DRAFTS, SLOT, opened
from tests.helpers.models.tiny_pair import save_tiny_pair, tiny_models, tiny_pair

PROMPTS = [torch.tensor([[3 + i, 7, 1, 9, 4 + i]]) for i in range(4)]
Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


@pytest.fixture
def models() -> Models:
    return made()


def made() -> Models:
    """Of configs of their own."""
    target, draft = tiny_models()
    for model in (target, draft):
        config = copy.deepcopy(model.config)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config = config
        model.set_attn_implementation("sdpa")
    return target, draft


def plain(model: LlamaForCausalLM, prompt: torch.Tensor = PROMPTS[0], **asked) -> list[int]:
    found = model.generate(prompt, max_new_tokens=16, do_sample=False, **asked)
    return found[0].tolist()


def ours(model: LlamaForCausalLM, draft, prompt: torch.Tensor = PROMPTS[0], **asked) -> list[int]:
    return plain(model, prompt, custom_generate=speculate, draft=draft, **asked)


def at_once(*jobs: Callable[[], list[int]], threads: int = 4) -> list[list[int]]:
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(job) for job in jobs]
        return [future.result() for future in futures]


def test_threads_get_what_each_gets_alone(models: Models) -> None:
    """Plain `generate` of the same model beside them, and a stop rule that they share."""
    target, draft = models
    expected = [plain(target, prompt) for prompt in PROMPTS]
    rule = Confidence(0.3)
    jobs: list[Callable[[], list[int]]] = []
    for prompt in PROMPTS * 3:
        jobs += [
            lambda prompt=prompt: ours(target, draft, prompt, stop=rule),
            lambda prompt=prompt: ours(target, target, prompt),
            lambda prompt=prompt: plain(target, prompt),
        ]
    found = at_once(*jobs)
    assert found == [answer for answer in expected * 3 for _ in range(3)]


def test_threads_take_turns_with_a_pair_and_share_it_in_generate() -> None:
    pair, other = tiny_pair(), tiny_pair()
    expected = [plain(other.target.model, prompt) for prompt in PROMPTS]
    rules = Confidence(0.3), TokenVerifier(), Warp(temperature=0), Warp(temperature=0)
    engine = SerialEngine(pair, Chain(4), *rules, eos_ids=frozenset({0}))

    def decoded(prompt: torch.Tensor) -> list[int]:
        return [*prompt[0].tolist(), *engine.decode(prompt[0], 16, Sampler.seeded(0)).tokens]

    jobs = [lambda prompt=prompt: decoded(prompt) for prompt in PROMPTS * 2]
    jobs += [lambda prompt=prompt: ours(pair.target.model, pair, prompt) for prompt in PROMPTS * 2]
    assert at_once(*jobs) == expected * 4
    with pytest.raises(UserError, match=r"^pair: its caches hold a response"):
        engine.decode([3, 7], 4, Sampler.seeded(0), lambda text: bool(decoded(PROMPTS[0])))
    assert decoded(PROMPTS[0]) == expected[0], "afterwards"


def test_a_call_inside_a_stopping_criterion(models: Models) -> None:
    target, draft = models
    inner = []

    def asks(ids: torch.Tensor, scores: object, **_: object) -> bool:
        inner.append(ours(target, draft, PROMPTS[1]))
        return False

    found = ours(target, draft, stopping_criteria=StoppingCriteriaList([asks]))
    assert found == plain(target)
    assert inner[0] == plain(target, PROMPTS[1]) and len({*map(tuple, inner)}) == 1


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit])
def test_nothing_of_a_call_that_fails_is_left(fault: type[BaseException], models: Models) -> None:
    target, draft = models
    target.train()

    def fails(ids: torch.Tensor, scores: object, **_: object) -> bool:
        assert target.config._attn_implementation == "sdpa" and target.training
        raise fault

    with pytest.raises(fault):
        ours(target, draft, stopping_criteria=StoppingCriteriaList([fails]))
    assert target.config._attn_implementation == "sdpa" and target.training
    assert ours(target.eval(), draft) == plain(target)


def test_drafts_in_turns_are_made_ready_once(models: Models, tmp_path) -> None:
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
def test_what_changes_between_calls_is_seen(activation: str, models: Models) -> None:
    """Tensors stay where they are: a view of a model shares them with it. What the config calls
    gelu, though it is none, is run by transformers' own forward."""
    target, draft = models
    target.config.hidden_act = activation
    ours(target, draft)
    addresses = [parameter.data_ptr() for parameter in target.parameters()]
    ours(target, draft)
    assert addresses == [parameter.data_ptr() for parameter in target.parameters()]

    attention, norm, rotary = (
        target.model.layers[0].self_attn,
        target.model.norm,
        target.model.rotary_emb,
    )
    changes: list[Callable[[], object]] = [
        lambda: attention.v_proj.weight.data.mul_(1.5),
        lambda: target.float(),
        lambda: setattr(target.lm_head, "weight", torch.nn.Parameter(target.lm_head.weight * -1)),
        lambda: setattr(rotary, "inv_freq", rotary.inv_freq * 2),
    ]
    if activation == "gelu":
        changes += [
            lambda: norm.register_forward_hook(lambda module, args, out: out.flip(-1)),
            lambda: setattr(attention, "scaling", attention.scaling * 3),
            lambda: setattr(target.model.layers[1], "mlp", torch.nn.Identity()),
            lambda: setattr(norm, "forward", lambda x: x.flip(-1)),
        ]
    before = plain(target)
    for number, change in enumerate(changes):
        change()
        after = plain(target)
        assert after != before or number == 1, number
        assert ours(target, draft) == after, number
        before = after


def test_new_weights_of_a_pair_are_seen_by_every_later_call() -> None:
    pair = tiny_pair()
    model = pair.target.model
    before = ours(model, pair)
    for part in (model.lm_head, model.model.layers[0].self_attn.v_proj):
        part.weight = torch.nn.Parameter(part.weight.detach().flip(0), requires_grad=False)
    right = plain(model)
    assert right != before
    assert [ours(model, pair) for _ in range(3)] == [right] * 3


@pytest.mark.slow
def test_what_is_kept_is_released_with_its_model() -> None:
    target, draft = made()
    ours(target, draft)
    copied = copy.deepcopy(target)
    assert not vars(copied)[SLOT], "it is neither copied nor saved"
    assert ours(copied, draft) == plain(copied) == plain(target)
    gone = [weakref.ref(part) for part in (draft, draft.lm_head.weight)]
    del draft
    gc.collect()
    assert [part() for part in gone] == [None, None], "with the target alive"
    gone = [weakref.ref(part) for part in (target, target.lm_head.weight)]
    del target
    gc.collect()
    assert [part() for part in gone] == [None, None]
