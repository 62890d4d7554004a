"""vLLM: a proposer of drafts with a tuned stop rule, lengths by batch size, and acceptance rates
for its synthetic sampler."""

import json
import pathlib
from dataclasses import dataclass
from itertools import accumulate
from shlex import quote
from typing import Annotated, Any

from evaluation.replay.thresholds import NO_ADVICE, checkpoint_hash
from runtime.errors import UserError
from runtime.settings.kinds import Path, Text
from serving.export.base import Export, Given

CONFIG, SYNTHETIC, PROPOSER = "speculative_config.json", "synthetic.json", "proposer.json"
COPIES = {"ngram_max": 8, "ngram_min": 2, "stretch": 2}  # those of conf/structure/sources.yaml


@dataclass(frozen=True)
class Vllm:
    """Exports the values of --speculative-config; of `thresholds` also the file of
    `serving.vllm.Proposer`, which drafts with the tuned rule."""

    method: Annotated[
        Text, "of the draft where there are no thresholds: eagle3, eagle, draft_model, dspark, ..."
    ]
    rule: Annotated[Text | None, "the rule among the thresholds; null: the one that is advised"]
    checkpoint: Annotated[Path | None, "folder of the predictor that the rule asks; null: none"]
    python: Annotated[Path, "the Python that vLLM is installed for, for the command to paste"]
    copies: Annotated[bool, "whether the text is copied where it repeats itself"]
    adaptive: Annotated[
        bool, "whether drafts are bounded by the speed that is measured with so many requests"
    ]

    def export(self, given: Given) -> Export:
        made, schedule = Export("vllm 0.33.0"), given.schedule
        longest = schedule.longest if schedule else given.gamma
        proposer = None if longest == 0 else self._proposer(given, made)
        if proposer:
            made.checked = "vllm 0.32.0"
            made.add_json(PROPOSER, proposer)
            most = proposer["structure"]["gamma_max"]
            if longest is not None and longest > most:
                made.left_out.append(f"schedule: drafts are at most {most} long, as tuned")
            longest = min(longest or most, most)
        draft = {"method": self.method, "model": given.draft}
        if proposer:
            draft = {"method": "custom_class", "model": "serving.vllm.Proposer"}
        if longest:
            config: dict[str, Any] = {**draft, "num_speculative_tokens": longest}
            if schedule is not None:
                ranges = [[low, high, min(size, longest)] for low, high, size in schedule.ranges]
                config["num_speculative_tokens_per_batch_size"] = ranges
            made.add_json(CONFIG, config)
            if given.calibration is not None:
                # Synthetic: drafts are accepted at the rates of the calibrated data, whatever their
                # tokens: for load tests, not for answers.
                rates = [min(max(rate, 0.0), 1.0) for rate in given.calibration["accepted"]]
                synthetic = {
                    **draft,
                    "num_speculative_tokens": len(rates),
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": list(accumulate(rates, min)),
                }
                made.add_json(SYNTHETIC, synthetic)
        serve, more = "vllm serve", ""
        if proposer:  # which the wheel for CPUs starts so alone
            serve = f"{self.python} -m vllm.entrypoints.openai.api_server --model"
            file = pathlib.Path(given.folder).absolute() / PROPOSER  # wherever vLLM is started
            named = json.dumps({"draftpredict": str(file)})
            more = f" --additional-config {quote(named)}"
        start = f"{serve} {quote(given.target)}"
        cpu = ["export VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-1"]  # GiB; cores
        made.launch = (cpu if proposer else []) + [
            f'{start} --speculative-config "$(cat {given.file(name)})"{more}'
            for name in made.files
            if name != PROPOSER
        ]
        if longest == 0:
            made.left_out.append(
                "schedule: nothing is drafted at any batch size. Serve without a draft"
            )
        made.left_out += given.left_out(
            calibration="vLLM reads no temperatures. What is the same at every position can"
            " be multiplied into the head of a DSpark checkpoint",
            costs="vLLM profiles its own at start-up (enable_adaptive_verification)",
        )
        if schedule is not None and longest:
            made.left_out.append(
                "schedule: more requests than its last range draft as that one does"
            )
        return made

    def _proposer(self, given: Given, made: Export) -> dict[str, Any] | None:
        """Return the content of the proposer's file; None where there are no thresholds that fit,
        or no draft pays."""
        tuned = given.thresholds
        if tuned is None:
            return None
        if tuned["draft_warp"]["temperature"] != 0:
            made.left_out.append(
                "thresholds: they are of a sampled draft, and vLLM tests a proposer's tokens as"
                " point masses. Tune on a harvest with draft_warp.temperature=0"
            )
            return None
        chosen = tuned["results"]["chosen"]
        name, rules = self.rule or chosen["advice"], chosen["rules"]
        if name == NO_ADVICE or (name in rules and not rules[name]["speculate"]):
            made.left_out.append("thresholds: no draft pays at their costs. Serve without one")
            return None
        if name not in rules:
            made.left_out.append(
                f"thresholds: {name} is none of their rules ({', '.join(rules)}). Set serving.rule"
            )
            return None
        rule = tuned["rules"][name]
        stop = json.loads(json.dumps(rule["stop"]))
        *groups, last = rule["setting"].split(".")
        inner = stop
        for group in groups:
            inner = inner[group]
        inner[last] = rules[name]["threshold"]
        if last == "gamma":
            inner[last] = int(inner[last])
        if rule["checkpoint"] is not None:
            stop["checkpoint"] = str(self._checkpoint(name, rule["checkpoint"]))
        gamma, draft = given.gamma or tuned["gamma"], pathlib.Path(given.draft)
        structure: dict[str, Any] = {"_target_": "decoding.structures.chain.Chain"}
        if self.copies:
            structure = {"_target_": "decoding.structures.sources.Sources", **COPIES}
        return {
            "format_version": 1,
            "draft": str(draft.absolute()) if draft.is_dir() else given.draft,
            "dtype": tuned["measured_on"]["dtypes"]["draft"].removeprefix("torch.")
            if tuned["measured_on"]
            else "auto",
            "structure": {**structure, "gamma_max": gamma},
            "stop": stop,
            "adaptive": self.adaptive,
        }

    def _checkpoint(self, name: str, wanted: str) -> pathlib.Path:
        key = "serving.checkpoint"
        if self.checkpoint is None:
            raise UserError(
                f"{key}: expected the folder of the predictor that {name} asks, got null. Name it,"
                " or another rule (serving.rule)"
            )
        folder = pathlib.Path(self.checkpoint).expanduser().absolute()
        if checkpoint_hash(folder, key) != wanted:
            raise UserError(
                f"{key}: expected the predictor that the thresholds were tuned with, got another in"
                f" {folder}. Name that one, or tune again: python scripts/tune.py"
            )
        return folder
