"""vLLM beside us: its own methods and our proposer inside it, as engines of a comparison and as a
machine whose costs thresholds can be chosen for.

Made by `conf/engine/vllm*.yaml` and `conf/cost/vllm.yaml`. `make vllm` brings a build for CPUs in
an environment of its own, where a process answers (`serving.vllm_worker`). Times are its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path as File
from statistics import median
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from decoding.cost import CostTable, cost_table
from decoding.models.loading import ModelPair
from decoding.sampling import Sampler, Warp
from decoding.trace import STAGES, RoundTrace, Trace
from evaluation.baselines.llamacpp import TEXTS
from runtime.errors import UserError
from runtime.settings.kinds import Count, Path

ROOT = File(__file__).parents[2]
Models = Annotated[Mapping[str, Any], "the pair, as Hugging Face folders"]
Python = Annotated[Path, "the Python that vLLM is installed for, as `make vllm` brings it"]


class Worker:
    """A running vLLM, which ends with this object."""

    def __init__(self, python: Path, **arguments: Any) -> None:
        """arguments: of `vllm.LLM`. Raises UserError with vLLM's own words where it does not
        start."""
        program = File(python).expanduser().absolute()
        if not program.is_file():
            raise UserError(f"engine.python: {python} is not there. Bring it: make vllm")
        self._log = tempfile.NamedTemporaryFile(mode="w+b")
        processors = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        self._process = subprocess.Popen(
            [program, "-m", "serving.vllm_worker", json.dumps(arguments)],
            cwd=ROOT,
            env={
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
                "VLLM_LOGGING_LEVEL": "WARNING",
                "HF_HUB_OFFLINE": "1",
                **os.environ,
                "PYTHONPATH": str(ROOT),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.end = weakref.finalize(self, _ended, self._process)
        print("note: vLLM starts, which takes a minute or two", file=sys.stderr)
        self._read()

    def ask(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **sampling: Any
    ) -> dict[str, Any]:
        """Return what became of these prompts, decoded at once. sampling: of `SamplingParams`."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        asked = {"prompts": [list(prompt) for prompt in prompts], "seeds": list(seeds), **sampling}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if self._process.poll() is None:  # an idle one would take the time of others
            os.killpg(self._process.pid, signal.SIGSTOP)
        if "error" in answer:
            raise UserError(f"engine: vLLM failed ({answer['error'][:300]}). Mend what it names")
        return answer

    def _last_words(self) -> str:
        lines = File(self._log.name).read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line] or lines or ["without a word"]
        return errors[-1].strip()


def _ended(process: subprocess.Popen[str]) -> None:
    """End a worker and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def sampling_of(warp: Warp, eos_ids: frozenset[int], max_tokens: int) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that give the distribution of `warp`."""
    return {
        "temperature": warp.temperature,
        "top_k": warp.top_k,
        "top_p": warp.top_p,
        "max_tokens": max_tokens,
        "stop_token_ids": sorted(eos_ids),
    }


class VllmEngine:
    """An engine of a comparison: what vLLM says, in its own seconds."""

    records_drafts = False
    caution = ""

    def __init__(self, worker: Worker, warp: Warp, eos_ids: frozenset[int]) -> None:
        self.worker, self.warp, self.eos_ids = worker, warp, eos_ids

    def decode(self, prompt_ids: Tensor, max_new_tokens: int, sampler: Sampler) -> Trace:
        """Continue `prompt_ids` [n] until EOS or `max_new_tokens`. One number of `sampler` seeds
        vLLM.

        Only how many tokens were accepted is known, not in which round: the first has all."""
        seed = int(torch.randint(1 << 31, (), generator=sampler.generator))
        sampling = sampling_of(self.warp, self.eos_ids, max_new_tokens)
        said = self.worker.ask([prompt_ids.tolist()], [seed], **sampling)
        (tokens,) = said["tokens"]
        first = min(said["accepted_tokens"], len(tokens) - 1) + 1
        rounds = [
            RoundTrace([], [], [], 0, len(each) - 1, each, [], 0, dict.fromkeys(STAGES, 0.0))
            for each in [tokens[:first], *([token] for token in tokens[first:])]
        ]
        return Trace(len(prompt_ids), tokens, rounds, 0.0, said["seconds"])


