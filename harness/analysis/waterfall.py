"""Windows -> where the efficiency of each cell is lost, part by part, from the ideal to what was measured."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import pandas as pd

from harness.analysis.common import by_cell, measured, order
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
class Timing:
    """One trial's seconds a step: of the slowest rank, and its wait; by rank for ddp's windows alone and together."""

    step_s: float
    wait_s: float
    alone_s: Mapping[int, float]
    together_s: float | None


def waterfall(
    trials: pd.DataFrame, windows: pd.DataFrame, scaling: pd.DataFrame, pilot: int | None = None
) -> pd.DataFrame:
    """One row a part of a cell on several devices: its share of the step, the mean over blocks.

    With T the measured step and T_ideal that of the base, scaled to this batch and these devices, efficiency is
    T_ideal / T, and each part's share is its seconds over T: all add up to 1. Parts may be negative. ``pilot``: how
    many blocks decided on the number of all, where a rule did.
    """
    timings = _timings(windows)
    every = trials[(trials["outcome"] == "ok") & (trials["kind"] != "convergence") & (trials["purpose"] != "twin")]
    known = {
        (row["cell_id"], row["block"], row["invocation"]): row
        for row in records(every)
        if (row["trial_id"], row["attempt"]) in timings
    }
    bases = {row["cell_id"]: row for row in records(scaling) if row["base_strategy"] == BASE_STRATEGY}
    rows: list[dict[str, Any]] = []
    for cell_id, group in by_cell(measured(trials)).items():
        first = group[0]
        base = bases.get(cell_id)
        if first["devices"] == 1 or base is None or pd.isna(base["efficiency"]):
            continue
        found = [(row["block"], _block(row, base["base_id"], known, timings)) for row in group]
        blocks = {block: parts for block, parts in found if parts}  # the last invocation's, where one was cut in two
        if blocks:
            blocks = _alike(blocks)
            rows += _rows(first, str(base["base_id"]), blocks, pilot)
    return WATERFALL.frame(sorted(rows, key=lambda row: (*order(row), row["position"])))


def _block(
    row: Mapping[Hashable, Any], base_id: Any, known: Mapping[Any, Any], timings: Mapping[Any, Timing]
) -> dict[str, float] | None:
    """Seconds of each part in one block, 'ideal' and 'step' among them; None where a part's cell is not there."""

    def of(cell_id: Any) -> Timing | None:
        found = known.get((cell_id, row["block"], row["invocation"]))
        return timings.get((found["trial_id"], found["attempt"])) if found is not None else None

    mine, base, alone = of(row["cell_id"]), of(base_id), of(row["alone_id"])
    base_row = known.get((base_id, row["block"], row["invocation"]))
    if mine is None or base is None or alone is None or base_row is None:
        return None
    ideal = base.step_s * row["global_batch_size"] / base_row["global_batch_size"] / row["devices"]
    parts = {"smaller batch": alone.step_s - ideal} if row["scaling"] == "strong" else {}
    traits = BUILTIN_TRAITS.get(row["strategy"])
    wrapped = of(row["wrapped_id"])
    complete = wrapped is not None and mine.together_s is not None
    if traits and traits.explained_by == "removal" and not complete:
        return None
    if wrapped is not None and mine.together_s is not None:
        parts |= _of_ddp(mine, alone, wrapped)
    else:
        columns = {part.name: part.column for part in (traits.profiled_parts if traits else ())}
        profiled = {part: row[column] for part, column in columns.items() if not pd.isna(row[column])}
        if columns and not profiled:
            return None  # what follows the windows failed there
        parts |= profiled  # what was not seen is in the rest
    parts["waiting for data"] = mine.wait_s - alone.wait_s
    parts["rest"] = mine.step_s - ideal - sum(parts.values())
    return {"ideal": ideal, "step": mine.step_s, **parts}


