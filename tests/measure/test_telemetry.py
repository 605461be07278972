"""Telemetry against a fake NVML: which GPU is read, what it tells, what is never claimed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.measure import environment, telemetry
from harness.measure.telemetry import ENERGY_LEAST_S, Nvml, Reading, Telemetry, open_telemetry, summarise
from tests.measure.nvml import FakeError, FakeNvml, answer

A, B, C = "GPU-aa11", "GPU-aa22", "GPU-bb33"
SLICE = "MIG-cc44"
ME, OTHER = os.getpid(), 10**7


class LibraryMismatch(Exception):
    """Stands for NVMLLibraryMismatchError, which is no NVMLError."""


@dataclass
class Gpu:
    """One device and its answers; an exception among them is raised."""

    uuid: str
    energy: Any = 5_000
    power: Any = 350_000
    busy: Any = 75
    clock: Any = 990
    max_clock: Any = 1980
    temperature: Any = 60
    reasons: Any = 0
    held: Any = field(default_factory=FakeError)
    old_reasons: Any = field(default_factory=FakeError)
    pids: Any = (ME,)
    mig: Any = field(default_factory=FakeError)


class GpuNvml(FakeNvml):
    """The functions that telemetry uses, over a list of Gpu; a handle is the Gpu itself."""

    def __init__(self, *gpus: Gpu, slices: Sequence[Gpu] = (), driver: bool = True) -> None:
        super().__init__(driver=driver)
        self.gpus, self.slices = list(gpus), list(slices)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        known = {gpu.uuid: gpu for gpu in (*self.gpus, *self.slices)}
        return known[uuid] if uuid in known else answer(FakeError("Not Found"))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> Any:
        return [SimpleNamespace(pid=pid) for pid in answer(gpu.pids)]

    def nvmlDeviceGetViolationStatus(self, gpu: Gpu, policy: int) -> Any:
        return SimpleNamespace(referenceTime=0, violationTime=answer(gpu.held)[policy])

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        return SimpleNamespace(gpu=answer(gpu.busy), memory=1)

    nvmlDeviceGetUUID = staticmethod(lambda gpu: gpu.uuid)
    nvmlDeviceGetMigMode = staticmethod(lambda gpu: answer(gpu.mig))
    nvmlDeviceGetTotalEnergyConsumption = staticmethod(lambda gpu: answer(gpu.energy))
    nvmlDeviceGetPowerUsage = staticmethod(lambda gpu: answer(gpu.power))
    nvmlDeviceGetClockInfo = staticmethod(lambda gpu, kind: answer(gpu.clock) if kind == 1 else None)
    nvmlDeviceGetMaxClockInfo = staticmethod(lambda gpu, kind: answer(gpu.max_clock) if kind == 1 else None)
    nvmlDeviceGetTemperature = staticmethod(lambda gpu, sensor: answer(gpu.temperature) if sensor == 0 else None)
    nvmlDeviceGetCurrentClocksEventReasons = staticmethod(lambda gpu: answer(gpu.reasons))
    nvmlDeviceGetCurrentClocksThrottleReasons = staticmethod(lambda gpu: answer(gpu.old_reasons))


def opened(
    nvml: Nvml | None, *devices: int, variables: Any = (), uuids: Sequence[str] = (), own_pids: Sequence[int] = ()
) -> Telemetry | None:
    """Telemetry of these devices; ``uuids`` are torch's, by default NVML's in NVML's order."""
    known = uuids or [gpu.uuid for gpu in getattr(nvml, "gpus", [Gpu(A)])]
    gpus = [torch.device("cuda", index) for index in devices or (0,)]
    options: Any = {"uuid_of": lambda device: known[device.index].partition("-")[2], "own_pids": own_pids}
    return open_telemetry(gpus, nvml, dict(variables), **options)


def read(nvml: Nvml, *devices: int, **given: Any) -> tuple[Reading, ...]:
    found: Any = opened(nvml, *devices, **given)
    return found.read()


