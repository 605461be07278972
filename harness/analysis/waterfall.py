"""Trials -> the parts of a step in which the efficiency of each cell is lost, from the ideal to the measured step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.common import (
    AnyRow,
    Row,
    by_cell,
    columns_of,
    grouped,
    measured,
    nearest,
    order,
    rows_of,
    trial_key,
)
from harness.analysis.phases import Timing, timings
from harness.analysis.ratios import same_hardware
from harness.analysis.stats import ENDS, mean_interval
from harness.config.strategy_traits import (
    ALL_REDUCE,
    BASE_STRATEGY,
    BROADCAST,
    BUILTIN_TRAITS,
    COLLECTIVES,
    EXCHANGE_CPU,
    OWN_COLLECTIVES,
    SPARSE,
)
from harness.plan.comparison import backend_of
from harness.plan.trial import REPEATS
from harness.record.schema import DESCRIPTION, WATERFALL

PART_OF = {"all_reduce": COLLECTIVES.name, "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
"""The part of a waterfall that waits for each collective."""


class ExchangeTime(NamedTuple):
    """The exchange of one step: its bytes, and its seconds at the measured latency and bandwidth, without overlap."""

    size_bytes: int
    seconds: float


Needed = Mapping[tuple[str, str], ExchangeTime]
"""By cell and part of the waterfall."""


def exchange_times(exchanges: pd.DataFrame, collectives: pd.DataFrame) -> Needed:
    """Return what each recorded exchange needs, if its collective was measured on as many devices and nodes."""
    known = rows_of(collectives[collectives["time_s"] > 0])
    measured = grouped(known, lambda row: (row.backend, row.devices, row.nodes, row.operation))
    found: dict[tuple[str, str], ExchangeTime] = {}
    for row in rows_of(exchanges):
        if of_placement := measured.get((backend_of(row), row.devices, row.nodes, row.operation)):
            times = [(int(one.size_bytes), float(one.time_s)) for one in of_placement]
            key, size = (row.cell_id, PART_OF[row.operation]), int(row.size_bytes)
            before = found.get(key, ExchangeTime(0, 0.0))
            found[key] = ExchangeTime(before.size_bytes + size, before.seconds + float(seconds_of([size], times)[0]))
    return found


def seconds_of(sizes: Sequence[int], measured: Sequence[tuple[int, float]]) -> npt.NDArray[np.float64]:
    """Return the time of a collective of each size, from measured sizes (bytes) and seconds.

    Between two of them on logarithmic axes; below the smallest that one's, which is latency; beyond the largest in
    proportion to the size.
    """
    at, seconds = np.array(sorted(measured), dtype=float).T
    between = np.exp(np.interp(np.log(sizes), np.log(at), np.log(seconds)))
    found: npt.NDArray[np.float64] = between * np.maximum(1.0, np.array(sizes) / at[-1])
    return found


class Part(NamedTuple):
    """A part of the waterfall: its name in sentences, and its row in figures, if they are not its name in tables."""

    words: str = ""
    row: str = ""


COMMUNICATION = "communication"
UNEQUAL_STEPS = "unequal steps"
PARTS: Mapping[str, Part] = {
    "smaller batch": Part("the smaller batch of each device"),
    "wrapper": Part("wrapper overhead", row="wrapper overhead"),
    "threads": Part("the threads of dp", row="wrapper overhead"),
    "side by side": Part("contention between devices", row="contention"),
    "slowest rank": Part("waiting for the slowest rank"),
    UNEQUAL_STEPS: Part("waiting for ranks that are slow in turn"),
    OWN_COLLECTIVES: Part("collectives of the user's own code", row=COMMUNICATION),
    BROADCAST: Part("broadcast of buffers", row=COMMUNICATION),
    SPARSE: Part("exchange of sparse gradients", row=COMMUNICATION),
    EXCHANGE_CPU: Part(row=COMMUNICATION),
    COLLECTIVES.name: Part(row=COMMUNICATION),
    **{part.name: Part(row=COMMUNICATION) for traits in BUILTIN_TRAITS.values() for part in traits.profiled_parts},
    "waiting for data": Part(row="extra waiting for data"),
    "rest": Part("unexplained", row="unexplained"),
}
"""The parts by name, in the order in which they are taken from the ideal; a strategy has those that apply to it."""
ROW_OF = {name: part.row or name for name, part in PARTS.items()}
"""The row of each part in figures and text."""
OF_EXCHANGE = (SPARSE, EXCHANGE_CPU)
"""What is taken from ddp's exposed communication, as far as that goes."""
MOST_TIMES = 3.0
"""A part that takes more than this many times what its exchange needs at the measured speed is something else."""
WORTH_NAMING = 0.01
"""The least share of the step that is named, lost, saved, or between two measurements of a part."""
BY_DIFFERENCE = "by difference, of steps with exchange and without"
TIMED = "by DDP's own timers it is {} of the step ({} ms)"
"""What the exposed communication is, if two measurements of it disagree."""
MOST_REST = 0.20
"""The largest share of the step, lost or saved, that parts may leave unexplained; beyond it they are withheld."""
MOST_CORRECTION = 0.25
"""The largest factor, beside 1, by which parts are scaled to the efficiency: near 1, it may follow from noise alone."""


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
        |== slowest rank, without exchange =====|
                                           |----| slowest rank
        |== slowest rank of each step, without exchange
                                                |---| unequal steps
        |== step with exchange ============================|
                                                    |------| broadcast of buffers, sparse gradients, the exchange's
                                                             CPU time, the rest of the exposed communication
        |== measured step, with its wait =============================|
                                                           |----| waiting for data
                                                                |-----| rest

    fsdp has the exposed time of its collectives, from a profile, in place of the communication; dp has them beside its
    replicas' threads and what the replicas lose to each other (side by side). Collectives of the user's own code
    are in steps without exchange too: they are taken from what is lost side by side. A part may be negative.
    """

    ideal_s: float
    step_mean_s: float
    parts: Mapping[str, float]
    rest_s: float
    is_explained: bool = True
    """Whether its profile was taken, if its strategy needs one."""
    timer_s: float | None = None
    """The exposed communication by DDP's own timers, if it was found by difference too."""

    @property
    def bars(self) -> dict[str, float]:
        """Seconds of every part, the ideal and the rest among them."""
        return {"ideal": self.ideal_s, **self.parts, "rest": self.rest_s}

    def keep(self, names: Collection[str]) -> StepLoss:
        """Return the loss with these parts alone; the rest takes the others, the exchange what was taken from it."""
        kept = {part: seconds for part, seconds in self.parts.items() if part in names}
        if COLLECTIVES.name in names:
            kept[COLLECTIVES.name] += sum(self.parts.get(part, 0.0) for part in OF_EXCHANGE if part not in names)
        others = sum(self.parts.values()) - sum(kept.values())
        return replace(self, parts=kept, rest_s=self.rest_s + others)


