"""What a report shows, and in which order: every figure there is, each with what builds it from the evidence."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from data_gen import harvest_figures
from decoding.figures import blocks, lengths, masks, overview, rollback, speed, times, toy, trees
from decoding.figures.evidence import Evidence
from decoding.figures.figure import Figure

Builder = Callable[[], Figure]


class Entry(NamedTuple):
    """A figure of the report, or one for each of several things of a kind. title: what it is called where it is
    lacking."""

    section: str
    title: str
    builders: Sequence[Builder]


def contents(evidence: Evidence) -> list[Entry]:
    """In the order of the page."""
    evaluations = evidence.evaluations

    def decoded(section: str, title: str, build: Callable[..., Figure]) -> Entry:
        return Entry(section, title, [partial(build, evaluations)])

    every = "All evaluations"
    lengths_of, specdecpp, specbranch = "Accepted lengths", "SpecDec++", "SpecBranch"
    drafts, tree = "Block verification and parallel drafts", "Draft trees"
    return [
        decoded(every, "Speed-up", overview.speedups),
        decoded(every, "Where the time goes", overview.time_shares),
        decoded(lengths_of, "Accepted length of a round, and the truncated geometric law", lengths.accepted_lengths),
        decoded(lengths_of, "Acceptance fitted to accepted lengths", lengths.length_fits),
        decoded(specdecpp, "SpecDec++ and what it is compared with", speed.specdecpp_speed),
        decoded(specdecpp, "SpecDec++ on other machines", speed.specdecpp_modelled),
        decoded(specdecpp, "Where a round's time goes: SpecDec++", times.specdecpp_times),
        decoded(specbranch, "SpecBranch and what it is compared with", speed.specbranch_speed),
        decoded(specbranch, "SpecBranch with a device for each model", speed.specbranch_modelled),
        decoded(specbranch, "Rollback rate by method and dataset", rollback.rollback_rates),
        decoded(specbranch, "Right and chosen draft length over rounds", lengths.optimal_lengths),
        decoded(specbranch, "SpecBranch without its parts, measured", rollback.ablation),
        decoded(specbranch, "SpecBranch without its parts, a device for each model", rollback.ablation_modelled),
        decoded(specbranch, "SpecBranch by threshold epsilon, measured", rollback.epsilon),
        decoded(specbranch, "SpecBranch by threshold epsilon, a device for each model", rollback.epsilon_modelled),
        decoded(specbranch, "SpecBranch by number of branches, measured", rollback.most_branches),
        decoded(
            specbranch, "SpecBranch by number of branches, a device for each model", rollback.most_branches_modelled
        ),
        decoded(specbranch, "Where a round's time goes: SpecBranch", times.specbranch_times),
        decoded(drafts, "Block against token-wise verification by draft length", blocks.block_gain),
        decoded(drafts, "Several whole drafts, token by token or as a block", blocks.parallel_drafts),
        decoded(tree, "Tokens per target call: DySpec, Sequoia, SpecInfer", trees.tree_table),
        decoded(tree, "Tree size and accepted tokens over steps", trees.tree_growth),
        decoded(tree, "RRS, RRSw and SpecHub on binary trees", trees.sibling_rules),
        decoded(tree, "Where a round's time goes: trees", times.tree_times),
        Entry(tree, "Acceptance of two candidates on toy laws", [toy.toy_acceptance]),
        Entry(tree, "Attention mask of a tree before and after reordering", [masks.mask_order]),
        *(Entry(*entry) for entry in harvest_figures.entries(evidence)),
    ]