@pytest.mark.parametrize(
    ("variable", "uuids", "degrees"),
    [
        (None, (A, B, C), [1, 2, 3]),
        ("2,0", (C, A), [3, 1]),
        *((names, (B,), [2]) for names in ("0", "GPU-bb", f"{C},{A}", "9", "")),  # no whole GPU, whose uuid torch has
        *((names, (A,), [4]) for names in (SLICE, f" {SLICE} ", f"{SLICE},0")),  # a slice, before torch's GPU
        (f"{C},{SLICE}", (C, A), [3, 4]),
        ("0", (SLICE,), [4]),
    ],
)
def test_a_device_is_a_named_slice_or_torchs(variable: str | None, uuids: tuple[str, ...], degrees: list[int]) -> None:
    """A, B, C and a slice are 1, 2, 3 and 4 degrees warm."""
    gpus = [Gpu(uuid, temperature=degrees) for degrees, uuid in enumerate((A, B, C, SLICE), start=1)]
    nvml = GpuNvml(*gpus[:3], slices=gpus[3:])
    variables = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    readings = read(nvml, *range(len(uuids)), variables=variables, uuids=uuids)
    assert [reading.temperature_c for reading in readings] == degrees


def test_torch_gives_the_uuid_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", uuid="bb33", total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found: Any = open_telemetry([torch.device("cuda", 0)], GpuNvml(Gpu(A), Gpu(C, temperature=3)), {})
    assert found.read()[0].temperature_c == 3


def test_there_is_none_of_a_gpu_unknown_to_nvml_without_a_driver_or_without_a_gpu() -> None:
    assert opened(GpuNvml(Gpu(A)), 0, uuids=("GPU-ff00",)) is None
    assert opened(GpuNvml(Gpu(A)), 0, variables={"CUDA_VISIBLE_DEVICES": "MIG-ff00"}) is None
    assert opened(GpuNvml(driver=False)) is None
    for devices in ([torch.device("cpu")], []):
        assert open_telemetry(devices, GpuNvml(Gpu(A))) is None


def test_nvml_is_given_back_once_and_also_if_some_devices_are_unknown() -> None:
    nvml = GpuNvml(Gpu(A), Gpu(B))
    nvml.nvmlInit()  # somebody else's
    assert opened(nvml, 0, 1, uuids=(A, "GPU-ff00")) is None and nvml.users == 1
    found: Any = opened(nvml)
    found.close()
    assert nvml.users == 1


def test_pynvml_is_used_where_it_is_installed_and_has_the_names_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    code = "".join(Path(str(module.__file__)).read_text() for module in (telemetry, environment))
    names = set(re.findall(r"nvml\.(nvml\w+|NVML\w+)", code))
    assert len(names) > 20
    assert [name for name in names if not hasattr(pynvml, name)] == []
    monkeypatch.setitem(sys.modules, "pynvml", GpuNvml(Gpu(A)))
    assert opened(None) is not None


def test_a_reading_has_plain_units_and_is_one_of_a_shared_device() -> None:
    (throttled,) = read(GpuNvml(Gpu(A, reasons=0x4, held=[11, 22])), 0, 0)
    assert throttled == Reading(5_000, 350.0, 0.75, 990, 1980, 60, ("sw power cap",), (), held_ns=(11, 22))


@pytest.mark.parametrize("error", [FakeError("Not Supported"), LibraryMismatch(), AttributeError("old pynvml")])
def test_a_gpu_without_supported_queries_gives_an_empty_reading(error: Exception) -> None:
    names = ("energy", "power", "busy", "clock", "max_clock", "temperature", "reasons", "old_reasons", "pids")
    gpu = Gpu(A, **dict.fromkeys(names, error))
    assert read(GpuNvml(gpu))[0] == Reading()


