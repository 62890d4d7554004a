"""Trained predictors on the Hugging Face hub. A repository holds a checkpoint folder: safetensors,
JSON and a model card; nothing else is fetched or sent."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from predictors.base import CARD, FILES, Predictor, load_predictor, read_config, refuse_changed
from predictors.card import REPOSITORY
from runtime.errors import UserError
from runtime.private import Cleaner

HELD = [*FILES, CARD, "config.json"]
PLOT = "reliability.png"  # in the card that `serving=hub` writes; sent, never fetched
NO_HUB = (ValueError, LookupError, TypeError, AttributeError)  # where an answer is not a hub's
REFUSALS: tuple[type[Exception], ...] = (
    *NO_HUB,
    HFValidationError,
    LocalEntryNotFoundError,
    OSError,
    # The bases of its error are those of the HTTP library, raised where there is no answer at all.
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)


def from_pretrained(source: str | Path, key: str = "predictor") -> Predictor:
    """Load the predictor in a folder or a repository. Raises UserError as `local_folder` and
    `load_predictor`."""
    return load_predictor(local_folder(source, key), key=key)


def local_folder(source: str | Path, key: str = "predictor") -> Path:
    """Return `source` if it is a folder; else the repository of that id, fetched into the cache of
    huggingface_hub unless it is there.

    key: config key named in errors. Raises UserError if there is neither."""
    if not isinstance(source, str | Path) or not str(source).strip():
        raise UserError(f"{key}: expected a folder or owner/name on the hub, got {source!r}")
    folder = Path(source).expanduser()
    if folder.is_dir() or not REPOSITORY.fullmatch(str(source)):
        return folder
    try:
        return Path(snapshot_download(str(source), allow_patterns=HELD))
    except REFUSALS as error:
        raise UserError(
            f"{key}: no folder {source}, and no such repository could be fetched"
            f" ({said_by(error)}). Train one: python train.py, or check its name and `hf auth"
            " login`"
        ) from error


def push_to_hub(folder: str | Path, repository: str, *, private: bool = False) -> str:
    """Upload the checkpoint to the repository, which is created if need be; return its address.

    Raises UserError if the folder was changed or contains local paths or keys, and if the hub
    refuses."""
    refuse_no_repository(repository)
    checkpoint, api = Path(folder).expanduser(), HfApi()
    config = read_config(checkpoint, "folder")
    refuse_changed(checkpoint, config, "folder")
    refuse_private(checkpoint, config)
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=checkpoint,
            allow_patterns=[*HELD, PLOT],
            commit_message=f"A predictor: {config['predictor']}",
        )
    except REFUSALS as error:
        raise UserError(
            f"repository: {repository} was not written ({said_by(error)}). Check the name and"
            " `hf auth login`"
        ) from error
    return str(address)


def refuse_private(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError naming a file that holds local paths or keys."""
    metrics, card = json.loads((folder / "metrics.json").read_bytes()), folder / CARD
    clean = Cleaner(config, metrics)
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    for name, held in (("config.json", config), ("metrics.json", metrics), (CARD, text)):
        if clean.value(held) != held:
            raise UserError(
                f"folder: {folder / name} holds paths of this machine or keys, which are not sent."
                f" Send what this makes: python scripts/export.py serving=hub"
                f" serving.checkpoint={folder}"
            )


def refuse_no_repository(repository: str, key: str = "repository") -> None:
    """Raise UserError naming the config key if `repository` is not an id."""
    if not REPOSITORY.fullmatch(repository):
        raise UserError(
            f"{key}: expected owner/name, got {repository!r}. Write e.g. me/hrad-for-my-pair"
        )


def said_by(error: Exception) -> str:
    """Return why the hub refused, in one line."""
    if type(error).__module__ != HFValidationError.__module__ and isinstance(error, NO_HUB):
        return f"what answers there is no hub: {type(error).__name__}"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
