"""Command line programs: they compose and check settings, and print errors in one line."""

import runtime.openmp  # noqa: F401  (before torch loads)

import importlib
import importlib.util
import inspect
import logging
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runtime.errors import UserError, shown
from runtime.files import ROOT, remedy
from runtime.job import COMMAND, as_called, called
from runtime.processes import launched
from runtime.settings.composed import asked, check, composed, jobs, runs, table
from runtime.settings.kinds import Group, alternatives
from runtime.text import printable

BAD_INPUT = 2
INTERRUPTED = 130
UNREAD = 141  # a shell's exit code for a program that SIGPIPE ended
NO_RUN_FOLDER = ("hydra.run.dir=.", "hydra.output_subdir=null")
SILENT = (*NO_RUN_FOLDER, "hydra/job_logging=none", "hydra/hydra_logging=none")
_FOREIGN_GROUP = re.compile(r"Could not override '([^'@]+)'\. No match in the defaults list")
FOLDERS = ("", "scripts", "pairs", "papers")  # of programs; an installation has no papers
GROUPS = ("warp", "features", "stop", "structure", "cost")
_UNKNOWN_KEY = "There is no such key: --cfg job lists them, and what appends is"


def program(
    script: str, settings: type[Group], *, several: bool = False
) -> Callable[[Callable[[Any], Any]], "Program"]:
    """Make a command line program of the function that it decorates, which is given an object of
    the class `settings`.

    Parameters
    ----------
    script
        File of the program, named like its config; the ``conf`` folder is looked for beside it and
        in the folders above it.
    settings
        Class of its settings.
    several
        Whether it may be one of several processes of `accelerate launch`, of which only the first
        prints and keeps a run folder.
    """
    return lambda main: Program(script, settings, main, several)


class Program:
    """A command line program: the settings that `conf/<name>.yaml` composes, checked, then given to
    the function `main`.

    Bad input (`UserError`, a setting that is unknown, missing or out of range, a full disk, a
    folder without access) ends with one line on stderr and exit code 2, Ctrl-C with exit code 130,
    output that nobody reads any more (``| head``) silently with exit code 141; anything else is a
    bug and keeps its traceback. Settings are checked before Hydra makes a run folder (of a
    single run only where ``hydra.run.dir`` names one) and before `main` imports a model library,
    those of every job of a sweep before the first begins. The working directory stays where the
    user is. A sweep (``-m``) goes on after a job that failed, and ends with its exit code."""

    def __init__(
        self,
        script: str,
        settings: type[Group],
        main: Callable[[Any], Any],
        several: bool = False,
        what: str = "",
    ) -> None:
        self.script, self.settings, self.main = Path(script).resolve(), settings, main
        self.several, self.what = several, what
        self.modes = dict[str, Program]()
        self.called = ""  # how its commands begin, where that is not python <its file>
        self.config = f"{self.script.stem}_{what}" if what else self.script.stem

    def mode(self, what: str, settings: type[Group]) -> Callable[[Callable[[Any], Any]], "Program"]:
        """Make the decorated function the program's mode ``what=<what>``, with the settings of
        ``conf/<program>_<what>.yaml``."""

        def add(main: Callable[[Any], Any]) -> Program:
            self.modes[what] = Program(str(self.script), settings, main, self.several, what)
            return self.modes[what]

        return add

    @property
    def programs(self) -> "list[Program]":
        """The program itself and its modes."""
        return [self, *self.modes.values()]

    def asked(self) -> "Program":
        """Return the mode that the command line names, else the program itself."""
        named = [one.removeprefix("what=") for one in sys.argv[1:] if one.startswith("what=")]
        return self.modes.get(named[-1], self) if named else self

    def __call__(self) -> None:
        """Run with the arguments of the command line."""
        asked = self.asked()
        asked.called = self.called

        def run() -> None:
            self.refuse_settings_of_another_mode(asked)
            asked.run()

        run_reporting_errors(run)

    def refuse_settings_of_another_mode(self, asked: "Program") -> None:
        """Raise UserError for a setting on the command line that only other modes have."""
        keys = [word.partition("=")[0].lstrip("+~").split(".")[0] for word in sys.argv[1:]]
        for key in keys:
            having = [mode for mode in self.programs if key in mode.settings.described()]
            if having and asked not in having:
                kinds = [mode.settings.described()["what"].annotation for mode in having]
                modes = [get_args(alternatives(kind)[0])[0] for kind in kinds]
                raise UserError(
                    f"{key}: expected a setting of this mode, got one of what={' or '.join(modes)}."
                    f" Leave {key}=... away, or say what={modes[0]}"
                )

    def run(self) -> None:
        share_the_terminal(self.several)
        conf, name = _conf_folder(self.script), self.config
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(self.help(conf))
            return
        arguments = asked(sys.argv[1:])
        if not (arguments.multirun or any(one.startswith("hydra.run.dir=") for one in sys.argv)):
            first = arguments.overrides[:1]  # Hydra takes settings that stand in one place
            at = sys.argv.index(first[0], 1) if first else len(sys.argv)
            sys.argv[at:at] = [*NO_RUN_FOLDER, "hydra/job_logging=stdout"]
        if runs(arguments):
            for overrides in jobs(conf, arguments):
                check(
                    self.settings,
                    partial(composed, conf, name, more=arguments.config_dir),
                    overrides,
                )
        job = Job(self)
        try:
            hydra.main(version_base="1.3", config_path=str(conf), config_name=name)(job)()
        except OSError as error:
            if job.begun or remedy(error):
                raise
            where = "hydra.sweep.dir" if arguments.multirun else "hydra.run.dir"
            raise UserError(
                f"{where}: {error.filename} cannot be made ({error.strerror}). Give another folder"
            ) from error

    def help(self, conf: Path) -> str:
        """Return the script's docstring and a table of all settings."""
        arguments = asked([one for one in sys.argv[1:] if one not in ("-h", "--help")])
        doc = inspect.getdoc(sys.modules[self.main.__module__]) or ""
        settings = composed(conf, self.config, arguments.overrides, more=arguments.config_dir)
        return f"{as_called(doc)}\n\n{table(self.settings, settings, conf)}"


