"""Training a draft on its target's own chats: one loop for every kind of draft.

The kinds (`pairs.ordinary`, `pairs.eagle`) differ in their model and in the positions of their
losses (`DraftInTraining`). Losses, optimiser, batches, learning rate, saving and resuming are here.

Per response position the loss is KL(p || q), mixed with a share of the total variation
TV(p, q) = 1 - sum min(p, q), which is the rejection rate itself, plus a smooth-L1 regression of the
draft's last hidden state on the target's. The output layer costs more than a small draft, so the
first part uses a random share of the positions, and its gradient is computed by a formula instead
of autograd."""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from pairs.chats import Chat, ChatPool, batches
from runtime.errors import UserError
from runtime.settings.kinds import Count, Field, NotNegative, Positive, Probability

ROWS = 128  # positions whose logits are held at once, [128, V] float32
STATE = "state.safetensors"  # file of a run's weights, optimiser state and progress


# Losses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """Means over positions. acceptance: sum_v min(p, q); agreement: argmax p = argmax q; kl: KL(p
    || q) in nats."""

    acceptance: float
    agreement: float
    kl: float
    positions: int


@torch.no_grad()
def head_gradient(
    own: Tensor, target: Tensor, head: Tensor, total_variation: float
) -> tuple[Tensor, float]:
    """Return the gradient of the mean loss with respect to `own`, and the mean acceptance. own,
    target: [n, H] hidden states; head: [V, H], whose dtype is that of the products.

    With respect to the draft's logits, KL(p || q) has gradient q - p, and TV(p, q) has q (Q - 1[q <
    p]) with Q = sum_{q < p} q."""
    gradients, accepted = [], 0.0
    for own_rows, target_rows in zip(own.split(ROWS), target.split(ROWS), strict=True):
        p, q = ((rows.to(head) @ head.T).float().softmax(-1) for rows in (target_rows, own_rows))
        below = (q < p).to(q)
        of_q, of_p = (torch.linalg.vecdot(distribution, below)[:, None] for distribution in (q, p))
        accepted += (1 - of_p + of_q).sum().item()
        factor = below.mul_(-total_variation).add_(1 - total_variation + total_variation * of_q)
        gradient = factor.mul_(q).sub_(p, alpha=1 - total_variation)
        gradients.append((gradient.to(head) @ head).to(own))
    return torch.cat(gradients) / len(own), accepted / len(own)


@torch.no_grad()
def measure_overlap(
    states: Callable[[list[Chat]], tuple[Tensor, Tensor]],
    chats: list[Chat],
    head: Tensor,
    stride: int = 1,
) -> Overlap:
    """Return how close the draft's distribution is to the target's on every `stride`-th response
    position of `chats`, temperature 1.

    states: of a batch, hidden states of the draft and of the target, [n, H] each, at the same n
    positions; head: [V, H].
    """
    sums = torch.zeros(3, dtype=torch.float64)
    count = 0
    for batch in batches(chats, 4096, random.Random(0)):
        for own, target in zip(*(x[::stride].split(ROWS) for x in states(batch)), strict=True):
            log_p, log_q = (target @ head.T).log_softmax(-1), (own @ head.T).log_softmax(-1)
            p, q = log_p.exp(), log_q.exp()
            same = (p.argmax(-1) == q.argmax(-1)).sum()
            kl = (p * (log_p - log_q)).sum()
            sums += torch.stack([torch.minimum(p, q).sum(), same, kl]).double().cpu()
            count += len(own)
    acceptance, agreement, kl = (sums / count).tolist()
    return Overlap(acceptance, agreement, kl, count)


# The optimiser ------------------------------------------------------------------------------------


@torch.no_grad()
def orthogonalised(matrix: Tensor) -> Tensor:
    """Return an approximation of the orthogonal factor of `matrix` [m, n], by five quintic
    Newton-Schulz steps (Muon, Jordan et al. 2024).

    In the matrix's own dtype (torch.optim.Muon: always bfloat16, slow on a CPU without it)."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon:
    """An optimiser: orthogonalised momentum for weight matrices, AdamW for the norms' vectors. Its
    whole state is `state`."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        momentum: float,
        dtype: torch.dtype,
        factors: Mapping[str, float],
    ) -> None:
        """factors: of the learning rate, for parameters that have a different one."""
        self.parameters, self.momentum, self.dtype = parameters, momentum, dtype
        self.factors = factors
        self.state = {f"{name}.momentum": torch.zeros_like(p) for name, p in parameters.items()}
        self.state |= {
            f"{name}.square": torch.zeros_like(p) for name, p in parameters.items() if p.ndim == 1
        }

    @torch.no_grad()
    def step(self, lr: float, number: int) -> None:
        """Update from the gradients, which are cleared. `number` counts steps from 1."""
        for name, parameter in self.parameters.items():
            gradient, momentum = parameter.grad, self.state[f"{name}.momentum"]
            if gradient is None:  # nothing depended on it
                continue
            if parameter.ndim == 2:
                momentum.mul_(self.momentum).add_(gradient)
                step = orthogonalised((gradient + self.momentum * momentum).to(self.dtype))
                # gives the update the root mean square of Adam's
                rate = 0.2 * lr * self.factors.get(name, 1.0) * math.sqrt(max(parameter.shape))
                parameter.sub_(step.to(parameter), alpha=rate)
            else:
                square = self.state[f"{name}.square"]
                momentum.lerp_(gradient, 0.1)
                square.lerp_(gradient.square(), 0.05)
                unbiased = (square / (1 - 0.95**number)).sqrt_() + 1e-8
                parameter.sub_(lr * momentum / (1 - 0.9**number) / unbiased)
            parameter.grad = None


# The loop -----------------------------------------------------------------------------------------


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
    """A draft while it is trained: the interface of the kinds of drafts."""

    model: PreTrainedModel
    weights: Sequence[float]
    """Of the losses of step 1, 2, ...: step k is the k-th token of a draft."""
    factors: Mapping[str, float]
    """Of the learning rate, for parameters that have one of their own."""

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        ...

    def states(self, chats: list[Chat], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return for each step the last hidden states of draft and target, [n, H] each float32, at
        the same n positions, all of which predict a response token.

        dtype: of the matrix products."""
        ...

    def write(self, folder: Path, vocabulary: Path | None) -> None:
        """Write the finished draft to its folder, in bfloat16. vocabulary: file of the tokens it
        was trained to propose; None: all."""
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
        """vocabulary: [k] tokens to which the distributions in the loss are restricted; None:
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
        `save_seconds` and at the end, also on an interrupt."""
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
            # Seeded by the first step of the pass, so that a resumed run has the same order.
            rng = random.Random(f"{self.seed}/{begun['step']}")
            chats = self.pool.training[: begun["chats"]]
            order = list(batches(chats, self.config.batch_tokens, rng))
            for batch in order[self.progress["step"] - begun["step"] :]:
                if self.progress["tokens"] >= tokens:
                    return
                yield batch
            self.progress["epoch"] += 1

    def train_step(self, batch: list[Chat]) -> dict[str, Any]:
        """Make one update. Return the batch's mean acceptance and regression loss of the first step
        of a draft, and lr, with the run's progress."""
        started = time.perf_counter()
        steps = self.draft.states(batch, self.dtype)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.progress["step"])
        gradients, accepted = list[Tensor](), list[float]()
        for weight, (own, target) in zip(self.draft.weights, steps, strict=True):
            share = max(1, round(len(own) * self.config.positions))
            chosen = torch.randperm(len(own), generator=generator)[:share].to(own.device)
            rows, head = (own[chosen].detach(), target[chosen]), self.products_head
            gradient, acceptance = head_gradient(*rows, head, self.config.total_variation)
            gradients.append(weight * torch.zeros_like(own).index_copy_(0, chosen, gradient))
            accepted.append(acceptance)
        regression = [nn.functional.smooth_l1_loss(own, target) for own, target in steps]
        weighted = torch.stack(
            [weight * loss for weight, loss in zip(self.draft.weights, regression, strict=True)]
        )
        torch.autograd.backward(
            [*(own for own, _ in steps), self.config.regression * weighted.sum()],
            [*gradients, None],
        )
        lr = self.learning_rate()
        self.progress["step"] += 1
        self.optimiser.step(lr, self.progress["step"])
        self.progress["tokens"] += len(steps[0][0])
        self.progress["seconds"] += time.perf_counter() - started
        shown = {"acceptance": accepted[0], "regression": regression[0].item(), "lr": lr}
        return shown | self.progress

    @torch.no_grad()
    def held_out_scores(self) -> list[Overlap]:
        """Return the overlaps of step 1, 2, ... of a draft on the held-out chats, over the whole
        vocabulary."""

        def states(step: int, chats: list[Chat]) -> tuple[Tensor, Tensor]:
            return self.draft.states(chats, self.dtype)[step]

        return [
            measure_overlap(partial(states, step), self.pool.validation, self.head, stride=2)
            for step in range(len(self.draft.weights))
        ]

    def save(self) -> None:
        """Write weights, optimiser state and progress, atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: x.contiguous() for name, x in self._state().items()}
        partial = self.folder / "state.partial"
        partial.write_bytes(save(tensors, {"progress": json.dumps(self.progress)}))
        partial.rename(self.folder / STATE)

    def _state(self) -> dict[str, Tensor]:
        weights = {name: parameter.detach() for name, parameter in self.draft.trained().items()}
        return weights | self.optimiser.state

    def resume(self) -> bool:
        """Continue from the state in `folder`, if there is one, with the same chats, as if the run
        had not been interrupted.

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
