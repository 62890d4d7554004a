"""The n-gram pool, the window's Jacobi steps, and what the engine does at every limit."""

from types import SimpleNamespace

import pytest
import torch

from decoding.engines.lookahead import LookaheadEngine, NgramPool, Window, merged
from decoding.models.table_lm import TableLM, random_table
from decoding.sampling import Sampler, Warp

GREEDY = Warp(0.0)
NOBODY = frozenset[int]()
SETTINGS = [(1, 2, 1), (1, 5, 1), (4, 2, 3), (3, 3, 2), (7, 5, 7)]


def model(vocab: int = 5, max_length: int = 1000) -> SimpleNamespace:
    """A pair whose draft nobody runs."""
    table = random_table(vocab, seed=1, concentration=0.5)
    return SimpleNamespace(target=TableLM(table, max_length=max_length), draft=TableLM(table))


def engine(
    pair: SimpleNamespace,
    window: int = 3,
    ngram: int = 3,
    guesses: int = 2,
    prompt_pool: bool = True,
    **kw,
) -> LookaheadEngine:
    return LookaheadEngine(pair, window, ngram, guesses, prompt_pool, **{"warp": GREEDY, **kw})


def test_pool_keeps_the_latest_of_each_key():
    pool = NgramPool(2)
    pool.add([(1, 2, 3), (1, 4, 5), (7, 8, 9), (1, 2, 3), (1, 6, 6)])
    assert pool.after(1) == [(6, 6), (2, 3)]  # 2, 3 was used again, 4, 5 was not
    assert pool.after(7) == [(8, 9)] and pool.after(2) == []


@pytest.mark.parametrize(
    ("text", "new", "ngrams"),
    [
        ([1, 2, 3, 4], 4, [(1, 2, 3), (2, 3, 4)]),
        ([1, 2, 3, 4], 1, [(2, 3, 4)]),
        ([1, 2], 2, []),
        ([1, 2, 3], 3, [(1, 2, 3)]),
        ([0, 1, 2, 3, 4], 2, [(1, 2, 3), (2, 3, 4)]),
    ],
)
def test_pool_takes_the_n_grams_that_end_in_new_text(text, new, ngrams):
    pool = NgramPool(9)
    engine(model())._pool_text(pool, text, new)
    found = {(key, *rest) for key in range(9) for rest in pool.after(key)}
    assert found == set(ngrams)
    engine(model(), prompt_pool=False)._pool_text(nothing := NgramPool(9), text, new)
    assert not any(nothing.after(key) for key in range(9))


def test_prompt_and_output_are_drafted_from():
    """Round after round, the candidates are the latest n-grams of the text: the window is too
    narrow to add any."""
    counting = TableLM(lambda context: torch.eye(5).double()[(sum(context[-1:]) + 1) % 5])
    models = SimpleNamespace(target=counting, draft=counting)
    narrow = engine(models, window=1, ngram=3, guesses=1)
    trace = narrow.decode([0, 1, 2, 3, 4, 0], 7, Sampler.seeded(0))
    assert [round_.draft_tokens for round_ in trace.rounds] == [[1, 2], [4, 0], []]
    assert [round_.tokens for round_ in trace.rounds] == [[1, 2, 3], [4, 0, 1], [2]]


def test_n_grams_with_the_same_beginning_share_it():
    assert merged([(1, 2, 3), (1, 4, 3), (2, 2, 3), (1, 2, 5)], 9, NOBODY) == (
        [0, 1, 2, 1, 4, 0, 6, 7, 2],
        [1, 2, 3, 4, 3, 2, 2, 3, 5],
    )
    assert merged([(1, 2, 3), (1, 2, 4)], 2, NOBODY) == ([0, 1], [1, 2])
    assert merged([(1, 2, 3), (2, 4, 4)], 9, frozenset({2})) == ([0, 1, 0], [1, 2, 2])
    assert merged([(1, 2)], 0, NOBODY) == merged([], 3, NOBODY) == ([], [])


def test_window_fills_and_then_moves_on():
    """W = 2, N = 4. Guesses are numbered step, column: the argmax after column c in step s is 10 s
    + c."""
    window = Window([7, 8, 9], 2, 4)
    # columns 1, 2, 3; column 0 is the last committed token
    assert window.rows == [[7, 8, 9]] and window.depth == 3
    assert window.step(0, [10, 11, 12, 13]) == [] and window.rows == [[8, 9], [11, 12, 13]]
    assert window.step(1, [20, 21, 22]) == [] and window.rows == [[9], [12, 13], [21, 22]]
    assert window.depth == 3
    assert window.step(2, [30, 31]) == [(2, 12, 21, 30), (9, 13, 22, 31)]
    assert window.rows == [[13], [21, 22], [30, 31]]
    assert window.step(3, [40, 41]) == [(3, 21, 30, 40), (13, 22, 31, 41)]
    assert window.rows == [[22], [30, 31], [40, 41]]


@pytest.mark.parametrize(("width", "ngram"), [(1, 2), (3, 2), (1, 3), (1, 5), (4, 5)])
def test_a_column_is_one_path_at_consecutive_positions(width, ngram):
    """A guess sees the oldest row up to its column and the newer ones of its column; its depth is
    its position."""
    window, start = Window([1, 2], width, ngram), 3
    for step in range(ngram + 2):
        tokens, parents, places = window.tree(start)
        assert len(tokens) == len(parents) == sum(map(len, window.rows))
        assert len(places) == len(window.rows[0]) + 1
        paths: dict[int, list[int]] = {0: [0]}
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), start):
            paths[row] = [*paths[parent], token]
        columns = [[0, *window.rows[0]], *window.rows[1:]]
        for column, place in enumerate(places):
            assert paths[place] == columns[0][: column + 1] + [row[column] for row in columns[1:]]
        assert max(map(len, paths.values())) - 1 == window.depth
        window.step(0, [100 * step + column for column in range(len(places))])
    assert len(window.rows) == ngram - 1 and len(window.rows[0]) == width - 1


@pytest.mark.parametrize("max_length", range(4, 20))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.few(16)
def test_no_row_lies_beyond_the_context(settings, max_length):
    pair, prompt = model(3, max_length), [1, 2, 1]
    forward, farthest = pair.target.forward, [0]

    def watched(tokens: torch.Tensor, parents: torch.Tensor | None = None, **kw):
        depths = [0]
        for parent in parents.tolist() if parents is not None else range(-1, len(tokens) - 1):
            depths.append(depths[parent + 1] + 1)
        farthest.append(pair.target.length + max(depths))
        return forward(tokens, parents, **kw)

    pair.target.forward = watched
    trace = engine(pair, *settings).decode(prompt, 99, Sampler.seeded(0))
    assert len(trace.tokens) == max_length - len(prompt) and max(farthest) <= max_length
