"""The wrapper around Weights & Biases, which is optional, asks nothing and needs no network."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from runtime.settings.kinds import Path, Text
from runtime.text import printable


class WandbLogger:
    """Logs to W&B: to the user's account when they are logged in and it answers, else to a folder
    `wandb sync` reads.

    `WANDB_MODE`, where set, decides."""

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

    def start(self, job: str, config: Mapping[str, Any]) -> None:
        """Begin a run of kind `job` ("train", "evaluate") with its full configuration."""
        import wandb

        settings = wandb.Settings(silent=True, init_timeout=self.timeout)
        wandb.setup(settings=settings)
        folder = pathlib.Path(self.folder).resolve()  # the process that writes may work elsewhere
        folder.mkdir(parents=True, exist_ok=True)
        arguments: dict[str, Any] = {
            "project": self.project,
            "job_type": job,
            "config": dict(config),
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

        self.run.log({printable(name): wandb.Image(str(path), caption=caption)})

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table. rows: numbers, text and None, which may be mixed within a column."""
        import wandb

        rows = [list(row) for row in rows]
        table = wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)
        self.run.log({printable(name): table})

    def artifact(self, name: str, kind: str, folder: pathlib.Path) -> None:
        """Keep a copy of `folder` with the run, e.g. a checkpoint."""
        import wandb

        artifact = wandb.Artifact(name, type=kind)
        artifact.add_dir(str(folder))
        self.run.log_artifact(artifact)

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
            if self.run.settings.mode == "offline":
                folder = pathlib.Path(self.run.dir).parent
                print(f"W&B: offline run, to upload it: wandb sync {folder}")


class NullLogger:
    """Logs nothing (`logger=none`)."""

    def start(self, job: str, config: Mapping[str, Any]) -> None: ...

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None: ...

    def image(self, name: str, path: pathlib.Path, caption: str) -> None: ...

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def artifact(self, name: str, kind: str, folder: pathlib.Path) -> None: ...

    def finish(self) -> None: ...


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under names that can be shown in a terminal."""
    return {printable(name): value for name, value in values.items()}


def _logged_in() -> bool:
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except (wandb.Error, TypeError):  # TypeError: a release whose login() cannot be told not to ask
        return False