Measured = Mapping[tuple[str, int], Sequence[Row]]
"""Trials with their ``timing`` by cell and block."""
Profiles = Mapping[tuple[str, int], Row]
"""The latest profile of a cell and block; cells that differ in their launcher alone share it, by launchers_id."""


def waterfall(
    trials: pd.DataFrame,
    windows: pd.DataFrame,
    scaling: pd.DataFrame,
    pilot: int | None = None,
    needed: Needed = MappingProxyType({}),
) -> pd.DataFrame:
    """Return one row a part of a cell on several devices: its share of the step, over blocks.

    The share of the ideal is the cell's efficiency E in ``scaling``, with its interval; the parts, the rest among
    them, have the share 1 - E in proportion to their mean seconds. ``pilot``: the number of blocks that a rule
    decided from. ``needed``: what the exchanges of a step need; a part of over MOST_TIMES that is in the rest. A cell
    whose rest exceeds MOST_REST has no other part. ``reason`` in its row says so.
    """
    by_trial = timings(windows)
    ok = trials[(trials["outcome"] == "ok") & (trials["kind"] != "convergence") & ~trials["purpose"].isin(REPEATS)]
    timed = [Row({**row, "timing": by_trial[key]}) for row in rows_of(ok) if (key := trial_key(row)) in by_trial]
    known = grouped(timed, lambda row: (row.cell_id, row.block))
    profiles = {(row.launchers_id, row.block): row for row in rows_of(measured(trials, "profile"))}
    claims = rows_of(scaling[scaling["excluded"].isna()])
    programs = set(trials.loc[trials["connected_ranks"].notna(), "cell_id"])  # each is its own base
    ratios = {row.cell_id: row for row in claims if row.base_strategy == BASE_STRATEGY or row.cell_id in programs}
    rows: list[AnyRow] = []
    for cell_id, group in by_cell(rows_of(measured(trials))).items():
        ratio = ratios.get(cell_id)
        if group[0].devices == 1 or ratio is None or pd.isna(ratio.efficiency):
            continue
        by_block = [(row.block, _step_loss(row, ratio.base_id, known, profiles)) for row in group]
        losses = {block: loss for block, loss in by_block if loss}  # the last invocation of a block counts
        losses = {block: loss for block, loss in losses.items() if loss.is_explained} or losses
        if losses:
            common = set.intersection(*(set(loss.parts) for loss in losses.values()))
            # what another block lacks goes to the rest, so that all blocks have the same parts
            losses = {block: loss.keep(common) for block, loss in losses.items()}
            rows += _checked_rows(ratio, losses, pilot, needed)
    return WATERFALL.frame(sorted(rows, key=lambda row: (*order(row), row["position"])))