def served(
    models: Models,
    python: Python,
    speculation: Annotated[
        Mapping[str, Any] | None, "vLLM's speculative config; draft: for the draft's folder"
    ],
    proposer: Annotated[
        Path | None, "file of `export.py serving=vllm`: our proposer drafts; null: none"
    ],
    requests: Annotated[Count, "requests decoded at once, at most"],
    warp: Annotated[Warp, "of the target"],
    pair: ModelPair,
    eos_ids: frozenset[int],
) -> VllmEngine:
    """Run vLLM with the pair's target: plain, with a method of its own, or with our proposer."""
    return VllmEngine(started(models, python, speculation, proposer, requests), warp, eos_ids)


def started(
    models: Mapping[str, Any],
    python: Path,
    speculation: Mapping[str, Any] | None,
    proposer: Path | None,
    requests: int,
) -> Worker:
    arguments = arguments_of(models, requests)
    if speculation is not None:
        config = dict(speculation)
        if config.get("model") == "draft":
            config["model"] = str(File(models["draft"]).expanduser())
        arguments["speculative_config"] = config
    if proposer is not None:
        file = File(proposer).expanduser().absolute()
        if not file.is_file():
            raise UserError(
                f"engine.proposer: {file} is not there. Write it: python scripts/export.py"
                " serving=vllm thresholds=..."
            )
        arguments["additional_config"] = {"draftpredict": str(file)}
    return _worker(str(python), json.dumps(arguments, sort_keys=True))


def arguments_of(models: Mapping[str, Any], requests: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that a comparison fixes."""
    return {
        "model": str(File(models["target"]).expanduser()),
        "dtype": models["target_dtype"],
        "max_model_len": models["max_length"],
        "max_num_seqs": requests,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
    }


@cache
def _worker(python: str, arguments: str) -> Worker:
    """Return the worker of these arguments: the engines of a run share them."""
    return Worker(File(python), **json.loads(arguments))


def measured_cost(
    models: Models,
    python: Python,
    gammas: Annotated[Sequence[Count], "draft lengths whose rounds are timed"],
    max_new_tokens: Annotated[Count, "tokens of each text that is decoded"],
) -> CostTable:
    """Return seconds of vLLM on this machine: of a forward of our draft inside it, of a step by
    rows, and of a token without a draft; medians over some texts, greedy."""
    tokenizer = AutoTokenizer.from_pretrained(File(models["target"]).expanduser())
    texts = [tokenizer(text)["input_ids"] for text in (TEXTS[0], *TEXTS)]  # the first warms up
    greedy = {"temperature": 0.0, "ignore_eos": True}

    def timed(name: str | None, **more: Any) -> Worker:
        config: dict[str, Any] = {}
        if name is not None:
            config = {"method": "custom_class", "model": f"serving.vllm.{name}"}
            config = {"speculative_config": config | {"num_speculative_tokens": max(gammas)}}
        return Worker(python, **arguments_of(models, 1), **config, additional_config=more)

    def step(worker: Worker) -> float:
        """Return seconds of a step, but for the first of a request."""
        times = list[float]()
        for text in texts:
            first = worker.ask([text], [0], max_tokens=1, **greedy)["seconds"]
            said = worker.ask([text], [0], max_tokens=max_new_tokens, **greedy)
            count = max_new_tokens - 1 - said["accepted_tokens"]
            times.append((said["seconds"] - first) / count)
        return median(times[1:])

    worker = timed(None)
    plain = step(worker)
    worker.end()
    with tempfile.TemporaryDirectory() as scratch:
        file, target = File(scratch) / "rows", dict[int, float]()
        worker = timed("Rows", draftpredict_rows=str(file))
        for gamma in gammas:
            file.write_text(str(gamma))
            target[gamma + 1] = step(worker)
        worker.end()
        length = sorted(gammas)[len(gammas) // 2]
        chain = {"_target_": "decoding.structures.chain.Chain", "gamma_max": length}
        facts = {
            "format_version": 1,
            "draft": str(File(models["draft"]).expanduser()),
            "dtype": models["draft_dtype"],
            "structure": chain,
            "stop": {"_target_": "decoding.stopping.never.Never"},
            "adaptive": False,
        }
        file.write_text(json.dumps(facts))
        worker = timed("Proposer", draftpredict=str(file))
        draft = max((step(worker) - target[length + 1]) / length, 0.0)
        worker.end()
    shown = ", ".join(f"{rows}: {seconds * 1e3:.2f}" for rows, seconds in target.items())
    print(f"vLLM, ms: draft {draft * 1e3:.2f}; step by rows {shown}; plain {plain * 1e3:.2f}")
    return cost_table(draft, target, plain)