def _alike(blocks: Mapping[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Blocks with the same parts: what was not seen in every one of them goes to the rest."""
    common = set.intersection(*(set(parts) for parts in blocks.values()))
    return {
        block: {part: seconds for part, seconds in parts.items() if part in common}
        | {"rest": parts["rest"] + sum(seconds for part, seconds in parts.items() if part not in common)}
        for block, parts in blocks.items()
    }


def _of_ddp(mine: Timing, alone: Timing, wrapped: Timing) -> dict[str, float]:
    """ddp's parts, waiting for data taken out of each.

    Of two ranks the faster is the usual one, else half of a slow rank's cost would be put on both.
    """
    own = list(mine.alone_s.values())
    usual = min(own) if len(own) == 2 else median(own)
    assert mine.together_s is not None
    return {
        "wrapper": (wrapped.step_s - wrapped.wait_s) - (alone.step_s - alone.wait_s),
        "side by side": usual - (wrapped.step_s - wrapped.wait_s),
        "slowest rank": max(own) - usual,
        "exposed communication": mine.together_s - max(own),
    }


def _rows(
    first: Mapping[Hashable, Any], base_id: str, blocks: Mapping[int, Mapping[str, float]], pilot: int | None
) -> list[dict[str, Any]]:
    named = {axis: first[axis] for axis in ("cell_id", *AXES)}
    rows = []
    for position, part in enumerate(("ideal", *PARTS)):
        if any(part not in parts for parts in blocks.values()):
            continue
        shares = {block: parts[part] / parts["step"] for block, parts in blocks.items()}
        first_shares = [share for block, share in shares.items() if pilot and block < pilot]
        share = mean_interval(list(shares.values()), pilot=first_shares or None)
        rows.append(
            {
                **named,
                "base_id": base_id,
                "position": position,
                "part": part,
                "part_s": mean(parts[part] for parts in blocks.values()),
                "share": share.value,
                "blocks": share.n,
                "low": share.low,
                "high": share.high,
            }
        )
    return rows


def _timings(windows: pd.DataFrame) -> dict[tuple[Hashable, Hashable], Timing]:
    """Seconds a step of every trial that was timed."""
    rows: dict[tuple[Hashable, Hashable], list[dict[Hashable, Any]]] = {}
    for row in records(windows[[*WINDOW_COLUMNS]]):
        rows.setdefault((row["trial_id"], row["attempt"]), []).append(row)
    return {key: timing for key, part in rows.items() if (timing := _timing(part))}


def _timing(rows: list[dict[Hashable, Any]]) -> Timing | None:
    """Windows begin together: the slowest rank ends each, and what it waited is the step's wait."""
    timed = _slowest(rows, "timed")
    if not timed:
        return None
    marked = timed if any(_is_marked(row) for row in timed) else _slowest(rows, "phases")
    waited = sum(_wait_s(row) for row in marked) / sum(row["steps"] for row in marked) if marked else 0.0
    alone: dict[int, list[dict[Hashable, Any]]] = {}
    for row in rows:
        if row["window_kind"] == "alone":
            alone.setdefault(int(row["rank"]), []).append(row)
    together = _slowest(rows, "together")
    return Timing(
        sum(row["duration_s"] for row in timed) / sum(row["steps"] for row in timed),
        waited,
        {rank: _net_step_s(part) for rank, part in alone.items()},
        _net_step_s(together) if together else None,
    )


def _is_marked(row: Mapping[Hashable, Any]) -> bool:
    """Whether the window's phases were marked on the clock that its steps ran by."""
    return _known(row["wait_s"]) or _known(row["idle_s"])


def _wait_s(row: Mapping[Hashable, Any]) -> float:
    """Seconds of a window lost to data: the host's wait, or on a GPU what of it left the stream idle."""
    if _known(row["wait_s"]):
        return float(row["wait_s"])
    if _known(row["idle_s"]) and _known(row["host_wait_s"]):
        return float(min(row["idle_s"], row["host_wait_s"]))
    return 0.0


def _known(seconds: float | None) -> bool:
    """pd.notna() of one number takes ten times as long, and there are a few for each window of each rank."""
    return seconds is not None and not math.isnan(seconds)


def _slowest(rows: list[dict[Hashable, Any]], kind: str) -> list[dict[Hashable, Any]]:
    """One row for each window of a kind: the slowest rank's time, and the wait of the rank that waited longest.

    Ranks that exchange gradients end a step together, whichever of them it was that made the others wait.
    """
    windows: dict[int, list[dict[Hashable, Any]]] = {}
    for row in rows:
        if row["window_kind"] == kind:
            windows.setdefault(int(row["window"]), []).append(row)
    merged = []
    for ranks in windows.values():
        slowest, waiting = max(ranks, key=lambda row: row["duration_s"]), max(ranks, key=_wait_s)
        waits: dict[Hashable, Any] = {name: waiting[name] for name in ("wait_s", "idle_s", "host_wait_s")}
        merged.append(dict(slowest) | waits)
    return merged


def _net_step_s(rows: list[dict[Hashable, Any]]) -> float:
    """Seconds a step without the wait for data."""
    total = sum(row["duration_s"] - _wait_s(row) for row in rows)
    steps = sum(row["steps"] for row in rows)
    return float(total / steps) if steps else math.nan
