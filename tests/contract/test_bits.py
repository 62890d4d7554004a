"""The forward in C++ is equal to the bit however its rows come: one by one or together, in a chain
or a tree, in a batch or alone, on one thread or more, with each kind of instructions that this
processor has. Without a compiler models run as before, which is said once."""

import copy
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from decoding.models import native
from decoding.models.batched_lm import BatchedLM
from decoding.models.cached_lm import CachedLM
from decoding.models.cpu_llama import LlamaForward
from decoding.models.packing import PackedLinear, pack_linears
from decoding.together import Together
from runtime.errors import UserError
from tests.helpers.models.cached import close, random_tokens, without_cache

SIZES = dict(vocab_size=61, num_hidden_layers=2, max_position_embeddings=96, initializer_range=0.3)
ODD = SIZES | dict(hidden_size=35, intermediate_size=51, head_dim=6, num_key_value_heads=1)
EVEN = SIZES | dict(hidden_size=96, intermediate_size=96, head_dim=64, num_key_value_heads=2)
BIASED = dict(attention_bias=True, mlp_bias=True)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "odd sizes": lambda: LlamaForCausalLM(LlamaConfig(**ODD, num_attention_heads=5, **BIASED)),
    "even sizes": lambda: LlamaForCausalLM(LlamaConfig(**EVEN, num_attention_heads=6)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**EVEN | dict(head_dim=18), num_attention_heads=4)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**EVEN | dict(head_dim=22), num_attention_heads=2)
    ),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HERE = native.variants_here()
TEXT = random_tokens(45, 0)
LAYERS = (-1, 1, 0)

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler, or no AVX2")


def made(kind: str, dtype: torch.dtype = torch.bfloat16) -> CachedLM:
    torch.manual_seed(0)
    model = MODELS[kind]().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    lm = CachedLM(model)
    assert isinstance(lm.network, LlamaForward) and lm.network._native is not None
    return lm


@pytest.fixture(params=[(v, k, d) for v in HERE for k in MODELS for d in DTYPES], ids="-".join)
def lm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CachedLM:
    variant, kind, dtype = request.param
    monkeypatch.setattr(native, "library", lambda: native.load(variant))
    return made(kind, DTYPES[dtype])


