"""The training loop, run through `accelerate`: schedule, clipping, early stopping, and the file
from which an interrupted training resumes."""

import glob
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import broadcast, broadcast_object_list
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import save
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader
from tqdm import tqdm

from predictors.base import UNREADABLE
from predictors.training.batches import CHUNK, EpochSampler, Items, Part, RowDropout, part_of
from predictors.training.losses import Pairs, mean_loss
from runtime.compatibility import differences
from runtime.errors import UserError
from runtime.files import write_atomically
from runtime.processes import this_process
from runtime.settings.kinds import Count, Positive, Probability

Tensors = dict[str, torch.Tensor]


class ResumeFile:
    """The state of a training whose result goes to the folder `out`.

    run: all that decides the result (settings, seed, data; plain values). It is part of the file
    and of its name, so trainings with other settings have other files, and a file never continues
    another run."""

    def __init__(self, out: Path, run: Mapping[str, Any]) -> None:
        text = json.dumps(run, sort_keys=True)
        self.run: dict[str, Any] = json.loads(text)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.path = out.with_name(f".{out.name}-{digest}.resume")
        self.others = f".{glob.escape(out.name)}-{'[0-9a-f]' * 12}.resume"

    def write(self, tensors: Tensors, progress: Mapping[str, Any]) -> None:
        """Replace the file. progress: plain values."""
        contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        text = json.dumps({"run": self.run, **progress})
        metadata = {"progress": text, "sha256": _digest(contents, text)}
        written = save(contents, metadata)
        write_atomically(self.path, lambda temporary: temporary.write_bytes(written))

    def read(self) -> tuple[Tensors, dict[str, Any]] | None:
        """Return (tensors, progress) as written; None if there is nothing to continue.

        Raises UserError if the file is damaged or another run's. Prints which other trainings for
        `out` were interrupted."""
        for path in sorted(set(self.path.parent.glob(self.others)) - {self.path}):
            what = "something unreadable"
            with suppress(*UNREADABLE), safe_open(path, framework="pt") as file:
                run = json.loads(file.metadata()["progress"])["run"]
                unlike = differences(run, self.run)
                what = f"an interrupted training with other settings ({unlike})"
            rest = "It is not used here; delete it if nobody continues it"
            print(f"out: {path} holds {what}. {rest}")
        if not self.path.exists():
            return None
        try:
            tensors, progress = _read(self.path)
        except UNREADABLE as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise UserError(
                f"out: {self.path} is damaged ({reason}). Delete it to train from the start"
            ) from error
        if progress["run"] != self.run:
            unlike = differences(progress["run"], self.run)
            raise UserError(
                f"out: {self.path} is of another run ({unlike}). Delete it to train from the start"
            )
        return tensors, progress

    def forget(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[Tensors, dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    if _digest(tensors, metadata["progress"]) != metadata["sha256"]:
        raise ValueError("its checksum is wrong")
    return tensors, json.loads(metadata["progress"])


def _digest(tensors: Tensors, progress: str) -> str:
    """Return the SHA-256 of names, types, shapes and values."""
    sha256 = hashlib.sha256(progress.encode())
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def named(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`, without that prefix."""
    return {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}


Loss = Callable[[torch.Tensor, torch.Tensor], Pairs]


class Logger(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...


@dataclass
class Trainer:
    """AdamW with gradient clipping; the weights of the epoch with the lowest validation loss are
    kept.

    batch_size: in items. schedule: ``"cosine"`` per step, after `warmup_ratio` of the steps.
    validation_fraction: share of the training prompts, held out for early stopping; no other split
    is used. state: the file the run can continue from, written every epoch. logger: of the main
    process.
    """

    epochs: Annotated[int, Field(ge=1, le=100_000), "most passes over the training prompts"]
    batch_size: Annotated[
        Count, "items of a micro-batch, of all processes together: rows, or whole prompts"
    ]
    lr: Annotated[float, Field(gt=0, le=1000), "learning rate of AdamW"]
    schedule: Annotated[
        Literal["cosine", "plateau"],
        "of the learning rate; plateau: halved after 2 epochs without a lower validation loss",
    ]
    accumulate: Annotated[Count, "micro-batches of a step"] = 1
    weight_decay: Annotated[float, Field(ge=0, le=1000), "of AdamW"] = 0.0
    warmup_ratio: Annotated[Probability, "share of the steps before a cosine begins"] = 0.0
    clip: Annotated[Positive, "largest norm of a gradient"] = 1.0
    patience: Annotated[Count, "epochs without a lower validation loss before it ends"] = 5
    validation_fraction: Annotated[
        float, Field(gt=0, lt=1), "share of the training prompts held out for early stopping"
    ] = 0.1
    seed: int = 0
    logger: Logger | None = None
    state: ResumeFile | None = None
    history: list[dict[str, float]] = field(default_factory=list, init=False)

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

        weights: [len(items)] draw items by weight with replacement instead of once each.
        `self.history` then holds one dict per epoch."""
        sampler = EpochSampler(len(items), self.seed, weights, items.together)
        run = _Run(self, module, sampler, items)
        self.history, best = run.resume(self.state)
        for row in self.history:
            self._log(row)
        batches = len(run.loader)
        shown = {"desc": "training", "unit": " batches", "mininterval": 1}
        shown |= {"disable": not run.accelerator.is_main_process}
        begun, total = len(self.history) * batches, self.epochs * batches
        with tqdm(total=total, initial=begun, **shown) as bar:
            for epoch in range(len(self.history), self.epochs):
                if _since_best(self.history) >= self.patience:
                    break
                row = {"epoch": epoch + 1, "train_loss": run.epoch(epoch, loss, bar.update)}
                row["lr"] = run.lr()
                row["validation_loss"] = run.held_out(held_out, held_out_loss)
                if isinstance(run.scheduler, ReduceLROnPlateau):
                    run.scheduler.step(row["validation_loss"])
                self.history.append(row)
                if _since_best(self.history) == 0:
                    best = run.weights()
                if self.state is not None and run.accelerator.is_main_process:
                    self.state.write(*run.state(best, self.history))
                bar.set_postfix(
                    {f"{n} loss": f"{row[f'{n}_loss']:.4f}" for n in ("train", "validation")}
                )
                self._log(row)
        module = run.module.cpu()
        module.load_state_dict(best)
        return module.eval()

    def _log(self, row: dict[str, float]) -> None:
        if self.logger is not None:
            named = {f"train/{name}": value for name, value in row.items()}
            self.logger.log(named, step=int(row["epoch"]))

    def forget(self) -> None:
        """Remove the resume file; call it once the trained model is saved."""
        if self.state is not None:
            self.state.forget()


class _Run:
    """The state that changes while training, the same in every process."""

    def __init__(
        self, trainer: Trainer, module: torch.nn.Module, sampler: EpochSampler, items: Items
    ) -> None:
        self.clip, self.seed, self.sampler = trainer.clip, trainer.seed, sampler
        this_process()
        self.accelerator = Accelerator(gradient_accumulation_steps=trainer.accumulate)
        self.rank, self.processes = self.accelerator.process_index, self.accelerator.num_processes
        self.dropouts = [layer for layer in module.modules() if isinstance(layer, RowDropout)]
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=trainer.lr, weight_decay=trainer.weight_decay
        )
        self.prepared, self.optimizer = self.accelerator.prepare(module, optimizer)
        loader = DataLoader(
            Part(items, self.rank, self.processes),  # divides a batch among processes
            batch_size=trainer.batch_size,
            sampler=sampler,
            collate_fn=lambda batch: batch,  # `Part.__getitems__` has put the rows together
        )
        self.loader = prepare_data_loader(loader, self.accelerator.device, 1, 0, put_on_device=True)
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
        """Make one pass over the items; return the mean micro-batch loss."""
        # dropout depends on the epoch alone: resumable
        torch.manual_seed(self.seed * 1_000_003 + epoch)
        self.sampler.epoch = epoch
        self.prepared.train()
        total = torch.zeros((), device=self.accelerator.device)
        for x, y, before, rows in self.loader:
            for layer in self.dropouts:
                layer.part = before, rows
            total += self.step(loss, x, y)
            advance()
        return _finite(float(self.accelerator.reduce(total)) / len(self.loader))

    def step(self, loss: Loss, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return what this process adds to the loss of the micro-batch."""
        with self.accelerator.accumulate(self.prepared):
            sums, counts = loss(self.prepared(x), y)
            value = mean_loss(sums, self.accelerator.reduce(counts))
            # gradients are averaged over processes
            self.accelerator.backward(value * self.processes)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.prepared.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients and isinstance(self.scheduler, LambdaLR):
            self.scheduler.step()
        return value.detach()

    def held_out(self, items: Items, loss: Loss) -> float:
        """Return the loss of all rows of `items`, bit for bit the same in every process, so that
        all take the same decisions."""
        part = torch.arange(len(items.y))[part_of(len(items.y), self.rank, self.processes)]
        logits = _in_chunks(self.module, map(items.inputs, part.split(CHUNK)), len(part))
        pairs = torch.stack(loss(logits, items.y[part]))
        value = mean_loss(*self.accelerator.reduce(pairs.to(self.accelerator.device)))
        return _finite(float(broadcast(value)))

    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def weights(self) -> Tensors:
        weights = self.module.state_dict().items()
        return {name: tensor.detach().cpu().clone() for name, tensor in weights}

    def state(
        self, best: Tensors, history: list[dict[str, float]]
    ) -> tuple[Tensors, dict[str, Any]]:
        """Return (tensors, plain values) from which `resume` goes on. Generators are seeded anew in
        each epoch."""
        moments = self.optimizer.state_dict()["state"]
        tensors = {
            f"optimizer.{i}.{name}": value
            for i, state in moments.items()
            for name, value in state.items()
        }
        tensors |= {f"module.{name}": value for name, value in self.weights().items()}
        if _since_best(history):  # else the best weights are the current ones
            tensors |= {f"best.{name}": value for name, value in best.items()}
        scheduler = self.scheduler.state_dict()
        scheduler.pop("lr_lambdas", None)
        return tensors, {"history": history, "scheduler": scheduler, "lr": self.lr()}

    def resume(self, file: ResumeFile | None) -> tuple[list[dict[str, float]], Tensors]:
        """Restore the state of an interrupted run and return its (history, best weights); without
        one, an empty history."""
        states = [file.read() if file is not None and self.accelerator.is_main_process else None]
        (state,) = broadcast_object_list(states)  # the others may not see the file
        if file is None or state is None:
            return [], self.weights()
        tensors, progress = state
        self.module.load_state_dict(named(tensors, "module."))
        moments: dict[int, Tensors] = {}
        for name, tensor in named(tensors, "optimizer.").items():
            index, key = name.split(".")
            moments.setdefault(int(index), {})[key] = tensor
        before = self.optimizer.state_dict()["param_groups"]
        groups = [{**group, "lr": progress["lr"]} for group in before]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **progress["scheduler"]})
        print(f"resuming after epoch {len(progress['history'])} from {file.path}")
        return progress["history"], named(tensors, "best.") or self.weights()


def cosine(step: int, warmup: int, total: int) -> float:
    """Return the factor of the learning rate at `step`: linear from 0 to 1 over `warmup` steps,
    then half a cosine to 0."""
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def logits_in_chunks(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return module(x) in eval mode, on the CPU; worked out on the module's device, `CHUNK` rows at
    a time."""
    return _in_chunks(module, x.split(CHUNK), len(x))


@torch.no_grad()
def _in_chunks(module: torch.nn.Module, chunks: Iterable[torch.Tensor], rows: int) -> torch.Tensor:
    device, done = next(module.parameters()).device, 0
    module.eval()
    logits = torch.empty(0)
    for chunk in chunks:
        some = module(chunk.to(device).float())
        if not done:  # all at once: many small results would keep large ones from being freed
            logits = torch.empty(rows, some.shape[1])
        logits[done : done + len(some)] = some
        done += len(some)
    return logits


def _since_best(history: list[dict[str, float]]) -> int:
    """Return the epochs since the lowest validation loss; the last epoch itself is 0."""
    losses = [row["validation_loss"] for row in history]
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise UserError("trainer.lr: the loss became NaN or infinite. Lower it, or check the data")
    return value
