"""Token-wise against block verification, from hand-made rounds."""

from dataclasses import replace
from pathlib import Path

import pytest

from papers.hsd.blocks import block_gain, parallel_drafts
from reports.figure import Missing, save
from tests.helpers.evaluation.evaluations import chain, evaluation, labels, method, plain, trace

PLAIN = [plain(4, 4.0, "a"), plain(4, 4.0, "b")]
# tokens per call: token-wise 2 and 1, block 3 and 1
TOKEN = [trace([chain(4, 1)], 1.0, "a"), trace([chain(4, 0)], 1.0, "b")]
BLOCK = [trace([chain(4, 2)], 1.0, "a"), trace([chain(4, 0)], 1.0, "b")]


def fixed(verifier: str, gamma: int) -> dict:
    return method("serial", "chain", verifier, "fixed", stop={"gamma": gamma})


def paths(rule: str, count: int) -> dict:
    return method(
        "serial",
        "paths",
        "parallel",
        "never",
        structure={"paths": count, "gamma": 4},
        verifier={"rule": rule},
    )


def one_draft(*extra: str) -> list:
    made = {
        "token_4": fixed("token", 4),
        "block_4": fixed("block", 4),
        "token_8": fixed("token", 8),
    }
    return [
        evaluation(
            made, {"autoregressive": PLAIN, "token_4": TOKEN, "block_4": BLOCK, "token_8": TOKEN}
        )
    ]


def test_gain_on_the_same_prompts() -> None:
    figure = block_gain(one_draft())
    rows = {row[3]: dict(zip(figure.columns, row, strict=True)) for row in figure.rows}
    assert figure.column("gamma") == [4, 4], "8 has no block verification beside it"
    assert (rows["token"]["tokens/target call"], rows["block"]["tokens/target call"]) == (1.5, 2)
    gain = "tokens/call over token-wise"
    assert [rows["block"][gain], rows["block"][f"{gain} low"], rows["block"][f"{gain} high"]] == [
        0.5,
        0,
        1,
    ]
    assert rows["token"][gain] is None
    assert (figure.kind, figure.n) == ("measured", "2 prompts, 4 rounds")


def test_each_length_once_and_rules_on_the_same_prompts() -> None:
    (found,) = one_draft()
    best = evaluation({"fixed": fixed("token", 4)}, {"autoregressive": PLAIN, "fixed": TOKEN})
    other = evaluation(
        {"block_8": fixed("block", 8)},
        {"autoregressive": [plain(4, 4.0, "z")], "block_8": [trace([chain(8, 2)], 1.0, "z")]},
    )
    alone = replace(other, folder=Path("runs/other"))
    assert block_gain([found, best, alone]).rows == block_gain([found]).rows


def test_several_drafts() -> None:
    made = {
        f"{rule}_{count}": paths(rule, count) for rule in ("token", "block") for count in (1, 2)
    }
    traces = {name: TOKEN if name.startswith("token") else BLOCK for name in made}
    found = [*one_draft(), evaluation(made, {"autoregressive": PLAIN, **traces})]
    figure = parallel_drafts(found)
    assert [(row[2], row[3]) for row in figure.rows] == [
        (1, "token"),
        (1, "block"),
        (2, "token"),
        (2, "block"),
    ]
    assert figure.column("speed-up") == pytest.approx([1.5, 2, 1.5, 2])
    assert set(block_gain(found).column("gamma")) == {4}, "several drafts are no draft length"


def test_what_is_missing_is_named() -> None:
    only = [evaluation({"token_4": fixed("token", 4)}, {"autoregressive": PLAIN, "token_4": TOKEN})]
    with pytest.raises(Missing, match="python scripts/evaluate.py experiment=draft_lengths"):
        block_gain(only)
    with pytest.raises(Missing, match="python scripts/evaluate.py experiment=parallel_drafts"):
        parallel_drafts(only)


def test_it_draws(tmp_path: Path) -> None:
    assert all(path.stat().st_size for path in save(block_gain(one_draft()), tmp_path))
    assert labels(block_gain(one_draft())) == {("gamma, tokens of a draft", "tokens/target call")}
