"""Windows -> the parts of a step in which the efficiency of each cell is lost, from the ideal to the measured step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import mean, median

import pandas as pd

from harness.analysis.common import Row, Rows, by_cell, measured, order
from harness.analysis.stats import mean_interval
from harness.config.strategy_traits import BASE_STRATEGY, BUILTIN_TRAITS
from harness.record.frames import records
from harness.record.schema import AXES, WATERFALL

PARTS = (
    "smaller batch",
    "wrapper",
    "side by side",
    "slowest rank",
    "exposed communication",
    *(part.name for traits in BUILTIN_TRAITS.values() for part in traits.profiled_parts),
    "waiting for data",
    "rest",
)
"""In the order in which they are taken from the ideal; a strategy has those that apply to it."""
WINDOW_COLUMNS = (
    "trial_id",
    "attempt",
    "rank",
    "window",
    "window_kind",
    "duration_s",
    "steps",
    "wait_s",
    "idle_s",
    "host_wait_s",
)


@dataclass(frozen=True)
class StepWindow:
    """Steps between two device syncs, of one rank or of all: seconds, number of steps, seconds lost to data.

    ``is_marked``: its phases were marked on the clock that its steps ran by, so that its wait for data is known.
    """

    duration_s: float
    steps: int
    wait_s: float
    is_marked: bool


@dataclass(frozen=True)
class Timing:
    """Seconds a step of one trial: of the slowest rank, and its wait for data.

    Without the wait: ``alone_s`` by rank without gradient exchange, ``together_s`` of the slowest rank with it; None
    for a strategy whose exchange cannot be taken out.
    """

    step_mean_s: float
    wait_s: float
    alone_s: Mapping[int, float]
    together_s: float | None

    @property
    def net_s(self) -> float:
        return self.step_mean_s - self.wait_s


@dataclass(frozen=True)
class StepLoss:
    """The step of one cell in one block, taken apart: ideal, parts and rest, in seconds, add up to the measured step.

    For ddp under strong scaling, each bar being one measurement, from the wrapper to the communication without its
    wait for data::

        |== ideal ==|                                               base, scaled to this batch and these devices
        |== single device ==|                                       bare model, same per-device batch
                    |-------| smaller batch
        |== wrapped, single device ==|
                            |--------| wrapper
        |== usual rank, without exchange ==|
                                     |-----| side by side
        |== slowest rank, without exchange ====|
                                           |---| slowest rank
        |== slowest rank, with exchange ==============|
                                               |------| exposed communication
        |== measured step, with its wait ========================|
                                                      |----| waiting for data
                                                           |-----| rest

    dp and fsdp have the parts that a profile shows in place of those from the wrapper to the communication. A part
    may be negative.
    """

    ideal_s: float
    step_mean_s: float
    parts: Mapping[str, float]
    rest_s: float

    @property
    def bars(self) -> dict[str, float]:
        """Seconds of every part, the ideal and the rest among them."""
        return {"ideal": self.ideal_s, **self.parts, "rest": self.rest_s}

    def keep(self, names: Collection[str]) -> StepLoss:
        """Return the loss with these parts alone; the rest takes the others."""
        others = sum(seconds for part, seconds in self.parts.items() if part not in names)
        kept = {part: seconds for part, seconds in self.parts.items() if part in names}
        return replace(self, parts=kept, rest_s=self.rest_s + others)


Measured = Mapping[tuple[str, int, int], tuple[Row, Timing]]
"""Trials and their timings by cell, block and invocation."""


def waterfall(
    trials: pd.DataFrame, windows: pd.DataFrame, scaling: pd.DataFrame, pilot: int | None = None
) -> pd.DataFrame:
    """Return one row a part of a cell on several devices: its share of the step, the mean over blocks.

    With T the measured step and T_ideal that of the base, scaled to this batch and these devices, efficiency is
    T_ideal / T, and the share of each part is its seconds over T: all add up to 1. ``pilot``: the number of blocks
    that a rule decided from.
    """
    known = _measured(trials, windows)
    bases = {row["cell_id"]: row for row in records(scaling) if row["base_strategy"] == BASE_STRATEGY}
    rows: list[Row] = []
    for cell_id, group in by_cell(measured(trials)).items():
        first, base = group[0], bases.get(cell_id)
        if first["devices"] == 1 or base is None or pd.isna(base["efficiency"]):
            continue
        by_block = [(row["block"], _step_loss(row, base["base_id"], known)) for row in group]
        losses = {block: loss for block, loss in by_block if loss}  # the last invocation of a block counts
        if losses:
            rows += _rows(first, str(base["base_id"]), _with_common_parts(losses), pilot)
    return WATERFALL.frame(sorted(rows, key=lambda row: (*order(row), row["position"])))


def _measured(trials: pd.DataFrame, windows: pd.DataFrame) -> Measured:
    timings = _timings(windows)
    ok = trials[(trials["outcome"] == "ok") & (trials["kind"] != "convergence") & (trials["purpose"] != "twin")]
    return {
        (row["cell_id"], row["block"], row["invocation"]): (row, timing)
        for row in records(ok)
        if (timing := timings.get((row["trial_id"], row["attempt"])))
    }


def _step_loss(row: Row, base_id: str, known: Measured) -> StepLoss | None:
    """Take one trial's step apart; None if a trial that it is compared with is missing from its block."""
    partners = (row["cell_id"], base_id, row["alone_id"], row["wrapped_id"])
    own, base, alone, wrapped = (known.get((cell_id, row["block"], row["invocation"])) for cell_id in partners)
    if own is None or base is None or alone is None:
        return None
    (base_row, base_timing), timing, alone_timing = base, own[1], alone[1]
    added = _parts_of_strategy(row, timing, alone_timing, wrapped[1] if wrapped else None)
    if added is None:
        return None
    ideal_s = base_timing.step_mean_s * row["global_batch_size"] / base_row["global_batch_size"] / row["devices"]
    smaller = {"smaller batch": alone_timing.step_mean_s - ideal_s} if row["scaling"] == "strong" else {}
    parts = {**smaller, **added, "waiting for data": timing.wait_s - alone_timing.wait_s}
    return StepLoss(ideal_s, timing.step_mean_s, parts, timing.step_mean_s - ideal_s - sum(parts.values()))


