"""Claims about clocks and counters: CUDA events, phases, NVML's energy against nvidia-smi."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from harness.measure.environment import capture_topology
from harness.measure.telemetry import ENERGY_LEAST_S
from harness.measure.throughput import LoadMonitor
from tests.gpu.setting import SMALL, cell_of, keep, need_cuda, stepper_of, steps_for
from tests.gpu.verdict import NotRun, Verdict, judged

CLOSE = 0.01
"""Largest relative difference of two clocks over the same window."""


def events_and_phases(device: torch.device) -> Verdict:
    """The times of a window's steps, by events on the stream, add up to its duration by the host's clock; so do phases.

    A window's phases add up to its steps, on the stream and on the host.
    """
    stepper = stepper_of(cell_of(device, SMALL), device)
    cuda = device.type == "cuda"
    steps = steps_for(stepper, 1.0 if cuda else 0.3)
    ratios = {}
    for detailed in (False, True):
        windows = [stepper.window("timed", steps, detailed=detailed) for _ in range(1 if cuda else 5)]
        found = [sum(window.step_s) / window.duration_s for window in windows]
        ratios[detailed] = min(found, key=lambda ratio: abs(ratio - 1))  # on a CPU other load may fall between the two
    window = stepper.window("phases", steps)
    shares = {name: seconds / sum(window.step_s) for name, seconds in window.phases.items()}
    off = abs(sum(shares.values()) - 1)
    text = f"steps / window: {ratios[False]:.4f}, with phases {ratios[True]:.4f}; bound 1 +- {CLOSE}; phases: off by "
    text += f"{off:.1e}, {', '.join(f'{name} {100 * share:.0f} %' for name, share in shares.items() if share >= 0.005)}"
    close = all(abs(ratio - 1) <= CLOSE for ratio in ratios.values())
    return judged(close and off <= 1e-3 and min(shares.values()) >= 0, text, plain=ratios[False], **shares)


QUERY = "power.draw,clocks.sm,clocks_event_reasons.active"
NEAR = 0.1


def energy(device: torch.device) -> Verdict:
    """A trial's columns of power and clock, from NVML's counters, are those that nvidia-smi prints beside its windows.

    The readings before and after, and the lines of nvidia-smi, are kept.
    """
    need_cuda(device)
    stepper = stepper_of(cell_of(device, {**SMALL, "model": "resnet18", "per_device_batch_size": 256}), device)
    steps = steps_for(stepper, 1.0)
    with printed_by_nvidia_smi(device) as lines:
        monitor = LoadMonitor(stepper.ranks, shared=False)
        before, began = monitor._gpus, time.perf_counter()
        timed = []
        while time.perf_counter() - began < ENERGY_LEAST_S + 1.5:
            timed.append(stepper.window("timed", steps, detailed=False))
        after = monitor._telemetry.read() if monitor._telemetry else ()
        samples = sum(window.weight for window in timed)
        columns = monitor.columns(samples)
    readings = {"before": [asdict(each) for each in before], "after": [asdict(each) for each in after]}
    seen = {"samples": samples, "columns": columns, "topology": capture_topology(), "nvidia_smi": lines}
    keep("nvml_readings", {**readings, **seen})
    energy_j, clock_mhz = columns.get("energy_j"), columns.get("sm_clock_mhz")
    if energy_j is None or clock_mhz is None:
        raise NotRun(f"no energy here: foreign processes {columns.get('foreign_gpu_processes')}, or no counter")
    power_w = energy_j / columns["watched_s"]
    if not (printed := numbers_of(lines)):
        raise NotRun(f"nvidia-smi printed no reading: {' '.join(lines)[:200]}")
    draws_w, clocks_mhz, reasons = zip(*printed, strict=True)
    ratios = power_w / statistics.fmean(draws_w), clock_mhz / statistics.median(clocks_mhz)
    text = f"{power_w:.0f} W by energy, {ratios[0]:.3f} of nvidia-smi's; SM clock {clock_mhz} MHz, {ratios[1]:.3f}; "
    text += f"reasons {', '.join(sorted({*reasons}))}; bounds 1 +- {NEAR}"
    return judged(all(abs(ratio - 1) <= NEAR for ratio in ratios), text, energy_w=power_w, clock_mhz=clock_mhz)


def numbers_of(lines: Iterable[str]) -> list[tuple[float, float, str]]:
    """Return W, MHz and the bits of the reasons for lowered clocks, of the lines of nvidia-smi that have all three."""
    found = (re.fullmatch(r"([\d.]+), (\d+), (0x[0-9a-fA-F]+)", line) for line in lines)
    return [(float(each[1]), float(each[2]), each[3]) for each in found if each]


@contextmanager
def printed_by_nvidia_smi(device: torch.device) -> Iterator[list[str]]:
    """Run nvidia-smi beside a block, every 200 ms; its lines are in the list after the block."""
    if shutil.which("nvidia-smi") is None:
        raise NotRun("no nvidia-smi here")
    options = [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "200"]
    which = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    lines: list[str] = []
    process = subprocess.Popen(["nvidia-smi", "-i", which, *options], stdout=subprocess.PIPE, text=True)
    try:
        yield lines
    finally:
        process.terminate()
        lines += process.communicate()[0].splitlines()
