"""Hidden states and embeddings that a harvest did not store (`features=recompute`), computed again
from its token ids."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache

import torch
from omegaconf import OmegaConf
from torch import Tensor

from data_gen.rollouts import Places, Texts, candidate_states, forward_along, states_of
from data_gen.room import ON_A_CORE, ON_A_DEVICE
from data_gen.storage.dataset import Harvest
from decoding.models.cached_lm import CachedLM
from decoding.models.loading import ModelPair, load_pair, pair_identity
from decoding.settings import Pair
from predictors.features.layers import RecordedLayers
from runtime.compatibility import incompatible
from runtime.errors import UserError

Row = Mapping[str, Tensor]
Maker = Callable[[ModelPair, Row, Row, RecordedLayers], Tensor]
"""(pair, responses row, records row, layers) of a prompt -> a column of its samples."""


def recompute(
    harvest: Harvest, kind: str, split: str, columns: Collection[str], settings: Pair
) -> Iterator[Row]:
    """Yield the recomputed columns of `data_gen.samples.read_columns(harvest, kind, split,
    columns)`, prompt by prompt, equal up to rounding to those that a harvest would have stored.

    settings: of the pair that was harvested. Raises UserError if it is another pair.
    """
    pair = _loaded(OmegaConf.to_yaml(settings.composed, resolve=True))
    models = {"target": harvest.pair.target, "draft": harvest.pair.draft}
    if unlike := incompatible({"pair": pair_identity(pair)}, {"pair": models}):
        raise UserError(
            f"{unlike[-1].name}: it is not the one of the harvest, {harvest.pair.name}"
            f", whose hidden states are to be recomputed. Give"
            " the pair that was harvested"
        )
    answers = harvest.by_prompt("responses", split, ["prompt_tokens", "response_tokens"])
    ids = ["position", "token"] if kind == "mixed" else ["anchor", "committed", "token"]
    for answer, row in zip(answers, harvest.by_prompt(kind, split, ids), strict=True):
        yield {name: MAKERS[kind, name](pair, answer, row, harvest.inputs) for name in columns}


@lru_cache(maxsize=1)
def _loaded(pair: str) -> ModelPair:
    """Load the pair of these settings (JSON); cached for the next split."""
    return load_pair(Pair.of(OmegaConf.create(pair)))


def text_of(answer: Row) -> Tensor:
    return torch.cat([answer["prompt_tokens"], answer["response_tokens"]])


def run(lm: CachedLM, tokens: Tensor) -> None:
    """Run the model so that its cache holds exactly these tokens."""
    lm.reset()
    lm.forward(tokens, logits="none")


def run_draft(pair: ModelPair, answer: Row) -> None:
    """Run the draft so that its cache holds prompt and response, as after verification."""
    if pair.draft.reads_target:
        run(pair.target, text_of(answer))
    run(pair.draft, text_of(answer))


def mixed_hidden(pair: ModelPair, answer: Row, row: Row, layers: RecordedLayers) -> Tensor:
    """Return the draft's hidden states [n, L * H] bfloat16 at the kept candidates of a mixed
    sequence (`data_gen.records.mixed`)."""
    start, sequence = len(answer["prompt_tokens"]), answer["response_tokens"].clone()
    sequence[row["position"]] = row["token"]
    run_draft(pair, answer)
    read = layers.of("draft_hidden")
    text = Texts(Places(torch.tensor([start - 1]), torch.zeros(1, dtype=torch.int64)), [sequence])
    return candidate_states(pair.draft, text, [row["position"]], read, together(pair))


def together(pair: ModelPair) -> int:
    """Return how many rollouts one forward advances."""
    return (ON_A_CORE if pair.draft.device.type == "cpu" else ON_A_DEVICE).rollouts


def _along_text(lm: CachedLM, answer: Row, rows: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Return the hidden states of some rows [A] of prompt and response, from an empty cache."""
    lm.reset()
    wanted: list[int] = rows.tolist()
    return states_of(lm.forward(text_of(answer), hidden=layers, hidden_rows=wanted, logits="none"))


def target_hidden(pair: ModelPair, answer: Row, row: Row, layers: RecordedLayers) -> Tensor:
    """Return the target's hidden states [A, L * H] bfloat16 at the last verified position before
    each anchor."""
    verified = row["anchor"] + len(answer["prompt_tokens"]) - 2
    return _along_text(pair.target, answer, verified, layers.of("target_hidden"))


def draft_first(pair: ModelPair, answer: Row, row: Row, layers: RecordedLayers) -> Tensor:
    """Return the draft's hidden states [A, L * H] bfloat16 at the last committed token before each
    anchor."""
    if pair.draft.reads_target:
        run(pair.target, text_of(answer))
    committed = row["anchor"] + len(answer["prompt_tokens"]) - 1
    return _along_text(pair.draft, answer, committed, layers.of("draft_hidden"))


def draft_hidden(pair: ModelPair, answer: Row, row: Row, layers: RecordedLayers) -> Tensor:
    """Return the draft's hidden states [A, gamma, L * H] bfloat16 at every token of the rounds."""
    run_draft(pair, answer)
    draft, count, read = pair.draft, len(row["anchor"]), layers.of("draft_hidden")
    base, last = draft.length, row["anchor"] + len(answer["prompt_tokens"]) - 1
    tokens = row["token"].view(count, -1)
    gamma = tokens.shape[1]
    at_once = 1 if draft.reads_target else gamma  # a draft that reads its own states goes stepwise
    places, parts = Places(last, torch.zeros_like(last)), list[Tensor]()
    for some in torch.arange(count).split(max(1, together(pair) * 4 // gamma)):
        here = places.take(some)
        depths = [
            states_of(forward_along(draft, here, drafted, base, hidden=read, logits="none"))
            for drafted in tokens[some].split(at_once, 1)
        ]
        draft.crop(base)
        parts.append(torch.cat(depths).view(gamma, len(some), -1).transpose(0, 1))
    return torch.cat(parts)


def embedding(pair: ModelPair, answer: Row, row: Row, layers: RecordedLayers) -> Tensor:
    """Return the input embeddings [n, E] or [A, gamma, E] bfloat16 of every drawn token."""
    shape = [len(row["anchor"]), -1] if "anchor" in row else [-1]
    return embedded(pair.target, row["token"]).view(*shape, pair.target.embed(0).shape[0])


def committed_embedding(pair: ModelPair, answer: Row, row: Row, layers: RecordedLayers) -> Tensor:
    """Return the input embeddings [A, E] bfloat16 of the last committed token before each
    anchor."""
    return embedded(pair.target, row["committed"])


def embedded(target: CachedLM, tokens: Tensor) -> Tensor:
    return torch.stack([target.embed(token) for token in tokens.tolist()]).bfloat16()


MAKERS: Mapping[tuple[str, str], Maker] = {
    ("mixed", "draft_hidden"): mixed_hidden,
    ("mixed", "embedding"): embedding,
    ("rounds", "draft_hidden"): draft_hidden,
    ("rounds", "draft_first"): draft_first,
    ("rounds", "target_hidden"): target_hidden,
    ("rounds", "embedding"): embedding,
    ("rounds", "committed_embedding"): committed_embedding,
}
"""By kind of record and column."""
