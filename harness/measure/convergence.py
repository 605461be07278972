"""Convergence: epochs on a training clock, each followed by an evaluation that does not count on it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from harness.config.sections import Convergence
from harness.errors import WorkloadError
from harness.measure.stepper import (
    WINDOW_KEYS,
    Divergence,
    TrainingData,
    earliest,
    first_in,
    window_rows,
)
from harness.measure.window import HostTimer, Window, measure_window, synchronize, timed_part
from harness.plan.cell import int_option
from harness.plan.rows import Json, WindowRow
from harness.train.checkpoint import CheckpointManager
from harness.train.optimizers import WarmUp, by_step, fast_forward, make_schedule, own_or_named
from harness.train.training import Mark, StepValues, Training
from harness.train.workloads import SizedDataset, describe

COLLECT_STEPS, COLLECT_ALL_STEPS = 50, 1000
"""Steps between two collections of garbage in an epoch: of the young generations, and of all."""
MOST_RECORDED = 10_000
"""The most steps of a training that are kept: of longer ones every second, third ... is."""
Kept = dict[str, list[float]]
"""The columns epoch, step (both from 1), loss and learning_rate."""


EVALUATED_PARTS = 8
"""A batch of the loader that evaluate() gets is a global batch divided by this."""


@dataclass(frozen=True)
class WholeSet:
    """A loader of the whole validation set, in its own order, in batches of one size on the device."""

    batches: Callable[[], Iterator[object]]
    length: int
    advance: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[object]:
        for batch in self.batches():
            yield batch
            self.advance()


def call_evaluate(workload: object, model: nn.Module, loader: WholeSet) -> dict[str, float]:
    """Return what the workload's evaluate() returns, in eval mode; raise WorkloadError if it is no {name: number}."""
    evaluate: Callable[[nn.Module, WholeSet], Mapping[str, float]] = getattr(workload, "evaluate")  # noqa: B009
    with evaluating(model), torch.no_grad():
        values = evaluate(model, loader)
    try:
        return {str(name): float(value) for name, value in values.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise WorkloadError(f"evaluate() must return {{name: number}}; got {describe(values)}") from None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for a block, then in train mode but for those of its modules that were not, as frozen
    norms.
    """
    frozen = [module for module in model.modules() if not module.training]
    model.eval()
    try:
        yield
    finally:
        model.train()
        for module in frozen:
            module.training = False


class Evaluator:
    """Evaluates a training on its whole validation set, or on its training set. ``advance`` is called at each batch."""

    def __init__(self, training: Training, data: TrainingData, advance: Callable[[], None]) -> None:
        self._training, self._data, self._ranks, self._advance = training, data, data.ranks, advance
        self._copy = data.copier()

    def evaluate(self) -> dict[str, float]:
        """Return means of the loss and of each metric, what the workload derives from them, and rank 0's evaluate()'s.

        Each sample counts exactly once. All ranks call this together.
        """
        means, own = _means(self.validation_sums()), self.own_values()
        if hasattr(self._data.workload, "evaluate"):
            own = self._ranks.broadcast(own)
        return {f"val_{name}": value for name, value in {**self._training.derived(means), **means, **own}.items()}

    def validation_sums(self) -> dict[str, tuple[float, float]]:
        """Return the sum and the weight of the loss and of each metric. All ranks call this together."""
        return self._sums(self._data.validation)

    def own_values(self) -> dict[str, float]:
        """Return what evaluate() returns of the whole validation set on this rank, empty without it.

        No collective of the harness is called.
        """
        data = self._data
        if not hasattr(data.workload, "evaluate"):
            return {}
        # the same for all strategies at one global batch, and no larger than a device's part on EVALUATED_PARTS devices
        batch = max(1, data.cell.global_batch_size // data.cell.micro_batches // EVALUATED_PARTS)
        length = -(-len(data.validation) // batch)
        loader = WholeSet(lambda: data.whole_batches(data.validation, batch), length, self._advance)
        with self._training.evaluating_whole:
            return call_evaluate(data.workload, self._training.model, loader)

    def evaluate_training(self) -> dict[str, float]:
        """Return the means over the training set, without the loss, which is a mean over the steps of the epoch."""
        means = _means(self._sums(self._data.train))
        values = {**self._training.derived(means), **means}
        return {f"train_{name}": value for name, value in values.items() if name != "loss"}

    def own_sums(self, dataset: SizedDataset) -> dict[str, list[float]]:
        """Return this rank's sum and weight of the loss and of each metric. No collective of the harness is called."""
        totals: dict[str, list[float]] = {}
        with evaluating(self._training.model):
            for share, batch in self._data.batches_once(dataset):
                for name, (total, weight) in self._training.evaluate(self._copy(batch), share).items():
                    entry = totals.setdefault(name, [0.0, 0.0])
                    entry[0] += total
                    entry[1] += weight
                self._advance()
        return totals

    def _sums(self, dataset: SizedDataset) -> dict[str, tuple[float, float]]:
        if self._ranks.world_size > 1:
            for buffer in self._training.model.buffers():
                dist.broadcast(buffer, src=0)  # batch statistics differ by rank; rank 0's are the model's
        totals = self.own_sums(dataset)
        # a rank may lack a metric, as that of a class which none of its samples has, or have them in another order
        names = list(dict.fromkeys(chain(*self._ranks.gather(list(totals)))))
        sums = self._ranks.sum([value for name in names for value in totals.get(name, (0.0, 0.0))])
        return {name: (sums[2 * i], sums[2 * i + 1]) for i, name in enumerate(names)}


def _means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each metric; NaN without weight, as of a class that no sample has."""
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}


@contextmanager
def _collecting(advance: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Yield ``advance`` that also collects garbage after every COLLECT_STEPS steps.

    The automatic collector, which would start at another step on each rank, is off for the whole epoch, in which cycles
    of a model's tensors would fill the memory. What exists before the block, as every imported module, is exempt.
    """
    numbers = count(1)

    def advance_and_collect() -> None:
        advance()
        number = next(numbers)
        if number % COLLECT_STEPS == 0:
            gc.collect(2 if number % COLLECT_ALL_STEPS == 0 else 1)

    gc.freeze()
    try:
        yield advance_and_collect
    finally:
        gc.unfreeze()


class StepLosses:
    """The losses of a training's steps, on rank 0 over all ranks. ``columns`` grows with each epoch.

    ``total``: the number of steps of the whole training, which decides the distance of the steps that are kept.
    """

    def __init__(self, total: int) -> None:
        self.every = max(1, math.ceil(total / MOST_RECORDED))
        self.columns: Kept = {"epoch": [], "step": [], "loss": [], "learning_rate": []}

    def add(
        self,
        epoch: int,
        steps_before: int,
        losses: Sequence[Sequence[float]],
        weights: Sequence[Sequence[float]],
        rates: Sequence[float],
    ) -> None:
        """Add an epoch: the sum of the losses and the weight of each step by rank, and the rate of each step."""
        for place in range(-steps_before % self.every, len(rates), self.every):
            loss = sum(each[place] for each in losses) / max(sum(each[place] for each in weights), 1.0)
            row = {"epoch": epoch, "step": steps_before + place + 1, "loss": loss, "learning_rate": rates[place]}
            for name, value in row.items():
                self.columns[name].append(value)


class Epochs:
    """The epochs of one training on one rank. ``rows`` grows by one an epoch, alike on every rank.

    ``checkpoints``: if given, the training is saved there, and resumed from the newest checkpoint. ``diverged``: where
    the training stopped being finite; that epoch is its last. ``train_s``: seconds of the epochs, over all attempts;
    ``spent``: those of this attempt, by part; ``window``: this rank's epochs of this attempt as one window, with sums
    of their seconds, steps and phases.
    """

    def __init__(
        self,
        training: Training,
        data: TrainingData,
        settings: Convergence,
        advance: Callable[[], None],
        checkpoints: CheckpointManager | None = None,
    ) -> None:
        assert settings.epochs  # of a workload
        self.training, self.data, self.ranks, self.checkpoints = training, data, data.ranks, checkpoints
        self._epochs, self._train_metrics, self._advance = settings.epochs, settings.train_metrics, advance
        cell, optimizer = data.cell, training.optimizer
        warmup = int_option(cell.training, "warmup_epochs", 0)
        self._warm_up = WarmUp(optimizer, cell.lr_factor, warmup * data.steps)
        named = partial(make_schedule, optimizer, cell.schedule)
        self._schedule = own_or_named(data.workload, "schedule", optimizer, cell.schedule, named)
        self._each_step = self._schedule if by_step(cell.schedule) else None
        """The schedule, if it advances at each step."""
        self._evaluator, self._copy = Evaluator(training, data, advance), data.copier()
        self.train_s = 0.0
        self.window: WindowRow | None = None
        self.spent = {"epochs": 0.0, "evaluation": 0.0, "checkpoints": 0.0}
        self.rows: list[dict[str, float]] = []
        self.steps = StepLosses(settings.epochs * data.steps)
        self._rates: list[float] = []
        """The learning rate of each step of the current epoch."""
        self.resumed_epoch = 0
        self.diverged: Divergence | None = None

    def run(self) -> None:
        """Train and evaluate epoch by epoch; stop early if the training diverges."""
        self._resume()
        for epoch in range(self.resumed_epoch + 1, self._epochs + 1):
            loss, rate = self._train(epoch)
            self.rows.append(self._row(epoch, loss, rate))
            if self.diverged:
                return
            if self._schedule and self._schedule is not self._each_step:
                self._schedule.step()
            self._save(epoch, last=epoch == self._epochs)
            self._advance()

    def _train(self, epoch: int) -> tuple[float, float]:
        """Train one epoch; return its mean loss, and the learning rate of its last step."""
        shares, steps, parts = self.data.shares(epoch - 1), self.data.steps, self.data.cell.micro_batches
        self._rates, groups = [], self.training.optimizer.param_groups
        on_gpu = self.ranks.devices[0].type == "cuda"
        self.ranks.barrier()
        rates = self._warm_up.rates_from((epoch - 1) * steps, self._each_step)
        with rates as set_rate, _collecting(self._advance) as advance_and_collect:

            def step(batch: object, mark: Mark) -> StepValues:
                set_rate()
                self._rates.append(groups[0]["lr"])
                return self.training.step(batch, next(shares), mark)

            window = measure_window(
                step,
                self.data.training_batches(epoch - 1),
                copy=self._copy,
                steps=steps,
                marks=HostTimer(micro_batches=parts, beside=on_gpu),  # an epoch has too many steps for events
                synchronize=lambda: synchronize(self.ranks.devices),
                advance=advance_and_collect,
                micro_batches=parts,
                kind="epochs",
            )
            rate = float(groups[0]["lr"])
        return self._mean_loss(window, epoch), rate

    def _mean_loss(self, window: Window, epoch: int) -> float:
        """Count the epoch's time; note whether it diverged and, on rank 0, its steps; return its mean loss."""
        steps_before = (epoch - 1) * self.data.steps
        own_losses, own_weights = window.values["loss"], window.values["weight"]
        means = [loss / max(weight, 1.0) for loss, weight in zip(own_losses, own_weights, strict=True)]
        diverged = first_in(means, self.ranks.rank, steps_before)
        if diverged is None and not self.training.finite([]):
            diverged = Divergence(self.ranks.rank)
        (row,) = window_rows(self.ranks.rank, [window])
        now, before = cast(Json, row), cast(Json, self.window or {})
        now |= {name: now[name] + before.get(name, 0) for name in now if name not in WINDOW_KEYS}
        self.window = row
        own = window.duration_s, own_losses, own_weights, diverged
        durations, losses, weights, divergences = zip(*self.ranks.gather_to_first(own), strict=True)
        self.steps.add(epoch, steps_before, losses, weights, list(map(float, self._rates)))
        known = max(durations), earliest(divergences), sum(map(sum, losses)), sum(map(sum, weights))
        epoch_s, self.diverged, loss, weight = self.ranks.broadcast(known)
        self.train_s += epoch_s
        self.spent["epochs"] += epoch_s
        return loss / weight

    def _save(self, epoch: int, *, last: bool) -> None:
        """Save a checkpoint. The order of the data follows from the seed and the epoch: the sampler's state."""
        if self.checkpoints:
            sampler = {"seed": self.data.seed, "epoch": epoch}
            steps = epoch * self.data.steps if self._each_step else epoch
            values = {"sampler": sampler, "schedule": {"steps": steps}, "rows": self.rows, "steps": self.steps.columns}
            with timed_part(self.spent, "checkpoints"):
                self.checkpoints.save(epoch, values, last=last)

    def _resume(self) -> None:
        """Restore the newest checkpoint, if there is one."""
        kept = self.checkpoints.resume() if self.checkpoints else {}
        if not kept:
            return
        self.rows, self.resumed_epoch = kept["rows"], kept["sampler"]["epoch"]
        self.train_s = self.rows[-1]["train_s"]
        self.training.steps_taken = self.resumed_epoch * self.data.steps
        self.steps.columns = kept["steps"]
        if self._schedule:
            fast_forward(self._schedule, kept["schedule"]["steps"])

    def _row(self, epoch: int, train_loss: float, rate: float) -> dict[str, float]:
        """Evaluate, and return the epoch's row."""
        before = self.spent["evaluation"]
        with timed_part(self.spent, "evaluation"):
            validation = {} if self.diverged else self._evaluator.evaluate()
            if self._train_metrics and not self.diverged:
                validation |= self._evaluator.evaluate_training()
        return {
            "epoch": epoch,
            "samples": epoch * self.data.samples,
            "train_s": self.train_s,
            "evaluation_s": self.spent["evaluation"] - before,
            "train_loss": train_loss,
            "learning_rate": rate,
            **validation,
        }
