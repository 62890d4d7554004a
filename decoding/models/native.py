"""The forward of a Llama in C++ (`native.cpp`), compiled where it is first used.

A library for this processor lies in the cache (`DRAFTPREDICT_CACHE`) under a hash of what it was
made of. Where there is no compiler, or no processor it is written for, models run as without it."""

import ctypes
import functools
import hashlib
import math
import mmap
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from decoding.models.bare import version_of
from decoding.models.forward import Rows
from decoding.models.kv_cache import BufferCache
from decoding.models.packing import CPUINFO, MOST_BYTES
from runtime.errors import UserError
from runtime.files import write_atomically

SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
WIDE = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
VARIANTS = {  # what the compiler calls the instructions of each, best first
    "amx_bf16": (*WIDE, "avx512bf16", "amx-tile", "amx-bf16"),
    "avx512_bf16": (*WIDE, "avx512bf16"),
    "avx512": WIDE,
    "avx2": ("avx2", "fma"),
}
DIGEST = 32  # bytes behind a library: the hash of what lies before
PAGES_BYTES = 1 << 26
LINE = 16  # numbers of a cache line
DTYPES = (torch.float32, torch.bfloat16)
LOOKS = 8  # after as many the same numbers of weights are looked at; as in the source


class Unavailable(Exception):
    """Why there is no library."""


def _structure(**fields: str) -> Any:
    """Return the structure with fields of these names, kind by kind, as the source has it."""
    kinds = {"pointers": c_void_p, "floats": c_float, "ints": c_int32, "longs": c_int64}
    parts = [(n, kinds[kind]) for kind, names in fields.items() for n in names.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": parts})


_Layer = _structure(
    pointers="qkv out gate_up down qkv_bias out_bias gate_up_bias down_bias norm mlp_norm q_norm"
    " k_norm",
    floats="eps mlp_eps q_eps k_eps",
)
_Shape = _structure(ints="bytes hidden heads kv_heads dim inner rotated", pointers="cos sin")
_Part = _structure(longs="first n start", pointers="seen")
_Rows = _structure(ints="parts total threads", pointers="part positions states")


_first = threading.Lock()  # of several threads, one compiles


# The library --------------------------------------------------------------------------------------


def library() -> ctypes.CDLL | None:
    """Return the library for this processor; None where there is none, which is said once."""
    with _first:
        return _library()


@functools.cache
def _library() -> ctypes.CDLL | None:
    reason = "this processor has neither AVX-512 nor AVX2"
    for variant in variants_here():
        try:
            return load(variant)
        except (Unavailable, OSError, UserError, RuntimeError, ValueError) as error:
            reason = str(error)
    print(f"note: models run two times slower than they could: {reason}", file=sys.stderr)
    return None


def variants_here() -> list[str]:
    """Return which of `VARIANTS` this processor has the instructions for."""
    about = CPUINFO.read_text(errors="replace") if CPUINFO.is_file() else ""
    line = next((line for line in about.splitlines() if line.startswith("flags")), "")
    flags = {flag.replace("_", "") for flag in line.split()}
    return [
        name
        for name, needed in VARIANTS.items()
        if flags.issuperset(flag.replace("-", "") for flag in needed)
    ]


def load(variant: str) -> ctypes.CDLL:
    """Return the library of a variant, compiled unless the cache has it whole.

    Raises Unavailable, OSError or UserError where it cannot be made."""
    compiler = _compiler()
    flags = [*FLAGS, *(f"-m{name}" for name in VARIANTS[variant])]
    program = Path(str(shutil.which(compiler[0]))).resolve()
    stamp = program.stat()
    made_of = [SOURCE.read_text(), *compiler, *flags, program, stamp.st_size, stamp.st_mtime_ns]
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("DRAFTPREDICT_CACHE", "~/.cache/draftpredict")).expanduser()
    path = cache / "native" / f"{variant}-{key}.so"
    if not _whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, functools.partial(_compile, [*compiler, *flags]))
    made = ctypes.CDLL(str(path))
    made.sampled.restype = ctypes.c_uint64
    if not made.allowed():
        raise Unavailable(f"the system does not let this process use {variant}")
    return made


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CXX", "")) or [x for x in COMPILERS if shutil.which(x)][:1]
    if not given or not shutil.which(given[0]):
        raise Unavailable(f"no C++ compiler ({', '.join(COMPILERS)}, $CXX)")
    return given


