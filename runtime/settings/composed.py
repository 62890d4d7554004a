"""Settings composed from a command line before Hydra makes a run folder, and tables of all settings
for ``--help`` and for the site."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple, NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from runtime.errors import UserError, shown
from runtime.files import file_name, installed
from runtime.settings.check import Fault, Unknown, expected, faults, help_of, is_made, settings_of
from runtime.settings.kinds import Group, Setting, alternatives, each_of, group_among

OmegaConf.register_new_resolver("file_name", file_name, replace=True)  # both used by conf/
OmegaConf.register_new_resolver("installed", installed, replace=True)


def asked(arguments: Sequence[str]) -> Namespace:
    """Parse a command line as Hydra does. Raises UserError where Hydra would refuse it, and for
    options that read pickles."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    namespace: Namespace = parser.parse_args(arguments)
    modes = ("run", "multirun", "cfg", "info", "shell_completion")
    if sum(bool(getattr(namespace, mode)) for mode in modes) > 1:
        _refuse(f"only one of {', '.join(f'--{mode}' for mode in modes)} can be asked for")
    if namespace.resolve and not namespace.cfg:
        _refuse("--resolve belongs to --cfg")
    if namespace.experimental_rerun:
        _refuse("--experimental-rerun reads pickles, which may run any code")
    if namespace.shell_completion:
        _refuse("--shell-completion is not supported")
    return namespace


def _refuse(message: str) -> NoReturn:
    if "unrecognized" in message:  # the message may show a secret
        message = "expected settings in one place"
    raise UserError(
        f"command line: {message}. Write options such as -m before the settings; --help lists both"
    )


def runs(arguments: Namespace) -> bool:
    """Return whether a run is asked for, not only information about the config."""
    others = ("cfg", "info", "hydra_help", "help", "version", "shell_completion")
    return not any(getattr(arguments, name, None) for name in others)


