"""A finished harvest of the tiny pair, as scripts/gen_data.py leaves it."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from omegaconf import OmegaConf

from data_gen.harvest import Progress, harvest, plan
from data_gen.prompts import Prompt
from data_gen.requests import Request
from data_gen.responses import log
from data_gen.run import finish
from data_gen.settings import HarvestSettings
from data_gen.storage.chunks import PLAN, plan_id
from data_gen.storage.dataset import Harvest
from data_gen.storage.shards import SPLITS
from decoding.models.loading import ModelPair
from decoding.sampling import Warp
from predictors.features.layers import RecordedLayers
from runtime.files import file_hash
from runtime.json_files import CHECKSUM, write_checksummed
from runtime.json_lines import with_checksum
from tests.helpers.models.tiny_pair import VOCAB

SPLIT = {"splits": {"calibration": 0.1, "test": 0.1}}
SETTINGS = OmegaConf.create({**SPLIT, "responses": {"name": "generate"}})
SERVER = {"name": "server", "url": "http://127.0.0.1:1/v1"}
SERVED = OmegaConf.create({**SPLIT, "responses": SERVER})
SAMPLED = HarvestSettings(
    gamma=4,
    seed=3,
    max_new_tokens=18,
    batch_size=4,
    mixing=0.15,
    stride=2,
    warp=Warp(0.9, top_k=20),
    draft_warp=Warp(1.1, top_p=0.95),
    layers=RecordedLayers([-1], [-3, -1]),
)
GREEDY = replace(SAMPLED, warp=Warp(0.0), draft_warp=Warp(0.0), stride=1)
RECIPE = replace(
    SAMPLED,
    **{"gamma": 3, "max_new_tokens": 10, "batch_size": 3},
    **{"warp": Warp(0.9), "draft_warp": Warp(), "layers": RecordedLayers([-1], [-2, -1])},
)


def some_requests(count: int = 6) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    tokens = [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]
    return [Request(f"p{n}", "toy", prompt, SPLITS[n % 3]) for n, prompt in enumerate(tokens)]


def make_dataset(
    pair: ModelPair,
    folder: Path,
    count: int = 9,
    recipe: HarvestSettings = RECIPE,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Harvest `count` prompts and write the manifest, which is returned."""
    requests = some_requests(count)
    harvest(pair, requests, recipe, folder, progress or Progress())
    return finish(plan(pair, requests, recipe), 0, folder, *SETTINGS.values()).manifest.written


def answered_dataset(
    pair: ModelPair, folder: Path, count: int, recipe: HarvestSettings
) -> tuple[list[Prompt], dict[str, Any]]:
    """The same with `answers.jsonl`, as if a server had given the responses. Returns its prompts,
    and its plan."""
    make_dataset(pair, folder / "generated", count, recipe)
    said = Harvest.open(folder / "generated").prompts("all")
    responses = {prompt.prompt_id: prompt.response_tokens for prompt in said}
    given = {name: torch.tensor(tokens) for name, tokens in responses.items()}
    requests = [replace(r, response=given[r.prompt_id]) for r in some_requests(count)]
    prompts = [Prompt(request.prompt_id, "toy", "", "w1 w2") for request in requests]
    with log.open_log(folder / "data", {}) as answers:
        for prompt in prompts:
            answers.append(prompt, {"response_tokens": responses[prompt.id]})
    harvest(pair, requests, recipe, folder / "data", Progress())
    whole = plan(pair, requests, recipe)
    finish(whole, sum(map(len, given.values())), folder / "data", *SERVED.values())
    return prompts, whole


def rows(folder: Path, kind: str) -> list[dict]:
    """Records of a kind."""
    paths = sorted(folder.glob(f"{kind}-*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def rewrite_checksum(folder: Path) -> None:
    """Make every checksum fit what lies in the folder, as far as it can be read, so that what comes
    after is tested."""
    values = {
        path.name: value for path in folder.glob("*.json") if isinstance(value := _json(path), dict)
    }
    for value in values.values():
        value.pop(CHECKSUM, None)
    for name, value in values.items():
        with suppress(LookupError, TypeError, OSError, ValueError):
            for entry in value.get("shards", []):
                path = folder / entry["name"]
                entry["bytes"], entry["sha256"] = path.stat().st_size, file_hash(path)
        if name.startswith("chunk") and PLAN in values:
            value["plan"] = plan_id(values[PLAN])
        write_checksummed(folder / name, value)
    answers = folder / log.NAME
    if answers.is_file():
        bare = [line.rpartition(b', "checksum"')[0] for line in answers.read_bytes().splitlines()]
        answers.write_bytes(b"".join(with_checksum(line) + b"\n" for line in bare))


def _json(path: Path) -> Any:
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text(encoding="utf-8"))
