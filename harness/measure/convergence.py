"""How well a training learns: epochs on a training clock, each followed by an evaluation beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from harness.config.sections import Convergence
from harness.errors import SkipTrial
from harness.measure.divergence import Divergence, earliest, first_in
from harness.measure.phase_timers import marks_for
from harness.measure.stepper import WINDOW_KEYS, TimedWindow, window_rows
from harness.measure.window import Window, measure_window, synchronize
from harness.plan.cell import Cell
from harness.plan.rows import WindowRow
from harness.train.checkpoint import CheckpointManager
from harness.train.loader import Share, batches, copier, epoch_shares, evaluation_shares
from harness.train.optimizers import WarmUp, fast_forward, make_schedule
from harness.train.phases import Mark
from harness.train.ranks import Ranks
from harness.train.training import Training

Datasets = tuple[Dataset[Any], Dataset[Any]]
Collate = Callable[[list[Any]], Any] | None


@dataclass(frozen=True)
class _EpochTotals:
    """One rank's epoch: seconds, and sums over its steps."""

    duration_s: float
    loss: float
    weight: float
    diverged: Divergence | None


class Epochs:
    """The epochs of one training on one rank. ``rows`` grows by one an epoch, alike on every rank.

    ``keeper``: what keeps checkpoints, from which the training goes on where it finds one. ``train_s`` is the training
    clock, over all attempts; ``spent`` what this one spent on epochs, evaluation and checkpoints, in seconds.
    """

    def __init__(
        self,
        training: Training,
        datasets: Datasets,
        cell: Cell,
        seed: int,
        ranks: Ranks,
        collate: Collate,
        keeper: CheckpointManager | None = None,
    ) -> None:
        self.training, self.cell, self.ranks, self.seed, self.collate = training, cell, ranks, seed, collate
        self.keeper = keeper
        self.train, self.validation = datasets
        self.samples = len(self.train)  # type: ignore[arg-type]
        if cell.global_batch_size > self.samples:
            raise SkipTrial(f"global batch {cell.global_batch_size} exceeds the {self.samples} training samples")
        self.steps = math.ceil(self.samples / cell.global_batch_size)
        warmup = int(cell.training.get("warmup_epochs", 0))
        self._warm_up = WarmUp(training.optimizer, cell.lr_factor, warmup * self.steps)
        self._copy = copier(ranks.devices[0], cell.loader)
        self.rows: list[dict[str, float]] = []
        self.resumed_epoch = 0
        self.train_s = 0.0
        self.spent = {"epochs": 0.0, "evaluation": 0.0, "checkpoints": 0.0}
        self.window: WindowRow | None = None
        """This rank's epochs of this attempt as one window: its seconds, steps and phases are their sums."""
        self.diverged: Divergence | None = None
        """Where the training stopped being finite; it went no further than that epoch."""

    def run(self, settings: Convergence, advance: Callable[[], None]) -> None:
        """Trains and evaluates epoch by epoch; stops early where the training diverged."""
        schedule = make_schedule(self.training.optimizer, self.cell.schedule)
        self._resume(schedule)
        to_do = range(self.resumed_epoch, settings.epochs)
        # one loader for all epochs: its worker processes live on, and it draws the shares as it needs them
        shares = chain.from_iterable(map(self._shares, to_do))
        source = self._batches(self.train, shares, self.cell.micro_batches)
        for epoch in (number + 1 for number in to_do):
            loss, rate = self._train(epoch, source, advance)
            self.rows.append(self._row(epoch, loss, rate, advance))
            if self.diverged:
                return
            if schedule:
                schedule.step()
            self._save(epoch, last=epoch == settings.epochs)
            advance()

    def _train(self, epoch: int, source: Iterator[Any], advance: Callable[[], None]) -> tuple[float, float]:
        """One epoch; its mean loss, and the learning rate of its last step."""
        shares = self._shares(epoch - 1)
        self.ranks.barrier()
        with self._warm_up.rates_from((epoch - 1) * self.steps) as set_rate:

            def step(batch: Any, mark: Mark) -> tuple[Tensor, Any]:
                set_rate()
                return self.training.step(batch, next(shares), mark)

            window = measure_window(
                step,
                source,
                copy=self._copy,
                steps=self.steps,
                marks=marks_for(self.ranks.devices, self.steps, micro_batches=self.cell.micro_batches),
                synchronize=lambda: synchronize(self.ranks.devices),
                advance=advance,
            )
            rate = float(self.training.optimizer.param_groups[0]["lr"])
        mine = self._told(window, (epoch - 1) * self.steps)
        self._add(window, mine.weight)
        told = self.ranks.gather(mine)
        epoch_s = max(one.duration_s for one in told)  # as long as its slowest rank takes
        self.train_s += epoch_s
        self.spent["epochs"] += epoch_s
        self.diverged = earliest(one.diverged for one in told)
        loss, weight = sum(one.loss for one in told), sum(one.weight for one in told)
        return loss / weight, rate

    def _add(self, window: Window, weight: float) -> None:
        (row,) = window_rows(self.ranks.rank, [TimedWindow("epochs", window, weight)])
        if self.window is not None:
            now: Any = row
            before: Any = self.window
            row = now | {name: now[name] + before.get(name, 0) for name in now if name not in WINDOW_KEYS}
        self.window = row

    def _told(self, window: Window, steps_before: int) -> _EpochTotals:
        """What the other ranks need to know of this one's epoch."""
        losses, weights = [float(loss) for loss in window.losses], [float(weight) for weight in window.weights]
        means = [loss / max(weight, 1.0) for loss, weight in zip(losses, weights, strict=True)]
        rank = self.ranks.rank
        diverged = first_in(means, rank, steps_before)
        if diverged is None and not self.training.finite([]):
            diverged = Divergence(rank)
        return _EpochTotals(window.duration_s, sum(losses), sum(weights), diverged)

    def _save(self, epoch: int, *, last: bool) -> None:
        """The order of the data follows from the seed and the epoch: they are the sampler's state."""
        if self.keeper:
            started = time.perf_counter()
            sampler = {"seed": self.seed, "epoch": epoch}
            self.keeper.save(epoch, {"sampler": sampler, "schedule": {"steps": epoch}, "rows": self.rows}, last=last)
            self.spent["checkpoints"] += time.perf_counter() - started

    def _resume(self, schedule: LRScheduler | None) -> None:
        """Goes back to where the newest checkpoint was taken."""
        kept = self.keeper.resume() if self.keeper else {}
        if not kept:
            return
        self.rows, self.resumed_epoch = kept["rows"], kept["sampler"]["epoch"]
        self.train_s = self.rows[-1]["train_s"]
        if schedule:
            fast_forward(schedule, kept["schedule"]["steps"])

    def _row(self, epoch: int, train_loss: float, rate: float, advance: Callable[[], None]) -> dict[str, float]:
        """What is known at the end of an epoch, the evaluation included."""
        started = time.perf_counter()
        validation = {} if self.diverged else self._evaluate(advance)
        evaluation_s = time.perf_counter() - started
        self.spent["evaluation"] += evaluation_s
        return {
            "epoch": epoch,
            "samples": epoch * self.samples,
            "train_s": self.train_s,
            "evaluation_s": evaluation_s,
            "train_loss": train_loss,
            "learning_rate": rate,
            **validation,
        }

    def _evaluate(self, advance: Callable[[], None]) -> dict[str, float]:
        """The mean of the loss and of each metric over the whole validation set, each sample exactly once.

        And what follows from these means.
        """
        model = self.training.model
        if self.ranks.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)  # batch statistics differ by rank; rank 0's are the model's
        model.eval()
        size = len(self.validation)  # type: ignore[arg-type]
        # a forward pass as large as in training: with accumulation there may be no room for more
        batch = max(1, self.cell.global_batch_size // self.cell.micro_batches)
        plan = (size, batch, self.ranks.rank, self.ranks.world_size)
        totals: dict[str, list[float]] = {}
        source = self._batches(self.validation, evaluation_shares(*plan))
        for share, batch in zip(evaluation_shares(*plan), source, strict=True):
            for name, (total, weight) in self.training.evaluate(self._copy(batch), share).items():
                entry = totals.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += weight
            advance()
        model.train()
        sums = self.ranks.sum([value for entry in totals.values() for value in entry])
        means = {name: sums[2 * i] / sums[2 * i + 1] for i, name in enumerate(totals)}
        return {f"val_{name}": value for name, value in {**self.training.derived(means), **means}.items()}

    def _shares(self, epoch: int) -> Iterator[Share]:
        batch, ranks = self.cell.global_batch_size, self.ranks
        return epoch_shares(self.samples, batch, self.seed, epoch, ranks.rank, ranks.world_size)

    def _batches(self, dataset: Dataset[Any], shares: Iterable[Share], micro_batches: int = 1) -> Iterator[Any]:
        device, options = self.ranks.devices[0], self.cell.loader
        return batches(
            dataset,
            shares,
            seed=self.seed,
            device=device,
            options=options,
            collate=self.collate,
            micro_batches=micro_batches,
        )
