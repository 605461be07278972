"""The windows of a training's steps, which begin together on every rank, and their rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, repeat
from typing import cast

import numpy as np
import numpy.typing as npt

from harness.errors import WorkloadError
from harness.measure.window import Window, marks_for, measure_window, synchronize
from harness.plan.cell import Cell
from harness.plan.rows import Json, PhaseSeconds, RankFacts, TrialFacts, WindowKind, WindowRow
from harness.train.loader import (
    Batches,
    Share,
    endless_shares,
    epoch_shares,
    evaluation_shares,
    need_full_batch,
    part_of,
)
from harness.train.precision import LossScale
from harness.train.ranks import Ranks
from harness.train.training import Mark, Training, no_mark
from harness.train.transfer import copier
from harness.train.workloads import SizedDataset, Workload, collate_of

StepColumns = dict[str, npt.NDArray[np.float64 | np.int64 | np.bool_]]
WINDOW_KEYS = ("rank", "window", "window_kind")
"""Columns that identify a window; the others are amounts."""
STEPPED = ("warmup", "timed")
"""The windows whose single steps are recorded."""
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainingData:
    """The data of a training on one rank, and how its batches are drawn. Raises SkipTrial if there is too little."""

    cell: Cell
    seed: int
    ranks: Ranks
    train: SizedDataset
    validation: SizedDataset
    workload: Workload

    def __post_init__(self) -> None:
        need_full_batch(self.samples, self.cell.global_batch_size)

    @property
    def samples(self) -> int:
        return len(self.train)

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(self.samples / self.cell.global_batch_size)

    def shares(self, epoch: int) -> Iterator[Share]:
        """Return the rank's shares of one epoch, counted from 0."""
        ranks = self.ranks
        return epoch_shares(self.samples, self.cell.global_batch_size, self.seed, epoch, ranks.rank, ranks.world_size)

    def training_batches(self, epoch: int) -> Iterator[object]:
        """Return the batches of one epoch, none of which is loaded before the first is asked for."""
        return self._training_loader.of(self.shares(epoch))

    def endless_batches(self) -> Iterator[object]:
        """Return the rank's parts of full global batches, without an end; their loader ends with the iterator."""
        plan = (self.samples, self.cell.global_batch_size, self.seed, self.ranks.rank, self.ranks.world_size)
        return self._loader(self.train, self.cell.micro_batches).of(endless_shares(*plan))

    def batches_once(self, dataset: SizedDataset) -> Iterator[tuple[Share, object]]:
        """Return the rank's shares of a data set with their batches, in its own order, each sample exactly once."""
        # a forward pass as large as in training: with accumulation there may be no room for more
        batch = max(1, self.cell.global_batch_size // self.cell.micro_batches)
        plan = (len(dataset), batch, self.ranks.rank, self.ranks.world_size)
        loader = self._loader(dataset, training=False)
        return zip(evaluation_shares(*plan), loader.of(evaluation_shares(*plan)), strict=True)

    def whole_batches(self, dataset: SizedDataset, batch: int) -> Iterator[object]:
        """Return the batches of a whole data set, in its own order, on this rank's device."""
        shares = evaluation_shares(len(dataset), batch, 0, 1)
        return map(self.copier(), self._loader(dataset, training=False).of(shares))

    def copier(self) -> Callable[[object], object]:
        """Return a function that moves a batch to the rank's device."""
        return copier(self.ranks.devices[0], self.cell.loader)

    @cached_property
    def _training_loader(self) -> Batches:
        return self._loader(self.train, self.cell.micro_batches)

    def _loader(self, dataset: SizedDataset, micro_batches: int = 1, *, training: bool = True) -> Batches:
        return Batches(
            dataset,
            seed=self.seed,
            ranks=self.ranks,
            options=self.cell.loader,
            collate=collate_of(self.workload, training=training),
            micro_batches=micro_batches,
        )


class Stepper:
    """One rank's training with its endless stream of full batches."""

    def __init__(self, training: Training, data: TrainingData, advance: Callable[[], None]) -> None:
        cell, ranks = data.cell, data.ranks
        self.training, self.data, self.ranks, self._advance = training, data, ranks, advance
        self.spent_s = 0.0
        """Seconds in steps of every kind."""
        self.micro_batches = cell.micro_batches
        training.set_first_rate()
        samples = len(part_of(cell.global_batch_size, ranks.rank, ranks.world_size))
        self.share = Share((), samples, cell.global_batch_size)
        self.copy, self.fetch = data.copier(), data.endless_batches()
        if cell.data == "synthetic_device":
            self.fetch = repeat(self.copy(next(self.fetch)))  # steps without a loader

    def step(self, mark: Mark = no_mark) -> None:
        """Take one step outside any window. ``mark``: see Training.step."""
        start = time.perf_counter()
        batch = self._micro_batches() if self.micro_batches > 1 else self.copy(next(self.fetch))
        self.training.step(batch, self.share, mark)
        self._advance()
        self.spent_s += time.perf_counter() - start

    def one_batch(self) -> object:
        """Return a batch of one forward pass, on the device."""
        first, *_ = self._micro_batches()
        return first

    def _micro_batches(self) -> Iterator[object]:
        """Return the micro-batches of a step, each fetched and copied when it is asked for."""
        return map(self.copy, islice(self.fetch, self.micro_batches))

    def window(self, kind: WindowKind, steps: int, *, detailed: bool = True) -> Window:
        """Measure a window; raise WorkloadError if the weights of loss() are not those of the batches."""
        self.ranks.barrier()
        training, share = self.training, self.share
        window = measure_window(
            lambda batch, mark: training.step(batch, share, mark),
            self.fetch,
            copy=self.copy,
            steps=steps,
            marks=marks_for(self.ranks.devices, steps, detailed=detailed, micro_batches=self.micro_batches),
            synchronize=lambda: synchronize(self.ranks.devices),
            advance=self._advance,
            micro_batches=self.micro_batches,
            kind=kind,
        )
        self.spent_s += window.duration_s
        if (each := training.units_per_sample) and window.weight != (whole := share.samples * steps * each):
            of_samples = "with unit 'samples' the weight is the length of the batch (unit 'tokens' lets it vary)"
            raise WorkloadError(
                f"loss() gave a weight of {window.weight:g} for {steps} batches of {share.samples} samples, in all "
                f"{whole:g}; {of_samples if training.unit == 'samples' else f'tokens_per_sample is {each:g}'}"
            )
        return window


KEPT = 5
"""Number of finite losses that are reported."""
UNSKIPPED = 20
"""Updates in a row without a skip that end the warm-up of fp16."""
MOST_STEPS = 200
"""Warm-up steps after which the training counts as diverged if updates are still skipped."""


@dataclass(frozen=True)
class Divergence:
    """A divergence on one rank. ``step`` counts from 1 over the whole trial; None if only a parameter is not finite."""

    rank: int
    step: int | None = None
    loss: float = math.nan
    before: tuple[float, ...] = ()
    """The last finite losses, the latest at the end."""


def first_in(losses: npt.ArrayLike, rank: int, steps_before: int = 0) -> Divergence | None:
    """Return the first of one rank's losses that is not finite; None if all are."""
    seen = np.asarray(losses, dtype=float)
    bad = np.flatnonzero(~np.isfinite(seen))
    if not bad.size:
        return None
    place = int(bad[0])
    before = tuple(seen[max(0, place - KEPT) : place].tolist())
    return Divergence(rank, steps_before + place + 1, float(seen[place]), before)


def earliest(found: Iterable[Divergence | None]) -> Divergence | None:
    """Return the earliest of the ranks' divergences; None if there is none."""
    seen = [one for one in found if one]
    return min(seen, key=lambda one: (one.step or math.inf, one.rank), default=None)


def outcome_columns(divergence: Divergence | None, facts: TrialFacts) -> Json:
    """Return the fields of a TrialResult that hold its outcome and facts."""
    if divergence is None:
        return {"outcome": "ok", "facts": facts}
    rank, step = divergence.rank, divergence.step
    facts = {**facts, "diverged_step": step}
    if step is None:
        return {"outcome": "diverged", "reason": "a parameter stopped being finite, no loss did", "facts": facts}
    reason = f"the loss became {divergence.loss:g} on rank {rank} in step {step}"
    before = "".join(f"\nstep {step - len(divergence.before) + i}: {x:g}" for i, x in enumerate(divergence.before))
    detail = f"{reason}\n\nThe last finite losses of that rank (mean over its part of the batch):{before or ' none'}"
    return {"outcome": "diverged", "reason": reason, "error_rank": rank, "detail": detail, "facts": facts}


class ScaleDiverged(Exception):
    """Updates are still skipped after MOST_STEPS; raised on every rank alike."""


def rounds_until_unskipped(stepper: Stepper, steps: int, taken: int) -> list[Window]:
    """Take further warm-up rounds of ``steps`` until UNSKIPPED updates in a row; raise ScaleDiverged.

    ``taken``: the warm-up steps before. No round unless the precision is fp16.
    """
    rounds: list[Window] = []
    while scale := stepper.ranks.broadcast(stepper.training.loss_scale()):
        if scale.unskipped >= UNSKIPPED:
            break
        if taken >= MOST_STEPS:
            raise ScaleDiverged(
                f"updates are still skipped after {taken} warm-up steps: gradients overflow float16 at a loss scale of "
                f"{scale.scale:g}"
            )
        rounds.append(stepper.window("warmup", steps))
        taken += steps
    return rounds


def scale_columns(before: LossScale | None, after: LossScale | None, steps: int) -> TrialFacts:
    """Return the loss scale after ``steps`` timed steps, and how many of them were skipped; empty unless fp16."""
    if before is None or after is None:
        return {}
    return {"loss_scale": after.scale, "skipped_updates": after.skipped_since(before, steps)}


def window_rows(rank: int, windows: Sequence[Window], first: int = 0) -> list[WindowRow]:
    """Return one row per window of one rank, numbered from ``first``, with the seconds of each phase."""
    rows: list[WindowRow] = []
    for index, window in enumerate(windows, first):
        sums = {f"{phase}_s": seconds for phase, seconds in window.phases.items()}
        sums |= {f"host_{phase}_s": seconds for phase, seconds in window.host_phases.items()}
        sums |= {"late_s": window.late_s} if window.late_s else {}
        rows.append(
            {
                "rank": rank,
                "window": index,
                "window_kind": window.kind,
                "duration_s": window.duration_s,
                "steps": window.steps,
                "weight": window.weight,
                **cast(PhaseSeconds, sums),
            }
        )
    return rows


def step_seconds(windows: Sequence[Window]) -> list[Seconds]:
    """Return the seconds of the steps of each window, without a wait by the same clock."""
    return [np.asarray(w.step_s) - (0.0 if w.host_phases else np.asarray(w.wait_s)) for w in windows]


def of_all_ranks(ranks: Sequence[tuple[list[WindowRow], list[Seconds]]]) -> list[WindowRow]:
    """Return the rows of all ranks; those without exchange with what the ranks lose by being slow in turn.

    ``ranks``: of each its rows and the seconds of the steps of each window. A step that exchanges gradients takes as
    long as on its slowest rank, which changes from step to step: the sum of the steps' maxima over ranks exceeds the
    largest sum of a rank.
    """
    steps = zip(*(seconds for _, seconds in ranks), strict=True)
    in_turn_s = [float(np.max(each, axis=0).sum() - np.sum(each, axis=1).max()) for each in map(np.stack, steps)]
    for rows, _ in ranks:
        for row, lost_s in zip(rows, in_turn_s, strict=True):
            if row["window_kind"] == "alone":
                row["in_turn_s"] = lost_s
    return [row for rows, _ in ranks for row in rows]


def step_columns(rank: int, windows: Sequence[Window]) -> StepColumns:
    """Return one row per step of one rank, in columns, with what the steps report; ``loss`` is over ``weight``."""
    parts: list[StepColumns] = []
    for index, window in enumerate(windows):
        if window.kind in STEPPED:
            reported = {name: np.array(values, dtype=float) for name, values in window.values.items()}
            if reported:
                reported["loss"] /= np.maximum(reported["weight"], 1.0)
            parts.append(
                {
                    "rank": np.full(window.steps, rank),
                    "window": np.full(window.steps, index),
                    "step": np.arange(window.steps),
                    "warmup": np.full(window.steps, window.kind == "warmup"),
                    "step_s": np.array(window.step_s, dtype=float),
                    "wait_s": np.array(window.wait_s, dtype=float),
                    **reported,
                }
            )
    return joined(parts)


def recorded(
    ranks: Ranks, windows: Sequence[Window], keep_steps: str
) -> tuple[tuple[WindowRow, ...], StepColumns, list[StepColumns]]:
    """Return all ranks' windows, the steps that are kept of all ranks, and each rank's steps; complete on rank 0."""
    gathered = ranks.gather_to_first((window_rows(ranks.rank, windows), step_columns(ranks.rank, windows)))
    by_rank = [steps for _, steps in gathered]
    own = [{name: values for name, values in steps.items() if name != "weight"} for steps in by_rank]
    kept = joined(own) if keep_steps == "all" else of_slowest(by_rank)
    return tuple(row for rows, _ in gathered for row in rows), kept, by_rank


def step_quantiles(windows: Sequence[Window]) -> RankFacts:
    """Return quantiles of one rank's timed steps, in seconds."""
    step_s = [seconds for each in windows if each.kind == "timed" for seconds in each.step_s]
    p5, median, p95 = map(float, np.percentile(step_s, (5, 50, 95)))
    return {"step_p5_s": p5, "step_s": median, "step_p95_s": p95}


def of_slowest(by_rank: Sequence[StepColumns]) -> StepColumns:
    """Return one row per step from those of all ranks, which took the same steps.

    ``step_s`` and ``rank``: of the rank whose step was longest; ``wait_s`` and ``wait_rank``: of the rank that waited
    longest for data; ``mean_s``: the mean over ranks; of all that steps report: the mean by the ranks' weights.
    """
    first, *_ = by_rank
    if not first:
        return first
    step_s, wait_s = (np.stack([columns[name] for columns in by_rank]) for name in ("step_s", "wait_s"))
    slowest, waiting = step_s.argmax(axis=0), np.nan_to_num(wait_s, nan=-1.0).argmax(axis=0)
    at = np.arange(step_s.shape[1])
    known = {
        **{name: first[name] for name in ("window", "step", "warmup")},
        "rank": slowest,
        "step_s": step_s[slowest, at],
        "mean_s": step_s.mean(axis=0),
        "wait_s": wait_s[waiting, at],
        "wait_rank": waiting,
    }
    if "weight" not in first:  # a script's
        return known
    weights = np.stack([columns["weight"] for columns in by_rank])
    part = np.maximum(weights, 1.0) / np.maximum(weights.sum(axis=0), 1.0)  # a loss is over at least 1
    reported = {
        name: (part * np.stack([columns[name] for columns in by_rank])).sum(axis=0)
        for name in first
        if name not in known and name != "weight"
    }
    return {**known, **reported}


def joined(parts: Sequence[StepColumns]) -> StepColumns:
    """Concatenate the rows of several tables."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


def columns_of(rows: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Return rows as columns; None if a row lacks a value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