def _step_loss(row: Row, base_id: str, known: Measured, profiles: Profiles) -> StepLoss | None:
    """Take one trial's step apart; None if its block lacks a trial to compare with on the same hardware."""
    partners = (row.cell_id, base_id, row.alone_id, row.wrapped_id)
    found = [nearest(row, known.get((cell_id, row.block), ())) for cell_id in partners]
    own, base, alone, wrapped = (each if each and same_hardware(row, each) else None for each in found)
    if own is None or base is None or alone is None:
        return None
    base_timing, timing, alone_timing = base.timing, own.timing, alone.timing
    by_ranks = _parts_by_ranks(row, timing, alone_timing, wrapped.timing if wrapped else None)
    if by_ranks is None:
        return None
    by_profile = _profiled_parts(row.strategy, profiles.get((row.launchers_id, row.block)))
    ideal_s = base_timing.step_mean_s * base.devices * row.global_batch_size / base.global_batch_size / row.devices
    smaller = {"smaller batch": alone_timing.step_mean_s - ideal_s} if row.scaling == "strong" else {}
    parts = {**smaller, **by_ranks, **(by_profile or {}), "waiting for data": timing.wait_s - alone_timing.wait_s}
    rest_s = timing.step_mean_s - ideal_s - sum(parts.values())
    timer_s = (row.exposed_s or {}).get(ALL_REDUCE) if COLLECTIVES.name in parts else None
    return StepLoss(ideal_s, timing.step_mean_s, parts, rest_s, by_profile is not None, timer_s)


