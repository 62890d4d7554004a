"""The one training loop, run through `accelerate`: schedule, clipping, early stopping, resume after an interruption."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from predictors.errors import UserError
from predictors.resampling import EpochSampler

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
State = dict[str, torch.Tensor]
CHUNK = 8192


class Logger(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...


class Items(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows x [n, D] (served as float32) and y [n], in items: one row each, or with `group` [n] all rows of a prompt."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, group: torch.Tensor | None = None) -> None:
        self.x, self.y = x, y
        self.rows = None if group is None else [torch.nonzero(group == g).flatten() for g in torch.unique(group)]

    def __len__(self) -> int:
        return len(self.x) if self.rows is None else len(self.rows)

    def __getitems__(self, items: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.as_tensor(items) if self.rows is None else torch.cat([self.rows[item] for item in items])
        return self.x[rows].float(), self.y[rows]


@dataclass
class Trainer:
    """AdamW with gradient clipping; the weights of the epoch with the lowest validation loss are kept.

    batch_size: items per micro-batch (`Items`). accumulate: micro-batches per optimiser step. schedule: ``"cosine"``
    (per step, after `warmup_ratio` of the steps) or ``"plateau"`` (ReduceLROnPlateau, factor 0.5, patience 2 epochs).
    patience: epochs without a lower validation loss before training ends. validation_fraction: share of the training
    prompts held out for that; no other split is looked at. state: file the run can continue from, written every epoch.
    """

    epochs: int
    batch_size: int
    lr: float
    schedule: str
    accumulate: int = 1
    weight_decay: float = 0.0
    warmup_ratio: float = 0.0
    clip: float = 1.0
    patience: int = 5
    validation_fraction: float = 0.1
    seed: int = 0
    logger: Logger | None = None
    state: Path | None = None
    history: list[dict[str, float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "plateau"):
            raise UserError(f"trainer.schedule: {self.schedule!r} is unknown. Use cosine or plateau")
        if min(self.epochs, self.batch_size, self.accumulate, self.patience) < 1:
            raise UserError("trainer: epochs, batch_size, accumulate and patience must be at least 1")
        if self.lr <= 0 or not 0 < self.validation_fraction < 1:
            raise UserError("trainer: lr must be above 0 and validation_fraction between 0 and 1")

    def train(
        self,
        module: torch.nn.Module,
        items: Items,
        held_out: Items,
        loss: Loss,
        held_out_loss: Loss,
        weights: torch.Tensor | None = None,
    ) -> torch.nn.Module:
        """Train `module` in place and return it, on the CPU, in eval mode, with its best weights.

        weights: [len(items)] draw items by weight with replacement instead of once each. `self.history` then holds
        one dict per epoch.
        """
        run = _Run(self, module, EpochSampler(len(items), self.seed, weights), items)
        self.history, best = _resume(self.state, run)
        with _progress(self, run) as bar:
            for epoch in range(len(self.history), self.epochs):
                if _since_best(self.history) >= self.patience:
                    break
                row = {"epoch": epoch + 1, "train_loss": run.epoch(epoch, loss, bar.update), "lr": run.lr()}
                logits = logits_in_chunks(run.module, held_out.x)
                row["validation_loss"] = _finite(float(held_out_loss(logits, held_out.y)))
                run.end_epoch(row["validation_loss"])
                self.history.append(row)
                if _since_best(self.history) == 0:
                    best = run.weights()
                _store(self.state, run, best, self.history)
                bar.set_postfix(train=f"{row['train_loss']:.4f}", validation=f"{row['validation_loss']:.4f}")
                if self.logger is not None:
                    self.logger.log({f"train/{name}": value for name, value in row.items()}, step=epoch + 1)
        module = run.module.cpu()
        module.load_state_dict(best)
        return module.eval()

    def forget(self) -> None:
        """Remove the resume file; call it once the trained model is saved."""
        if self.state is not None:
            self.state.unlink(missing_ok=True)


class _Run:
    """Everything that changes while training."""

    def __init__(self, trainer: Trainer, module: torch.nn.Module, sampler: EpochSampler, items: Items) -> None:
        self.clip, self.seed, self.sampler = trainer.clip, trainer.seed, sampler
        self.accelerator = Accelerator(gradient_accumulation_steps=trainer.accumulate)
        if self.accelerator.num_processes > 1:
            raise UserError("train.py: a head this small trains in one process. Run: python train.py")
        loader = DataLoader(items, batch_size=trainer.batch_size, sampler=sampler, collate_fn=_already_a_batch)
        optimizer = torch.optim.AdamW(module.parameters(), lr=trainer.lr, weight_decay=trainer.weight_decay)
        self.prepared, self.optimizer, self.loader = self.accelerator.prepare(module, optimizer, loader)
        self.steps = trainer.epochs * math.ceil(len(self.loader) / trainer.accumulate)
        self.scheduler: LambdaLR | ReduceLROnPlateau
        if trainer.schedule == "cosine":
            warmup = math.ceil(trainer.warmup_ratio * self.steps)
            self.scheduler = LambdaLR(optimizer, lambda step: cosine(step, warmup, self.steps))
        else:
            self.scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=2)

    @property
    def module(self) -> torch.nn.Module:
        unwrapped: torch.nn.Module = self.accelerator.unwrap_model(self.prepared)
        return unwrapped

    def epoch(self, epoch: int, loss: Loss, advance: Callable[[], Any]) -> float:
        """One pass over the items; returns the mean micro-batch loss."""
        torch.manual_seed(self.seed * 1_000_003 + epoch)  # dropout depends on the epoch alone: resumable
        self.sampler.epoch = epoch
        self.prepared.train()
        total = torch.zeros((), device=self.accelerator.device)
        for x, y in self.loader:
            total += self.step(loss, x, y)
            advance()
        return _finite(float(total) / len(self.loader))

    def step(self, loss: Loss, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.accelerator.accumulate(self.prepared):
            value = loss(self.prepared(x), y)
            self.accelerator.backward(value)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.prepared.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients and isinstance(self.scheduler, LambdaLR):
            self.scheduler.step()
        return value.detach()

    def end_epoch(self, validation_loss: float) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(validation_loss)

    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def weights(self) -> State:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}


def cosine(step: int, warmup: int, total: int) -> float:
    """Factor of the learning rate at `step`: linear from 0 to 1 over `warmup` steps, then half a cosine to 0."""
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


@torch.no_grad()
def logits_in_chunks(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """module(x) in eval mode, on the module's device, `CHUNK` rows at a time. Returns it on the CPU."""
    device = next(module.parameters()).device
    module.eval()
    return torch.cat([module(rows.to(device).float()).cpu() for rows in x.split(CHUNK)])


