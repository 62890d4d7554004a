"""A pretend accelerator: tensors that say ``cuda:0`` or ``cuda:1`` and lie in host memory.

    with pretend() as counts:
        model.to("cuda:0")
        model(ids.to("cuda:0")).logits.argmax(-1).tolist()
    print(counts)

They refuse what CUDA refuses (host tensors or another device's in the same operation, `numpy`) and
count what CUDA would wait for: copies between host and device, `item`, `tolist`, shapes that depend
on values. Numbers are the host's, so results are equal bit for bit. What a kernel costs is not
known here; nothing is asynchronous."""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

HOST = torch.device("cpu")


@dataclass
class Counts:
    """synchronisations: how often the host waited for a device, by why; transfers, bytes: of
    copies, by direction (``to host``, ``to device``, ``between``)."""

    synchronisations: Counter[str] = field(default_factory=Counter)
    transfers: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def copied(self, direction: str, size: int, why: str) -> None:
        """A copy the host waits for, unless it is between devices."""
        self.transfers[direction] += 1
        self.bytes[direction] += size
        if direction != "between":
            self.synchronisations[why] += 1

    def since(self, earlier: "Counts") -> "Counts":
        """What was added."""
        parts = ("synchronisations", "transfers", "bytes")
        return Counts(*(getattr(self, part) - getattr(earlier, part) for part in parts))

    def copy(self) -> "Counts":
        return Counts(self.synchronisations.copy(), self.transfers.copy(), self.bytes.copy())


