"""The wrapper around Weights & Biases, which is optional, asks nothing and needs no network."""

import hashlib
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from hydra.utils import instantiate
from pydantic import Field

from runtime.errors import UserError
from runtime.settings.kinds import Path, Text
from runtime.text import printable

LONGEST_TAG = 64


@contextmanager
def tracked(
    chosen: Any,
    job: str,
    config: Mapping[str, Any],
    about: Sequence[Mapping[str, Any]],
    tags: Sequence[str] = (),
) -> Iterator[Any]:
    """Begin a run of a logger and end it with the block, as failed where that fails.

    chosen: settings of the logger; job: kind of the run; config: all settings; about: `pair`,
    `warp` and `draft_warp` of all that it is about, whose runs are a group where they are one
    pair's with one pair of temperatures."""
    logger: Any = instantiate(chosen)
    groups = {_group(each) for each in about}
    try:
        logger.start(job, config, groups.pop() if len(groups) == 1 else "", tags)
        yield logger
    except BaseException:
        logger.finish(failed=True)
        raise
    logger.finish()


def _group(about: Mapping[str, Any]) -> str:
    temperatures = [f"{about[name]['temperature']:g}" for name in ("warp", "draft_warp")]
    return f"{about['pair']['name']} T={'/'.join(dict.fromkeys(temperatures))}"


class WandbLogger:
    """Logs to W&B: to the user's account when they are logged in and it answers, else to a folder
    `wandb sync` reads.

    `WANDB_MODE`, where set, decides. shows: whether anybody will see pictures."""

    shows = True

    def __init__(
        self,
        project: Annotated[Text, "of Weights & Biases"],
        folder: Annotated[Path, "where its files are kept"] = "outputs",
        timeout: Annotated[
            float, Field(gt=0, le=3600), "seconds to wait for the server before logging offline"
        ] = 15,
    ) -> None:
        self.project, self.folder, self.timeout = project, folder, timeout
        self.run: Any = None
        self._used = dict[str, str]()

    def start(
        self, job: str, config: Mapping[str, Any], group: str = "", tags: Sequence[str] = ()
    ) -> None:
        """Begin a run of kind `job` ("train", "evaluate") with its full configuration. group: of
        runs that may be compared."""
        import wandb

        settings = wandb.Settings(silent=True, init_timeout=self.timeout)
        wandb.setup(settings=settings)
        folder = pathlib.Path(self.folder).resolve()  # the process that writes may work elsewhere
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"logger.folder: {folder} cannot be written ({error.strerror}). Set another, or"
                " logger=none"
            ) from error
        arguments: dict[str, Any] = {
            "project": self.project,
            "job_type": job,
            "config": dict(config),
            "group": printable(group)[:128] or None,
            "tags": sorted({printable(tag)[:LONGEST_TAG] for tag in tags if tag}),
        }
        arguments |= {"dir": str(folder), "settings": settings}
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
        try:
            self.run = wandb.init(mode=mode, **arguments)
        except wandb.Error as error:
            print(f"W&B: no answer ({type(error).__name__}), logging offline")
            self.run = wandb.init(mode="offline", **arguments)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log values of one step (curves), or of the whole run if `step` is None (summary)."""
        if step is None:
            self.run.summary.update(_named(values))
        else:
            self.run.log(_named(values), step=step)

    def image(self, name: str, path: pathlib.Path, caption: str) -> None:
        """Log a PNG."""
        import wandb

        self.run.log({_short(printable(name)): wandb.Image(str(path), caption=caption)})

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table. rows: numbers, text and None, which may be mixed within a column."""
        import wandb

        rows = [list(row) for row in rows]
        table = wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)
        self.run.log({_short(printable(name)): table})

    def artifact(self, name: str, kind: str, path: pathlib.Path) -> None:
        """Keep a copy of a file or folder that the run has made, e.g. a checkpoint."""
        with _heard():
            self.run.log_artifact(_artifact(name, kind, path))

    def used(self, name: str, kind: str, path: pathlib.Path) -> None:
        """Say that the run has used a file or folder, which another one has made: the same content
        is the same version of an artifact. Its digest is in the run's configuration, too."""
        artifact = _artifact(name, kind, path)
        self._used[artifact.name] = artifact.digest
        self.run.config.update({"uses": self._used}, allow_val_change=True)
        if self.run.settings.mode not in ("offline", "dryrun"):
            with _heard():
                self.run.use_artifact(artifact)
        elif later := getattr(self.run, "_log_artifact", None):  # `use_artifact` refuses offline
            later(artifact, aliases=[], is_user_created=True, use_after_commit=True)

    def finish(self, failed: bool = False) -> None:
        if self.run is not None:
            self.run.finish(exit_code=int(failed))
            if self.run.settings.mode == "offline":
                folder = pathlib.Path(self.run.dir).parent
                print(f"W&B: offline run, to upload it: wandb sync {folder}")


class NullLogger:
    """Logs nothing (`logger=none`)."""

    shows = False

    def start(
        self, job: str, config: Mapping[str, Any], group: str = "", tags: Sequence[str] = ()
    ) -> None: ...

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None: ...

    def image(self, name: str, path: pathlib.Path, caption: str) -> None: ...

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def artifact(self, name: str, kind: str, path: pathlib.Path) -> None: ...

    def used(self, name: str, kind: str, path: pathlib.Path) -> None: ...

    def finish(self, failed: bool = False) -> None: ...


@contextmanager
def _heard() -> Iterator[None]:
    """Say what W&B refuses: no work is lost for it."""
    import wandb

    try:
        yield
    except wandb.Error as error:
        print(f"W&B: an artefact was not taken ({type(error).__name__})")


def _artifact(name: str, kind: str, path: pathlib.Path) -> Any:
    """Return a file or folder as an artifact; of a harvest its manifest, which names the hashes of
    all records."""
    import wandb

    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name) or "_"
    artifact = wandb.Artifact(_short(safe), type=kind)
    (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
    return artifact


def _short(name: str) -> str:
    """Return a name that W&B takes for an artefact and as a part of a file's name: a long one ends
    in a digest of the whole, so that no two become one."""
    if len(name) <= LONGEST_TAG:
        return name
    return f"{name[: LONGEST_TAG - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under names that can be shown in a terminal."""
    return {printable(name): value for name, value in values.items()}


def _logged_in() -> bool:
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except (wandb.Error, TypeError):  # TypeError: a release whose login() cannot be told not to ask
        return False