def _parts_of_strategy(row: Row, timing: Timing, alone: Timing, wrapped: Timing | None) -> dict[str, float] | None:
    """Return the parts that the strategy adds to one device's step; None if the measurements for them failed."""
    if wrapped is not None and timing.together_s is not None:
        return _parts_by_removal(timing.together_s, list(timing.alone_s.values()), alone, wrapped)
    traits = BUILTIN_TRAITS.get(row["strategy"])
    if traits and traits.explained_by == "removal":
        return None
    columns = {part.name: part.column for part in (traits.profiled_parts if traits else ())}
    profiled = {part: row[column] for part, column in columns.items() if not pd.isna(row[column])}
    return None if columns and not profiled else profiled  # a part that the profile lacks is in the rest


def _parts_by_removal(together_s: float, alone_s: list[float], alone: Timing, wrapped: Timing) -> dict[str, float]:
    """Return the parts of a strategy whose gradient exchange can be left out, without waiting for data.

    Of two ranks the faster is the usual one: with the median half of a slow rank's cost would fall on both.
    """
    usual = min(alone_s) if len(alone_s) == 2 else median(alone_s)
    return {
        "wrapper": wrapped.net_s - alone.net_s,
        "side by side": usual - wrapped.net_s,
        "slowest rank": max(alone_s) - usual,
        "exposed communication": together_s - max(alone_s),
    }


def _with_common_parts(losses: Mapping[int, StepLoss]) -> dict[int, StepLoss]:
    """Return the blocks with the same parts: a part that a block lacks goes to the rest of every other."""
    common = set.intersection(*(set(loss.parts) for loss in losses.values()))
    return {block: loss.keep(common) for block, loss in losses.items()}


