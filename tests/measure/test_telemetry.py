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

A, B, C = "GPU-aa11", "GPU-aa22", "GPU-bb33"
SLICE = "MIG-cc44"
ME, OTHER = os.getpid(), 10**7
ALL_BITS = 0x7FF


class FakeError(Exception):
    """Stands for NVMLError."""


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


def answer(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


class FakeNvml:
    """The functions that telemetry uses, over a list of Gpu; a handle is the Gpu itself."""

    NVMLError = FakeError

    def __init__(self, *gpus: Gpu, slices: Sequence[Gpu] = (), driver: bool = True) -> None:
        self.gpus, self.slices, self.driver, self.users = list(gpus), list(slices), driver, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise FakeError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        known = {gpu.uuid: gpu for gpu in (*self.gpus, *self.slices)}
        return known[uuid] if uuid in known else answer(FakeError("Not Found"))

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        return handle.uuid

    def nvmlDeviceGetMigMode(self, handle: Gpu) -> Any:
        return answer(handle.mig)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Gpu) -> Any:
        return answer(handle.energy)

    def nvmlDeviceGetPowerUsage(self, handle: Gpu) -> Any:
        return answer(handle.power)

    def nvmlDeviceGetUtilizationRates(self, handle: Gpu) -> Any:
        return SimpleNamespace(gpu=answer(handle.busy), memory=1)

    def nvmlDeviceGetClockInfo(self, handle: Gpu, kind: int) -> Any:
        return answer(handle.clock) if kind == 1 else None

    def nvmlDeviceGetMaxClockInfo(self, handle: Gpu, kind: int) -> Any:
        return answer(handle.max_clock) if kind == 1 else None

    def nvmlDeviceGetTemperature(self, handle: Gpu, sensor: int) -> Any:
        return answer(handle.temperature) if sensor == 0 else None

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Gpu) -> Any:
        return answer(handle.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Gpu) -> Any:
        return answer(handle.old_reasons)

    def nvmlDeviceGetViolationStatus(self, handle: Gpu, policy: int) -> Any:
        return SimpleNamespace(referenceTime=0, violationTime=answer(handle.held)[policy])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Gpu) -> Any:
        return [SimpleNamespace(pid=pid) for pid in answer(handle.pids)]


def cuda(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def opened(
    nvml: Nvml | None,
    *devices: int,
    variables: dict[str, str] | None = None,
    uuids: Sequence[str] | None = None,
    own_pids: Sequence[int] = (),
) -> Telemetry | None:
    """Telemetry of these devices; ``uuids`` are torch's, by default NVML's in NVML's order."""
    known = uuids or [gpu.uuid for gpu in getattr(nvml, "gpus", [Gpu(A)])]

    def uuid_of(device: torch.device) -> str:
        return known[device.index].partition("-")[2]

    return open_telemetry(cuda(*devices or (0,)), nvml, variables or {}, uuid_of=uuid_of, own_pids=own_pids)


def read(nvml: Nvml, *devices: int, **given: Any) -> tuple[Reading, ...]:
    found = opened(nvml, *devices, **given)
    assert found is not None
    return found.read()


def read_temperatures(variables: dict[str, str], *devices: int, **given: Any) -> list[int | None]:
    """Which of four GPUs is which: A, B, C and a slice are 1, 2, 3 and 4 degrees warm."""
    gpus = [Gpu(uuid, temperature=degrees) for degrees, uuid in enumerate((A, B, C), start=1)]
    nvml = FakeNvml(*gpus, slices=[Gpu(SLICE, temperature=4)])
    return [reading.temperature_c for reading in read(nvml, *devices, variables=variables, **given)]


# which GPU


def test_a_device_is_found_by_torchs_uuid() -> None:
    assert read_temperatures({}, 0, 1, 2) == [1, 2, 3]
    assert read_temperatures({"CUDA_VISIBLE_DEVICES": "2,0"}, 0, 1, uuids=(C, A)) == [3, 1]


@pytest.mark.parametrize("variable", ["0", "GPU-bb", f"{C},{A}", "9", ""])
def test_the_variable_names_no_whole_gpu(variable: str) -> None:
    assert read_temperatures({"CUDA_VISIBLE_DEVICES": variable}, 0, uuids=(B,)) == [2]


@pytest.mark.parametrize("variable", [SLICE, f" {SLICE} ", f"{SLICE},0"])
def test_a_slice_that_the_variable_names_comes_before_the_gpu_that_torch_reports(variable: str) -> None:
    assert read_temperatures({"CUDA_VISIBLE_DEVICES": variable}, 0, uuids=(A,)) == [4]


def test_the_entry_of_the_variable_is_the_devices_own() -> None:
    assert read_temperatures({"CUDA_VISIBLE_DEVICES": f"{C},{SLICE}"}, 0, 1, uuids=(C, A)) == [3, 4]


def test_a_slice_is_found_by_torchs_uuid() -> None:
    assert read_temperatures({"CUDA_VISIBLE_DEVICES": "0"}, 0, uuids=(SLICE,)) == [4]


def test_torch_gives_the_uuid_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", uuid="bb33", total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = open_telemetry(cuda(0), FakeNvml(Gpu(A), Gpu(C, temperature=3)), {})
    assert found is not None
    assert found.read()[0].temperature_c == 3


def test_a_gpu_unknown_to_nvml_is_not_guessed() -> None:
    assert opened(FakeNvml(Gpu(A)), 0, uuids=("GPU-ff00",)) is None
    assert opened(FakeNvml(Gpu(A)), 0, variables={"CUDA_VISIBLE_DEVICES": "MIG-ff00"}) is None


def test_a_shared_device_is_read_once() -> None:
    assert len(read(FakeNvml(Gpu(A)), 0, 0)) == 1


# no telemetry


def test_a_cpu_has_none() -> None:
    assert open_telemetry([torch.device("cpu")], FakeNvml(Gpu(A))) is None


def test_no_devices_have_none() -> None:
    assert open_telemetry([], FakeNvml(Gpu(A))) is None


def test_without_a_driver_there_is_none() -> None:
    assert opened(FakeNvml(driver=False)) is None


def test_pynvml_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(A)))
    assert opened(None) is not None


