"""Distilling a small draft from a target's own chats: the loss, the optimiser and a resumable
training run.

Per response position the loss is KL(p || q), optionally mixed with the total variation TV(p, q) = 1
- sum min(p, q) (the rejection rate itself), plus a smooth-L1 regression of the draft's last hidden
state on the target's. The output layer (28 M parameters for SmolLM2, against 7 M trained ones)
costs more than the draft, so KL and TV are taken on a random share of the positions and their
gradient is written out instead of being traced."""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from decoding.models.draft_model import own_layers
from drafts.chats import Chat, ChatPool, batches
from runtime.errors import UserError, checked_count

States = Callable[[list[Chat]], tuple[Tensor, Tensor]]
"""Of a batch: hidden states of the draft and of the target, [n, H] each, at the same n
positions."""

ROWS = 128  # positions whose logits are held at once, [128, V] float32


@dataclass(frozen=True)
class TrainingConfig:
    """HarvestSettings of one run. `tokens` counts response tokens seen, repetitions included; the
    run ends there.

    lr rises over `warmup` steps, stays, and falls linearly to 2 % over the last `decay` share of
    `tokens`. dtype is that of the matrix products and of the logits; weights stay float32. bfloat16
    makes a run about three times as fast on a CPU with AMX, and gradients a few percent off."""

    tokens: int
    batch_tokens: int
    lr: float
    warmup: int
    decay: float
    momentum: float
    positions: float
    regression: float
    total_variation: float
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for key in ("tokens", "batch_tokens", "warmup"):
            checked_count(f"training.{key}", getattr(self, key))
        for key in ("lr", "decay", "momentum", "positions", "regression", "total_variation"):
            value = getattr(self, key)
            if (
                type(value) not in (int, float)
                or not 0 <= value < math.inf
                or (key == "lr" and value == 0)
            ):
                raise UserError(
                    f"training.{key}: {value} cannot be. Give a number, e.g. that of the config"
                    " file"
                )
        if not 0 < self.positions <= 1:
            raise UserError(
                f"training.positions: {self.positions} is no share. Use a number in (0, 1]"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(
                f"training.dtype: {self.dtype} is not supported. Use float32 or bfloat16"
            )


def training_config(settings: Mapping[str, Any], key: str) -> TrainingConfig:
    """Raises UserError for a setting that is missing or unknown, and as `TrainingConfig` does. key:
    theirs."""
    known = {field.name for field in fields(TrainingConfig)}
    if odd := sorted(known.symmetric_difference(settings)):
        raise UserError(
            f"{key}.{odd[0]}: {'is missing' if odd[0] in known else 'is no setting'}. See conf"
        )
    return TrainingConfig(**settings)


@dataclass(frozen=True)
class Overlap:
    """Means over positions. acceptance: sum_v min(p, q); agreement: argmax p = argmax q; kl: KL(p
    || q) in nats."""

    acceptance: float
    agreement: float
    kl: float
    positions: int


def draft_states(
    draft: LlamaForCausalLM, chats: list[Chat], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Last hidden states of draft and target, [n, H] each float32, at the n positions that predict
    a response."""
    width = max(len(chat.tokens) for chat in chats)
    ids = torch.zeros(len(chats), width, dtype=torch.long)
    for row, chat in enumerate(chats):
        ids[row, : len(chat.tokens)] = chat.tokens
    with torch.autocast(draft.device.type, dtype, enabled=dtype != torch.float32):
        hidden = draft.model(
            input_ids=ids.to(draft.device), use_cache=False
        ).last_hidden_state.float()
    own = [hidden[row, chat.start - 1 : len(chat.tokens) - 1] for row, chat in enumerate(chats)]
    return torch.cat(own), torch.cat([chat.hidden for chat in chats]).to(hidden)


@torch.no_grad()
def head_gradient(
    own: Tensor, target: Tensor, head: Tensor, total_variation: float
) -> tuple[Tensor, float]:
    """Gradient of the mean loss by `own`, and the mean acceptance. own, target: [n, H] hidden
    states; head: [V, H], whose dtype is that of the products.

    By the draft's logits, KL(p || q) has gradient q - p, and TV(p, q) has q (Q - 1[q < p]) with Q =
    sum_{q < p} q."""
    gradients, accepted = [], 0.0
    for own_rows, target_rows in zip(own.split(ROWS), target.split(ROWS), strict=True):
        p, q = (probs_of(rows, head) for rows in (target_rows, own_rows))
        below = (q < p).to(q)
        of_q, of_p = (torch.linalg.vecdot(distribution, below)[:, None] for distribution in (q, p))
        accepted += (1 - of_p + of_q).sum().item()
        factor = below.mul_(-total_variation).add_(1 - total_variation + total_variation * of_q)
        gradient = factor.mul_(q).sub_(p, alpha=1 - total_variation)
        gradients.append((gradient.to(head) @ head).to(own))
    return torch.cat(gradients) / len(own), accepted / len(own)


def probs_of(rows: Tensor, head: Tensor) -> Tensor:
    """[n, V] float32 distributions at temperature 1 of hidden states `rows` [n, H]."""
    return (rows.to(head) @ head.T).float().softmax(-1)


@torch.no_grad()
def measure_overlap(states: States, chats: list[Chat], head: Tensor, stride: int = 1) -> Overlap:
    """How close the draft's distribution is to the target's on every `stride`-th response position
    of `chats`, temperature 1.

    states: of a batch, as `draft_states` gives them.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    count = 0
    for batch in batches(chats, 4096, random.Random(0)):
        for own, target in zip(*(x[::stride].split(ROWS) for x in states(batch)), strict=True):
            log_p, log_q = (target @ head.T).log_softmax(-1), (own @ head.T).log_softmax(-1)
            p, q = log_p.exp(), log_q.exp()
            same = (p.argmax(-1) == q.argmax(-1)).sum()
            sums += (
                torch.stack([torch.minimum(p, q).sum(), same, (p * (log_p - log_q)).sum()])
                .double()
                .cpu()
            )
            count += len(own)
    acceptance, agreement, kl = (sums / count).tolist()
    return Overlap(acceptance, agreement, kl, count)


@torch.no_grad()
def orthogonalised(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal factor of `matrix` [m, n]: five quintic Newton-Schulz steps (Muon,
    Jordan et al. 2024).

    In the matrix's own dtype (torch.optim.Muon: always bfloat16, ten times slower on a CPU without
    it)."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon:
    """Momentum, orthogonalised, for weight matrices; AdamW for the norms' vectors. Its whole state
    is `state`."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        momentum: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.parameters, self.momentum, self.dtype = parameters, momentum, dtype
        self.state = {f"{name}.momentum": torch.zeros_like(p) for name, p in parameters.items()}
        self.state |= {
            f"{name}.square": torch.zeros_like(p) for name, p in parameters.items() if p.ndim == 1
        }
        self.factors: Mapping[
            str, float
        ] = {}  # of the learning rate, for parameters with one of their own

    @torch.no_grad()
    def step(self, lr: float, number: int) -> None:
        """Update from the gradients, which are cleared. `number` counts steps from 1."""
        for name, parameter in self.parameters.items():
            gradient, momentum = parameter.grad, self.state[f"{name}.momentum"]
            if gradient is None:  # nothing depended on it
                continue
            if parameter.ndim == 2:
                momentum.mul_(self.momentum).add_(gradient)
                update = orthogonalised((gradient + self.momentum * momentum).to(self.dtype)).to(
                    parameter
                )
                rate = lr * self.factors.get(name, 1.0)
                parameter.sub_(
                    update, alpha=0.2 * rate * math.sqrt(max(parameter.shape))
                )  # root mean square as Adam's
            else:
                square = self.state[f"{name}.square"]
                momentum.lerp_(gradient, 0.1)
                square.lerp_(gradient.square(), 0.05)
                unbiased = (square / (1 - 0.95**number)).sqrt_() + 1e-8
                parameter.sub_(lr * momentum / (1 - 0.9**number) / unbiased)
            parameter.grad = None


class Distillation:
    """One training run of `draft` on the chats of `pool`; `folder` holds its state and log."""

    def __init__(
        self,
        draft: LlamaForCausalLM,
        pool: ChatPool,
        config: TrainingConfig,
        folder: Path,
        seed: int,
    ) -> None:
        self.draft, self.pool, self.config, self.folder = draft, pool, config, folder
        self.dtype = getattr(torch, config.dtype)
        self.head = draft.lm_head.weight.detach()
        self.weights = [1.0]  # of the losses of each step
        draft.requires_grad_(False)
        for parameter in self.trained().values():
            parameter.requires_grad_(True)
        self.optimiser = Muon(self.trained(), config.momentum, self.dtype)
        self.products_head = self.head.to(self.dtype)
        self.progress: dict[str, Any] = {"step": 0, "tokens": 0, "epoch": 0, "seconds": 0.0}
        self.seed = seed

    def trained(self) -> dict[str, nn.Parameter]:
        """Everything that changes."""
        own = own_layers(self.draft)
        return {name: parameter for name, parameter in self.draft.named_parameters() if name in own}

    def states(self, chats: list[Chat]) -> list[tuple[Tensor, Tensor]]:
        """Of each step of a draft that is trained on, as `draft_states`."""
        return [draft_states(self.draft, chats, self.dtype)]

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
            self.pool.refresh()
            rng = random.Random(
                f"{self.seed}/{self.progress['step']}"
            )  # a run that goes on sees another order
            for batch in batches(self.pool.training, self.config.batch_tokens, rng):
                if self.progress["tokens"] >= tokens:
                    return
                yield batch
            self.progress["epoch"] += 1

    def train_step(self, batch: list[Chat]) -> dict[str, Any]:
        """One update. Returns the batch's mean acceptance, regression loss and lr with the run's
        progress."""
        started = time.perf_counter()
        steps = self.states(batch)
        gradients, acceptances = zip(
            *(self._distribution_gradient(*step) for step in steps), strict=True
        )
        regression = [nn.functional.smooth_l1_loss(own, target) for own, target in steps]
        weighted = torch.stack(
            [w * loss for w, loss in zip(self.weights, regression, strict=True)]
        ).sum()
        scaled = [w * gradient for w, gradient in zip(self.weights, gradients, strict=True)]
        torch.autograd.backward(
            [*(own for own, _ in steps), self.config.regression * weighted], [*scaled, None]
        )
        lr = self.learning_rate()
        self.progress["step"] += 1
        self.optimiser.step(lr, self.progress["step"])
        self.progress["tokens"] += len(steps[0][0])
        self.progress["seconds"] += time.perf_counter() - started
        return {
            "acceptance": acceptances[0],
            "regression": regression[0].item(),
            "lr": lr,
            **self.progress,
        }

    def _distribution_gradient(self, own: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """`head_gradient` on a random share of the rows, zeros for the others."""
        chosen = torch.randperm(len(own))[: max(1, round(len(own) * self.config.positions))].to(
            own.device
        )
        gradient, acceptance = head_gradient(
            own[chosen].detach(), target[chosen], self.products_head, self.config.total_variation
        )
        return torch.zeros_like(own).index_copy_(0, chosen, gradient), acceptance

    def save(self) -> None:
        """Write weights, optimiser state and progress; each file is replaced whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = self._weights() | self.optimiser.state
        partial = self.folder / "state.partial"
        save_file(
            {k: v.contiguous() for k, v in state.items()},
            partial,
            {"progress": json.dumps(self.progress)},
        )
        partial.rename(self.folder / "state.safetensors")

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.trained().items()}

    def resume(self) -> bool:
        """Continue from `folder`, if a state is there; the epoch it stopped in begins again, in
        another order.

        Raises UserError when the state is damaged or that of a draft of another shape.
        """
        path = self.folder / "state.safetensors"
        if not path.is_file():
            return False
        try:
            with safe_open(path, "pt") as file:
                progress = json.loads(file.metadata()["progress"])
            state = load_file(path, str(self.draft.device))
        except SafetensorError as error:
            raise UserError(
                f"folder: {path} is damaged ({error}). Delete it to train from the start"
            ) from error
        expected = self._weights() | self.optimiser.state
        if {name: x.shape for name, x in state.items()} != {
            name: x.shape for name, x in expected.items()
        }:
            raise UserError(
                f"folder: {path} is of a draft with other layers. Choose another folder=..., or"
                " delete it"
            )
        with torch.no_grad():
            for name, parameter in self.trained().items():
                parameter.copy_(state.pop(name))
        self.optimiser.state, self.progress = state, progress
        return True