def _already_a_batch(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch  # `Items.__getitems__` has put the rows together
    return x, y


def _since_best(history: list[dict[str, float]]) -> int:
    """Epochs since the lowest validation loss; the last epoch itself is 0."""
    losses = [row["validation_loss"] for row in history]
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise UserError("trainer.lr: the loss became NaN or infinite. Lower it, or check the data")
    return value


@contextmanager
def _progress(trainer: Trainer, run: _Run) -> Iterator[tqdm]:
    done = len(trainer.history) * len(run.loader)
    with tqdm(total=trainer.epochs * len(run.loader), initial=done, desc="train", unit="batch", mininterval=1) as bar:
        yield bar


def _store(path: Path | None, run: _Run, best: State, history: list[dict[str, float]]) -> None:
    """Replace the resume file: weights, best weights and optimiser moments as tensors, the rest as JSON metadata."""
    if path is None:
        return
    moments = run.optimizer.state_dict()["state"]
    tensors = {f"optimizer.{i}.{name}": value for i, state in moments.items() for name, value in state.items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    tensors |= {f"module.{name}": value for name, value in run.weights().items()}
    scheduler = {name: value for name, value in run.scheduler.state_dict().items() if name != "lr_lambdas"}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".writing")
    contents = {name: tensor.contiguous() for name, tensor in tensors.items()}
    progress = {"history": history, "scheduler": scheduler, "lr": run.lr()}
    save_file(contents, fresh, metadata={"progress": json.dumps(progress)})
    fresh.replace(path)


def _resume(path: Path | None, run: _Run) -> tuple[list[dict[str, float]], State]:
    """(history, best weights) of an interrupted run after putting `run` where it stopped; else an empty history."""
    if path is None or not path.is_file():
        return [], run.weights()
    try:
        with safe_open(path, framework="pt") as file:
            tensors: State = {name: file.get_tensor(name) for name in file.keys()}
            progress = json.loads(file.metadata()["progress"])
    except SafetensorError as error:
        raise UserError(f"out: {path} is damaged ({error}). Delete it to train from the start") from error
    run.module.load_state_dict(_part(tensors, "module."))
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in _part(tensors, "optimizer.").items():
        index, key = name.split(".")
        moments.setdefault(int(index), {})[key] = tensor
    groups = run.optimizer.state_dict()["param_groups"]
    run.optimizer.load_state_dict(
        {"state": moments, "param_groups": [{**group, "lr": progress["lr"]} for group in groups]}
    )
    run.scheduler.load_state_dict({**run.scheduler.state_dict(), **progress["scheduler"]})
    print(f"resuming after epoch {len(progress['history'])} from {path}")
    return progress["history"], _part(tensors, "best.")


def _part(tensors: State, prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
