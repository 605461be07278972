"""Claims whose answer is planted: idle time, time in the forward pass, memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from harness.measure.profiles import busy_s, profiled_steps
from harness.measure.stepper import Stepper
from tests.gpu.setting import cell_of, need_cuda, stepper_of
from tests.gpu.verdict import NotRun, Verdict, judged

BATCH, STEPS = 8, 20
WINDOWS = 5
"""In which the steps are timed: the fastest counts, since a pause of the machine may be in any other."""
PLANTED_S, CLOSE = 0.02, 0.15
"""The planted seconds a step, and how far what is measured may be from them."""
ON_CPU = 5
"""How many times as much is planted on a CPU, whose processors other processes may share."""
HELD_BYTES = 4 * 2**30


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


def waits(device: torch.device) -> Verdict:
    """A data set that sleeps leaves the stream idle, or a CPU waiting, for that time and in no other phase."""
    return _phase(device, "wait_s", "idle" if device.type == "cuda" else "wait")


def forward(device: torch.device) -> Verdict:
    """Work that is added to the forward pass is time of that pass, on the device's clock, and of no other."""
    if device.type == "cuda":
        busy(device, PLANTED_S)  # reads the clock's rate outside the windows
    return _phase(device, "busy_s", "forward")


def _phase(device: torch.device, kind: str, phase: str) -> Verdict:
    """Compare the phases of a workload with and without the planted seconds of this kind."""
    planted_s = PLANTED_S if device.type == "cuda" else ON_CPU * PLANTED_S
    seconds = {}
    for name, workload in {"without": Planted(), "with": Planted(**{kind: planted_s})}.items():  # type: ignore[arg-type]
        stepper = stepper_with(workload, device)
        stepper.window("warmup", STEPS // WINDOWS)
        steps = STEPS // WINDOWS
        windows = [stepper.window("phases", steps).phases for _ in range(WINDOWS)]
        seconds[name] = {one: min(phases[one] for phases in windows) / steps for one in windows[0]}
    grown = {one: seconds["with"][one] - seconds["without"][one] for one in seconds["with"]}
    text = ", ".join(f"{one} {1000 * more:+.2f} ms" for one, more in grown.items() if abs(more) >= 1e-5)
    others = max(abs(more) for one, more in grown.items() if one != phase)
    holds = abs(grown[phase] / planted_s - 1) <= CLOSE and others <= CLOSE * planted_s
    return judged(holds, f"{text}; planted: {phase} {1000 * planted_s:.0f} ms, within {100 * CLOSE:.0f} %", **grown)


def kernels(device: torch.device) -> Verdict:
    """A kernel that is added to the forward pass is time in which the GPU is busy, by the profile."""
    need_cuda(device)
    busy(device, PLANTED_S)
    found = []
    for planted in (Planted(), Planted(busy_s=PLANTED_S)):
        stepper = stepper_with(planted, device)
        stepper.window("warmup", STEPS)
        found.append(busy_s(profiled_steps(stepper), [device]))
    if None in found:
        raise NotRun("the profiler sees no kernels, or not all: CUPTI is not allowed here")
    without, with_it = map(float, found)  # type: ignore[arg-type]
    text = f"busy {1000 * without:.2f} and {1000 * with_it:.2f} ms a step; planted {1000 * PLANTED_S:.0f} ms"
    return judged(abs((with_it - without) / PLANTED_S - 1) <= CLOSE, text, grown=with_it - without)


def stepper_with(workload: Planted, device: torch.device) -> Stepper:
    return stepper_of(cell_of(device, {"per_device_batch_size": BATCH}, workload="mlp"), device, workload=workload)


def memory(device: torch.device) -> Verdict:
    """Bytes that a model holds are those by which the peak of its steps grows."""
    need_cuda(device)
    peaks = []
    for held in (0, HELD_BYTES):
        stepper = stepper_with(Planted(held_bytes=held), device)
        stepper.window("warmup", STEPS)
        torch.cuda.reset_peak_memory_stats(device)
        stepper.window("timed", STEPS)
        peaks.append(torch.cuda.max_memory_allocated(device))
        del stepper
    grown = peaks[1] - peaks[0]
    text = f"peak + {grown / 2**30:.4f} GiB; planted {HELD_BYTES / 2**30:.0f} GiB, within 0.1 %"
    return judged(abs(grown / HELD_BYTES - 1) <= 1e-3, text, grown=float(grown))