def jobs(conf: Path, arguments: Namespace) -> list[list[str]]:
    """Return the overrides of every job; a sweep has several."""
    if not arguments.multirun:
        return [arguments.overrides]
    with initialize_config_dir(str(conf), version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(overrides=arguments.overrides)
    return [job for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]


class Composed(NamedTuple):
    """The settings of a program, without Hydra's own.

    choices: key -> config group, and which of its files was chosen"""

    cfg: DictConfig
    choices: Mapping[str, tuple[str, str]]

    def values(self, resolve: bool = True) -> dict[str, Any]:
        """Return plain mappings and lists; "???" where a value is missing."""
        container: Any = OmegaConf.to_container(self.cfg, resolve=resolve)
        return dict(container)


def composed(conf: Path, program: str, overrides: Sequence[str], *, more: str | None) -> Composed:
    """Compose the settings of `program`. more: a further folder of configs. Raises UserError for a
    choice that is no name."""
    for override in OverridesParser.create().parse_overrides(overrides=list(overrides)):
        group, named = override.key_or_group, isinstance(override.value(), str | list)
        if (not group or (conf / group).is_dir()) and not (named or override.is_delete()):
            raise UserError(
                f"{group or override.input_line}: expected a choice, got {shown(override.value())}."
                f" Choose one of {', '.join(options(conf, group)) or 'the settings'}"
            )
    searched = [f"hydra.searchpath=[file://{Path(more).resolve()}]"] if more else []
    with initialize_config_dir(str(conf), version_base="1.3"):
        cfg = compose(program, [*overrides, *searched], return_hydra_config=True)
    choices = {}
    for place, option in cfg.hydra.runtime.choices.items():
        group, _, key = place.partition("@")
        choices[key or group] = (group, str(option))
    with open_dict(cfg):
        del cfg["hydra"]
    return Composed(cfg, choices)


def options(conf: Path, group: str) -> list[str]:
    """Return the choices of a config group."""
    return sorted(path.stem for path in (conf / group).glob("*.yaml"))


def check(
    settings: type[Group], compose_with: Callable[[Sequence[str]], Composed], job: Sequence[str]
) -> None:
    """Compose the settings with the overrides of `job`. Raises UserError for values that are
    missing (``???``), else for the first fault."""
    config = compose_with(job)
    if missing := sorted(OmegaConf.missing_keys(config.cfg)):
        raise UserError(
            f"{', '.join(missing)}: no value given. Add {' '.join(key + '=...' for key in missing)}"
        )
    wrong = list(faults(settings, config.values()))
    if wrong:
        first = next((fault for fault in wrong if not _copied(config.cfg, fault.key)), wrong[0])
        remedy = first.remedy or _remedy(first, compose_with([]).values(resolve=False))
        raise UserError(str(first._replace(remedy=remedy)))


def _copied(cfg: Any, key: str) -> bool:
    """Return whether the value at `key` is interpolated from another, which is then at fault."""
    for name in key.split("."):
        if not OmegaConf.is_dict(cfg) or name not in cfg:
            return False
        if OmegaConf.is_interpolation(cfg, name):
            return True
        cfg = cfg[name]
    return False


def _remedy(fault: Fault, defaults: Any) -> str:
    value: Any = defaults
    for name in fault.key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    known = value is not None and not isinstance(value, Mapping) and "${" not in str(value)
    if value == [] and isinstance(fault.value, str) and fault.shows:
        return f"Write e.g. {fault.key}=[{fault.value}]" if fault.value else "--help says more"
    if not known or repr(value) == repr(fault.value):
        return "--help says more"
    return f"Write e.g. {fault.key}={written(value)}"


def written(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


WIDTH, COLUMN = 100, 34


class Row(NamedTuple):
    """A setting: its key, its composed value, the values that it takes, and what it is for."""

    key: str
    value: Any
    takes: str
    about: str


def rows(known: Mapping[str, Setting], values: Mapping[str, Any], key: str = "") -> Iterator[Row]:
    """Yield every setting, with those of the groups and parts in `values`."""
    for name, (kind, _) in known.items():
        if name not in values:
            continue
        value, inner, group = values[name], f"{key}{name}", group_among(alternatives(kind))
        if is_made(value):
            yield from rows(settings_of_part(value), value, f"{inner}.")
        elif group is not None and isinstance(value, Mapping):
            yield from rows(group.described(), value, f"{inner}.")
        else:
            named = isinstance(value, Mapping) and each_of(alternatives(kind)) is not None
            yield Row(inner, list(value) if named else value, expected(kind), help_of(kind))


def settings_of_part(value: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings of something made by its ``_target_``; empty where that is another
    library's."""
    try:
        return settings_of(str(value["_target_"]))
    except Unknown:
        return {}


def table(settings: type[Group], found: Composed, conf: Path) -> str:
    """Return the settings as text for the terminal."""
    known = settings.described()
    lines = ["Choices (files of conf/<group>; --cfg job prints what they compose):"]
    for name in known:
        if name in found.choices:
            group, option = found.choices[name]
            place = group if group == name else f"{group}@{name}"
            about = (help_of(known[name].annotation), ", ".join(options(conf, group)))
            lines += _entry(f"{place}={option}", ": ".join(filter(None, about)))
    lines += ["", "Settings, and what this command line gives them:"]
    for row in rows(known, found.values()):
        about = (row.about, row.takes)
        lines += _entry(f"{row.key}={written(row.value)}", "; ".join(filter(None, about)))
    return "\n".join(lines)


def _entry(left: str, right: str) -> Iterator[str]:
    lines = wrap(right, WIDTH - COLUMN - 4, break_on_hyphens=False, break_long_words=False) or [""]
    if len(left) > COLUMN:
        yield f"  {left}"
    else:
        yield f"  {left:{COLUMN}}  {lines.pop(0)}".rstrip()
    for line in lines:
        yield f"  {'':{COLUMN}}  {line}"


def page(programs: Mapping[str, tuple[type[Group], Composed]], conf: Path) -> str:
    """Return Markdown for the site: the settings of each program, then those of each choice of a
    group."""
    lines = list[str]()
    for name, (settings, config) in programs.items():
        lines += [f"## {name}", "", *_markdown(rows(settings.described(), config.values(False)))]
    for group in sorted(path for path in conf.iterdir() if path.is_dir()):
        lines += [f"## {group.name}=", ""]
        for file in sorted(group.glob("*.yaml")):
            lines += [f"### {group.name}={file.stem}", "", *_choice(file)]
    return "\n".join(lines) + "\n"


def _choice(file: Path) -> list[str]:
    """Return the description in a config group's file, and the settings of the part it makes."""
    text = file.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("# ") for line in text if line.startswith("# ")]
    command, *about = [line for line in comments if not line.startswith("@package")]
    values: Any = OmegaConf.to_container(OmegaConf.load(file))
    settings = _markdown(rows(settings_of_part(values), values)) if is_made(values) else []
    return [f"`{command}`", "", " ".join(about), "", *settings]


def _markdown(settings: Iterator[Row]) -> list[str]:
    lines = [
        f"| `{row.key}` | `{written(row.value)}` | {_cell(row.about)} | {_cell(row.takes)} |"
        for row in settings
    ]
    head = ["| setting | value | what for | takes |", "|---|---|---|---|"]
    return [*head, *lines, ""] if lines else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
