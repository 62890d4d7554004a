"""llama.cpp beside us: its server with the same weights, as an engine of a comparison and as a
machine whose costs thresholds can be chosen for.

Made by `conf/engine/llamacpp*.yaml` and `conf/cost/llamacpp.yaml`. `make engine` brings a build;
nothing here is a part of ours. Times are its own, so that what passes between two programs does not
count."""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from statistics import median
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from decoding.cost import CostTable, cost_table
from decoding.models.gguf import write_gguf
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.trace import STAGES, RoundTrace, Trace
from runtime.errors import UserError
from runtime.settings.kinds import Count, Group, Path, Probability

SECONDS = 60  # that a server may take to load
DRAFTS = "--spec-draft-n-max"
DRAFTED = re.compile(r"#gen tokens = +(\d+).*dur\(b,g,a\) = [\d.]+, ([\d.]+),")
ALONE = ("-np", "1", "--no-webui", "-lv", "4")  # one request at once; the log counts drafts
TEXTS = (
    "Write a Python function that returns the prime factors of a number.",
    "A train leaves at nine and travels 80 km an hour. Where is it at noon? Explain.",
    "Tell me about the history of the bicycle.",
    "Translate into French: The weather is fine, and we are going to the sea.",
)

Binary = Annotated[Path, "llama-server, as `make engine` brings it"]
Gguf = Annotated[
    Path, "a GGUF file of the target at any precision, whose tokenizer is taken; or file to serve"
]
Models = Annotated[
    Mapping[str, Any], "the pair, whose weights are served in bfloat16; a GGUF file as it is"
]


class Speculation(Group):
    kind: Annotated[Literal["none", "draft-simple", "ngram-simple"], "what drafts: --spec-type"]
    n_max: Annotated[Count, "draft tokens of a round, at most"]
    p_min: Annotated[Probability, "a draft ends before a token less probable than this"]


class Server:
    """A running llama-server, which ends with this object."""

    def __init__(self, binary: Path, *flags: str) -> None:
        """Raises UserError where there is none, and with the server's own words where it ends."""
        program = File(binary).expanduser().resolve()
        if not program.is_file():
            raise UserError(f"server: {binary} is not there. Bring one: make engine")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(mode="w+b")
        threads = str(torch.get_num_threads())
        self._process = subprocess.Popen(
            [program, *flags, *ALONE, "-t", threads, "--port", str(port)],
            env={**os.environ, "LD_LIBRARY_PATH": str(program.parent)},
            stdout=self._log,
            stderr=self._log,
        )
        self.end = weakref.finalize(self, self._process.send_signal, signal.SIGKILL)
        until = time.monotonic() + SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                said = [x for x in self.log().splitlines() if " E " in x] or ["it does not answer"]
                raise UserError(f"server: {binary} does not start ({said[-1].strip()[:200]})")
            time.sleep(0.05)

    def log(self) -> str:
        return File(self._log.name).read_text(errors="replace")

    def drafting(self) -> tuple[int, float]:
        """Return draft tokens and seconds of drafting of all requests so far."""
        said = DRAFTED.findall(self.log())
        return (int(said[-1][0]), float(said[-1][1]) / 1e3) if said else (0, 0.0)

    def complete(self, prompt: Sequence[int] | str, tokens: int, **sampling: Any) -> dict[str, Any]:
        """Return the answer to a completion of at most `tokens` tokens."""
        fixed = {"cache_prompt": False, "return_tokens": True, "n_predict": tokens}
        body = json.dumps({"prompt": prompt, **fixed, **sampling}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completion", body, headers)
        with urllib.request.urlopen(request) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1):
                return True
        except OSError:
            return False


class LlamaCppEngine:
    """An engine of a comparison: what a server says, in its own seconds."""

    records_drafts = False
    caution = ""

    def __init__(self, server: Server, warp: Warp, eos_ids: frozenset[int]) -> None:
        self.server, self.eos_ids = server, eos_ids
        order = ["top_k", "top_p"]
        self.sampling = {**warp.fields(), "min_p": 0.0, "samplers": ["temperature", *order]}

    def decode(self, prompt_ids: Tensor, max_new_tokens: int, sampler: Sampler) -> Trace:
        """Continue `prompt_ids` [n] until EOS or `max_new_tokens`. One number of `sampler` seeds
        the server.

        Only how many tokens were accepted is known, not in which round: the first has all."""
        seed = int(torch.randint(1 << 31, (), generator=sampler.generator))
        said = self.server.complete(prompt_ids.tolist(), max_new_tokens, seed=seed, **self.sampling)
        tokens, times = list(said["tokens"]), said["timings"]
        accepted = times.get("draft_n_accepted", 0)
        first = accepted + 1
        rounds = [
            RoundTrace([], [], [], 0, len(each) - 1, each, [], 0, dict.fromkeys(STAGES, 0.0))
            for each in [tokens[:first], *([token] for token in tokens[first:])]
        ]
        prefill, decoding = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
        return Trace(len(prompt_ids), tokens, rounds, prefill, prefill + decoding)