def _parts_by_ranks(row: Row, timing: Timing, alone: Timing, wrapped: Timing | None) -> dict[str, float] | None:
    """Return the parts that windows without exchange show; None if a strategy explained by them has none."""
    traits, own = BUILTIN_TRAITS.get(row.strategy), row.exchange_s or {}
    others = {part: own[part] for part in (OWN_COLLECTIVES, BROADCAST) if part in own}
    if COLLECTIVES.name in (row.exposed_s or {}) and timing.alone_s and alone.alone_s:  # of a program of the user's
        parts = _over_ranks(timing, next(iter(alone.alone_s.values())), {})
        del parts[UNEQUAL_STEPS]  # steps are not known one by one
        return {**parts, COLLECTIVES.name: row.exposed_s[COLLECTIVES.name]}
    if wrapped is not None and timing.together_s is not None:
        own_s = next(iter(wrapped.alone_s.values()), wrapped.net_s)  # if its explanation failed
        slowest_s = timing.slowest_s or own_s
        exposed_s = timing.together_s - slowest_s - others.get(BROADCAST, 0.0)
        for part in OF_EXCHANGE:  # some of it may be beside the backward pass, and of CPU time a broadcast's
            if part in own:
                others[part] = max(0.0, min(own[part], exposed_s))
                exposed_s -= others[part]
        exposed = {COLLECTIVES.name: exposed_s}
        return {"wrapper": own_s - alone.net_s, **_over_ranks(timing, own_s, others), **others, **exposed}
    if traits and traits.explained_by == "removal":
        return None
    parts = {part: own[part] for part in ("threads", "side by side") if part in own}  # of replicas in one process
    if wrapped is not None and traits and traits.wrapper_cost:
        # without exchange fsdp's step has no optimizer: whole steps show the wrapper, those others what ranks lose
        parts["wrapper"] = wrapped.net_s - alone.net_s
        if timing.alone_s and wrapped.alone_s:
            parts |= {**_over_ranks(timing, next(iter(wrapped.alone_s.values())), others), **others}
    return parts


def _over_ranks(timing: Timing, own_s: float, others: Mapping[str, float]) -> dict[str, float]:
    """Return the parts from a step on one device to that of the slowest of several ranks, all without exchange.

    Of two ranks the faster is the usual one: with the median half of a slow rank's cost would fall on both. Ranks that
    are slow in turn wait for each other too: for the slowest of each step beyond the slowest on the whole.
    """
    alone_s = list(timing.alone_s.values())
    usual = min(alone_s) if len(alone_s) == 2 else median(alone_s)
    slowest = max(alone_s)
    return {
        "side by side": usual - own_s - others.get(OWN_COLLECTIVES, 0.0),
        "slowest rank": slowest - usual,
        UNEQUAL_STEPS: (timing.slowest_s or slowest) - slowest,
    }


def _profiled_parts(strategy: str, profile: Row | None) -> dict[str, float] | None:
    """Return the exposed time of each collective that the profile shows; None if a profile is missing, or empty."""
    traits = BUILTIN_TRAITS.get(strategy)
    if not traits or not traits.profiled_parts:
        return {}
    if profile is None:
        return None
    seen = profile.exposed_s or {}
    return {part.name: seen[part.name] for part in traits.profiled_parts if part.name in seen} or None


def _checked_rows(ratio: Row, losses: Mapping[int, StepLoss], pilot: int | None, needed: Needed) -> list[AnyRow]:
    """Return the rows of one cell, without the parts that the measured speed of its exchange contradicts."""
    names, reasons = list[str](), list[str]()
    timed = _contradicting_timers(float(ratio.efficiency), list(losses.values()))
    for part in next(iter(losses.values())).parts:
        part_s = mean(loss.parts[part] for loss in losses.values())
        time = needed.get((ratio.cell_id, part))
        if time is None or part_s <= MOST_TIMES * time.seconds:
            names.append(part)
            continue
        need = f"{1000 * time.seconds:.3g} ms that its {time.size_bytes:,} bytes need"
        times = f"{part_s / time.seconds:.2g} times the {need} at the measured latency and bandwidth"
        reasons.append(f"{part} of {1000 * part_s:.3g} ms a step is {times}")
    if timed and COLLECTIVES.name not in names:
        reasons.append(timed)
    rows = _rows(ratio, {block: loss.keep(names) for block, loss in losses.items()}, pilot)
    rest = float(rows[-1]["share"])
    if abs(rest) > MOST_REST and names:
        reasons.append(f"the measured parts miss it by {100 * abs(rest):.0f} % of the step, and are withheld")
        rows = _rows(ratio, {block: loss.keep(()) for block, loss in losses.items()}, pilot)
    of_part = {COLLECTIVES.name: f"{BY_DIFFERENCE}; {timed}" if timed else None, "rest": "; ".join(reasons) or None}
    return [{**row, "reason": of_part.get(row["part"])} for row in rows]


