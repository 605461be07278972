"""GPU readings at two instants -> a rank's columns: energy, power, clocks, throttling, other processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.plan.rows import RankFacts
from harness.plan.thresholds import HELD_BY_POWER, POWER_CAP

ENERGY_LEAST_S = 10.0
"""The energy counter is updated at intervals: over less time than this, they would distort the difference."""
POWER_LEAST_S = 1.0
"""Over less time the mean power is not taken from the energy counter."""

THROTTLING = {
    0x04: POWER_CAP,
    0x08: "hw slowdown",
    0x20: "sw thermal slowdown",
    0x40: "hw thermal slowdown",
    0x80: "hw power brake",
}
"""NVML's bits for throttled clocks. An idle GPU, or clocks set by a user, have other bits."""

POLICIES = {0: HELD_BY_POWER, 1: "held by heat"}
"""NVML's counters of throttled time (NVML_PERF_POLICY_POWER and _THERMAL)."""
HELD_LEAST = 0.01
"""Least part of the time between two readings that counts as throttling."""


T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Reading:
    """One device at one instant; None if a value is not available.

    ``energy_mj`` counts since the driver was loaded. ``utilisation`` is the part of NVML's last sampling period, at
    most a second, in which a kernel ran. ``throttle``: the reasons for throttling at that instant; ``held_ns``:
    throttled time since the driver was loaded, by POLICIES. ``other_pids`` are compute processes of others; inside a
    container, a recent driver lists the container's processes only.
    """

    energy_mj: int | None = None
    power_w: float | None = None
    utilisation: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] | None = None
    other_pids: tuple[int, ...] | None = None
    held_ns: tuple[int, ...] | None = None

    @property
    def sm_clock_fraction(self) -> float | None:
        clock, most = self.sm_clock_mhz, self.max_sm_clock_mhz
        return clock / most if clock is not None and most else None


def summarise(
    before: Sequence[Reading], after: Sequence[Reading], *, seconds: float, shared: bool, samples: float
) -> RankFacts:
    """Return a rank's columns from readings before its first and after its last timed window, devices in one order.

    ``samples``: all that the rank trained on between the two, in ``seconds``; ``shared``: whether other ranks use the
    GPU. A column is None if it is not available on every device. Energy is that of the GPUs only; None below
    ENERGY_LEAST_S, and on a shared GPU, where it would include others' energy.
    """
    foreign = _foreign((*before, *after))
    spent_j = _over(list, _spent_j(before, after))
    energy_j = sum(spent_j) if spent_j and seconds >= ENERGY_LEAST_S and not shared and not foreign else None
    return {
        "gpu_utilisation": _over(statistics.fmean, [reading.utilisation for reading in after]),
        "power_w": _power_w(spent_j, after, seconds),
        "sm_clock_mhz": _over(min, [reading.sm_clock_mhz for reading in after]),
        "sm_clock_fraction": _over(min, [reading.sm_clock_fraction for reading in after]),
        "temperature_c": _over(max, [reading.temperature_c for reading in after]),
        "throttled": _throttled(before, after, seconds),
        "energy_j": energy_j,
        "samples_per_joule": None if energy_j is None else samples / energy_j,
        "foreign_gpu_processes": foreign,
    }


def _over(merge: Callable[[Sequence[T]], R], values: Sequence[T | None]) -> R | None:
    """Merge the devices' values; None if one of them is not known."""
    known = [value for value in values if value is not None]
    return merge(known) if known and len(known) == len(values) else None


def _throttled(before: Sequence[Reading], after: Sequence[Reading], seconds: float) -> str | None:
    """Return the reasons for throttling between the readings, by counters, or at the last reading; '' if none.

    After the last window a GPU is idle: without counters, only lasting reasons are seen.
    """
    reasons = _over(_reasons, [reading.throttle for reading in after])
    counts = [(start.held_ns, end.held_ns) for start, end in zip(before, after, strict=True)]
    held = [[e - s for s, e in zip(start, end, strict=True)] for start, end in counts if start and end]
    if reasons is None and not held:
        return None
    least_ns = HELD_LEAST * seconds * 1e9
    rose = [name for i, name in enumerate(POLICIES.values()) if any(spent[i] > least_ns for spent in held)]
    return ", ".join(part for part in (reasons, *rose) if part)


def _reasons(throttles: Sequence[tuple[str, ...]]) -> str:
    return ", ".join(name for name in THROTTLING.values() if any(name in throttle for throttle in throttles))


def _spent_j(before: Sequence[Reading], after: Sequence[Reading]) -> list[float | None]:
    """Return the joules of each device; None if its counter decreased (the driver was reloaded) or did not change."""
    counts = [(start.energy_mj, end.energy_mj) for start, end in zip(before, after, strict=True)]
    return [None if start is None or end is None or end <= start else (end - start) / 1000.0 for start, end in counts]


def _power_w(spent_j: Sequence[float] | None, after: Sequence[Reading], seconds: float) -> float | None:
    """Return the mean power of one device: energy over time, or the readings at the end if there are no counters.

    At the end the devices are idle, and on some (A100, and older than Ampere) a reading is the power of that instant.
    """
    if spent_j and seconds >= POWER_LEAST_S:
        return statistics.fmean(spent_j) / seconds
    return _over(statistics.fmean, [reading.power_w for reading in after])


def _foreign(readings: Sequence[Reading]) -> int | None:
    """Return the number of other processes; None if none was seen, but not every device lists them."""
    seen = {pid for reading in readings for pid in reading.other_pids or ()}
    untold = not readings or any(reading.other_pids is None for reading in readings)
    return None if untold and not seen else len(seen)