def served(
    models: Models,
    server: Binary,
    tokenizer: Gguf,
    speculation: Annotated[Speculation, "what drafts, and how much"],
    warp: Annotated[Warp, "of the target"],
    pair: ModelPair,
    eos_ids: frozenset[int],
) -> LlamaCppEngine:
    """Run a server of llama.cpp with the pair's weights: plain, or with drafts."""
    flags = _speculating(speculation.kind, speculation.n_max, speculation.p_min)
    started = _started(models, server, tokenizer, flags)
    return LlamaCppEngine(started, warp, eos_ids)


def _speculating(kind: str, n_max: int = 1, p_min: float = 0.0) -> list[str]:
    limits = {
        "draft-simple": [DRAFTS, str(n_max), "--spec-draft-p-min", str(p_min)],
        "ngram-simple": ["--spec-ngram-simple-size-m", str(n_max)],
    }
    return ["--spec-type", kind, *limits.get(kind, [])]


def _started(
    models: Mapping[str, Any], server: Path, tokenizer: Path, flags: Sequence[str]
) -> Server:
    drafts, like = DRAFTS in flags, File(tokenizer).expanduser()
    if not like.is_file():
        raise UserError(f"tokenizer: {tokenizer} is not there. Give a GGUF file of the target")
    with tempfile.TemporaryDirectory() as scratch:  # a server maps its files: they may go
        folder = File(scratch)
        files = list[str]()
        for side in ("target", "draft")[: 1 + drafts]:
            given = File(models[side]).expanduser()
            file = given if given.suffix == ".gguf" else folder / f"{side}.gguf"
            if file != given:
                write_gguf(given, like, file)
            files += [{"target": "-m", "draft": "-md"}[side], str(file)]
        return Server(server, *files, "-c", str(models["max_length"]), *flags)


def measured_cost(
    models: Models,
    server: Binary,
    tokenizer: Gguf,
    gammas: Annotated[Sequence[Count], "draft lengths whose rounds are timed"],
    max_new_tokens: Annotated[Count, "tokens of each text that is decoded"],
) -> CostTable:
    """Return seconds of llama.cpp on this machine: of a draft forward, of a round's target call by
    rows, and of a token without a draft; medians over some texts, greedy."""
    greedy = {"temperature": 0.0, "ignore_eos": True}

    def rounds(*speculation: Any) -> list[tuple[float, float]]:
        """Return seconds of a draft forward and of the rest of a round, for each text."""
        started = _started(models, server, tokenizer, _speculating(*speculation))
        times, before = list[tuple[float, float]](), (0, 0.0)
        for text in (TEXTS[0], *TEXTS):  # the first warms up
            said = started.complete(text, max_new_tokens, **greedy)["timings"]
            now = started.drafting()
            forwards, drafting = now[0] - before[0], now[1] - before[1]
            count = said["predicted_n"] - 1 - said.get("draft_n_accepted", 0)  # 1: of the prefill
            rest = said["predicted_ms"] / 1e3 - drafting
            times.append((drafting / max(forwards, 1), rest / count))
            before = now
        started.end()
        return times[1:]

    plain = median(rest for _, rest in rounds("none"))
    by_length = {n: rounds("draft-simple", n) for n in gammas}
    draft = median(each for times in by_length.values() for each, _ in times)
    target = {n + 1: median(rest for _, rest in times) for n, times in by_length.items()}
    shown = ", ".join(f"{rows}: {seconds * 1e3:.2f}" for rows, seconds in target.items())
    print(
        f"llama.cpp, ms: draft {draft * 1e3:.2f}; target by rows {shown}; plain {plain * 1e3:.2f}"
    )
    return cost_table(draft, target, plain)
