"""Whether a model's modules do what their classes' forwards do, and nothing besides.

Hooks, a patched `forward`, adapters and replaced modules change what a model computes. A forward
that reads the weights alone must not take their place, and they may come at any time."""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils.hooks import RemovableHandle

PATCHED = frozenset({"forward", "_call_impl", "_wrapped_call_impl"})  # of an instance
RECORDING = "transformers.utils."  # hooks of transformers, which only look


class Watch:
    """Base of forwards that read weights: notices that the model is no longer what the forward was
    made of. A copy notices for itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._state = list[Any]()
        self._hooks = -1

    def due(self, empty: bool) -> bool:
        """Whether to look: a text begins, or somebody has registered a hook since the last look.
        empty: whether nothing is cached."""
        return empty or RemovableHandle.next_id != self._hooks

    def look(self) -> tuple[bool, bool]:
        """Whether all modules are bare, and whether they and their weights are those of the last
        `note`."""
        self._hooks = RemovableHandle.next_id
        state = state_of(self._model)
        return state is not None, state == self._state

    def note(self) -> None:
        """Take what is there now as what the forward is made of."""
        self._state = state_of(self._model) or []


def bare(module: nn.Module) -> bool:
    """Whether a call of `module` is its class's forward: it has no hooks that could change
    anything, and none is patched."""
    if module._forward_hooks or module._forward_pre_hooks:
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(str(getattr(hook, "__module__", "")).startswith(RECORDING) for hook in hooks):
            return False
    return PATCHED.isdisjoint(vars(module))


def state_of(model: nn.Module) -> list[Any] | None:
    """What tells apart two states of a model: modules, their forwards, where weights lie and how
    often they were written, buffers, numbers. None: some module is not bare."""
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return None
    state, modules = list[Any](), [model]
    for module in modules:  # grows
        if not bare(module):
            return None
        state += (module, type(module).forward)
        state += [item for item in vars(module).items() if type(item[1]) in (int, float)]
        for weight in module._parameters.values():
            if weight is not None:
                state += (weight.data_ptr(), version_of(weight))
        buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
        state += [None if buffer.is_meta else buffer.tolist() for buffer in buffers]
        modules += [child for child in module._modules.values() if child is not None]
    return state


def version_of(weight: Tensor) -> int:
    """Counts writes into `weight`, but for those behind the back of autograd."""
    return 0 if weight.is_inference() else weight._version
