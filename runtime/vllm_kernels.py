"""A kernel of vLLM's CPU build that leaves its result unwritten, replaced by vLLM's own registry of
kernels (a `worker_extension_cls`, so every process that computes imports this).

Without it, sampling with drafts divides the logits of drafted tokens by memory that nobody wrote
(vllm issue 55005, in 0.32.0 with every method): outputs are not the target's. Greedy ones are."""

import importlib.util
import sys

import torch
from torch import Tensor

from runtime.errors import UserError

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expanded(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: float,
    replace_to: float,
    most: int | None = None,
) -> None:
    """Write `values` [b] to `output` [n], each as often as `ends` [b], running sums, say.
    `replace_from` among them becomes `replace_to`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    kept = values.masked_fill(values == replace_from, replace_to)
    output.copy_(kept.repeat_interleave(counts))


def mend() -> None:
    """Replace the kernel on a CPU if it does not write its result. Raises UserError where this
    vLLM has it elsewhere."""
    if importlib.util.find_spec("vllm") is None:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        if not _right():
            from vllm.triton_utils.dispatcher import register_kernels

            register_kernels({KERNEL: expanded})
            print("note: vLLM's CPU build samples wrongly with drafts; mended", file=sys.stderr)
        if _right():
            return
    except (ImportError, TypeError):
        pass
    raise UserError(
        "vllm: whether its CPU build samples rightly with drafts cannot be checked or mended in"
        " this version (issue 55005). Take 0.32.0, which was"
    )


def _right() -> bool:
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    given, ends = torch.tensor([0.25, 0.75]), torch.tensor([3, 8], dtype=torch.int32)
    return bool(expand_batch_to_tokens(given, ends, 8).tolist() == [0.25] * 3 + [0.75] * 5)


mend()


class Extension:
    """What `worker_extension_cls` names: nothing but the import."""