class Job:
    """The function that Hydra calls with a program's settings, in this process or in a worker of a
    launcher, which loads the script's file."""

    def __init__(self, program: Program) -> None:
        self.program, self.begun = program, False
        self.__module__, self.__name__ = program.script.stem, "main"

    def __call__(self, cfg: DictConfig) -> None:
        self.begun = True
        reporting = (
            run_in_sweep if HydraConfig.get().mode == RunMode.MULTIRUN else run_reporting_errors
        )
        script = self.program.script
        file = script.relative_to(_conf_folder(script).parent)
        with called(self.program.called or f"python {file}"):
            reporting(lambda: self.program.main(self.program.settings.of(cfg)))

    def __reduce__(self) -> tuple[Callable[[str, str, str], "Job"], tuple[str, str, str]]:
        return job_of, (str(self.program.script), self.program.what, self.program.called)


def job_of(script: str, what: str, called: str) -> Job:
    """Return the job of the program in the file `script`, or of its mode `what` if that is not "".
    called: how its commands begin, "" for python and the file."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program: Program = module.main.modes[what] if what else module.main
    program.called = called
    return Job(program)


def modules() -> dict[str, str]:
    """Return the module of every program by its name: train, scripts.tune, pairs.build_pair."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).glob("*.py"))]
    return {
        file.stem: ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if (ROOT / "conf" / f"{file.stem}.yaml").is_file()
    }


def command() -> None:
    """Run ``draftpredict <program> key=value``, which is ``python scripts/<program>.py key=value``
    from any folder."""
    programs = modules()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in programs:
        _exit(
            f"expected a program, got {shown(name)}. Write draftpredict <program> key=value with"
            f" one of {', '.join(sorted(programs))}; draftpredict <program> --help says more",
            BAD_INPUT,
        )
    del sys.argv[1]
    main: Program = importlib.import_module(programs[name]).main
    main.called = f"{COMMAND} {name}"
    main()


