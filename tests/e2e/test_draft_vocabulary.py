"""pairs/draft_vocabulary.py from its command line, and a harvest with the vocabulary it makes."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from data_gen.storage.dataset import Harvest
from decoding.models.draft_vocabulary import read_vocabulary
from pairs import draft_vocabulary
from pairs.chats import Chat, save_chats
from scripts import evaluate, gen_data
from tests.helpers.models.tiny_pair import EOS, VOCAB
from tests.helpers.programs.programs import GREEDY, JSONL, SPLITS, models, refused, run

SIZES = ("sizes=[4,20]", "size=9", "positions=40", "pair.max_length=40")


@pytest.fixture
def pair(tiny_pair_dir: Path) -> list[str]:
    return [*models(tiny_pair_dir), "pair.dtype=float64"]


def test_a_vocabulary_is_made_and_drafts_keep_to_it(
    harvest: Path, pair: list[str], here: Path
) -> None:
    shutil.copytree(harvest, here, dirs_exist_ok=True)
    printed = run(draft_vocabulary, *pair, *SIZES, *GREEDY, "data=data/greedy")
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|")][2:]
    assert [int(row[0]) for row in rows] == [4, 9, 20, VOCAB] and "modelled speed-up" in printed
    shares = [[float(row[column]) for row in rows] for column in (1, 2, 3)]
    assert all(share == sorted(share) and share[-1] == 1 for share in shares[:2])
    assert all(0 < share <= 1 for share in shares[2])  # a greedy draft's first choice may change

    path = Path("data/greedy/draft_vocabulary.safetensors")
    tokens = read_vocabulary(path, VOCAB).tolist()
    harvested = Harvest.open("data/greedy")
    rows = harvested.by_prompt("responses", "train", ["response_tokens"])
    counts = torch.bincount(torch.cat([row["response_tokens"] for row in rows]), minlength=VOCAB)
    assert sorted(counts[tokens].tolist()) == counts.topk(9).values.sort().values.tolist()

    small = ("max_new_tokens=12", "gamma=3", "out=data/short", *SPLITS, *GREEDY)
    run(gen_data, *pair, *JSONL, *small, f"pair.draft_vocabulary={path}")
    short, whole = (one.manifest.written["pair"] for one in (Harvest.open("data/short"), harvested))
    assert short["draft"] != whole["draft"] and short["target"] == whole["target"]
    drafted = {
        token
        for shard in Path("data/short").glob("rounds*.parquet")
        for row in pq.read_table(shard, columns=["token"]).to_pylist()
        for token in row["token"]
    }
    assert drafted and drafted <= {EOS, *tokens}

    learned = ("methods=[specdecpp]", "method.specdecpp.stop.checkpoint=checkpoints/specdecpp")
    given = (*pair, *JSONL, *GREEDY, *learned, "split=all", "logger=none")
    message = refused(evaluate, *given, f"pair.draft_vocabulary={path}")
    assert "was trained with pair.draft=" in message and "tokens" in message


def test_chats_are_counted_and_the_first_held_out(pair: list[str], here: Path) -> None:
    Path("chats").mkdir()
    spoken = ([1, 2, 9, 9], [1, 2, 5, 7], [3, 4, 7, 5, 7])
    chats = [
        Chat(torch.tensor(tokens, dtype=torch.int32), 2, torch.zeros(len(tokens) - 1, 1, 4))
        for tokens in spoken
    ]
    save_chats(Path("chats/one.safetensors"), chats)
    few = "chats=chats held_out=1 sizes=[] size=2 positions=2 gammas=2"
    arguments = (*pair, *few.split())
    printed = run(draft_vocabulary, *arguments, "out=kept.safetensors")
    assert read_vocabulary(Path("kept.safetensors"), VOCAB).tolist() == [7, 5]
    assert "2 of them said at least once in 5 counted" in printed
    message = refused(draft_vocabulary, *arguments, "held_out=3")
    assert message.startswith("error: chats: chats has 3 chats, held_out=3 leaves none")


DIFFERENT = "sizes: expected a list of different sizes, such as [4096,16384]"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("size=32", "size: 32 are all tokens of the pair, it has 32"),
        ("size=0", "size: expected a whole number from 1 on, got 0"),
        ("sizes=[0,4]", f"{DIFFERENT}, got [0, 4]"),
        ("sizes=5", f"{DIFFERENT}, got 5"),
        ("data=data/none", "data: data/none is no harvested dataset"),
        ("data=null", "data: expected a folder, as chats is null, got null"),
        ("chats=5", "chats: expected a path or null, got 5"),
        ("chats=none", "chats: none has 0 chats"),
        ("out=5", "out: expected a path, with no ~ for the home folder or null, got 5"),
        ("out=", "out: expected a path, with no ~ for the home folder or null, got ''"),
        ("pair.draft=nowhere/at/all", "pair.draft: no model in"),
    ],
)
def test_bad_input_is_refused(
    override: str, message: str, pair: list[str], replaying: list[str]
) -> None:
    given = (*pair, *GREEDY, "data=data/greedy", *SIZES, override)
    assert message in refused(draft_vocabulary, *given)


def test_responses_of_another_target_are_refused(pair: list[str], replaying: list[str]) -> None:
    swapped = [*pair, pair[1].replace("pair.draft", "pair.target")]
    message = refused(draft_vocabulary, *swapped, "data=data/greedy", *SIZES)
    assert "pair.target: it belongs to another target than the harvest" in message
