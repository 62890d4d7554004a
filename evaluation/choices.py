"""What is settled before methods are compared: tuned thresholds, and settings tried on calibration
prompts. Neither is chosen on the prompts that methods are judged on, and neither is written into
the config: a method gets a copy of its settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from omegaconf import DictConfig, OmegaConf

from decoding.models.machine import other_machine
from evaluation.methods import Method, configured, is_given
from evaluation.replay.decoding import REPLAYED
from evaluation.replay.thresholds import NO_ADVICE, checkpoint_hash, command_anew, rule_settings
from evaluation.replay.tuning import span
from evaluation.table import BASELINE

# Tuned thresholds ---------------------------------------------------------------------------------


def tuned_names(names: Sequence[str], found: Mapping[str, Any]) -> list[str]:
    """The methods that the file of thresholds `found` has tuned."""
    return [name for name in found["results"]["chosen"]["rules"] if name in names]


def tuned_methods(
    cfg: DictConfig, names: Sequence[str], found: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Method], list[str]]:
    """The methods of `names` that `found` (`thresholds.read`) settles, and a line about each it
    names.

    A method that no threshold makes worth its draft gets the settings of plain decoding, and says
    so. overrides: of the command line; what they set wins. A method built otherwise than it was
    tuned is left out."""
    chosen, methods = found["results"]["chosen"], dict[str, Method]()
    advice = f"whose advice is: {chosen['advice']}"
    lines = [f"thresholds: {cfg.thresholds}, for cost {found['cost']}, {advice}"]
    for name in tuned_names(names, found):
        rule = {**found["rules"][name], **chosen["rules"][name], "gamma": found["gamma"]}
        key = f"method.{name}.stop.{rule['setting']}"
        if why := _unfit(configured(cfg, name), rule, name):
            lines.append(f"{name}: {why}, thresholds left out")
        elif is_given(key, overrides):
            lines.append(f"{name}: {key}={OmegaConf.select(cfg, key)}, as given")
        else:
            methods[name] = _tuned(cfg, name, rule)
            lines.append(f"{name}: {methods[name].note}")
    return methods, lines


def _tuned(cfg: DictConfig, name: str, rule: Mapping[str, Any]) -> Method:
    """rule: what was tuned, and what was found."""
    key, value = f"stop.{rule['setting']}", rule["threshold"]
    chosen = f"{key}={value:.3g}"
    speed = f"{rule['speedup']:.3f}x ({span(rule['interval'])}) modelled"
    if not rule["speculate"]:
        note = f"{NO_ADVICE}, so plain decoding; tuned: the best, {chosen}, is {speed}"
        return Method(name, configured(cfg, BASELINE), note, speculates=False)
    whole = isinstance(OmegaConf.select(cfg, f"method.{name}.{key}"), int)
    settings = configured(cfg, name, {key: int(value) if whole else value})
    return Method(name, settings, f"{chosen}, tuned: {speed}")


def _unfit(settings: DictConfig, rule: Mapping[str, Any], name: str) -> str | None:
    """Why a method is not what was replayed: chains, verified token by token, and a rule of the
    same settings and checkpoint. None where it is."""
    parts = {part: settings.get(part, {}).get("_target_") for part in REPLAYED}
    if parts != REPLAYED or settings.structure.gamma_max < rule["gamma"]:
        return "built otherwise than it was tuned"
    if rule_settings(settings.stop, rule["setting"]) != rule["stop"]:
        return "built otherwise than it was tuned"
    folder = settings.stop.get("checkpoint")
    if folder and checkpoint_hash(folder, f"method.{name}.stop.checkpoint") != rule["checkpoint"]:
        return f"{folder} is not the checkpoint it was tuned with"
    return None


def cautions(methods: Mapping[str, Method], engines: Mapping[str, Any]) -> list[str]:
    """What the stop rules of methods that nothing was chosen for have to say about that."""
    said = {
        name: getattr(getattr(engine, "stop", None), "caution", "")
        for name, engine in engines.items()
        if not methods[name].note
    }
    return [f"warning: {name}: {caution}" for name, caution in said.items() if caution]


def tuned_elsewhere(
    cfg: DictConfig, found: Mapping[str, Any], overrides: Sequence[str], here: Mapping[str, Any]
) -> list[str]:
    """A warning where the thresholds were tuned for another machine than `here` (`setup_facts`)."""
    other = other_machine(found["measured_on"], here) if found["measured_on"] else None
    if other is None:
        return []
    anew = command_anew(found["command"], overrides)
    return [f"warning: {cfg.thresholds} was tuned on another machine: {other}. Tune anew: {anew}"]


# Settings that are tried --------------------------------------------------------------------------


def alternatives(cfg: DictConfig, name: str, overrides: Sequence[str]) -> dict[str, Method]:
    """The method with every combination of the settings that `cfg.tried` lists for it, by what is
    set; none where it lists nothing, or the command line has chosen."""
    lists = dict(_lists(cfg.tried.get(name, {})))
    if not lists or any(is_given(f"method.{name}.{key}", overrides) for key in lists):
        return {}
    found = {}
    for values in product(*lists.values()):
        changes = dict(zip(lists, values, strict=True))
        label = " ".join(f"{key}={value}" for key, value in changes.items())
        found[label] = Method(name, configured(cfg, name, changes))
    return found


def _lists(node: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of `node` by their dotted keys."""
    for part, inner in node.items():
        if OmegaConf.is_dict(inner):
            yield from _lists(inner, f"{before}{part}.")
        else:
            yield f"{before}{part}", inner


def chosen(tried: Mapping[str, Method], speeds: Mapping[str, float], where: str) -> Method:
    """The fastest. speeds: tokens/s of each, by the same names; where: on what they were tried."""
    best = max(tried, key=lambda label: speeds[label]) if len(tried) > 1 else next(iter(tried))
    note = f"{best}, the fastest of {len(tried)} {where}" if len(tried) > 1 else best
    return replace(tried[best], note=note)