def _contradicting_timers(efficiency: float, losses: Sequence[StepLoss]) -> str:
    """Return what DDP's own timers have as exposed communication; empty if they agree with the difference, or lack it.

    They disagree if the 95 % interval of the two measurements' difference, paired by block, excludes 0, by at least
    WORTH_NAMING of the step. The timers see what is left of the exchange after the backward pass, some of its CPU time
    with it: with or without that, whichever is nearer; and the exchange of sparse gradients.
    """
    known = [
        (loss.parts[COLLECTIVES.name] + loss.parts.get(SPARSE, 0.0), loss.parts.get(EXCHANGE_CPU, 0.0), loss.timer_s)
        for loss in losses
        if COLLECTIVES.name in loss.parts and loss.timer_s is not None
    ]
    if not known:
        return ""
    least, timer_s = mean(part_s for part_s, *_ in known), mean(timer_s for *_, timer_s in known)
    if least <= timer_s <= least + mean(cpu_s for _, cpu_s, _ in known):
        return ""
    with_cpu = timer_s > least
    apart = mean_interval([part_s + with_cpu * cpu_s - timer_s for part_s, cpu_s, timer_s in known])
    a_second = _share_of_a_second(efficiency, losses)
    unclear = apart.low is None or apart.high is None or apart.low <= 0 <= apart.high
    if unclear or abs(apart.value) * a_second < WORTH_NAMING:
        return ""
    return TIMED.format(f"{100 * timer_s * a_second:.0f} %", f"{1000 * timer_s:.3g}")


def _rows(ratio: Row, losses: Mapping[int, StepLoss], pilot: int | None) -> list[AnyRow]:
    """Return the rows of one cell, whose efficiency is in its row of ``scaling``."""
    named = columns_of(ratio, "cell_id", "base_id", *DESCRIPTION)
    efficiency = float(ratio.efficiency)
    per_second = _share_of_a_second(efficiency, list(losses.values()))
    ideal = {"share": efficiency, **{end: getattr(ratio, f"efficiency_{end}") for end in ENDS}}
    ideal_s = mean(loss.ideal_s for loss in losses.values())
    rows: list[AnyRow] = [{**named, "position": 0, "part": "ideal", "part_s": ideal_s, "blocks": ratio.blocks, **ideal}]
    left = 1.0 - efficiency
    for position, part in enumerate(PARTS, 1):
        seconds = {block: loss.bars[part] for block, loss in sorted(losses.items()) if part in loss.bars}
        if not seconds:
            continue
        estimate = mean_interval(list(seconds.values()), pilot=sum(block < (pilot or 0) for block in seconds))
        share = left if part == "rest" else estimate.value * per_second  # its share by its seconds is the same
        interval = estimate.around("", per_second, share - per_second * estimate.value)
        of_part = {"position": position, "part": part, "part_s": estimate.value, "blocks": estimate.n}
        rows.append({**named, **of_part, "share": share, **interval})
        left -= share
    return rows


def _share_of_a_second(efficiency: float, losses: Sequence[StepLoss]) -> float:
    """Return the share of the step that one second of a part stands for: all parts together make 1 - E.

    Near an efficiency of 1 the quotient may follow from noise alone; then one over the step, and the rest takes the
    difference between the mean of ratios and the ratio of means.
    """
    step_s, ideal_s = mean(loss.step_mean_s for loss in losses), mean(loss.ideal_s for loss in losses)
    lost_s = step_s - ideal_s
    factor = (1.0 - efficiency) * step_s / lost_s if lost_s else 0.0
    return (factor if abs(factor - 1.0) <= MOST_CORRECTION else 1.0) / step_s
