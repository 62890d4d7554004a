"""Records survive the disk, whatever they hold."""

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.labels import accepted_length, drafted_length
from data_gen.storage import shards
from predictors.features.draft_statistics import Q_STATS
from tests.helpers.data.harvests import write_harvest

SMALL = st.integers(0, 4)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_rounds_come_back_as_they_were(rows: int, gamma: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    floats = torch.rand(rows, gamma, generator=generator)
    whole = torch.randint(0, 2**31 - 1, (rows,), generator=generator)
    features = torch.randn(rows, gamma, 3, generator=generator) * 1e3
    record = {
        **{"prompt_id": "é\n|", "dataset": "", "split": "test"},
        **dict.fromkeys(("anchor", "committed", "known", "drafted", "accepted"), whole),
        "token": whole[:, None].expand(-1, gamma),
        **dict.fromkeys(("q", *Q_STATS, "accept_prob"), floats),
        "history": floats[:, :1].expand(-1, 3),
        "target_hidden": shards.pack_features(features[:, 0]),
        "draft_hidden": shards.pack_features(features),
        "draft_first": shards.pack_features(features[:, 0]),
        **{
            name: (whole[:, None] if name.endswith("token") else floats)[..., None].expand(
                -1, gamma, count
            )
            for name, count in shards.SIBLINGS.items()
        },
    }
    with tempfile.TemporaryDirectory() as name:
        folder = write_harvest(Path(name), rows=2, gamma=gamma)
        entry = shards.write_shard(folder, "rounds", 0, [record])
        (row,) = next(shards.batches(folder, entry, record)).to_pylist()
    assert row["prompt_id"] == "é\n|" and row["accepted"] == whole.tolist()
    assert torch.equal(torch.tensor(row["accept_prob"]), floats.flatten())
    bits = torch.tensor(row["draft_hidden"], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(bits, features.bfloat16().flatten())


@given(
    st.lists(st.lists(SMALL, min_size=3, max_size=3), min_size=1, max_size=5),
    st.sets(SMALL),
    st.data(),
)
def test_lengths_keep_their_order(
    tokens: list[list[int]], ends: set[int], data: st.DataObject
) -> None:
    drafted = drafted_length(torch.tensor(tokens), ends)
    chance = st.lists(st.floats(0, 1), min_size=3, max_size=3)
    accept, coins = (
        torch.tensor([data.draw(chance) for _ in tokens], dtype=torch.float64) for _ in range(2)
    )
    accepted = accepted_length(accept, coins, drafted)
    assert (0 <= accepted).all() and (accepted <= drafted).all() and (drafted <= 3).all()
    for row, count in zip(tokens, drafted.tolist(), strict=True):
        assert not ends & set(row[: count - 1]) and (count == 3 or row[count - 1] in ends)