def test_some_of_the_devices_are_none_and_nvml_is_given_back() -> None:
    nvml = FakeNvml(Gpu(A), Gpu(B))
    assert opened(nvml, 0, 1, uuids=(A, "GPU-ff00")) is None
    assert nvml.users == 0


def test_nvml_is_given_back_once() -> None:
    nvml = FakeNvml(Gpu(A))
    nvml.nvmlInit()  # somebody else's
    found = opened(nvml)
    assert found is not None
    found.close()
    found.close()
    assert nvml.users == 1


def test_pynvml_has_the_names_that_are_used() -> None:
    pynvml = pytest.importorskip("pynvml")
    code = "".join(Path(str(module.__file__)).read_text() for module in (telemetry, environment))
    names = set(re.findall(r"nvml\.(nvml\w+|NVML\w+)", code))
    assert len(names) > 20
    assert [name for name in names if not hasattr(pynvml, name)] == []


# readings


def test_a_reading_has_plain_units() -> None:
    assert read(FakeNvml(Gpu(A, reasons=0x4)))[0] == Reading(
        energy_mj=5_000,
        power_w=350.0,
        utilisation=0.75,
        sm_clock_mhz=990,
        max_sm_clock_mhz=1980,
        temperature_c=60,
        throttle=("sw power cap",),
        other_pids=(),
    )


@pytest.mark.parametrize("error", [FakeError("Not Supported"), LibraryMismatch(), AttributeError("old pynvml")])
def test_a_gpu_without_supported_queries_gives_an_empty_reading(error: Exception) -> None:
    names = ("energy", "power", "busy", "clock", "max_clock", "temperature", "reasons", "old_reasons", "pids")
    gpu = Gpu(A, **dict.fromkeys(names, error))
    assert read(FakeNvml(gpu))[0] == Reading()


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("energy", "energy_mj"),
        ("power", "power_w"),
        ("busy", "utilisation"),
        ("clock", "sm_clock_mhz"),
        ("max_clock", "max_sm_clock_mhz"),
        ("temperature", "temperature_c"),
        ("reasons", "throttle"),
        ("pids", "other_pids"),
    ],
)
def test_one_unsupported_query_is_one_missing_value(name: str, column: str) -> None:
    whole = read(FakeNvml(Gpu(A)))[0]
    assert read(FakeNvml(replace(Gpu(A), **{name: FakeError()})))[0] == replace(whole, **{column: None})


