"""Telemetry of a rank's GPUs through NVML: energy, power, clocks, throttling, other processes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

import torch

from harness.measure.gpu_readings import POLICIES, THROTTLING, Reading
from harness.measure.nvml import Handle, Nvml

_SM_CLOCK = 1  # NVML_CLOCK_SM
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU

Value = TypeVar("Value")


class Telemetry:
    """NVML, held open for one rank's devices."""

    def __init__(self, nvml: Nvml, handles: Sequence[Handle], own_pids: Collection[int]) -> None:
        self._nvml = nvml
        self._handles = tuple(handles)
        self._divided = tuple(_is_divided(nvml, handle) for handle in handles)
        self._own_pids = frozenset(own_pids)
        self._open = True

    def read(self) -> tuple[Reading, ...]:
        """Return one reading per device, each device once, in the rank's order; never raises.

        Takes milliseconds, so never inside a window. The rank must have used its devices before.
        """
        return tuple(map(self._reading, self._handles, self._divided))

    def close(self) -> None:
        """Shut NVML down; further calls do nothing."""
        if self._open:
            self._open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _reading(self, handle: Handle, divided: bool) -> Reading:
        nvml = self._nvml
        # for a slice of a GPU (MIG), NVML reports the whole GPU's energy and power
        energy = None if divided else _first(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        power = None if divided else _first(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        busy = _first(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        reasons = _first(
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),  # its name in older drivers
        )
        return Reading(
            energy_mj=energy,
            power_w=None if power is None else power / 1000.0,
            utilisation=None if busy is None else busy / 100.0,
            sm_clock_mhz=_first(lambda: nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK)),
            max_sm_clock_mhz=_first(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, _SM_CLOCK)),
            temperature_c=_first(lambda: nvml.nvmlDeviceGetTemperature(handle, _GPU_SENSOR)),
            throttle=None if reasons is None else tuple(name for bit, name in THROTTLING.items() if reasons & bit),
            held_ns=_first(lambda: tuple(nvml.nvmlDeviceGetViolationStatus(handle, p).violationTime for p in POLICIES)),
            other_pids=self._other_pids(handle),
        )

    def _other_pids(self, handle: Handle) -> tuple[int, ...] | None:
        processes = _first(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        pids = {process.pid for process in processes or ()}
        # This process has a context on the device, so one of the pids is its own. If none is, they belong to another
        # namespace (an older driver gives a container the host's pids), and others cannot be identified.
        return tuple(sorted(pids - self._own_pids)) if pids & self._own_pids else None


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

    ``own_pids``: further processes that do not count as others. None on a CPU, without pynvml or a driver, and if
    NVML does not find one of the devices.
    """
    if not devices or any(device.type != "cuda" for device in devices):
        return None
    nvml = nvml or _installed()
    if nvml is None:
        return None
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


def _installed() -> Nvml | None:
    try:
        return cast(Nvml, importlib.import_module("pynvml"))
    except ImportError:
        return None


def _handle(device: torch.device, nvml: Nvml, visible: str, uuid: str) -> Handle | None:
    """Return NVML's handle of a device by torch's UUID, or by the name of a slice in CUDA_VISIBLE_DEVICES.

    For a slice, CUDA 12 may report the UUID of the whole GPU.
    """
    entries, index = visible.split(","), device.index or 0
    named = entries[index].strip() if index < len(entries) else ""
    names = (named,) if named.startswith("MIG-") else (f"GPU-{uuid}", f"MIG-{uuid}")
    return _first(*(partial(nvml.nvmlDeviceGetHandleByUUID, name) for name in names))


def _is_divided(nvml: Nvml, handle: Handle) -> bool:
    """Return whether this is a slice of a GPU, or a GPU that is divided into slices."""
    uuid, mode = _first(lambda: nvml.nvmlDeviceGetUUID(handle)), _first(lambda: nvml.nvmlDeviceGetMigMode(handle))
    return bool(uuid and uuid.startswith("MIG-")) or bool(mode and mode[0])


def _first(*queries: Callable[[], Value]) -> Value | None:
    """Return the first answer; None if there is none, as a trial never fails because of its telemetry.

    pynvml raises not only NVMLError: there is NVMLLibraryMismatchError, and an old version lacks names.
    """
    for query in queries:
        with suppress(Exception):
            return query()
    return None
