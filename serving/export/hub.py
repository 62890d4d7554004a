"""The Hugging Face hub: of predictors, where engines are of models."""

from dataclasses import dataclass
from typing import Annotated

from runtime.settings.kinds import Path, Text


@dataclass(frozen=True)
class Hub:
    """A folder as the hub shows it, made of a checkpoint."""

    checkpoint: Annotated[Path, "folder that train.py has made"]
    repository: Annotated[Text | None, "owner/name on the hub; null: only the folder is made"]
    private: Annotated[bool, "whether a repository that is made is private"]
