"""The table of an engine's logged confidences, in memory and in a folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import UserError
from runtime.files import file_hash, replaced_folder
from runtime.json_files import Form, Length, read_json, write_checksummed

MANIFEST, TENSORS = "confidences.json", "confidences.safetensors"
BLOCK = 64  # consecutive proposals grouped into one unit if the log names no requests
TENSOR_NAMES = ("logits", "labels", "length", "group", "domain")
Labels = Literal["realised", "expected"]
REMEDY = "Import it again: python scripts/import_confidence.py"


@dataclass(frozen=True)
class Confidences:
    """Proposals of gamma draft tokens at most.

    logits: [n, gamma] float64, log-odds z_i that token i is accepted if those before it are
    labels: [n, gamma] float64, of the prefix up to and including token i: 1 if all of it was
        accepted, 0 if not, or the probability that it is
    length: [n] valid tokens; values beyond them mean nothing
    group: [n] units that are independent of each other: requests, prompts, or blocks of proposals
    domain: [n] index into `domains`
    facts: their origin
    Made by `table`, which checks them."""

    logits: Tensor
    labels: Tensor
    length: Tensor
    group: Tensor
    domain: Tensor
    domains: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gamma(self) -> int:
        return self.logits.shape[1]

    def rows(self, kept: Tensor) -> "Confidences":
        """Return the proposals that the mask `kept`, [n] bool, selects."""
        return replace(self, **{name: getattr(self, name)[kept] for name in TENSOR_NAMES})

    def counts(self, position: int) -> Tensor:
        """Return which proposals have a valid token at `position` (from 0), [n] bool."""
        return self.length > position

    def before(self) -> Tensor:
        """Return the label of the prefix before each token, [n, gamma]."""
        return torch.cat([torch.ones_like(self.labels[:, :1]), self.labels[:, :-1]], 1)


def table(
    where: str, domain: str, logits: Tensor, labels: Tensor, length: Tensor, group: Tensor
) -> Confidences:
    """Return `Confidences` of one domain. Raises UserError, which begins with `where`, for shapes
    that differ, NaN, and labels that cannot be those of prefixes."""
    if logits.ndim != 2 or logits.shape != labels.shape or not logits.numel():
        shapes = f"{list(logits.shape)} and {list(labels.shape)}"
        _refuse(where, "logits and labels of the same shape [proposals, gamma]", shapes)
    logits, labels = logits.double(), labels.double()
    inside = torch.arange(logits.shape[1]) < length[:, None]
    logits, labels = (values.where(inside, torch.zeros(())) for values in (logits, labels))
    if not torch.isfinite(logits.float()).all():
        _refuse(where, "finite logits", "NaN or infinity")
    if not ((labels >= 0) & (labels <= 1)).all():
        _refuse(where, "labels between 0 and 1", "others")
    if (labels[:, 1:] > labels[:, :-1] + 1e-6)[inside[:, 1:]].any():
        _refuse(where, "labels of prefixes, which never rise along a draft", "one that rises")
    return Confidences(logits, labels, length, group, torch.zeros_like(length), (domain,))


def _refuse(where: str, expected: str, got: str) -> NoReturn:
    raise UserError(f"{where}: expected {expected}, got {got}. Give a log of confidences")


def blocks(count: int) -> Tensor:
    """Return groups [count] for proposals in the order they were logged, for a log that names no
    requests."""
    return torch.arange(count) // BLOCK


def joined(parts: list[Confidences], where: str, gamma: int | None = None) -> Confidences:
    """Join tables; their groups stay apart. gamma: the gamma that all must have; None: any common
    one."""
    gamma = gamma or parts[0].gamma
    for part in parts:
        if part.gamma != gamma:
            raise UserError(
                f"{where}: expected proposals of {gamma} tokens, got {part.gamma}. Give logs of"
                " one gamma"
            )
    names = sorted({name for part in parts for name in part.domains})
    first, groups, domains = 0, list[Tensor](), list[Tensor]()
    for part in parts:
        groups.append(part.group + first)
        first += int(part.group.max()) + 1
        domains.append(torch.tensor([names.index(name) for name in part.domains])[part.domain])
    logits, labels, length = (
        torch.cat([getattr(part, name) for part in parts]) for name in TENSOR_NAMES[:3]
    )
    return Confidences(
        logits, labels, length, torch.cat(groups), torch.cat(domains), tuple(names), parts[0].facts
    )


# In a folder --------------------------------------------------------------------------------------


class Manifest(Form):
    version: ClassVar[tuple[str, int] | None] = ("schema_version", 1)
    schema_version: int
    gamma: Length
    proposals: Length
    groups: Length
    domains: list[str]
    labels: Labels
    facts: dict[str, Any]
    sha256: str
    command: str
    checksum: str


def is_imported(folder: str | Path) -> bool:
    return (Path(folder) / MANIFEST).exists()


def write_confidences(folder: Path, rows: Confidences, labels: Labels, command: str) -> None:
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor.int()
        for name in TENSOR_NAMES
        for tensor in (getattr(rows, name),)
    }
    with replaced_folder(folder, MANIFEST) as fresh:
        save_file(tensors, fresh / TENSORS)
        facts = {
            "schema_version": 1,
            "gamma": rows.gamma,
            "proposals": len(rows.logits),
            "groups": len(rows.group.unique()),
            "domains": list(rows.domains),
            "labels": labels,
            "facts": dict(rows.facts),
            "sha256": file_hash(fresh / TENSORS),
            "command": command,
        }
        write_checksummed(fresh / MANIFEST, facts)


def read_confidences(folder: str | Path, key: str = "data") -> Confidences:
    """Read what `write_confidences` wrote. Raises UserError naming `key` if it is missing or
    damaged."""
    folder = Path(folder)
    facts = read_json(folder / MANIFEST, Manifest, key, REMEDY)
    path = folder / TENSORS
    try:
        if file_hash(path) != facts.sha256:
            raise UserError(f"{key}: {path} is damaged (its checksum does not fit). {REMEDY}")
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{key}: {path} cannot be read ({error}). {REMEDY}") from error
    return Confidences(
        **{
            name: tensor.double() if tensor.is_floating_point() else tensor.long()
            for name, tensor in tensors.items()
        },
        domains=tuple(facts.domains),
        facts={**facts.facts, "labels": facts.labels, "command": facts.command},
    )
