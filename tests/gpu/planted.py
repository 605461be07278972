"""Claims whose answer is planted: idle time, time in the forward pass, memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from harness.measure.memory_trace import examine
from harness.measure.profiles import busy_s, profiled_steps
from harness.measure.stepper import Stepper
from harness.plan.inventory import Inventory, Node
from harness.plan.memory_forecast import forecast, traced_cell
from tests.gpu.setting import cell_of, stepper_of
from tests.gpu.verdict import Verdict, judged

BATCH, STEPS = 8, 20
WINDOWS = 5
"""In which the steps are timed: the fastest counts, since a pause of the machine may be in any other."""
PLANTED_S, CLOSE = 0.02, 0.15
"""The planted seconds a step, and how far what is measured may be from them."""
ON_CPU = 5
"""How many times as much is planted on a CPU, whose processors other processes may share."""
HELD_BYTES = 10 * 2**30
"""Bytes that a model holds; at most a quarter of a GPU's memory, which other claims use too."""


class Planted:
    """A small model with a data set that sleeps for ``wait_s`` a batch and a pass that takes ``busy_s`` longer."""

    unit = "samples"

    def __init__(self, *, wait_s: float = 0.0, busy_s: float = 0.0, held_bytes: int = 0) -> None:
        self.wait_s, self.busy_s, self.held_bytes = wait_s, busy_s, held_bytes

    def build_model(self) -> nn.Module:
        model = nn.Linear(8, 8)
        model.register_buffer("held", torch.empty(self.held_bytes, dtype=torch.uint8))
        return model

    def datasets(self) -> tuple[Any, Any]:
        data = Sleeping(self.wait_s / BATCH)
        return data, data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total = model(batch).square().sum()
        if self.busy_s:
            busy(total.device, self.busy_s)
        return total, torch.full((), len(batch), device=total.device)


class Sleeping(torch.utils.data.Dataset[Tensor]):
    """Samples that take ``seconds`` each."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64 * BATCH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.full((8,), float(index))


_cycles_per_s: list[float] = []


def busy(device: torch.device, seconds: float) -> None:
    """Keep the device busy for so long; on a CPU the calling thread."""
    if device.type != "cuda":
        return time.sleep(seconds)
    if not _cycles_per_s:
        _cycles_per_s.append(cycles_per_s())
    torch.cuda._sleep(int(seconds * _cycles_per_s[0]))


def cycles_per_s() -> float:
    """Return how many cycles of ``torch.cuda._sleep`` a second has, at the clock of a GPU that works."""
    cycles, start, end = 200_000_000, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / (start.elapsed_time(end) / 1e3)


def seconds(device: torch.device) -> Verdict:
    """Seconds that are planted are in their phase and in no other, and a planted kernel is time in which a GPU is busy.

    A data set that sleeps leaves the stream idle, or a CPU waiting; work that is added to the forward pass is that
    pass's, on the device's clock.
    """
    cuda = device.type == "cuda"
    planted_s = PLANTED_S if cuda else ON_CPU * PLANTED_S
    if cuda:
        busy(device, PLANTED_S)  # reads the clock's rate outside the windows
    steppers = [stepper_with(one, device) for one in (Planted(), Planted(wait_s=planted_s), Planted(busy_s=planted_s))]
    without, *planted = map(_phases_of, steppers)
    told, off = [], 0.0
    for phase, with_it in zip(("idle" if cuda else "wait", "forward"), planted, strict=True):
        grown = {one: with_it[one] - without[one] for one in without}
        told += [f"{one} {1000 * more:+.2f} ms" for one, more in grown.items() if abs(more) >= 1e-3 or one == phase]
        off = max(off, *(abs(more / planted_s - (one == phase)) for one, more in grown.items()))
    text = f"{', '.join(told)}; planted {1000 * planted_s:.0f} ms in two phases, within {100 * CLOSE:.0f} %"
    if not cuda:
        return judged(off <= CLOSE, text, off=off)
    found = [busy_s(profiled_steps(stepper), [device]) for stepper in (steppers[0], steppers[2])]
    if None in found:
        return judged(off <= CLOSE, f"{text}; the profiler sees no kernels, or not all", off=off)
    grown_s = found[1] - found[0]  # type: ignore[operator]
    text += f"; busy {1000 * grown_s:+.2f} ms"
    return judged(off <= CLOSE and abs(grown_s / planted_s - 1) <= CLOSE, text, off=off, busy_s=grown_s)


def _phases_of(stepper: Stepper) -> dict[str, float]:
    """Return the seconds of a step by phase, of each in its fastest window."""
    steps = STEPS // WINDOWS
    stepper.window("warmup", steps)
    windows = [stepper.window("phases", steps).phases for _ in range(WINDOWS)]
    return {one: min(phases[one] for phases in windows) / steps for one in windows[0]}


def stepper_with(workload: Planted, device: torch.device) -> Stepper:
    return stepper_of(cell_of(device, {"per_device_batch_size": BATCH}, workload="mlp"), device, workload=workload)


def memory(device: torch.device) -> Verdict:
    """Bytes that a model holds are those by which the forecast, and on a GPU the peak of its steps, grows."""
    cuda = device.type == "cuda"
    held_bytes = min(HELD_BYTES, torch.cuda.mem_get_info(device)[1] // 4) if cuda else HELD_BYTES
    forecasts, peaks = [], []
    for held in (0, held_bytes):
        own = {"workload": "tests.gpu.planted:Planted", "workload_options": {"held_bytes": held}}
        cell = cell_of(device, {"per_device_batch_size": BATCH}, **own)
        found = forecast(cell, examine(traced_cell(cell)), Inventory((Node("n", "", "n", 1, gpus=1),)))
        if found.peak is None:
            raise RuntimeError(f"no forecast: {found.reason}")
        forecasts.append(found.peak - found.allowance)  # which is on a CPU the size of this process
        if not cuda:
            continue
        stepper = stepper_with(Planted(held_bytes=held), device)
        stepper.window("warmup", STEPS)
        torch.cuda.reset_peak_memory_stats(device)
        stepper.window("timed", STEPS)
        peaks.append(torch.cuda.max_memory_allocated(device))
        del stepper
    grown = {"forecast": forecasts[1] - forecasts[0]} | ({"peak": peaks[1] - peaks[0]} if cuda else {})
    text = ", ".join(f"{name} + {more / 2**30:.4f} GiB" for name, more in grown.items())
    text += f"; planted {held_bytes / 2**30:.4f} GiB, within 0.1 %"
    return judged(all(abs(more / held_bytes - 1) <= 1e-3 for more in grown.values()), text, **grown)
