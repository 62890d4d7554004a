"""What a report shows, and in which order: every figure there is, each with what builds it from the
evidence."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from decoding.models.machine import in_words
from reports import harvest_figures
from reports.artifacts import Evaluation, Evidence
from reports.figure import Figure
from reports.figure_data import models
from reports.figures import blocks, lengths, masks, overview, rollback, speed, times, toy, trees

Builder = Callable[[], Figure]
Build = Callable[[Sequence[Evaluation]], Figure]
Alike = Sequence[tuple[str, Sequence[Evaluation]]]


class Entry(NamedTuple):
    """A figure of the report, or one for each of several things of a kind. title: what it is called
    where it is lacking."""

    section: str
    title: str
    builders: Sequence[Builder]


def figure_registry(evidence: Evidence) -> list[Entry]:
    """In the order of the page. Methods are compared with others of their setting alone
    (`setting`)."""
    found = (Entry(*entry) for entry in harvest_figures.entries(evidence))
    alike = by_setting(evidence.evaluations)
    return [*_overview(evidence.evaluations), *_lengths(alike), *found, *_papers(alike)]


def setting(evaluation: Evaluation) -> dict[str, str]:
    """What two evaluations have to share for one table to hold both: the pair, what it ran on, and
    the draft's distribution beside the target's. In words, by which `by_setting` tells them
    apart."""
    run, config = evaluation.results["run"], evaluation.config
    draft = (config.get("draft_warp") or config["warp"])["temperature"]
    return {
        "models": models(run["pair"]),
        "pair": run["pair"]["name"],
        "machine": (
            f"{in_words(run['hardware'])}, {in_words(run['dtypes'])}, threads: {run['threads']}"
        ),
        "draft": "" if draft == evaluation.temperature else f"draft at T = {draft:g}",
    }


def by_setting(evaluations: Sequence[Evaluation]) -> Alike:
    """Evaluations of each setting, with what tells it from the others; one empty group where there
    are none."""
    settings = [setting(evaluation) for evaluation in evaluations]
    differ = [
        key for key in ("pair", "machine", "draft") if len({each[key] for each in settings}) > 1
    ]
    found: dict[str, tuple[str, list[Evaluation]]] = {}
    for each, evaluation in zip(settings, evaluations, strict=True):
        told = "; ".join(each[key] for key in differ if each[key])
        key = " ".join([each["models"], each["machine"], each["draft"]])
        found.setdefault(key, (told, []))[1].append(evaluation)
    return list(found.values()) or [("", [])]


def _each(build: Build, alike: Alike) -> list[Builder]:
    return [partial(_told, build, told, evaluations) for told, evaluations in alike]


def _told(build: Build, told: str, evaluations: Sequence[Evaluation]) -> Figure:
    """With its setting in the title, where there are several."""
    figure = build(evaluations)
    return replace(figure, title=f"{figure.title} ({told})") if told else figure


def _overview(evaluations: Sequence[Evaluation]) -> list[Entry]:
    every = "All evaluations"
    figures: list[tuple[str, str, Build]] = [
        (every, "Speed-up", overview.speedups),
        (every, "Where the time goes", overview.time_shares),
    ]
    return [
        Entry(section, title, [partial(build, evaluations)]) for section, title, build in figures
    ]


def _lengths(alike: Alike) -> list[Entry]:
    accepted = "Accepted lengths"
    figures: list[tuple[str, str, Build]] = [
        (
            accepted,
            "Accepted length of a round, and the truncated geometric distribution",
            lengths.accepted_lengths,
        ),
        (accepted, "Acceptance fitted to accepted lengths", lengths.length_fits),
    ]
    return [Entry(section, title, _each(build, alike)) for section, title, build in figures]


def _papers(alike: Alike) -> list[Entry]:
    plus, branch = "SpecDec++", "SpecBranch"
    block, tree = "Block verification and parallel drafts", "Draft trees"
    figures: list[tuple[str, str, Build]] = [
        (plus, "SpecDec++ and what it is compared with", speed.specdecpp_speed),
        (plus, "SpecDec++ on other machines", speed.specdecpp_modelled),
        (plus, "Where a round's time goes: SpecDec++", times.specdecpp_times),
        (branch, "SpecBranch and what it is compared with", speed.specbranch_speed),
        (branch, "SpecBranch with a device for each model", speed.specbranch_modelled),
        (branch, "Rollback rate by method and dataset", rollback.rollback_rates),
        (branch, "Right and chosen draft length over rounds", lengths.optimal_lengths),
        (branch, "SpecBranch without its parts", rollback.ablation),
        (
            branch,
            "SpecBranch without its parts, a device for each model",
            rollback.ablation_modelled,
        ),
        (branch, "SpecBranch by threshold epsilon", rollback.epsilon),
        (
            branch,
            "SpecBranch by threshold epsilon, a device for each model",
            rollback.epsilon_modelled,
        ),
        (branch, "SpecBranch by number of branches", rollback.most_branches),
        (
            branch,
            "SpecBranch by number of branches, a device for each model",
            rollback.most_branches_modelled,
        ),
        (branch, "Where a round's time goes: SpecBranch", times.specbranch_times),
        (block, "Block against token-wise verification by draft length", blocks.block_gain),
        (block, "Several whole drafts, token by token or as a block", blocks.parallel_drafts),
        (tree, "Tokens per target call: DySpec, Sequoia, SpecInfer", trees.tree_table),
        (tree, "Tree size and accepted tokens over steps", trees.tree_growth),
        (tree, "RRS, RRSw and SpecHub on binary trees", trees.sibling_rules),
        (tree, "Where a round's time goes: trees", times.tree_times),
    ]
    return [
        *(Entry(section, title, _each(build, alike)) for section, title, build in figures),
        Entry(tree, "Acceptance of two candidates on toy distributions", [toy.toy_acceptance]),
        Entry(tree, "Attention mask of a tree before and after reordering", [masks.mask_order]),
    ]