@pytest.mark.parametrize(
    ("name", "column"),
    [
        *(("energy", "energy_mj"), ("power", "power_w"), ("busy", "utilisation"), ("clock", "sm_clock_mhz")),
        *(("max_clock", "max_sm_clock_mhz"), ("temperature", "temperature_c"), ("reasons", "throttle")),
        ("pids", "other_pids"),
    ],
)
def test_one_unsupported_query_is_one_missing_value(name: str, column: str) -> None:
    whole = read(GpuNvml(Gpu(A)))[0]
    assert read(GpuNvml(replace(Gpu(A), **{name: FakeError()})))[0] == replace(whole, **{column: None})


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        *((bits, ()) for bits in (0x0, 0x1, 0x2, 0x10, 0x100, 0x113)),  # idle, clocks of applications, sync, display
        (0x4, ("sw power cap",)),
        (0x8, ("hw slowdown",)),
        (0x20, ("sw thermal slowdown",)),
        (0x40, ("hw thermal slowdown",)),
        (0x80, ("hw power brake",)),
        (0x48, ("hw slowdown", "hw thermal slowdown")),
        (0x5, ("sw power cap",)),
        (0x7FF, tuple(telemetry.THROTTLING.values())),
    ],
)
def test_throttle_reasons_exclude_idle_and_settings(bits: int, expected: tuple[str, ...]) -> None:
    assert read(GpuNvml(Gpu(A, reasons=bits)))[0].throttle == expected
    assert read(GpuNvml(Gpu(A, reasons=FakeError(), old_reasons=bits)))[0].throttle == expected  # an older driver


