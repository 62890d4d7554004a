"""External responses that vLLM gives offline, in a process and an environment of its own.

Prompts go to it as token ids and responses come back as ids, under the harvest's own distribution:
no template and no default of a server has a say. Responses are kept in `answers.jsonl` in the
folder of the dataset, a batch at a time; the next run asks for the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Annotated

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from data_gen.prompts import Prompt
from data_gen.prompts.render import prompt_ids
from data_gen.responses.external import ExternalResponse, seed_of
from data_gen.responses.log import open_log
from data_gen.settings import HarvestSettings
from runtime.errors import UserError
from runtime.files import file_hash
from runtime.json_files import digest
from runtime.settings.kinds import Count, Path, Text
from runtime.vllm_process import Worker


@dataclass(frozen=True)
class Vllm:
    """vLLM with the pair's target."""

    python: Annotated[Path, "the Python that vLLM is installed for, as `make vllm` brings it"]
    model: Annotated[Path, "folder of the target"]
    dtype: Annotated[Text, "of its weights there"]
    max_length: Annotated[Count, "of a prompt and its response, tokens"]
    at_once: Annotated[Count, "prompts answered together, and kept together"]

    external, own_clock = True, False

    def fetch(
        self, prompts: Sequence[Prompt], settings: HarvestSettings, out: File, ask: bool
    ) -> dict[str, ExternalResponse]:
        """Ask for the responses that `out` does not have yet. Raises UserError if vLLM fails; those
        that have arrived are kept."""
        most, folder = settings.max_new_tokens, File(self.model).expanduser()
        sampling = {**settings.warp.fields(), "max_tokens": most}
        files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        model = digest({path.name: file_hash(path) for path in files if path.is_file()})
        fields = {"engine": "vllm", "model": model, "dtype": self.dtype, "seed": settings.seed}
        fields |= sampling
        with open_log(out, fields) as log:
            missing = log.missing(list(prompts))
            if missing and not ask:
                raise UserError(
                    f"estimate: {len(missing)} responses are still to be asked from vLLM, which"
                    " takes as long as it takes. Run without estimate=true"
                )
            if not missing:
                return log.responses
            tokenizer, room = AutoTokenizer.from_pretrained(folder), self.max_length - most
            ids = [prompt_ids(prompt, tokenizer, room).tolist() for prompt in missing]
            worker = Worker(
                self.python,
                "responses",
                torch.get_num_threads(),
                model=str(folder),
                dtype=self.dtype,
                max_model_len=self.max_length,
                max_num_seqs=self.at_once,
            )
            with tqdm(total=len(missing), unit=" prompts", desc="responses") as bar:
                for first in range(0, len(missing), self.at_once):
                    some = slice(first, first + self.at_once)
                    seeds = [seed_of(settings.seed, prompt) for prompt in missing[some]]
                    said = worker.ask(ids[some], seeds, **sampling)
                    answers = zip(missing[some], said["tokens"], said["reasons"], strict=True)
                    for prompt, tokens, reason in answers:
                        row = {"response_tokens": tokens, "finish_reason": reason}
                        log.append(prompt, row | ({"date": prompt.date} if prompt.date else {}))
                    bar.update(len(said["tokens"]))
            worker.end()
            return log.responses
