"""Training a draft on its target's own chats: one loop for every kind of draft.

The kinds (`pairs.ordinary`, `pairs.eagle`) differ in their model and in where their losses are
taken (`DraftInTraining`). Batches, learning rate, optimiser, saving and going on are here. Each
step of a draft has the loss of `pairs.losses` plus a smooth-L1 regression of the draft's last
hidden state on the target's."""

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from pairs.chats import Chat, ChatPool, batches
from pairs.losses import Overlap, head_gradient, measure_overlap
from pairs.muon import Muon
from runtime.errors import UserError
from runtime.settings.kinds import Count, Field, NotNegative, Positive, Probability

STATE = "state.safetensors"  # file of a run's weights, optimiser state and progress


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of the loop. lr rises over `warmup` steps, stays, and falls linearly to 2 % at the
    end."""

    tokens: Annotated[Count, "response tokens to train on, repetitions included"]
    batch_tokens: Annotated[Count, "padded tokens a step"]
    lr: Annotated[Positive, "learning rate, where it is highest"]
    warmup: Annotated[Count, "steps over which lr rises"]
    decay: Annotated[Probability, "share of the run, its end, over which lr falls"]
    momentum: Annotated[float, Field(ge=0, lt=1), "of the optimiser"]
    positions: Annotated[
        float,
        Field(gt=0, le=1),
        "share of the response positions the distribution loss is taken at",
    ]
    regression: Annotated[NotNegative, "weight of smooth-L1 on the last hidden state"]
    total_variation: Annotated[Probability, "share of TV in the distribution loss; the rest is KL"]
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        "of the matrix products and logits; bfloat16 is faster on a CPU with AMX, its gradients a"
        " few percent off; weights stay float32",
    ] = "float32"


class DraftInTraining(Protocol):
    """A draft while it is trained: all that one kind of draft has and another has not."""

    model: PreTrainedModel
    weights: Sequence[float]
    """Of the losses of step 1, 2, ...: step k is the k-th token of a draft."""
    factors: Mapping[str, float]
    """Of the learning rate, for parameters that have one of their own."""

    def trained(self) -> dict[str, nn.Parameter]:
        """Everything that changes, by name."""
        ...

    def states(self, chats: list[Chat], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Of each step: last hidden states of draft and target, [n, H] each float32, at the same n
        positions, which are among those that predict a response token.

        dtype: of the matrix products."""
        ...

    def write(self, folder: Path, vocabulary: Path | None) -> None:
        """Write the finished draft to its folder, in bfloat16. vocabulary: file of the tokens it
        was trained to say; None: all."""
        ...


