"""Prompts, and a stub server that is asked for responses to them."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data_gen.prompts import Prompt
from data_gen.responses.external import ExternalResponse
from data_gen.responses.log import NAME
from data_gen.responses.server import Server
from data_gen.settings import HarvestSettings
from decoding.sampling import Warp
from tests.invariant.test_teacher_forcing import SAMPLED

PROMPTS = [Prompt(f"p{number}", "toy", "", f"w{number + 1} w2", chat=False) for number in range(20)]
NUCLEUS = HarvestSettings(**{**vars(SAMPLED), "warp": Warp(0.7, top_p=0.9)})


def server(url: str, **changed: Any) -> Server:
    settings = {
        "concurrency": 4,
        "timeout": 2.0,
        "retries": 3,
        "key_variable": None,
        "extra": {},
        **changed,
    }
    return Server(url, "tiny", **{**settings, "extra": OmegaConf.create(settings["extra"])})


def fetch(
    url: str,
    out: Path,
    recipe: HarvestSettings = NUCLEUS,
    prompts: list[Prompt] = PROMPTS,
    **changed: Any,
) -> dict[str, ExternalResponse]:
    return server(url, **changed).fetch(prompts, recipe, out, ask=True)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / NAME).read_text().splitlines()]


def asked_as(line: str, asked: Any) -> str:
    return json.dumps({**json.loads(line), "asked": asked})