class Pretend(Tensor):
    """`held` on the host, said to be on a device. Only inside `pretend`."""

    held: Tensor
    counts: Counts | None = None  # of the `pretend` we are in
    kind = "cuda"

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Pretend":
        options: Any = {
            "strides": held.stride(),
            "storage_offset": held.storage_offset(),
            "dtype": held.dtype,
            "layout": held.layout,
            "device": device,
        }
        with torch.inference_mode(False):  # else views of ordinary tensors could not be made in it
            made: Pretend = torch.Tensor._make_wrapper_subclass(cls, held.shape, **options)
        made.held = held.detach()
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretend({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return dispatched(func, args, dict(kwargs or {}))


def counting() -> Counts:
    assert Pretend.counts is not None, "a pretend tensor outside of `pretend`"
    return Pretend.counts


def on_device(held: Tensor, device: Any) -> Pretend:
    return Pretend(held, torch.device(device))


def moved(tensor: Tensor, device: torch.device, why: str = "copy") -> Tensor:
    """`tensor` on `device`, a copy where it is elsewhere; counted."""
    device = indexed(device)
    if tensor.device == device:
        return tensor
    held = tensor.held if isinstance(tensor, Pretend) else tensor
    direction = "to host" if device == HOST else "to device"
    if isinstance(tensor, Pretend) and device != HOST:
        direction = "between"
    counting().copied(direction, held.nbytes, why)
    return held.clone() if device == HOST else on_device(held.clone(), device)


def indexed(device: torch.device) -> torch.device:
    whole = device.type == Pretend.kind and device.index is None
    return torch.device(device.type, 0) if whole else device


# Operations ---------------------------------------------------------------------------------------

WAITED_FOR = {
    *("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "one_hot"),
    *("masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
"""Operations whose value, or size of the result, the host needs before it can go on."""
NUMBER = 8  # bytes of it
PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"}
"""Not of integers."""
COPIES = {"copy_", "_to_copy", "to"}
WITH_HOST_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def dispatched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    if name in COPIES:
        return copied(func, name, args, kwargs)
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    device = common_device(func, name, tensors)
    if name in PRODUCTS and device != HOST and not tensors[0].is_floating_point():
        raise RuntimeError(f'"{name}_cuda" not implemented for {tensors[0].dtype}')
    if name in WAITED_FOR:
        counting().copied("to host", NUMBER, name)
    if name in WITH_HOST_INDICES:
        count_indices(tensors[1:])
    if "device" in kwargs and kwargs["device"] is not None:
        device, kwargs["device"] = indexed(torch.device(kwargs["device"])), HOST
    found = func(*held_of(args), **held_of(kwargs))
    return given_back(func, name, args, kwargs, found, device)


def held_of(values: Any) -> Any:
    return tree_map_only(Pretend, lambda each: each.held, values)


def given_back(func: Any, name: str, args: Any, kwargs: Any, found: Any, device: Any) -> Any:
    """The results of an operation as tensors of `device`; what was written in place is itself."""
    if func._schema.is_mutable and name.endswith("_") and not name.endswith("__"):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    if device == HOST:
        return found
    return tree_map_only(Tensor, lambda each: on_device(each, device), found)


def common_device(func: Any, name: str, tensors: list[Tensor]) -> torch.device:
    """Where all of them are. Raises RuntimeError, as CUDA does, where they are not on one device;
    scalars of the host go along with element-wise operations."""
    lenient = torch.Tag.pointwise in func.tags or name in ("masked_fill_", "masked_fill", "where")
    first = tensors[0].device if tensors else HOST
    counted = [
        tensor
        for number, tensor in enumerate(tensors)
        if not (tensor.device == HOST and tensor.ndim == 0 and lenient)
        and not (number and name in WITH_HOST_INDICES and first != HOST and tensor.device == HOST)
    ]
    devices = list(dict.fromkeys(tensor.device for tensor in counted))
    if len(devices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices,"
            f" {devices[0]} and {devices[1]}! ({func})"
        )
    return devices[0] if devices else HOST


def count_indices(indices: list[Tensor]) -> None:
    """Of the host they are copied; where they are masks the number of results has to be known."""
    for index in indices:
        if index.device == HOST:
            counting().copied("to device", index.nbytes, "indices of the host")
        if index.dtype in (torch.bool, torch.uint8):
            counting().synchronisations["mask as index"] += 1


def copied(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Between devices, or of another dtype."""
    if name == "copy_":
        into, source = args[0], args[1]
        there = moved(source, into.device)
        func(*held_of((into, there, *args[2:])), **kwargs)
        return into
    source = args[0]
    wanted = kwargs.pop("device", None)
    changed = func(*held_of(args), **kwargs)
    here = changed if source.device == HOST else on_device(changed, source.device)
    return here if wanted is None else moved(here, torch.device(wanted))


# What does not come to the operations -------------------------------------------------------------


def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    copy = kwargs.pop("copy", False)
    device, dtype = asked_for(args, kwargs)
    held = held_of(tensor)
    changed = held if dtype is None else held.to(dtype)
    if copy and changed is held:
        changed = held.clone()
    here = tensor if changed is held else changed
    if here is changed and tensor.device != HOST:
        here = on_device(changed, tensor.device)
    return here if device is None else moved(here, device)


def asked_for(args: Any, kwargs: Mapping[str, Any]) -> tuple[torch.device | None, Any]:
    """Device and dtype that `to` is given."""
    if args and isinstance(args[0], Tensor):
        return args[0].device, args[0].dtype
    return torch._C._nn._parse_to(*args, **kwargs)[:2]


def cuda(tensor: Tensor, device: Any = None, *_: Any, **__: Any) -> Tensor:
    number = device if isinstance(device, int) else 0
    return moved(tensor, torch.device(Pretend.kind, number) if device is None else device)


def tolist(tensor: Tensor) -> Any:
    """Allowed, and waited for."""
    return moved(tensor, HOST, "tolist").tolist()


def numpy(tensor: Tensor, *_: Any, **__: Any) -> Any:
    raise TypeError(
        f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the"
        " tensor to host memory first."
    )


def new_tensor(tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
    device = kwargs.pop("device", None) or tensor.device
    made = torch.tensor(data, **{"dtype": tensor.dtype, **kwargs})
    return moved(made, torch.device(device), "new_tensor")


def getitem(tensor: Tensor, index: Any) -> Tensor:
    check_index(tensor, index)
    found = held_of(tensor)[held_of(index)]
    return on_device(found, tensor.device) if isinstance(tensor, Pretend) else found


def setitem(tensor: Tensor, index: Any, value: Any) -> None:
    check_index(tensor, index)
    advanced = any(isinstance(part, Tensor | list) for part in parts_of(index))
    if isinstance(value, Tensor) and value.device != tensor.device and value.ndim:
        if advanced:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices,"
                f" {tensor.device} and {value.device}!"
            )
        value = moved(value, tensor.device)
    held_of(tensor)[held_of(index)] = held_of(value)


def parts_of(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def check_index(tensor: Tensor, index: Any) -> None:
    """Indices of the host are copied to the device; none of a device reach into the host."""
    for part in parts_of(index):
        if isinstance(part, list):
            part = torch.tensor(part)
        if not isinstance(part, Tensor):
            continue
        if part.device not in (tensor.device, HOST):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor"
                f" ({tensor.device})"
            )
        if tensor.device != HOST and part.ndim:
            count_indices([part])
        elif tensor.device != HOST:
            counting().synchronisations["index"] += part.device != HOST


def copy_(tensor: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
    held_of(tensor).copy_(held_of(moved(source, tensor.device)))
    return tensor


def number(kind: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    """`item` and what Python makes of it: waited for."""
    return lambda tensor: kind(moved(tensor, HOST, "item").item())


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose binding asks for a driver before its operation is dispatched."""

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if method.__name__ in WAITED_FOR:
            counting().copied("to host", NUMBER, method.__name__)
        held = held_of(tensor)
        found = method(held, *held_of(args), **held_of(kwargs))
        if found is held:
            return tensor
        return tree_map_only(Tensor, lambda each: on_device(each, tensor.device), found)

    return run


METHODS: dict[Any, Callable[..., Any]] = {
    Tensor.to: to,
    Tensor.cuda: cuda,
    Tensor.cpu: lambda tensor, *_, **__: moved(tensor, HOST),
    Tensor.copy_: copy_,
    Tensor.tolist: tolist,
    Tensor.item: number(lambda x: x),
    Tensor.__float__: number(float),
    Tensor.__int__: number(int),
    Tensor.__index__: number(operator.index),
    Tensor.__bool__: number(bool),
    Tensor.__format__: lambda tensor, spec: format(moved(tensor, HOST, "item").item(), spec),
    Tensor.contiguous: guarded(Tensor.contiguous),
    Tensor.nonzero: guarded(Tensor.nonzero),
    torch.nonzero: guarded(torch.nonzero),
    Tensor.type: guarded(Tensor.type),
    Tensor.__invert__: guarded(Tensor.__invert__),
    torch._has_compatible_shallow_copy_type: lambda *_: False,
    Tensor.numpy: numpy,
    Tensor.__array__: numpy,
    Tensor.new_tensor: new_tensor,
    torch.as_tensor: to,
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
}
DIFFERENTIABLE = (Tensor.__getitem__, Tensor.contiguous)
"""Of these, left to themselves where torch knows who drives the device: gradients flow through."""
FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)


class Functions(TorchFunctionMode):
    """Factories with a device, and methods that never come to `Pretend.__torch_dispatch__`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        own = func in METHODS and not (Pretend.kind != "cuda" and func in DIFFERENTIABLE)
        if own and concerns_device(func, args, kwargs):
            return METHODS[func](*args, **kwargs)
        device = kwargs.get("device")
        if device is None or torch.device(device).type != Pretend.kind:
            return func(*args, **kwargs)
        if (generator := kwargs.get("generator")) is not None and generator.device == HOST:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        made = func(*held_of(args), **{**held_of(kwargs), "device": HOST})
        if func in FROM_HOST:
            return moved(made, torch.device(device), func.__name__)
        return on_device(made, indexed(torch.device(device)))


def args_on_device(args: Any) -> bool:
    return any(isinstance(each, Pretend) for each in tree_flatten(args)[0])


def concerns_device(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor is on a device, or shall be."""
    if func is Tensor.to:
        others = {name: value for name, value in kwargs.items() if name != "copy"}
        device, _ = asked_for(args[1:], others)
        if device is not None and device.type == Pretend.kind:
            return True
    return func is Tensor.cuda or args_on_device((args, kwargs))


class Operations(TorchDispatchMode):
    """What an operation makes for itself on the way, such as a mask."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if args_on_device((args, kwargs)) or Pretend.kind in str((kwargs or {}).get("device")):
            return dispatched(func, args, dict(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Threads(ThreadPoolExecutor):
    """Modes are those of a thread."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def run() -> Any:
            with Functions(), Operations():
                return work(*args, **kwargs)

        return super().submit(run)


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def synchronize(self) -> None:
        counting().synchronisations["synchronize"] += 1

    def wait_stream(self, other: Any) -> None: ...


class Event:
    """Nothing is asynchronous here: whatever was recorded is done."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        counting().synchronisations["synchronize"] += 1

    def elapsed_time(self, end: "Event") -> float:
        return 0.0


@contextmanager
def pretend() -> Iterator[Counts]:
    """Inside, there are two devices. Not to be nested."""
    assert Pretend.counts is None, "already on a pretend device"
    Pretend.counts = counts = Counts()
    with ExitStack() as stack:
        stack.callback(setattr, Pretend, "counts", None)
        stack.enter_context(patch("torch.cuda.current_stream", Stream))
        stack.enter_context(patch("torch.cuda.Event", Event))
        stack.enter_context(patch("torch.cuda.Stream", Stream))
        stack.enter_context(patch("torch.cuda.stream", nullcontext))
        stack.enter_context(patch("decoding.engines.threads.ThreadPoolExecutor", Threads))
        stack.enter_context(patch("torch.cuda.synchronize", lambda _=None: Stream().synchronize()))
        stack.enter_context(Functions())
        stack.enter_context(Operations())
        yield counts
