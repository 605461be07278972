"""What a rank's GPUs say of themselves through NVML: energy, power, clocks, throttling, other processes."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

import torch

from harness.measure.environment import describe_device
from harness.measure.gpu_readings import POLICIES, THROTTLING, Reading
from harness.measure.nvml import Handle, Nvml
from harness.measure.window import Clock

_SM_CLOCK = 1  # NVML_CLOCK_SM
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU

Value = TypeVar("Value")


class Telemetry:
    """NVML, held open for one rank's devices."""

    def __init__(self, nvml: Nvml, handles: Sequence[Handle], own_pids: Collection[int], clock: Clock) -> None:
        self._nvml = nvml
        self._handles = tuple(handles)
        self._divided = tuple(_is_divided(nvml, handle) for handle in handles)
        self._own_pids = frozenset(own_pids)
        self._clock = clock
        self._open = True

    def read(self) -> tuple[Reading, ...]:
        """One reading a device, each device once, in the rank's order; never raises.

        It takes milliseconds: between windows, never inside. The rank must have used its devices before.
        """
        return tuple(map(self._reading, self._handles, self._divided))

    def close(self) -> None:
        """Gives NVML back, once however often it is called."""
        if self._open:
            self._open = False
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _reading(self, handle: Handle, divided: bool) -> Reading:
        nvml, time_s = self._nvml, self._clock()
        # for a slice of a GPU (MIG), NVML answers with what the whole GPU takes
        energy = None if divided else _first(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        power = None if divided else _first(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        busy = _first(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        reasons = _first(
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),  # its name in older drivers
        )
        return Reading(
            time_s=time_s,
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
        # We hold a context on this device, so one of the pids is ours. Where none is, they are numbered in another
        # namespace than ours (an older driver tells a container the host's): which are others' cannot be known.
        return tuple(sorted(pids - self._own_pids)) if pids & self._own_pids else None


def torch_uuid(device: torch.device) -> str | None:
    """The UUID that torch tells of a device, without NVML's prefix."""
    uuid: str | None = describe_device(device)["uuid"]
    return uuid


def open_telemetry(
    devices: Sequence[torch.device],
    nvml: Nvml | None = None,
    environ: Mapping[str, str] = os.environ,
    clock: Clock = time.perf_counter,
    *,
    uuid_of: Callable[[torch.device], str | None] = torch_uuid,
    own_pids: Collection[int] = (),
) -> Telemetry | None:
    """Telemetry of one rank's CUDA devices, to be closed by the caller.

    ``own_pids`` are processes beside this one that do not count as others. None on a CPU, without pynvml or a
    driver, and where NVML's device cannot be told for certain.
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
    handles = [_handle(device, nvml, environ, uuid_of(device)) for device in dict.fromkeys(devices)]
    telemetry = Telemetry(nvml, handles, {os.getpid(), *own_pids}, clock)
    if any(handle is None for handle in handles):  # sums over some devices must not pass for sums over all
        telemetry.close()
        return None
    return telemetry


def _installed() -> Nvml | None:
    try:
        return cast(Nvml, importlib.import_module("pynvml"))
    except ImportError:
        return None


def _handle(device: torch.device, nvml: Nvml, environ: Mapping[str, str], told: str | None) -> Handle | None:
    """NVML's handle by the UUID that torch told, or else by the variable."""
    visible = visible_uuids(environ.get("CUDA_VISIBLE_DEVICES"), *_uuids(nvml, environ))
    index = device.index or 0
    named = visible[index] if index < len(visible) else None
    # a slice that the variable names comes first: for a slice, CUDA 12 may tell the whole GPU's UUID
    by_torch = told and not (named and named.startswith("MIG-"))
    names = (f"GPU-{told}", f"MIG-{told}") if by_torch else (named,) if named else ()
    return _first(*(partial(nvml.nvmlDeviceGetHandleByUUID, name) for name in names))


def _uuids(nvml: Nvml, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """UUIDs of the GPUs that this process may use; the same in CUDA's order, or none where that is not known."""
    count = _first(nvml.nvmlDeviceGetCount) or 0
    found = [_first(partial(nvml.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    handles = [handle for handle in found if handle is not None]
    uuids = [uuid for handle in handles if (uuid := _first(partial(nvml.nvmlDeviceGetUUID, handle)))]
    # NVML numbers by PCI bus, CUDA by speed unless told otherwise: they agree where all are equally fast
    models = {_first(partial(nvml.nvmlDeviceGetName, handle)) for handle in handles}
    agree = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or (len(models) == 1 and None not in models)
    return uuids, uuids if agree else []


def visible_uuids(variable: str | None, uuids: Sequence[str], numbered: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in torch's order.

    ``numbered`` are the GPUs that numbers stand for. As in CUDA, the list ends before an entry that is negative,
    unknown or ambiguous, and none is left where one is named twice.
    """
    if variable is None:
        return tuple(numbered)
    visible: list[str] = []
    for entry in variable.split(","):
        uuid = _named_by(entry.strip(), uuids, numbered)
        if uuid is None:
            break
        visible.append(uuid)
    return tuple(visible) if len(set(visible)) == len(visible) else ()


def _named_by(entry: str, uuids: Sequence[str], numbered: Sequence[str]) -> str | None:
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [uuid for uuid in uuids if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.match(r"\+?(\d+)", entry)  # like CUDA, which reads "1x" as 1
    return numbered[int(number[1])] if number and int(number[1]) < len(numbered) else None


def _is_divided(nvml: Nvml, handle: Handle) -> bool:
    """Whether this is a slice of a GPU, or a GPU that is cut into slices."""
    uuid, mode = _first(lambda: nvml.nvmlDeviceGetUUID(handle)), _first(lambda: nvml.nvmlDeviceGetMigMode(handle))
    return bool(uuid and uuid.startswith("MIG-")) or bool(mode and mode[0])


def _first(*queries: Callable[[], Value]) -> Value | None:
    """The first answer, None where there is none: a trial never fails for what only watches it.

    Not all that pynvml raises is an NVMLError: there is NVMLLibraryMismatchError, and names that an old one lacks.
    """
    for query in queries:
        with suppress(Exception):
            return query()
    return None
