"""The same of all prompts together and of each dataset."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")
ALL = "all"  # what tables and figures call all datasets together


def shown_as(dataset: str) -> str:
    """What tables and figures call a dataset: its name, in quotation marks where it could be taken
    for all datasets. No two datasets are called the same."""
    return f'"{dataset}"' if dataset.strip('"') == ALL else dataset


@dataclass(frozen=True)
class ByDataset(Generic[T]):
    """pooled: of all prompts; datasets: of each dataset by its name, where there are several. They
    are apart, for a dataset may be called anything."""

    pooled: T
    datasets: dict[str, T]

    @classmethod
    def of(cls, names: Iterable[str], part: Callable[[str | None], T]) -> "ByDataset[T]":
        """part: of a dataset, or of all (None)."""
        found = sorted(set(names))
        return cls(part(None), {name: part(name) for name in found} if len(found) > 1 else {})

    def each(self, what: Callable[[T], U]) -> "ByDataset[U]":
        datasets = {name: what(of) for name, of in self.datasets.items()}
        return ByDataset(what(self.pooled), datasets)

    def shown(self) -> Iterator[tuple[str, T]]:
        """What tables and figures call each, and it."""
        yield ALL, self.pooled
        for name, of in self.datasets.items():
            yield shown_as(name), of