def _compile(command: Sequence[str], path: Path) -> None:
    """Write a library and the hash of its bytes: to load one that was cut short is fatal."""
    done = subprocess.run([*command, str(SOURCE), "-o", str(path)], capture_output=True, text=True)
    if done.returncode:
        first = next((x for x in done.stderr.splitlines() if "error" in x), "it failed")
        raise Unavailable(f"{command[0]} cannot compile {SOURCE.name} ({first.strip()[:160]})")
    with path.open("ab") as file:
        file.write(hashlib.sha256(path.read_bytes()).digest())


def _whole(path: Path) -> bool:
    held = path.read_bytes() if path.is_file() else b""
    return len(held) > DIGEST and hashlib.sha256(held[:-DIGEST]).digest() == held[-DIGEST:]


# Weights ------------------------------------------------------------------------------------------


class Product:
    """x -> x w^T + bias, equal to the bit for any number of rows."""

    def __init__(
        self,
        made: ctypes.CDLL,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        pages: "Pages",
    ) -> None:
        """weights: [out, in] each, all of one input and one dtype of `DTYPES`; biases: of all of
        them, or None; pages: where they are packed."""
        self._made = made
        whole = torch.cat([weight.detach() for weight in weights])
        self.outputs, self.inputs = whole.shape
        self.bytes = whole.element_size()
        self.packed = _packed(made, whole, pages)
        given = [bias.detach().float() for bias in biases if bias is not None]
        self.bias = torch.cat(given) if given else None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in], any dtype -> [..., out] float32."""
        if x.shape[-1] != self.inputs:
            raise RuntimeError(f"expected rows of {self.inputs} numbers, got {x.shape[-1]}")
        x = x.float().contiguous()
        y = torch.empty(*x.shape[:-1], self.outputs)
        rows = x.numel() // self.inputs
        sizes = (c_int64(size) for size in (rows, self.inputs, self.outputs))
        self._made.linear(
            self.bytes, *sizes, threads_here(), *map(_address, (self.packed, self.bias, x, y))
        )
        return y


def threads_here() -> int:
    """Return torch's number of threads, or that of the processors this thread may run on: those it
    starts run there, too."""
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


class Pages:
    """Memory for the packed weights of one model, in pages of 2 MB where the system has them: a
    step reads all of it, and where a page lies is looked up for each."""

    def __init__(self, least: int = PAGES_BYTES) -> None:
        """least: bytes that are set aside at once; none is used before it is written to."""
        self._least, self._left = least, torch.empty(0, dtype=torch.int32)

    def room(self, shape: Sequence[int]) -> Tensor:
        """Return int32 numbers of this shape, whatever they are."""
        size = math.prod(shape)
        if size > len(self._left):
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            held = mmap.mmap(-1, max(4 * size, self._least), kind)
            with suppress(OSError):  # a system without such pages
                held.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(held, dtype=torch.int32)
        taken, self._left = self._left[:size], self._left[-(-size // LINE) * LINE :]
        return taken.view(shape)


def _packed(made: ctypes.CDLL, weight: Tensor, pages: Pages) -> Tensor:
    """[out, in] -> [out / block, in / P, block, P], with zeros where they do not divide; P numbers
    are 32 bits."""
    block, depth = made.block(), made.depth(weight.element_size())
    weight = F.pad(weight, (0, -weight.shape[1] % depth, 0, -weight.shape[0] % block))
    words = weight.view(torch.int32).unflatten(0, (-1, block)).transpose(1, 2)
    return pages.room(words.shape).copy_(words)


class Linear:
    """x -> x w^T in the dtype of the weight: by a `Product` where there can be one, made at the
    first call and after writes into the weight."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._packed: tuple[int, Product] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._weight
        made = library() if weight.device.type == "cpu" and weight.dtype in DTYPES else None
        if made is None:
            return F.linear(x, weight)
        if self._packed is None or self._packed[0] != version_of(weight):
            self._packed = version_of(weight), Product(made, [weight], [None], Pages(0))
        return self._packed[1](x).to(weight.dtype)

    def __reduce__(self) -> Any:
        return Linear, (self._weight,)


