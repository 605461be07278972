"""What GPUs told at two instants -> a rank's columns: energy, power, clocks, throttling, other processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.plan.rows import RankFacts

ENERGY_LEAST_S = 10.0
"""The energy counter is only updated now and then: over less time than this, the gaps would show."""

THROTTLING = {
    0x04: "sw power cap",
    0x08: "hw slowdown",
    0x20: "sw thermal slowdown",
    0x40: "hw thermal slowdown",
    0x80: "hw power brake",
}
"""NVML's bits for clocks that are held down. An idle GPU, or clocks that somebody chose, have other bits."""

POLICIES = {0: "held by power", 1: "held by heat"}
"""NVML's counters of the time that clocks were held down (NVML_PERF_POLICY_POWER and _THERMAL)."""
HELD_LEAST = 0.01
"""The part of the time between two readings from which on that counts."""


T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Reading:
    """One device at one instant; None is what it does not tell.

    ``energy_mj`` counts since the driver was loaded. ``utilisation`` is the part of NVML's last sampling period, at
    most a second, in which a kernel ran. ``throttle`` is why clocks are held down at that instant, ``held_ns`` for how
    long they were since the driver was loaded, by POLICIES. ``other_pids`` are compute processes that are not ours; a
    recent driver shows a container only the container's own, so that none there means none in sight.
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
    """One rank's columns from readings before its first and after its last timed window, devices in the same order.

    ``samples`` are all that the rank trained on between the two, in ``seconds``; ``shared`` says that other ranks
    use the GPU too. A column is None where any device does not tell. Energy is that of the GPUs alone, and None
    under ENERGY_LEAST_S and on a GPU known to be shared, where it would be others' too.
    """
    foreign = _foreign((*before, *after))
    energy_j = _energy_j(before, after) if seconds >= ENERGY_LEAST_S and not shared and not foreign else None
    return {
        "gpu_utilisation": _over(statistics.fmean, [reading.utilisation for reading in after]),
        "power_w": _over(statistics.fmean, [reading.power_w for reading in after]),
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
    """Why clocks were held down between the readings, by their counters, or are at the last one; '' where not.

    After the last window a GPU is idle: without counters, only what lasts is seen.
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


def _energy_j(before: Sequence[Reading], after: Sequence[Reading]) -> float | None:
    """None also where a counter went back (the driver was loaded again) or stood still (it does not count)."""
    counts = [(start.energy_mj, end.energy_mj) for start, end in zip(before, after, strict=True)]
    spent = [None if start is None or end is None or end <= start else end - start for start, end in counts]
    total_mj = _over(sum, spent)
    return None if total_mj is None else total_mj / 1000.0


def _foreign(readings: Sequence[Reading]) -> int | None:
    """How many others were seen; None where none was, but not all devices tell."""
    seen = {pid for reading in readings for pid in reading.other_pids or ()}
    untold = not readings or any(reading.other_pids is None for reading in readings)
    return None if untold and not seen else len(seen)
