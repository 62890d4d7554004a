"""The job that this process does: the command it was called by and, in a sweep (``python train.py
-m ...``), its own folder, named after its overrides."""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from runtime.errors import UserError
from runtime.files import checked_folder, file_name

COMMAND = "draftpredict"  # of an installation (pyproject.toml)
ASIDE = ("out", "overwrite", "logger", "verbose")
"""Keys that do not change what a job makes."""

SHARED = ("pair", "dataset", "warp", "draft_warp", "splits")
"""Keys that a harvest, tuning and decoding have in common."""

_CALLED: list[str] = []  # the words of the command


@contextmanager
def called(program: str) -> Iterator[None]:
    """Record in this block that `program` runs, with the overrides that Hydra has given it."""
    _CALLED[:] = [*program.split(), *HydraConfig.get().overrides.task]
    try:
        yield
    finally:
        _CALLED.clear()


def command_line() -> str:
    """Return the command that repeats this job: ``python scripts/tune.py ...`` or ``draftpredict
    tune ...``; for a job of a sweep, without the others."""
    return shlex.join(_CALLED or ["python", *sys.argv])


def command_of(program: str, *settings: str) -> str:
    """Return the command of a program ("tune") for the pair, distributions and prompts of this job,
    and for the harvest and the methods of a job of the same program; what the job says wins over
    `settings`."""
    same = ("data", "methods", "batch") if program == Path(*_CALLED[1:2]).stem else ()
    words = {word.partition("=")[0]: word for word in [*settings, *shared_settings(*SHARED, *same)]}
    return shlex.join(["python", f"scripts/{program}.py", *words.values()])


def as_called(text: str) -> str:
    """Return `text` with its commands as this program is called: ``draftpredict tune`` in the place
    of ``python scripts/tune.py`` where that is how it began, from whatever folder."""
    if COMMAND not in (Path(sys.argv[0]).stem, *_CALLED[:1]):
        return text
    return re.sub(r"python (?:\w+/)?(\w+)\.py", rf"{COMMAND} \1", text)


def shared_settings(*keys: str, words: Sequence[str] | None = None) -> list[str]:
    """Return the words of a command line, by default this job's, that set what a harvest, tuning
    and decoding must have in common, or these `keys` alone."""
    every = _CALLED[2:] if words is None else words
    return [x for x in every if re.split(r"[.@=]", x.lstrip("+~"))[0] in (keys or SHARED)]


def is_job() -> bool:
    """Return whether this program is running as a job of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def result_folder(out: str | Path | None, name: str, marker: str) -> Path:
    """Return the folder that this job writes: `out`, or checkpoints/`name` if that is None; for a
    job of a sweep, a subfolder. marker: a file that every single run leaves in its folder."""
    default = f"checkpoints/{name}{'-sweep' if is_job() else ''}"
    folder = checked_folder("out", default if out is None else out)
    if not is_job():
        return folder
    if (folder / marker).exists():
        raise UserError(
            f"out: {folder} is the result of a single run. Choose another out=<folder> for a sweep"
        )
    return folder / job_name(HydraConfig.get().overrides.task)


def job_name(overrides: list[str]) -> str:
    """Return a job's name, ``predictor.depth=1+predictor.w_rej=3``: unique to its overrides,
    whatever their order."""
    keys = {override: re.split(r"[=.@]", override.lstrip("+~"))[0] for override in overrides}
    kept = sorted(override for override, key in keys.items() if key not in ASIDE)
    return file_name(*kept) or "defaults"


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package; "not installed" where it runs from a folder."""
    found = dict[str, str]()
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