def _address(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def takes(model: Any) -> bool:
    """Whether a model that fits `LlamaForward` can be a `NativeLlama`: of float32 or bfloat16, all
    layers of one shape, and not too large for a second copy."""
    layers = model.model.layers
    shapes = [[p.shape for p in layer.parameters()] for layer in layers]
    weights = list(model.parameters())
    return (
        model.dtype in DTYPES
        and len(layers) > 0
        and layers[0].self_attn.head_dim % 2 == 0
        and all(shape == shapes[0] for shape in shapes)
        and all(p.is_contiguous() for p in weights)
        and all(
            part.weight.shape == (part.out_features, part.in_features)
            for part in model.modules()
            if isinstance(part, torch.nn.Linear)
        )
        and sum(p.nbytes for p in weights) <= MOST_BYTES
        and library() is not None
    )


class NativeLlama:
    """Layers, norm and output layer of a model that it `takes`, weights packed."""

    def __init__(self, model: Any, rotation: Tensor) -> None:
        """rotation: cos and sin, [2, positions, r] float32, as `rotations` gives them."""
        made = library()
        assert made is not None
        self._made, self._pages, body = made, Pages(), model.model
        layers, first = body.layers, body.layers[0].self_attn
        self._positions = rotation.shape[1]
        self._made_of = model, rotation
        self._kept: list[Any] = []  # what the library reads, besides
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        heads, kv_heads = (
            part.out_features // first.head_dim for part in (first.q_proj, first.k_proj)
        )
        self._cache_shape = kv_heads, first.head_dim, model.dtype
        self._norm, self._eps = body.norm.weight.detach().float(), body.norm.variance_epsilon
        self._head = Product(made, [model.lm_head.weight], [model.lm_head.bias], self._pages)
        self._hidden = self._head.inputs
        self._shape = _Shape(
            model.dtype.itemsize,
            self._hidden,
            heads,
            kv_heads,
            first.head_dim,
            layers[0].mlp.gate_proj.out_features,
            rotation.shape[-1],
            *(part.data_ptr() for part in rotation),
        )
        weights = [p.detach() for p in model.parameters()]
        self._kept += weights
        self._watched = (
            (c_void_p * len(weights))(*(w.data_ptr() for w in weights)),
            (c_int64 * len(weights))(*(w.nbytes for w in weights)),
            c_int64(len(weights)),
        )
        self._samples = [self._made.sampled(*self._watched, phase) for phase in range(LOOKS)]
        self._looks = 0

    def __reduce__(self) -> Any:
        return NativeLlama, self._made_of

    def _layer(self, layer: Any) -> Any:
        attention, mlp = layer.self_attn, layer.mlp
        joined = (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
        products = [
            Product(self._made, [x.weight for x in p], [x.bias for x in p], self._pages)
            for p in joined
        ]
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        vectors = [None if norm is None else norm.weight.detach().float() for norm in norms]
        read = [product.packed for product in products] + [x.bias for x in products] + vectors
        self._kept += read
        return _Layer(
            *map(_address, read), *(getattr(norm, "variance_epsilon", 0.0) for norm in norms)
        )

    def written(self) -> bool:
        """Whether weights were written since they were packed. Some of their numbers tell, others
        at each of `LOOKS` calls: the system may have taken back their memory, so that each is
        slow."""
        phase = self._looks = (self._looks + 1) % LOOKS
        return bool(self._made.sampled(*self._watched, phase) != self._samples[phase])

    def over(
        self, x: Tensor, calls: Sequence[tuple[Rows, BufferCache]]
    ) -> Callable[[int, int], None]:
        """Count the rows of each call as cached, and return what runs the layers from a first one
        up to another: it writes the rows into the caches. x: [all rows, H] float32, what the first
        of the layers reads; it becomes what the last one gives."""
        parts, places = list[Any](), list[Any]()
        positions, masks = list[Tensor](), list[Tensor]()  # read through pointers
        first = 0
        for rows, cache in calls:
            batch, n = rows.tokens.shape
            start, held = self._reserved(cache, batch, n)
            places += zip(*held, strict=True)
            mask = None if rows.chain else rows.mask
            seen = None if mask is None else (mask[:, 0] == 0).contiguous()
            whole = rows.positions.shape[1] == n and (
                seen is None or (seen.shape[1:] == (n, start + n) and len(seen) in (1, batch))
            )
            if not whole or len(rows.positions) not in (1, batch):
                raise RuntimeError("positions and mask are of other rows than the states")
            positions.append(rows.positions.long().expand(batch, n).reshape(-1))
            masks += [] if seen is None else [seen]
            for row in range(batch):
                own = None if seen is None else seen[row % len(seen)].data_ptr()
                parts.append((first, n, start, own))
                first += n
        at = torch.cat(positions)
        if len(at) != len(x):
            raise RuntimeError("positions and mask are of other rows than the states")
        if len(at) and not 0 <= at.amin() <= at.amax() < self._positions:
            raise IndexError(f"positions lie outside of 0 to {self._positions - 1}")
        listed = (_Part * len(parts))(*parts)
        buffers = np.array([*zip(*places, strict=True)], np.int64)  # [layers, parts, 3], as in C
        pointers = ctypes.addressof(listed), at.data_ptr(), x.data_ptr()
        call = _Rows(len(parts), len(x), threads_here(), *pointers)
        read = x, calls, listed, at, masks, buffers  # as long as the function

        def run(first: int, stop: int) -> None:
            layer = ctypes.byref(self._layers, first * ctypes.sizeof(_Layer))
            held = c_void_p(read[-1][first:].ctypes.data)
            shape, rows = ctypes.byref(self._shape), ctypes.byref(call)
            self._made.run(shape, layer, held, rows, c_int64(stop - first))

        return run

    def _reserved(self, cache: BufferCache, batch: int, n: int) -> tuple[int, list[Any]]:
        """Count n rows as cached. Return how many were before, and by layer where those of each
        sequence lie."""
        kv_heads, dim, dtype = self._cache_shape
        cache.layer(len(self._layers) - 1)
        start, places = 0, list[Any]()
        for layer in cache.layers[: len(self._layers)]:
            if not layer.is_initialized:
                like = torch.empty((), dtype=dtype).expand(batch, kv_heads, n, dim)
                layer.lazy_initialization(like, like)
            start = layer.reserve(n)
            kind, held = layer.held()
            if kind != (dtype, batch, kv_heads):
                raise RuntimeError("the cache holds keys of another dtype or number of sequences")
            places.append(held)
        return start, places

    def normed(self, x: Tensor) -> Tensor:
        """What the output layer reads, of what the last layer gives, [..., H] float32."""
        x, y = x.contiguous(), torch.empty(x.shape)
        sizes = c_int64(x.numel() // self._hidden), c_int64(self._hidden)
        eps = c_float(self._eps)
        self._made.norm(*sizes, _address(self._norm), eps, _address(x), _address(y))
        return y

    def head(self, normed: Tensor) -> Tensor:
        """[..., H] -> logits [..., V] float32."""
        return self._head(normed)
