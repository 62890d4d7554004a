"""vLLM beside us: its own methods and our proposer inside it, as engines of a comparison and as a
machine whose costs thresholds can be chosen for.

Made by `conf/engine/vllm*.yaml` and `conf/cost/vllm.yaml`. `make vllm` brings a build for CPUs in
an environment of its own, where a process answers (`runtime.vllm_process`). Times are its own."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path as File
from statistics import median
from typing import Annotated, Any

import torch
from omegaconf import OmegaConf
from pydantic import Field
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from decoding.batch_cost import BatchTable, share
from decoding.cost import CostTable
from decoding.models.loading import ModelPair
from decoding.models.options import first_line
from decoding.sampling import Sampler, Warp
from decoding.trace import STAGES, RoundTrace, Trace
from evaluation.baselines.llamacpp import TEXTS
from runtime.errors import UserError
from runtime.settings.kinds import Count, Group, Path, Says, Size, Text
from runtime.vllm_process import Worker

Models = Annotated[Mapping[str, Any], "the pair, as Hugging Face folders"]
Gammas = Annotated[Sequence[Count], "draft lengths whose steps are timed, rising"]
Tokens = Annotated[Count, "tokens of each text that is decoded"]
Python = Annotated[Path, "the Python that vLLM is installed for, as `make vllm` brings it"]


Range = Annotated[
    list[Size], Field(min_length=3, max_length=3), Says("three whole numbers, such as [1,4,3]")
]


class Speculation(Group):
    """Settings of vLLM's `speculative_config`."""

    method: Annotated[Text, "vLLM's name of it"]
    num_speculative_tokens: Annotated[Count, "tokens of a draft, at most"]
    model: Annotated[Text | None, "draft: the pair's ordinary draft; of custom_class, the class"]
    prompt_lookup_max: Annotated[Count | None, "tokens of the longest ending that ngram looks for"]
    prompt_lookup_min: Annotated[Count | None, "tokens of the shortest"]
    num_speculative_tokens_per_batch_size: Annotated[
        list[Range] | None,
        "[fewest, most, tokens] by requests at once, as `export.py schedule=` writes it",
    ]