def run_reporting_errors(program: Callable[[], Any]) -> None:
    """Run `program`; exit with one line on stderr where the user, not the code, is at fault."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing a page, exiting with 1
    with any_terminal():
        try:
            program()
        except KeyboardInterrupt:
            again = "Run the same command again: jobs that save as they go continue"
            _exit(f"interrupted. {again}", INTERRUPTED)
        except Exception as error:
            message = explain(error)
            if message is None:
                raise
            _exit(message, BAD_INPUT)


def run_in_sweep(program: Callable[[], Any]) -> None:
    """Run one job of a sweep. A failure is printed at once and raised, in a form that survives the
    way back from a worker; Hydra raises it again when all jobs have had their turn."""
    try:
        with any_terminal():
            program()
    except Exception as error:
        message = explain(error)
        if message is None:
            traceback.print_exc()
        name = _one_line(" ".join(HydraConfig.get().overrides.task))
        print(f"failed: {name}: {message or type(error).__name__}", file=sys.stderr)
        if message is None:
            raise
        raise UserError(message) from error


@contextmanager
def any_terminal() -> Iterator[None]:
    """Print characters that the terminal's encoding lacks as escapes; exit silently when the reader
    of a pipe has gone."""
    logging.raiseExceptions = False  # a line of a log that could not be written is no fault
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # flushes the buffer
        yield
        if sys.stdout is not None:  # closed before Python began
            sys.stdout.flush()
    except BrokenPipeError:
        unread = [stream.fileno() for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:  # another pipe or a socket
            raise
        for number in unread:  # Python still writes to it when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        sys.exit(UNREAD)


def _is_unread(stream: Any) -> bool:
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):  # not a file
        return False
    poll = select.poll()
    poll.register(number, 0)
    return bool(poll.poll(0))


def share_the_terminal(several: bool) -> None:
    """Silence all processes but the first, except for errors, and let only the first write a run
    folder.

    Raises UserError if there are several and the program does not allow it.
    """
    process = launched()
    if process.size > 1 and not several:
        raise UserError(
            "WORLD_SIZE: this program starts its own processes, if any (gen_data.py: workers=ray"
            " workers.count=8). Run it without accelerate launch, or unset WORLD_SIZE"
        )
    if process.size > 1 and {"-m", "--multirun"} & set(sys.argv):
        raise UserError(
            "-m: a sweep runs its jobs in one process each. Run it without accelerate launch"
        )
    if process.rank > 0:
        sys.argv += SILENT
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


def explain(error: Exception) -> str | None:
    """Return one line for the user, or None when `error` is a bug that deserves its traceback."""
    place = ""  # config key of the part that could not be made
    for cause in _causes(error):
        if isinstance(cause, InstantiationException):
            place = str(cause).partition("full_key: ")[2]
        if isinstance(cause, OverrideParseException):
            key = _one_line(cause.override.partition("=")[0])  # the value may be a secret
            told = "expected a value that Hydra can read, got something else"
            return f"{key}: {told}. Write '{key}=\"...\"'"
        if isinstance(cause, UserError):
            return as_set(_one_line(str(cause)), place)
        if told := remedy(cause):
            where = isinstance(cause, OSError) and cause.filename
            return (
                f"{_one_line(str(cause))}{'' if where else ': a file could not be written'}. {told}"
            )
    if unmade := unmade_part(error, place):
        return unmade
    if isinstance(error, HydraException | OmegaConfBaseException | YAMLError):
        message = next((str(cause) for cause in _causes(error) if str(cause)), type(error).__name__)
        if group := _FOREIGN_GROUP.match(message):
            return (
                f"{group[1]}: expected a setting of this program, got another one's. Leave"
                f" {group[1]}=... away; --help lists what there is"
            )
        return _one_line(
            message.split("Config search path:")[0].replace(
                "To append to your config use", _UNKNOWN_KEY
            )
        )
    return None


def unmade_part(error: BaseException, place: str) -> str | None:
    """Return what went wrong in the class at `place` of the config, and in which line of its file
    (it may be a plug-in under development); None if `error` is of another kind."""
    if not isinstance(error, InstantiationException) or error.__cause__ is None:
        return None
    *_, reason = _causes(error)
    *_, last = traceback.extract_tb(reason.__traceback__) or [None]
    own = last and not last.filename.startswith(("<", str(Path(hydra.__file__).parent)))
    where = f" ({last.filename} line {last.lineno})" if last and own else ""
    target = str(error).partition("'")[2].partition("'")[0]
    return _one_line(
        f"{place or 'config'}: expected _target_ to make something, got {type(reason).__name__} of"
        f" {target}: {reason}{where}. Mend it, or check the name and the settings"
    )


def as_set(message: str, place: str) -> str:
    """Return `message` with the key as the user sets it.

    A class names its settings after its group (``warp.top_k``), but may be made elsewhere in the
    config: at "draft_warp", or at "method.specdecpp.engine.stop". Parts of an engine are set beside
    it, those of the custom method at the top."""
    group, setting = message.split(": ")[0].partition(".")[::2]
    if not (place and setting and group in GROUPS):
        return message
    parts = [part for part in place.removeprefix("method.custom.").split(".") if part != "engine"]
    if place.endswith("engine"):  # its message names a part
        parts.append(group)
    return message.replace(f"{group}.{setting}", ".".join([*parts, setting]))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _exit(message: str, code: int) -> None:
    rank = 0
    with suppress(UserError):  # this call may itself be the cause of the error
        rank = launched().rank
    where = f"error in process {rank}" if rank else "error"
    print(f"{where}: {as_called(message)}", file=sys.stderr)
    sys.exit(code)


def _conf_folder(script: Path) -> Path:
    for folder in script.parents:
        if (folder / "conf" / f"{script.stem}.yaml").is_file():
            return folder / "conf"
    raise UserError(
        f"conf/{script.stem}.yaml: not found above {script}. Install the toolkit whole:"
        " pip install ."
    )