@pytest.mark.parametrize(
    ("pids", "own", "expected"),
    [
        ((ME,), (), ()),
        ((ME, OTHER + 1, OTHER), (), (OTHER, OTHER + 1)),
        ((ME, ME, OTHER, OTHER), (), (OTHER,)),
        ((OTHER,), (), None),  # another namespace: none of them is ours
        ((), (), None),
        ((ME, OTHER, OTHER + 1), (OTHER,), (OTHER + 1,)),
    ],
)
def test_foreign_processes_are_counted_if_our_own_is_listed(
    pids: tuple[int, ...], own: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    assert read(GpuNvml(Gpu(A, pids=pids)), own_pids=own)[0].other_pids == expected


@pytest.mark.parametrize(
    ("gpu", "energy"), [(Gpu(A, mig=[1, 1]), None), (Gpu(SLICE), None), (Gpu(A, mig=[0, 1]), 5_000)]
)
def test_a_slice_does_not_claim_the_whole_gpus_energy(gpu: Gpu, energy: int | None) -> None:
    reading = read(GpuNvml(gpu))[0]
    assert (reading.energy_mj, reading.power_w) == (energy, energy and 350.0)
    assert reading.temperature_c == 60


BEFORE = Reading(energy_mj=1_000_000, other_pids=())
AFTER = Reading(7_000_000, 300.0, 0.5, 1500, 2000, 60, throttle=(), other_pids=())


def columns(before: Sequence[Reading] = (BEFORE,), after: Sequence[Reading] = (AFTER,), **given: Any) -> dict[str, Any]:
    return summarise(before, after, **{"seconds": 20.0, "shared": False, "samples": 12_000.0, **given})


@pytest.mark.parametrize(
    ("at_the_end", "spent_ms", "expected"),
    [
        ((), (0, 0), ""),
        ((), (100, 0), ""),  # under a hundredth of the 20 s
        ((), (500, 0), "held by power"),
        (("sw power cap",), (500, 3000), "sw power cap, held by power, held by heat"),
        (None, (0, 300), "held by heat"),
        (None, None, None),
    ],
)
def test_throttling_during_windows_is_recorded_although_the_gpu_is_idle_afterwards(
    at_the_end: tuple[str, ...] | None, spent_ms: tuple[int, ...] | None, expected: str | None
) -> None:
    counts = [None if spent_ms is None else tuple(7 + int(ms * 1e6) for ms in at) for at in ((0, 0), spent_ms or ())]
    before, after = replace(BEFORE, held_ns=counts[0]), replace(AFTER, throttle=at_the_end, held_ns=counts[1])
    assert columns([before], [after])["throttled"] == expected


ONE = {"gpu_utilisation": 0.5, "power_w": 300.0, "sm_clock_mhz": 1500, "sm_clock_fraction": 0.75, "temperature_c": 60}
ONE |= {"throttled": "", "energy_j": 6_000.0, "samples_per_joule": 2.0, "foreign_gpu_processes": 0}


def test_several_gpus_are_averaged_or_the_worst_or_summed() -> None:
    assert columns(after=[replace(AFTER, power_w=60.0)]) == ONE  # idle after the last window
    other = Reading(3_000_000, 500.0, 0.7, 1600, 3200, 80, ("hw power brake", "hw slowdown"), ())
    both = {"gpu_utilisation": pytest.approx(0.6), "power_w": 200.0, "sm_clock_fraction": 0.5, "temperature_c": 80}
    both |= {"throttled": "hw slowdown, hw power brake", "energy_j": 8_000.0, "samples_per_joule": 1.5}
    assert columns([BEFORE, BEFORE], [replace(AFTER, throttle=("hw slowdown",)), other]) == ONE | both
    assert columns((), ()) == dict.fromkeys(ONE)


@pytest.mark.parametrize(
    ("column", "missing"),
    [
        ("gpu_utilisation", {"utilisation": None}),
        ("power_w", {"energy_mj": None, "power_w": None}),
        *((column, {"sm_clock_mhz": None}) for column in ("sm_clock_mhz", "sm_clock_fraction")),
        *(("sm_clock_fraction", {"max_sm_clock_mhz": most}) for most in (None, 0)),
        ("temperature_c", {"temperature_c": None}),
        ("throttled", {"throttle": None}),
        ("energy_j", {"energy_mj": None}),
        ("samples_per_joule", {"energy_mj": None}),
        ("foreign_gpu_processes", {"other_pids": None}),
    ],
)
def test_a_query_missing_on_one_device_is_missing(column: str, missing: dict[str, Any]) -> None:
    assert columns([BEFORE, BEFORE], [AFTER, replace(AFTER, **missing)])[column] is None


@pytest.mark.parametrize(
    ("seconds", "counter", "energy", "power"),
    [
        (ENERGY_LEAST_S, 7_000_000, 6_000.0, 6_000.0 / ENERGY_LEAST_S),
        (9.99, 7_000_000, None, 6_000.0 / 9.99),
        (0.9, 7_000_000, None, 123.0),  # that of the last reading
        (20.0, None, None, 123.0),
        (20.0, 1_000_000, None, 123.0),
    ],
)
def test_short_windows_have_no_energy_and_the_power_of_the_last_reading(
    seconds: float, counter: int | None, energy: float | None, power: float
) -> None:
    result = columns(after=[replace(AFTER, energy_mj=counter, power_w=123.0)], seconds=seconds)
    assert (result["energy_j"], result["samples_per_joule"]) == (energy, energy and 2.0)
    assert result["power_w"] == power


def test_oversubscribed_gpus_and_a_constant_counter_have_no_energy() -> None:
    constant = [columns([BEFORE] * 2, [AFTER, replace(AFTER, energy_mj=count)]) for count in (1_000_000, 999_999, 0)]
    for result in (columns(shared=True), *constant):
        assert (result["energy_j"], result["samples_per_joule"]) == (None, None)


@pytest.mark.parametrize(
    ("before", "after", "foreign", "energy"),
    [
        ([(OTHER,)], [()], 1, None),
        ([()], [(OTHER,)], 1, None),
        ([(), ()], [(OTHER,), (OTHER, OTHER + 1)], 2, None),  # one on two GPUs counts once
        ([(), ()], [None, (OTHER,)], 1, None),
        ([None], [None], None, 6_000.0),  # lists that nobody knows
    ],
)
def test_a_foreign_process_at_either_edge_leaves_no_energy(
    before: list[Any], after: list[Any], foreign: int | None, energy: float | None
) -> None:
    edges = ([replace(edge, other_pids=pids) for pids in lists] for edge, lists in ((BEFORE, before), (AFTER, after)))
    result = columns(*edges)
    assert (result["foreign_gpu_processes"], result["energy_j"]) == (foreign, energy)
    assert result["samples_per_joule"] == (energy and 2.0)