def test_an_older_drivers_name_for_the_reasons_is_asked_too() -> None:
    assert read(FakeNvml(Gpu(A, reasons=FakeError(), old_reasons=0x20)))[0].throttle == ("sw thermal slowdown",)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x0, ()),
        (0x1, ()),  # idle
        (0x2, ()),  # applications' clocks
        (0x10, ()),  # sync boost
        (0x100, ()),  # display clock
        (0x113, ()),
        (0x4, ("sw power cap",)),
        (0x8, ("hw slowdown",)),
        (0x20, ("sw thermal slowdown",)),
        (0x40, ("hw thermal slowdown",)),
        (0x80, ("hw power brake",)),
        (0x48, ("hw slowdown", "hw thermal slowdown")),
        (0x5, ("sw power cap",)),
        (ALL_BITS, tuple(telemetry.THROTTLING.values())),
    ],
)
def test_throttle_reasons_exclude_idle_and_settings(bits: int, expected: tuple[str, ...]) -> None:
    assert read(FakeNvml(Gpu(A, reasons=bits)))[0].throttle == expected


@pytest.mark.parametrize(
    ("pids", "expected"),
    [
        ((ME,), ()),
        ((ME, OTHER + 1, OTHER), (OTHER, OTHER + 1)),
        ((ME, ME, OTHER, OTHER), (OTHER,)),
        ((OTHER,), None),  # another namespace: none of them is ours
        ((), None),
    ],
)
def test_foreign_processes_are_counted_if_our_own_is_listed(
    pids: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    assert read(FakeNvml(Gpu(A, pids=pids)))[0].other_pids == expected


def test_our_own_processes_are_not_foreign() -> None:
    nvml = FakeNvml(Gpu(A, pids=(ME, OTHER, OTHER + 1)))
    assert read(nvml, own_pids=[OTHER])[0].other_pids == (OTHER + 1,)


@pytest.mark.parametrize("gpu", [Gpu(A, mig=[1, 1]), Gpu(SLICE)])
def test_a_slice_does_not_claim_the_whole_gpus_energy(gpu: Gpu) -> None:
    reading = read(FakeNvml(gpu))[0]
    assert (reading.energy_mj, reading.power_w) == (None, None)
    assert reading.temperature_c == 60


def test_a_mig_capable_gpu_without_slices_has_energy() -> None:
    assert read(FakeNvml(Gpu(A, mig=[0, 1])))[0].energy_mj == 5_000


# columns


BEFORE = Reading(energy_mj=1_000_000, other_pids=())
AFTER = Reading(
    energy_mj=7_000_000,
    power_w=300.0,
    utilisation=0.5,
    sm_clock_mhz=1500,
    max_sm_clock_mhz=2000,
    temperature_c=60,
    throttle=(),
    other_pids=(),
)


def columns(
    before: Sequence[Reading] = (BEFORE,),
    after: Sequence[Reading] = (AFTER,),
    *,
    seconds: float = 20.0,
    shared: bool = False,
    samples: float = 12_000.0,
) -> dict[str, Any]:
    return summarise(before, after, seconds=seconds, shared=shared, samples=samples)


def test_one_gpu() -> None:
    assert columns(after=[replace(AFTER, power_w=60.0)]) == {  # it is idle after the last window
        "gpu_utilisation": 0.5,
        "power_w": 300.0,
        "sm_clock_mhz": 1500,
        "sm_clock_fraction": 0.75,
        "temperature_c": 60,
        "throttled": "",
        "energy_j": 6_000.0,
        "samples_per_joule": 2.0,
        "foreign_gpu_processes": 0,
    }


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


def test_throttling_counters_are_read_by_policy() -> None:
    assert read(FakeNvml(Gpu(A, held=[11, 22])))[0].held_ns == (11, 22)
    assert read(FakeNvml(Gpu(A)))[0].held_ns is None


def test_several_gpus_are_averaged_or_the_worst_or_summed() -> None:
    other = Reading(3_000_000, 500.0, 0.7, 1600, 3200, 80, ("hw slowdown", "hw power brake"), ())
    assert columns([BEFORE, BEFORE], [AFTER, other]) == {
        "gpu_utilisation": pytest.approx(0.6),
        "power_w": 200.0,
        "sm_clock_mhz": 1500,
        "sm_clock_fraction": 0.5,
        "temperature_c": 80,
        "throttled": "hw slowdown, hw power brake",
        "energy_j": 8_000.0,
        "samples_per_joule": 1.5,
        "foreign_gpu_processes": 0,
    }


def test_each_reason_stands_once_in_the_tables_order() -> None:
    after = [replace(AFTER, throttle=throttle) for throttle in (("hw power brake", "hw slowdown"), ("hw slowdown",))]
    assert columns([BEFORE, BEFORE], after)["throttled"] == "hw slowdown, hw power brake"


@pytest.mark.parametrize(
    ("column", "missing"),
    [
        ("gpu_utilisation", {"utilisation": None}),
        ("power_w", {"energy_mj": None, "power_w": None}),
        ("sm_clock_mhz", {"sm_clock_mhz": None}),
        ("sm_clock_fraction", {"sm_clock_mhz": None}),
        ("sm_clock_fraction", {"max_sm_clock_mhz": None}),
        ("sm_clock_fraction", {"max_sm_clock_mhz": 0}),
        ("temperature_c", {"temperature_c": None}),
        ("throttled", {"throttle": None}),
        ("energy_j", {"energy_mj": None}),
        ("samples_per_joule", {"energy_mj": None}),
        ("foreign_gpu_processes", {"other_pids": None}),
    ],
)
def test_a_query_missing_on_one_device_is_missing(column: str, missing: dict[str, Any]) -> None:
    assert columns([BEFORE, BEFORE], [AFTER, replace(AFTER, **missing)])[column] is None


def test_no_readings_are_missing_values() -> None:
    assert set(columns((), ()).values()) == {None}


@pytest.mark.parametrize(("seconds", "expected"), [(9.99, None), (ENERGY_LEAST_S, 6_000.0)])
def test_short_windows_have_no_energy(seconds: float, expected: float | None) -> None:
    result = columns(seconds=seconds)
    assert result["energy_j"] == expected
    assert result["samples_per_joule"] == (expected and 2.0)
    assert result["power_w"] == 6_000.0 / seconds


@pytest.mark.parametrize(("seconds", "counter"), [(0.9, 7_000_000), (20.0, None), (20.0, 1_000_000)])
def test_without_energy_over_a_second_the_power_is_that_of_the_last_reading(
    seconds: float, counter: int | None
) -> None:
    assert columns(after=[replace(AFTER, energy_mj=counter, power_w=123.0)], seconds=seconds)["power_w"] == 123.0


def test_oversubscribed_gpus_have_no_energy() -> None:
    result = columns(shared=True)
    assert (result["energy_j"], result["samples_per_joule"]) == (None, None)


@pytest.mark.parametrize("edge", ["before", "after"])
def test_a_foreign_process_at_either_edge_leaves_no_energy(edge: str) -> None:
    others = (OTHER,)
    before = replace(BEFORE, other_pids=others) if edge == "before" else BEFORE
    after = replace(AFTER, other_pids=others) if edge == "after" else AFTER
    result = columns([before], [after])
    assert (result["energy_j"], result["samples_per_joule"], result["foreign_gpu_processes"]) == (None, None, 1)


def test_a_foreign_process_on_two_gpus_counts_once() -> None:
    after = [replace(AFTER, other_pids=(OTHER,)), replace(AFTER, other_pids=(OTHER, OTHER + 1))]
    assert columns([BEFORE, BEFORE], after)["foreign_gpu_processes"] == 2


def test_a_foreign_process_is_counted_although_another_gpu_has_no_process_list() -> None:
    after = [replace(AFTER, other_pids=None), replace(AFTER, other_pids=(OTHER,))]
    result = columns([BEFORE, BEFORE], after)
    assert (result["foreign_gpu_processes"], result["energy_j"]) == (1, None)


def test_unknown_process_lists_do_not_remove_energy() -> None:
    result = columns([replace(BEFORE, other_pids=None)], [replace(AFTER, other_pids=None)])
    assert (result["foreign_gpu_processes"], result["energy_j"]) == (None, 6_000.0)


@pytest.mark.parametrize("counter", [1_000_000, 999_999, 0])
def test_a_constant_counter_gives_no_energy(counter: int) -> None:
    result = columns([BEFORE, BEFORE], [AFTER, replace(AFTER, energy_mj=counter)])
    assert (result["energy_j"], result["samples_per_joule"]) == (None, None)


def test_columns_from_devices_end_to_end() -> None:
    gpus = [Gpu(A, energy=1_000), Gpu(B, energy=2_000)]
    found = opened(FakeNvml(*gpus), 0, 1)
    assert found is not None
    before = found.read()
    gpus[0].energy, gpus[1].energy = 3_001_000, 1_002_000
    result = summarise(before, found.read(), seconds=10.0, shared=False, samples=400.0)
    assert (result["energy_j"], result["samples_per_joule"]) == (4_000.0, 0.1)
