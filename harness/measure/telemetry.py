"""Telemetry of a rank's GPUs through NVML: energy, power, clocks, throttling, other processes."""

from __future__ import annotations

import importlib
import os
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TypeVar

import torch

from harness.plan.rows import HELD_BY_POWER, POWER_CAP, RankFacts

Nvml = ModuleType
"""The module ``pynvml``; every function may raise its NVMLError."""
Handle = object
"""NVML's handle of a device."""

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
_SM_CLOCK = 1  # NVML_CLOCK_SM
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU


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
    pids = [reading.other_pids for reading in (*before, *after)]
    seen = {pid for each in pids for pid in each or ()}
    foreign = len(seen) if seen or (pids and None not in pids) else None  # None: not every device lists processes
    counts = [(start.energy_mj, end.energy_mj) for start, end in zip(before, after, strict=True)]
    # a counter that decreases was reset with the driver; one that does not change is not updated
    spent_j = _over(
        list, [None if start is None or end is None or end <= start else (end - start) / 1e3 for start, end in counts]
    )
    # at the end the devices are idle, and on some (A100, older than Ampere) a reading is the power of that instant
    power_w = _over(statistics.fmean, [reading.power_w for reading in after])
    if spent_j and seconds >= POWER_LEAST_S:
        power_w = statistics.fmean(spent_j) / seconds
    energy_j = sum(spent_j) if spent_j and seconds >= ENERGY_LEAST_S and not shared and not foreign else None
    return {
        "gpu_utilisation": _over(statistics.fmean, [reading.utilisation for reading in after]),
        "power_w": power_w,
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
    throttles = _over(list, [reading.throttle for reading in after])
    counts = [(start.held_ns, end.held_ns) for start, end in zip(before, after, strict=True)]
    held = [[e - s for s, e in zip(start, end, strict=True)] for start, end in counts if start and end]
    if throttles is None and not held:
        return None
    reasons = [name for name in THROTTLING.values() if any(name in throttle for throttle in throttles or ())]
    least_ns = HELD_LEAST * seconds * 1e9
    rose = [name for i, name in enumerate(POLICIES.values()) if any(spent[i] > least_ns for spent in held)]
    return ", ".join((*reasons, *rose))


class Telemetry:
    """NVML, held open for one rank's devices."""

    def __init__(self, nvml: Nvml, handles: Sequence[Handle], own_pids: Collection[int]) -> None:
        self._nvml = nvml
        self._handles = tuple(handles)
        self._divided = tuple(map(self._is_divided, handles))
        self._own_pids = frozenset(own_pids)

    def read(self) -> tuple[Reading, ...]:
        """Return one reading per device, each device once, in the rank's order; never raises.

        Takes milliseconds, so never inside a window. The rank must have used its devices before.
        """
        return tuple(map(self._reading, self._handles, self._divided))

    def close(self) -> None:
        """Shut NVML down."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _is_divided(self, handle: Handle) -> bool:
        """Return whether this is a slice of a GPU, or a GPU that is divided into slices."""
        uuid = first(lambda: self._nvml.nvmlDeviceGetUUID(handle))
        mode = first(lambda: self._nvml.nvmlDeviceGetMigMode(handle))
        return bool(uuid and uuid.startswith("MIG-")) or bool(mode and mode[0])

    def _reading(self, handle: Handle, divided: bool) -> Reading:
        nvml = self._nvml
        # for a slice of a GPU (MIG), NVML reports the whole GPU's energy and power
        energy = None if divided else first(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        power = None if divided else first(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        busy = first(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        reasons = first(
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),  # its name in older drivers
        )
        processes = first(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        pids = {process.pid for process in processes or ()}
        # This process has a context on the device, so one of the pids is its own. If none is, they belong to another
        # namespace (an older driver gives a container the host's pids), and others cannot be identified.
        return Reading(
            energy_mj=energy,
            power_w=None if power is None else power / 1000.0,
            utilisation=None if busy is None else busy / 100.0,
            sm_clock_mhz=first(lambda: nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK)),
            max_sm_clock_mhz=first(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, _SM_CLOCK)),
            temperature_c=first(lambda: nvml.nvmlDeviceGetTemperature(handle, _GPU_SENSOR)),
            throttle=None if reasons is None else tuple(name for bit, name in THROTTLING.items() if reasons & bit),
            held_ns=first(lambda: tuple(nvml.nvmlDeviceGetViolationStatus(handle, p).violationTime for p in POLICIES)),
            other_pids=tuple(sorted(pids - self._own_pids)) if pids & self._own_pids else None,
        )


def torch_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, or of a slice of one, without NVML's prefix."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_telemetry(
    devices: Sequence[torch.device],
    nvml: Nvml | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    uuid_of: Callable[[torch.device], str] = torch_uuid,
    own_pids: Collection[int] = (),
) -> Telemetry | None:
    """Return telemetry of one rank's CUDA devices, to be closed by the caller.

    ``own_pids``: further processes that do not count as others. None on a CPU, without a driver, and if NVML
    does not find one of the devices.
    """
    if not devices or any(device.type != "cuda" for device in devices):
        return None
    nvml = nvml or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    handles = [
        _handle(device, nvml, environ.get("CUDA_VISIBLE_DEVICES", ""), uuid_of(device))
        for device in dict.fromkeys(devices)
    ]
    telemetry = Telemetry(nvml, handles, {os.getpid(), *own_pids})
    if any(handle is None for handle in handles):  # a sum over some devices is no sum over all
        telemetry.close()
        return None
    return telemetry


def _handle(device: torch.device, nvml: Nvml, visible: str, uuid: str) -> Handle | None:
    """Return NVML's handle of a device by torch's UUID, or by the name of a slice in CUDA_VISIBLE_DEVICES.

    For a slice, CUDA 12 may report the UUID of the whole GPU.
    """
    entries, index = visible.split(","), device.index or 0
    named = entries[index].strip() if index < len(entries) else ""
    names = (named,) if named.startswith("MIG-") else (f"GPU-{uuid}", f"MIG-{uuid}")
    return first(*(partial(nvml.nvmlDeviceGetHandleByUUID, name) for name in names))


def first(*queries: Callable[[], T]) -> T | None:
    """Return the first answer; None if there is none, as a trial never fails because of its telemetry.

    pynvml raises not only NVMLError: there is NVMLLibraryMismatchError, and an old version lacks names.
    """
    for query in queries:
        with suppress(Exception):
            return query()
    return None