def chain(lm: CachedLM, *sizes: int) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of `TEXT`, run in parts of these sizes; one by one where there are
    none."""
    lm.reset()
    parts = TEXT.split(list(sizes) or 1)
    outputs = [lm.forward(part, hidden=LAYERS) for part in parts]
    hidden = [output.hidden for output in outputs if output.hidden is not None]
    return torch.cat([output.logits for output in outputs]), torch.cat(hidden, 1)


def equal(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    assert len(found) == len(right) and all(map(torch.equal, found, right))


def test_parts_of_a_text(lm: CachedLM) -> None:
    """And what is cached; and other numbers are close to those of transformers."""
    right = chain(lm)
    cached = lm.held().rows
    for sizes in ((45,), (1, 2, 3, 4, 5, 6, 7, 8, 9), (12, 13, 20), (17, 25, 3)):
        equal(chain(lm, *sizes), right)
        for found, expected in zip(lm.held().rows, cached, strict=True):
            equal(found, expected)
    with torch.no_grad():
        expected = lm.model.float()(TEXT[None]).logits[0]
    close(right[0], expected, 1e-3 if lm.network._native._shape.bytes == 4 else 0.5)


def test_trees_and_masks(lm: CachedLM) -> None:
    """A path is a chain, whatever lies between its rows; so is what is kept of it."""
    parents = torch.tensor([-1, -1, 0, 1, 1, 2, 4, 0])
    right, states = chain(lm)
    paths = ([0, 2, 5], [1, 4, 6], [1, 3], [0, 7])
    for path in paths:
        tokens = random_tokens(8, 1)
        tokens[path] = TEXT[19 : 19 + len(path)]
        for first in (8, 5):  # the rest goes on from there
            lm.crop(19)
            outputs = [lm.forward(tokens[:first], parents[:first], hidden=LAYERS)]
            if first < 8:
                rest = tokens[first:], parents[first:]
                outputs.append(lm.forward(*rest, extend=True, hidden=LAYERS))
            last = 19 + len(path)
            equal((torch.cat([x.logits for x in outputs])[path],), (right[19:last],))
            equal((torch.cat([x.hidden for x in outputs], 1)[:, path],), (states[:, 19:last],))
        lm.keep_path(path)
        equal((lm.forward(TEXT[last:]).logits,), (right[last:],))
    lm.crop(40)
    places = torch.tensor([39, 3, 17, 16])
    own = torch.eye(4).bool()
    visible = torch.cat([torch.arange(40) < places[:, None], own], 1)
    equal((lm.forward_masked(TEXT[places], places, visible).logits,), (right[places],))


def test_batches(lm: CachedLM) -> None:
    lengths = (7, 0, 3, 12)
    right, states = chain(lm)
    batch = BatchedLM(lm, [TEXT[:n] for n in lengths], 8)
    for step in range(3):
        output = batch.step(TEXT[[n + step for n in lengths]], LAYERS)
        rows = [n + step for n in lengths]
        equal((output.logits, output.hidden), (right[rows], states[:, rows]))
    batch.keep(torch.tensor([0, 3]))
    equal((batch.step(TEXT[[10, 15]]).logits,), (right[[10, 15]],))
    batch.hand_over(1)
    equal((lm.forward(TEXT[16:]).logits,), (right[16:],))


def test_requests_side_by_side(lm: CachedLM) -> None:
    """Chains, prompts, rows that few outputs are asked for and trees, in calls of all of them."""
    right, states = chain(lm)
    together = Together(lm.network)
    copies = [lm.fresh() for _ in range(4)]
    for each in copies:
        each.network = together.joined(0)

    def tree() -> tuple[Tensor, Tensor]:
        copies[3].forward(TEXT[:19], logits="last")
        tokens, parents = random_tokens(4, 1), torch.tensor([-1, -1, 1, 2])
        tokens[1:] = TEXT[19:22]
        output = copies[3].forward(tokens, parents, hidden=LAYERS)
        assert output.hidden is not None
        return output.logits[1:], output.hidden[:, 1:]

    sizes = (45,), (17, 1, 27), (1,) * 45
    tasks = [
        functools.partial(chain, one, *parts) for one, parts in zip(copies, sizes, strict=False)
    ]
    ended = dict(together.run([*tasks, tree], 4))
    *chains, path = (ended[number] for number in range(4))
    for found in chains:
        equal(found, (right, states))
    equal(path, (right[19:22], states[:, 19:22]))


def test_rows_that_are_asked_for_and_the_full_context(lm: CachedLM) -> None:
    right, _ = chain(lm)
    lm.reset()
    assert lm.forward(TEXT[:20], logits="none").logits.shape == (0, 61)
    equal((lm.forward(TEXT[20:30], logits=[7, 2]).logits,), (right[[27, 22]],))
    equal((lm.forward(TEXT[30:], logits="last").logits,), (right[-1:],))
    tokens = random_tokens(51, 3)
    found = lm.forward(tokens)
    assert lm.length == lm.max_length == 96
    with pytest.raises(UserError, match="max_length"):
        lm.forward(TEXT[:1])
    lm.crop(45)
    equal((torch.cat([lm.forward(x).logits for x in tokens.split(1)]),), (found.logits,))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", MODELS)
def test_threads(kind: str, two_threads: None) -> None:
    """Of one forward, and of two at once."""
    lm = made(kind)
    found = chain(lm, 20, 1, 24)
    results = dict[int, tuple[Tensor, Tensor]]()
    copies = [lm.fresh() for _ in range(3)]
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: chain(copies[i], 9, 9, 27)}))
        for i in range(3)
    ]
    for action in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            action(thread)
    torch.set_num_threads(1)
    right = chain(lm)
    for each in (found, *results.values()):
        equal(each, right)


def test_packed_layers_give_up_their_copy() -> None:
    model = MODELS["even sizes"]()
    pack_linears(model)
    lm = CachedLM(model)
    packed = [part for part in lm.model.modules() if isinstance(part, PackedLinear)]
    assert packed and all(part.packed is None for part in packed)


# The library --------------------------------------------------------------------------------------

TINY = """extern "C" int block() { return 7; }
extern "C" unsigned long sampled() { return 0; }
extern "C" int allowed() { return %s; }
"""


@pytest.mark.parametrize("damage", [lambda held: held[:5000], lambda held: b"no library", None])
def test_a_damaged_library_is_made_anew(
    damage: Callable[[bytes], bytes] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTPREDICT_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "SOURCE", tmp_path / "tiny.cpp")
    native.SOURCE.write_text(f"// {damage}\n{TINY % 1}")
    folder = tmp_path / "native"
    if damage is not None:
        native.load(HERE[0])
        (file,) = folder.iterdir()
        whole = file.read_bytes()
        file.unlink()  # what is mapped stays
        file.write_bytes(damage(whole))
    assert native.load(HERE[0]).block() == 7
    (file,) = folder.iterdir()
    assert native._whole(file)


def test_what_the_system_does_not_allow_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTPREDICT_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "SOURCE", tmp_path / "tiny.cpp")
    native.SOURCE.write_text(TINY % 0)
    with pytest.raises(native.Unavailable, match=f"not let this process use {HERE[0]}"):
        native.load(HERE[0])


def test_other_libraries_may_use_the_same_registers() -> None:
    made("qwen2", torch.bfloat16)
    x, weight = torch.randn(40, 96).bfloat16(), torch.randn(64, 96).bfloat16()
    ours = native.Linear(weight)
    found = [(F.linear(x, weight), ours(x)) for _ in range(3)]
    for theirs, mine in found:
        assert torch.equal(theirs, found[0][0]) and torch.equal(mine, found[0][1])
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.1)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/c++", "no C++ compiler"),
        ("false", "false cannot compile native.cpp"),
        ('"c++', "No closing quotation"),
    ],
)
def test_without_a_compiler(
    compiler: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = chain(made("qwen2", torch.float32))[0]
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("DRAFTPREDICT_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_library", functools.cache(native._library.__wrapped__))
    with pytest.raises(AssertionError):
        made("qwen2", torch.float32)
    torch.manual_seed(0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and reason in lines[0]
    monkeypatch.setattr(native, "library", lambda: None)
    lm = CachedLM(MODELS["qwen2"]())
    assert not capsys.readouterr().err and lm.forward(TEXT).logits.shape == right.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_go_another_way(dtype: torch.dtype) -> None:
    lm = CachedLM(MODELS["even sizes"]().to(dtype))
    assert isinstance(lm.network, LlamaForward) and lm.network._native is None


def test_rows_that_do_not_fit_are_refused_and_weights_are_watched() -> None:
    torch.manual_seed(0)
    model = MODELS["odd sizes"]().eval()
    lm, text = CachedLM(model), random_tokens(20, 0)
    lm.forward(text)
    seen = torch.ones(1, 21, dtype=torch.bool)
    with pytest.raises(IndexError, match="outside"):
        lm.forward_masked(text[:1], torch.tensor([-100_000]), seen)
    with pytest.raises(RuntimeError):
        native.Linear(torch.ones(4, 32))(torch.ones(1, 16))
    for call in (lm.forward, lambda x: lm.forward(x, x), lambda x: lm.forward_masked(x, x, seen)):
        with pytest.raises(ValueError, match="at least one token"):
            call(text[:0])
    model.model.layers[0].mlp.down_proj.weight.data.mul_(2)
    lm.reset()
    torch.testing.assert_close(lm.forward(text).logits, without_cache(model, text))
    model.model.layers[0].self_attn.k_proj.weight.data.view(torch.int32).fill_(0x7FFFFFFF)
    lm.reset()
    assert lm.forward(text).logits.isnan().all()
    lm.forward(text[:1])
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        lm.forward(text[:1]), lm.reset(), lm.forward(text)


def test_what_is_written_into_few_weights_is_noticed_some_texts_later() -> None:
    lm, text = CachedLM(MODELS["odd sizes"]().eval()), random_tokens(20, 0)
    lm.forward(text)
    lm.model.model.layers[0].mlp.down_proj.weight.data.view(-1)[::10] *= 2
    for _ in range(native.LOOKS):
        lm.reset()
        found = lm.forward(text).logits
    torch.testing.assert_close(found, without_cache(lm.model, text))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    lm = made("qwen3")
    right = chain(lm, 45)
    other = copied(lm)
    with torch.no_grad():
        lm.model.lm_head.weight.mul_(2)
    equal(chain(other, 45), right)
    lm.model.lm_head.weight.data.div_(2)
    lm.reset()
    lm.forward(TEXT[:20])
    used = copied(lm)  # in the middle of a text
    for each in (used, lm):
        equal((each.forward(TEXT[20:23]).logits,), (right[0][20:23],))
        equal((each.forward(TEXT[23:25]).logits,), (right[0][23:25],))
    weight = torch.randn(5, 3)
    product = native.Linear(weight)
    x = torch.randn(4, 3)
    found = copied(product)(x)
    equal((product(x), product(x[1]), found[1]), (found, found[1], product(x)[1]))
    weight.mul_(2)
    equal((product(x),), (2 * found,))


def test_the_ends_of_the_numbers() -> None:
    """Gates far below zero close, and what is no number stays none."""
    lm = made("odd sizes")
    bias = lm.model.model.layers[0].mlp.gate_proj.bias
    found = []
    for gate in (-300.0, -1e38):
        with torch.no_grad():
            bias.fill_(gate)
        lm.reset()
        found.append(lm.forward(TEXT).logits)
    equal(tuple(found[:1]), tuple(found[1:]))
    none = torch.full((1, 32), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert native.Linear(torch.ones(4, 32).bfloat16())(none).isnan().all()