def sampling_of(warp: Warp, eos_ids: frozenset[int], max_tokens: int) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that give the distribution of `warp`."""
    return {**warp.fields(), "max_tokens": max_tokens, "stop_token_ids": sorted(eos_ids)}


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
        said = self.serve([prompt_ids.tolist()], [seed], max_new_tokens, 1)
        (tokens,) = said["tokens"]
        first = min(said["accepted_tokens"], len(tokens) - 1) + 1
        rounds = [
            RoundTrace([], [], [], 0, len(each) - 1, each, [], 0, dict.fromkeys(STAGES, 0.0))
            for each in [tokens[:first], *([token] for token in tokens[first:])]
        ]
        return Trace(len(prompt_ids), tokens, rounds, 0.0, said["seconds"])

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: int,
        at_once: int,
    ) -> dict[str, Any]:
        """See `evaluation.served.Serving`."""
        sampling = sampling_of(self.warp, self.eos_ids, max_new_tokens)
        return self.worker.ask(prompts, seeds, at_once, **sampling)


def served(
    models: Models,
    python: Python,
    speculation: Annotated[Speculation | None, "how vLLM drafts; null: not at all"],
    proposer: Annotated[
        Path | None, "file of `export.py serving=vllm`: our proposer drafts; null: none"
    ],
    requests: Annotated[Count, "requests decoded at once, at most"],
    warp: Annotated[Warp, "of the target"],
    pair: ModelPair,
    eos_ids: frozenset[int],
) -> VllmEngine:
    """Run vLLM with the pair's target, in our dtype: plain, with a method of its own, or with our
    proposer."""
    ours = {**models, "target_dtype": str(pair.target.model.dtype).removeprefix("torch.")}
    return VllmEngine(started(ours, python, speculation, proposer, requests), warp, eos_ids)


def started(
    models: Mapping[str, Any],
    python: Path,
    speculation: Any,  # `Speculation`, as composed
    proposer: Path | None,
    requests: int,
) -> Worker:
    arguments = arguments_of(models, requests)
    if speculation is not None:
        given: Any = OmegaConf.to_container(OmegaConf.create(speculation))
        config = {name: value for name, value in given.items() if value is not None}
        if config.get("model") == "draft":
            config["model"] = str(File(models.get("assistant") or models["draft"]).expanduser())
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


def rising(key: str, values: Sequence[int]) -> list[int]:
    if not values or list(values) != sorted(set(values)):
        raise UserError(f"{key}: expected rising numbers, got {list(values)}. Write e.g. [1,2,4,8]")
    return list(values)


@cache
def _worker(python: str, arguments: str) -> Worker:
    """Return the worker of these arguments: the engines of a run share them."""
    return Worker(python, "engine", torch.get_num_threads(), **json.loads(arguments))


def measured_cost(
    models: Models, python: Python, gammas: Gammas, max_new_tokens: Tokens
) -> CostTable:
    """Return seconds of vLLM with one request: of a forward of our draft inside it, of a step by
    rows, and of a token without a draft (`measured_batches`)."""
    batches = measured_batches(models, python, [1], gammas, max_new_tokens)
    return share(batches, 1, max(gammas))


def measured_batches(
    models: Models,
    python: Python,
    requests: Annotated[Sequence[Count] | None, "decoded at once, rising numbers; null: one"],
    gammas: Gammas,
    max_new_tokens: Tokens,
) -> BatchTable:
    """Return seconds of vLLM on this machine by requests at once: of a step without a draft, of one
    by rows of each request, and of a forward of our draft inside it; medians over some texts,
    greedy, of which the first warms up. All requests have the same text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(File(models["target"]).expanduser())
    except (OSError, ValueError) as error:
        raise UserError(
            f"pair.target: no tokenizer in {models['target']} ({first_line(error)}). Set"
            " pair.target=<a folder or hub id>"
        ) from error
    texts = [tokenizer(text)["input_ids"] for text in (TEXTS[0], *TEXTS)]
    greedy = {"temperature": 0.0, "ignore_eos": True}
    sizes = rising("batch_cost.requests", requests or [1])
    gammas = rising("batch_cost.gammas", gammas)
    longest, between = gammas[-1], gammas[len(gammas) // 2]

    def timed(name: str | None, **more: Any) -> Worker:
        config: dict[str, Any] = {}
        if name is not None:
            config = {"method": "custom_class", "model": f"serving.vllm.{name}"}
            config = {"speculative_config": config | {"num_speculative_tokens": longest}}
        arguments = arguments_of(models, max(sizes)) | {"additional_config": more}
        return Worker(python, "cost", torch.get_num_threads(), **arguments, **config)

    def step(worker: Worker, size: int) -> float:
        """Return seconds of a step of `size` requests, but for the first."""
        times, seeds = list[float](), [0] * size
        for text in texts:
            first = worker.ask([text] * size, seeds, None, max_tokens=1, **greedy)["seconds"]
            said = worker.ask([text] * size, seeds, None, max_tokens=max_new_tokens, **greedy)
            count = max_new_tokens - 1 - said["accepted_tokens"] / size
            times.append((said["seconds"] - first) / count)
            bar.update()
        return median(times[1:])

    total = len(sizes) * (len(gammas) + 2) * len(texts)  # in three engines, one after the other
    draft = dict[int, float]()
    with (
        tqdm(desc="vLLM's steps", total=total, unit=" texts", mininterval=1) as bar,
        tempfile.TemporaryDirectory() as scratch,
    ):
        worker = timed(None)
        steps = {size: [step(worker, size)] for size in sizes}
        worker.end()
        file = File(scratch) / "rows"
        worker = timed("Rows", draftpredict_rows=str(file))
        for gamma in gammas:
            file.write_text(str(gamma))
            for size in sizes:
                steps[size].append(step(worker, size))
        worker.end()
        chain = {"_target_": "decoding.structures.chain.Chain", "gamma_max": between}
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
        for size in sizes:
            alone = steps[size][1 + list(gammas).index(between)]
            draft[size] = max((step(worker, size) - alone) / between, 1e-6)
        worker.end()
    for size, seconds in steps.items():
        by_length = zip([0, *gammas], seconds, strict=True)
        shown = ", ".join(f"{gamma}: {each * 1e3:.1f}" for gamma, each in by_length)
        print(
            f"vLLM, {size} at once, ms: step by draft tokens {shown}; draft {draft[size] * 1e3:.2f}"
        )
    rows = [1, *(gamma + 1 for gamma in gammas)]
    return BatchTable("measured", sizes, rows, list(steps.values()), list(draft.values()))
