"""Prompts, and a stub server that is asked for responses to them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data_gen.prompts import Prompt
from data_gen.responses.external import ExternalResponse
from data_gen.responses.log import NAME
from data_gen.responses.server import Server
from data_gen.settings import HarvestSettings
from decoding.sampling import Warp
from tests.helpers.data.datasets import SAMPLED

PROMPTS = [Prompt(f"p{number}", "toy", "", f"w{number + 1} w2", chat=False) for number in range(20)]
NUCLEUS = replace(SAMPLED, warp=Warp(0.7, top_p=0.9))


def server(url: str, **changed: Any) -> Server:
    extra = OmegaConf.create(changed.pop("extra", {}))
    settings = {"concurrency": 4, "timeout": 2.0, "retries": 3, "key_variable": None, **changed}
    return Server(url, "tiny", **settings, extra=extra)


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
