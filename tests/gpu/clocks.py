"""Claims about clocks and counters: CUDA events, phases, NVML's energy."""

from __future__ import annotations

import threading
import time

import torch

from harness.measure.environment import capture_topology
from harness.measure.telemetry import ENERGY_LEAST_S
from harness.measure.throughput import LoadMonitor
from tests.gpu.setting import SMALL, cell_of, keep, need_cuda, stepper_of, steps_for
from tests.gpu.verdict import NotRun, Verdict, judged

CLOSE = 0.01
"""Largest relative difference of two clocks over the same window."""


def events_and_wall(device: torch.device) -> Verdict:
    """The times of a window's steps, by events on the stream, add up to its duration by the host's clock."""
    stepper = stepper_of(cell_of(device, SMALL), device)
    cuda = device.type == "cuda"
    steps = steps_for(stepper, 1.0 if cuda else 0.3)
    ratios = {}
    for detailed in (False, True):
        windows = [stepper.window("timed", steps, detailed=detailed) for _ in range(1 if cuda else 5)]
        found = [sum(window.step_s) / window.duration_s for window in windows]
        ratios[detailed] = min(found, key=lambda ratio: abs(ratio - 1))  # on a CPU other load may fall between the two
    text = f"steps / window: {ratios[False]:.4f}, with phases {ratios[True]:.4f}; bound 1 +- {CLOSE}"
    return judged(all(abs(ratio - 1) <= CLOSE for ratio in ratios.values()), text, plain=ratios[False])


def phases_and_steps(device: torch.device) -> Verdict:
    """The phases of a window add up to its steps, on the stream and on the host."""
    stepper = stepper_of(cell_of(device, SMALL), device)
    steps = steps_for(stepper, 0.3)
    window = stepper.window("phases", steps)
    total = sum(window.step_s)
    shares = {name: seconds / total for name, seconds in window.phases.items()}
    off = abs(sum(shares.values()) - 1)
    told = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= 0.005)
    negative = [name for name, share in shares.items() if share < 0]
    return judged(off <= 1e-3 and not negative, f"off by {off:.1e}; {told}", **shares)


def energy(device: torch.device) -> Verdict:
    """The energy of NVML's counter over the windows is the mean power, read beside them, times their duration."""
    need_cuda(device)
    stepper = stepper_of(cell_of(device, {**SMALL, "model": "resnet18", "per_device_batch_size": 256}), device)
    steps = steps_for(stepper, 1.0)
    with PowerReader(device) as reader:
        monitor = LoadMonitor(stepper.ranks, shared=False)
        began = time.perf_counter()
        timed = []
        while time.perf_counter() - began < ENERGY_LEAST_S + 1.5:
            timed.append(stepper.window("timed", steps, detailed=False))
        columns = monitor.columns(sum(window.weight for window in timed))
    keep("nvml_readings", {"power_w": reader.read_w, "columns": columns, "topology": capture_topology()})
    energy_j, seconds = columns.get("energy_j"), columns["watched_s"]
    if energy_j is None:
        raise NotRun(f"no energy here: foreign processes {columns.get('foreign_gpu_processes')}, or no counter")
    power_w = energy_j / seconds
    ratio = power_w / reader.mean_w
    text = f"{power_w:.0f} W by energy, {reader.mean_w:.0f} W by readings, ratio {ratio:.3f}; bound 1 +- 0.1"
    shown = columns.get("power_w")
    text += f"; column power_w {shown:.0f} W" if shown is not None else ""
    return judged(abs(ratio - 1) <= 0.1, text, energy_w=power_w, read_w=reader.mean_w, column_w=shown)


class PowerReader:
    """The mean of NVML's power readings, every 50 ms from a thread."""

    def __init__(self, device: torch.device) -> None:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.read_w: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.read_w.append(self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000.0)

    def __enter__(self) -> PowerReader:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def mean_w(self) -> float:
        return sum(self.read_w) / len(self.read_w)
