"""What a run measured of the cells that differ in their devices alone: the parts from which others are predicted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.common import KEYS, AnyRow, Lines, Row, Rows, TrialKey, grouped, rows_of, trial_key
from harness.analysis.phases import Timing, timings
from harness.analysis.step_times import StepTimes
from harness.plan.comparison import backend_of
from harness.plan.rows import Collective, LinkTier

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, order=True)
class Size:
    """A number of devices and of nodes."""

    devices: int
    nodes: int

    @property
    def tier(self) -> LinkTier:
        return "between nodes" if self.nodes > 1 else "inside a node"

    @property
    def words(self) -> str:
        """The size as a noun: '1 device', '4 devices on 2 nodes'."""
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        return devices if self.nodes == 1 else f"{devices} on {self.nodes} nodes"

    def __str__(self) -> str:
        return f"{self.devices}" if self.nodes == 1 else f"{self.devices} on {self.nodes} nodes"


@dataclass(frozen=True)
class Observed:
    """The measured cell of one size, in seconds a step.

    ``step_s``: of each block, with its wait for data; ``wait_s``: that wait. ``own_s``: of each rank without any
    exchange, mean over blocks, empty if not measured; ``own_by_block``: mean over ranks. Of sharded parameters they
    lack the optimizer. ``batch``: of one device. ``optimizer_s``: 0 if not known.
    """

    size: Size
    row: AnyRow
    step_s: tuple[float, ...]
    wait_s: float
    own_s: tuple[float, ...]
    own_by_block: tuple[float, ...]
    optimizer_s: float

    @property
    def batch(self) -> int:
        return int(self.row["per_device_batch_size"])

    @property
    def mean_s(self) -> float:
        """Seconds of a step with its wait for data, over all blocks."""
        return fmean(self.step_s)


@dataclass(frozen=True)
class Exchange:
    """A collective of the step; ``ready_s``, ``needed_s``: as in ExchangeRow."""

    operation: Collective
    size_bytes: int
    ready_s: float
    needed_s: float


@dataclass(frozen=True)
class Family:
    """Cells that differ in their devices alone, by size, in order.

    ``alone``: seconds of the same strategy's step on one device, by per-device batch. ``jitter``: step times of one
    device over their mean, one after the other; empty if it was not measured.
    """

    sizes: Mapping[Size, Observed]
    alone: Mapping[int, float]
    jitter: Array
    exchanges: tuple[Exchange, ...]

    @property
    def row(self) -> AnyRow:
        """The trial of the largest size."""
        return [*self.sizes.values()][-1].row

    @property
    def is_sharded(self) -> bool:
        return any(exchange.operation == "all_gather" for exchange in self.exchanges)

    @property
    def backend(self) -> str:
        """The backend of the ranks' collectives."""
        return backend_of(self.row)


def families(trials: pd.DataFrame, windows: pd.DataFrame, lines: Lines, times: StepTimes) -> list[Family]:
    """Return the families of the measured cells with several devices, in the order of their trials."""
    known = trials["purpose"].fillna("").isin(["", "explain"]) & (trials["kind"] != "convergence")
    ok = known & (trials["outcome"] == "ok") & ~trials["inline"].fillna(False).astype(bool)
    rows = [row for row in rows_of(trials[ok]) if row.device_ids is None and row.per_device_batch_size]
    exchanges = {
        (line["trial_id"], line["attempt"]): tuple(
            Exchange(row["operation"], row["size_bytes"], row["ready_s"], row["needed_s"]) for row in found
        )
        for line in lines
        if (found := line.get("exchanges"))
    }
    marked = windows[windows["window_kind"].isin(["timed", "phases"]) & windows["optimizer_s"].notna()]
    sums = marked.groupby([*KEYS, "rank"])[["optimizer_s", "steps"]].sum()
    optimizer = (sums["optimizer_s"] / sums["steps"]).astype(float).groupby(KEYS).max().to_dict()  # of the slowest rank
    timed = timings(windows)
    steps = net_step_times(times, {trial_key(row) for row in rows if row.device == "cuda"})
    for row in rows:
        key = trial_key(row)
        own = {"timing": timed.get(key), "optimizer_s": optimizer.get(key, 0.0), "steps": steps.get(key)}
        row |= {**own, "exchanges": exchanges.get(key, ())}
    several = [row for row in rows if row.devices > 1 and row.kind == "throughput"]
    return [_family(family_id, rows) for family_id in dict.fromkeys(str(row.family_id) for row in several)]


def net_step_times(times: StepTimes, on_gpus: Collection[TrialKey]) -> dict[TrialKey, Array]:
    """Return the seconds of each trial's steps, without their wait for data if that is by the clock of the steps.

    On a GPU the host waits while the stream computes: its wait is no part of the stream's step.
    """
    found: dict[TrialKey, Array] = {}
    values = zip(times.trials, times.column("step_s"), times.column("wait_s"), strict=True)
    for (trial_id, attempt), step_s, wait_s in values:
        key = str(trial_id), int(attempt)
        found[key] = step_s if key in on_gpus else step_s - np.nan_to_num(wait_s)
    return found


def _family(family_id: str, rows: Rows) -> Family:
    """Return a family, with the one-device cells of its strategy, which under strong scaling are in others.

    ``rows``: the timed trials of the run, each with what is known of it.
    """
    members = [row for row in rows if row.family_id == family_id]
    cells: dict[Size, list[Row]] = {}
    for row in members:
        size = cells.setdefault(Size(int(row.devices), int(row.nodes)), [])
        if row.timing and (not size or size[0].cell_id == row.cell_id):
            size.append(row)
    sizes = {size: _observed(size, cells[size]) for size in sorted(cells) if cells[size]}
    wrapped = {row.wrapped_id for row in members}
    single = [row for row in rows if row.cell_id in wrapped and row.timing]
    largest = [*sizes.values()][-1].batch
    nearest = sorted(single, key=lambda row: abs(int(row.per_device_batch_size) - largest))
    alone = {
        batch: fmean(_own(row.timing, 1)[0] for row in of_batch)
        for batch, of_batch in grouped(single, lambda row: int(row.per_device_batch_size)).items()
    }
    steps = [row.steps for row in nearest if row.cell_id == nearest[0].cell_id and row.steps is not None]
    jitter = np.concatenate([of_trial / of_trial.mean() for of_trial in steps]) if steps else np.array([])
    return Family(sizes, alone, jitter, next((row.exchanges for row in (*nearest, *members) if row.exchanges), ()))


def _observed(size: Size, rows: Rows) -> Observed:
    own = [own for row in rows if (own := _own(row.timing, size.devices))]
    return Observed(
        size,
        rows[-1],
        tuple(row.timing.step_mean_s for row in rows),
        fmean(row.timing.wait_s for row in rows),
        tuple(fmean(of_rank) for of_rank in zip(*own, strict=False)),
        tuple(fmean(ranks) for ranks in own),
        fmean(row.optimizer_s for row in rows),
    )


def _own(timing: Timing, devices: int) -> Sequence[float]:
    """Return each rank's seconds without exchange; of one device those of its step, if no such steps were measured."""
    alone = [timing.alone_s[rank] for rank in sorted(timing.alone_s)]
    return alone or ([timing.net_s] if devices == 1 else [])