def _rows(first: Row, base_id: str, losses: Mapping[int, StepLoss], pilot: int | None) -> list[Row]:
    named = {axis: first[axis] for axis in ("cell_id", *AXES)}
    bars = {block: loss.bars for block, loss in losses.items()}
    rows: list[Row] = []
    for position, part in enumerate(("ideal", *PARTS)):
        if any(part not in of_block for of_block in bars.values()):
            continue
        shares = {block: of_block[part] / losses[block].step_mean_s for block, of_block in bars.items()}
        first_shares = [share for block, share in shares.items() if pilot and block < pilot]
        share = mean_interval(list(shares.values()), pilot=first_shares or None)
        rows.append(
            {
                **named,
                "base_id": base_id,
                "position": position,
                "part": part,
                "part_s": mean(of_block[part] for of_block in bars.values()),
                "share": share.value,
                "blocks": share.n,
                "low": share.low,
                "high": share.high,
            }
        )
    return rows


def _timings(windows: pd.DataFrame) -> dict[tuple[str, int], Timing]:
    """Return the timing of every trial that was timed, by its id and attempt."""
    by_trial: dict[tuple[str, int], list[Row]] = {}
    for row in records(windows[[*WINDOW_COLUMNS]]):
        by_trial.setdefault((row["trial_id"], row["attempt"]), []).append(row)
    return {key: timing for key, rows in by_trial.items() if (timing := _timing(rows))}


def _timing(rows: Rows) -> Timing | None:
    """Return the timing of a trial from its windows; None without a timed one."""
    timed = _windows_of_all_ranks(rows, "timed")
    if not timed:
        return None
    marked = timed if any(window.is_marked for window in timed) else _windows_of_all_ranks(rows, "phases")
    alone: dict[int, list[StepWindow]] = {}
    for row in rows:
        if row["window_kind"] == "alone":
            alone.setdefault(int(row["rank"]), []).append(_merged([row]))
    together = _windows_of_all_ranks(rows, "together")
    return Timing(
        step_mean_s=sum(window.duration_s for window in timed) / sum(window.steps for window in timed),
        wait_s=sum(window.wait_s for window in marked) / sum(window.steps for window in marked) if marked else 0.0,
        alone_s={rank: _net_step_s(windows) for rank, windows in alone.items()},
        together_s=_net_step_s(together) if together else None,
    )


def _windows_of_all_ranks(rows: Rows, kind: str) -> list[StepWindow]:
    """Return the windows of a kind, each over all ranks."""
    by_window: dict[int, list[Row]] = {}
    for row in rows:
        if row["window_kind"] == kind:
            by_window.setdefault(int(row["window"]), []).append(row)
    return [_merged(ranks) for ranks in by_window.values()]


def _merged(ranks: Rows) -> StepWindow:
    """Return one window over its ranks: the time of the slowest, and the wait of the one that waited longest.

    Windows begin together, so the slowest rank ends each; and ranks that exchange gradients end a step together,
    whichever of them made the others wait.
    """
    slowest, waiting = max(ranks, key=lambda row: row["duration_s"]), max(ranks, key=_wait_s)
    is_marked = _known(waiting["wait_s"]) or _known(waiting["idle_s"])
    return StepWindow(slowest["duration_s"], slowest["steps"], _wait_s(waiting), is_marked)


def _wait_s(row: Row) -> float:
    """Return the seconds of a window lost to data: the host's wait, or on a GPU the part of it with an idle stream."""
    if _known(row["wait_s"]):
        return float(row["wait_s"])
    if _known(row["idle_s"]) and _known(row["host_wait_s"]):
        return float(min(row["idle_s"], row["host_wait_s"]))
    return 0.0


def _known(seconds: float | None) -> bool:
    """Return whether a number is there; pd.notna() takes ten times as long, for each window of each rank."""
    return seconds is not None and not math.isnan(seconds)


def _net_step_s(windows: list[StepWindow]) -> float:
    """Return the seconds a step without the wait for data."""
    steps = sum(window.steps for window in windows)
    return sum(window.duration_s - window.wait_s for window in windows) / steps if steps else math.nan
