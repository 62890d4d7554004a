"""Linear layers that multiply a few rows at little more than the price of one.

Verification runs the target on 2 to 20 rows at once. A CPU spends most of such a product on
rearranging the weights, and costs two to three times a single row: speculation would lose before it
starts. oneDNN can keep the weights arranged. From how many rows on that is faster depends on the
processor and the precision (`fewest_rows`): on AMD from one, on others from a few, in bfloat16
always. Measurements: papers/lab-notes.md."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from decoding.models.bare import bare, version_of

CPUINFO = Path("/proc/cpuinfo")  # of Linux


def fewest_rows(capability: str, about: str) -> int:
    """Rows of a float32 product from which on packed weights are faster. about: what `CPUINFO`
    says."""
    if "AuthenticAMD" in about:
        return 1
    return 4 if capability.startswith("AVX512") else 2


FEWEST_ROWS = fewest_rows(
    torch.backends.cpu.get_cpu_capability(),
    CPUINFO.read_text(errors="replace") if CPUINFO.is_file() else "",
)
FEW_ROWS = 128  # beyond, the ordinary product is as fast
ROWS = {torch.float32: range(FEWEST_ROWS, FEW_ROWS + 1), torch.bfloat16: range(1, 2 * FEW_ROWS + 1)}
PACKED_FOR = 16  # rows the arrangement of the weights is made for
SAMPLED = 8  # rows and columns of a weight that are compared with what was packed
MOST_BYTES = (
    4 << 30
)  # of weights; larger models are left alone, because packing keeps a second copy


class PackedLinear(nn.Linear):
    """An `nn.Linear` with the same parameters and a packed copy of its weight, for as many rows as
    `ROWS` says."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._pack()

    def _pack(self) -> None:
        weight = self.weight.detach()
        self.rows = ROWS[weight.dtype]
        self.packed: torch.Tensor | None = torch.ops.mkldnn._reorder_linear_weight(
            weight, PACKED_FOR
        )
        rows, columns = (size // SAMPLED + 1 for size in weight.shape)
        self._sample = weight[::rows, ::columns]  # a view
        self._state = weight.data_ptr(), version_of(self.weight), self._sample.clone()

    def refresh(self) -> None:
        """Pack the weight again where it is no longer the packed one, which is told by where it
        lies, how often it was written, and some of its numbers, for writes through `.data` count
        nowhere; give up where it cannot be packed."""
        if self.packed is None:
            return
        weight, (start, version, sample) = self.weight, self._state
        lies = weight.data_ptr() == start and version_of(weight) == version
        if lies and torch.equal(self._sample, sample):
            return
        if weight.device.type == "cpu" and weight.dtype in ROWS:
            self._pack()
        else:
            self.unpack()

    def unpack(self) -> None:
        """Give up the packed copy: someone else has one, or nobody will multiply a few rows."""
        self.packed = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        rows = x.numel() // self.in_features
        few = self.rows.start <= rows < self.rows.stop  # which torch.compile can read
        if self.packed is None or not few or torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return product


def refresh(linears: Iterable[object]) -> None:
    """Pack anew those whose weights are no longer what was packed."""
    for linear in linears:
        if isinstance(linear, PackedLinear):
            linear.refresh()


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of a float32 model on the CPU, or a bfloat16 one where the
    processor can multiply it.

    Any other model, quantised and huge ones, are left as they are, and layers with hooks or a
    patched forward."""
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and bare(module)
    }
    weights = [module.weight for module in linears.values()]
    packable = all(
        type(w) is nn.Parameter and w.device.type == "cpu" and _multiplies(w.dtype) for w in weights
    )
    if not packable or sum(w.nbytes for w in weights) > MOST_BYTES:
        return
    for name, linear in linears.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, PackedLinear(linear))


def fast_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16 (AVX-512 BF16, AMX). oneDNN
    multiplies it with AVX-512 alone, too, but widens every number first. False with a PyTorch that
    cannot tell."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return _multiplies(torch.bfloat16) and any(
        getattr(torch.cpu, check, bool)() for check in checks
    )


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype on this processor."""
    if not torch.backends.mkldnn.is_available() or dtype not in ROWS:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
