"""Windows -> the seconds a step of each trial: with the exchange between ranks, and of each rank without it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from harness.analysis.common import Row, Rows
from harness.record.frames import records

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
    "in_turn_s",
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

    Without the wait: ``alone_s`` by rank without gradient exchange, ``slowest_s`` of each step's slowest rank without
    it, ``together_s`` of the slowest rank with it; None for a strategy whose exchange cannot be taken out.
    ``wait_fraction``: the wait over the time of the windows in which it was marked; None if it was marked in none.
    """

    step_mean_s: float
    wait_s: float
    wait_fraction: float | None
    alone_s: Mapping[int, float]
    slowest_s: float | None
    together_s: float | None

    @property
    def net_s(self) -> float:
        return self.step_mean_s - self.wait_s


def timings(windows: pd.DataFrame) -> dict[tuple[str, int], Timing]:
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
    waited_s = sum(window.wait_s for window in marked)
    wait_s = waited_s / sum(window.steps for window in marked) if marked else 0.0
    is_known = any(window.is_marked for window in marked)
    return Timing(
        step_mean_s=sum(window.duration_s for window in timed) / sum(window.steps for window in timed),
        wait_s=wait_s,
        wait_fraction=waited_s / sum(window.duration_s for window in marked) if is_known else None,
        alone_s={rank: _net_step_s(windows, wait_s) for rank, windows in alone.items()},
        slowest_s=_slowest_s(rows, wait_s),
        together_s=_net_step_s(together, wait_s) if together else None,
    )


def _slowest_s(rows: Rows, usual_wait_s: float) -> float | None:
    """Return the seconds a step of the slowest rank of each step, without exchange; None without such windows."""
    by_window: dict[int, list[Row]] = {}
    for row in (row for row in rows if row["window_kind"] == "alone"):
        by_window.setdefault(int(row["window"]), []).append(row)
    total_s = 0.0
    for ranks in by_window.values():
        total_s += ranks[0]["steps"] * max(_net_step_s([_merged([row])], usual_wait_s) for row in ranks)
        total_s += ranks[0]["in_turn_s"] if _known(ranks[0]["in_turn_s"]) else 0.0
    steps = sum(ranks[0]["steps"] for ranks in by_window.values())
    return total_s / steps if steps else None


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


def _net_step_s(windows: list[StepWindow], usual_wait_s: float) -> float:
    """Return the seconds a step without the wait for data: that of the trial's other windows, if these mark none."""
    steps = sum(window.steps for window in windows)
    waits = (window.wait_s if window.is_marked else window.steps * usual_wait_s for window in windows)
    return (sum(window.duration_s for window in windows) - sum(waits)) / steps if steps else math.nan