class DraftTraining:
    """One run of the loop: `draft` is trained on the chats of `pool`; `folder` holds its state."""

    def __init__(
        self,
        draft: DraftInTraining,
        pool: ChatPool,
        config: TrainingConfig,
        folder: Path,
        seed: int,
        vocabulary: Tensor | None = None,
    ) -> None:
        """vocabulary: [k] the tokens whose probabilities the distribution loss is about; None:
        all."""
        self.draft, self.pool, self.config, self.folder = draft, pool, config, folder
        self.dtype, self.seed = getattr(torch, config.dtype), seed
        draft.model.requires_grad_(False)
        for parameter in draft.trained().values():
            parameter.requires_grad_(True)
        self.optimiser = Muon(draft.trained(), config.momentum, self.dtype, draft.factors)
        self.head = draft.model.lm_head.weight.detach()
        head = self.head.to(self.dtype)
        self.products_head = head if vocabulary is None else head[vocabulary]
        self.progress: dict[str, Any] = {"step": 0, "tokens": 0, "epoch": 0, "seconds": 0.0}
        self.resumed = False

    def learning_rate(self) -> float:
        done = self.progress["tokens"] / self.config.tokens
        rise = min(1.0, (self.progress["step"] + 1) / self.config.warmup)
        fall = min(1.0, max(0.02, (1 - done) / self.config.decay)) if self.config.decay else 1.0
        return self.config.lr * rise * fall

    def run(self, tokens: int, save_seconds: float) -> Iterator[dict[str, Any]]:
        """Train until `tokens` response tokens were seen; yield a record per step. Saves every
        `save_seconds` and when it ends, also by an interruption."""
        saved = time.monotonic()
        try:
            for batch in self._stream(tokens):
                yield self.train_step(batch)
                if time.monotonic() - saved > save_seconds:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()

    def _stream(self, tokens: int) -> Iterator[list[Chat]]:
        while True:
            begun = self.progress.get("begun") if self.resumed else None
            self.resumed = False
            if begun is None:
                self.pool.refresh()
                begun = {"step": self.progress["step"], "chats": len(self.pool.training)}
                self.progress["begun"] = begun
            # Named after the first step of the pass, which a run that goes on goes on with.
            rng = random.Random(f"{self.seed}/{begun['step']}")
            chats = self.pool.training[: begun["chats"]]
            order = list(batches(chats, self.config.batch_tokens, rng))
            for batch in order[self.progress["step"] - begun["step"] :]:
                if self.progress["tokens"] >= tokens:
                    return
                yield batch
            self.progress["epoch"] += 1

    def train_step(self, batch: list[Chat]) -> dict[str, Any]:
        """One update. Returns the batch's mean acceptance and regression loss of the first step of
        a draft, and lr, with the run's progress."""
        started = time.perf_counter()
        steps = self.draft.states(batch, self.dtype)
        chosen = torch.Generator().manual_seed(self.seed * 1_000_003 + self.progress["step"])
        found = [self._distribution_gradient(*step, chosen) for step in steps]
        regression = [nn.functional.smooth_l1_loss(own, target) for own, target in steps]
        self._backward(steps, [gradient for gradient, _ in found], regression)
        lr = self.learning_rate()
        self.progress["step"] += 1
        self.optimiser.step(lr, self.progress["step"])
        self.progress["tokens"] += len(steps[0][0])
        self.progress["seconds"] += time.perf_counter() - started
        shown = {"acceptance": found[0][1], "regression": regression[0].item(), "lr": lr}
        return shown | self.progress

    def _distribution_gradient(
        self, own: Tensor, target: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, float]:
        """`head_gradient` on a random share of the rows, zeros for the others."""
        share = max(1, round(len(own) * self.config.positions))
        chosen = torch.randperm(len(own), generator=generator)[:share].to(own.device)
        gradient, acceptance = head_gradient(
            own[chosen].detach(), target[chosen], self.products_head, self.config.total_variation
        )
        return torch.zeros_like(own).index_copy_(0, chosen, gradient), acceptance

    def _backward(
        self,
        steps: Sequence[tuple[Tensor, Tensor]],
        gradients: Sequence[Tensor],
        regression: Sequence[Tensor],
    ) -> None:
        """Add up the losses of all steps, the distribution loss by its `gradients`."""
        weights = self.draft.weights
        weighted = torch.stack([w * loss for w, loss in zip(weights, regression, strict=True)])
        scaled = [w * gradient for w, gradient in zip(weights, gradients, strict=True)]
        torch.autograd.backward(
            [*(own for own, _ in steps), self.config.regression * weighted.sum()], [*scaled, None]
        )

    @torch.no_grad()
    def held_out_scores(self) -> list[Overlap]:
        """Of step 1, 2, ... of a draft, on the held-out chats, over the whole vocabulary."""

        def of_step(step: int) -> Overlap:
            def states(chats: list[Chat]) -> tuple[Tensor, Tensor]:
                return self.draft.states(chats, self.dtype)[step]

            return measure_overlap(states, self.pool.validation, self.head, stride=2)

        return [of_step(step) for step in range(len(self.draft.weights))]

    def save(self) -> None:
        """Write weights, optimiser state and progress; the file is replaced whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: x.contiguous() for name, x in self._state().items()}
        partial = self.folder / "state.partial"
        partial.write_bytes(save(tensors, {"progress": json.dumps(self.progress)}))
        partial.rename(self.folder / STATE)

    def _state(self) -> dict[str, Tensor]:
        weights = {name: parameter.detach() for name, parameter in self.draft.trained().items()}
        return weights | self.optimiser.state

    def resume(self) -> bool:
        """Continue from `folder`, if a state is there: with the same chats, as if it had not been
        interrupted.

        Raises UserError when the state is damaged or that of a draft of another shape.
        """
        path = self.folder / STATE
        if not path.is_file():
            return False
        try:
            with safe_open(path, "pt") as file:
                progress = json.loads(file.metadata()["progress"])
            state = load_file(path, str(self.draft.model.device))
        except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"out: {path} is damaged ({error}). Delete it to train from the start"
            ) from error
        if {name: x.shape for name, x in state.items()} != {
            name: x.shape for name, x in self._state().items()
        }:
            raise UserError(
                f"out: {path} is of a draft with other layers. Choose another out=..., or delete it"
            )
        with torch.no_grad():
            for name, parameter in self.draft.trained().items():
                parameter.copy_(state.pop(name))
        self.optimiser.state, self.progress, self.resumed = state, progress, True
        return True
