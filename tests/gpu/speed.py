"""Claims about speed: the harness's cost a step, and ResNet-50 against a loop written by hand."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.measure.flops import count_flops
from harness.measure.profiles import Event, events_of, union
from harness.measure.stepper import Stepper
from harness.measure.window import synchronize
from harness.system.process import no_garbage_collection
from tests.benchmarks.overhead import one_process
from tests.gpu.setting import SMALL, cell_of, median_pace_s, need_cuda, pace_s, stepper_of, steps_for
from tests.gpu.verdict import Verdict, judged, measured

ROOT = Path(__file__).parents[2]
MOST_OVERHEAD, LEAST_OF_HAND_WRITTEN = 1.01, 0.98
MOST_ADDED_S = 20e-6
"""A step of less than 2 ms is bound by the host on a GPU: its kernels take less time than their launches, and what the
harness adds (marks, an event) shows in full, as it does not beside a GPU that works. 1 % of such a step would be a
bound on the speed of torch's launches. On two CPU cores the harness adds 11 us to a step of 1.1 ms."""
PAIRS = 7
RATE = 0.05


def overhead(device: torch.device) -> Verdict:
    """A step of the harness takes at most 1.01 of a bare loop's, or 20 us more: tests.benchmarks.overhead, in short."""
    if device.type == "cpu":  # this process is a fork that has imported what a fresh one would
        return verdict_of([one_process(["small MLP"], 7, 0.05, device)], cuda=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        short = ["--device", "cuda", "--processes", "2", "--pairs", "15", "--window", "0.1", "--json", str(file)]
        command = [sys.executable, "-m", "tests.benchmarks.overhead", *short]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if not file.exists():
            raise RuntimeError(f"tests.benchmarks.overhead left with exit code {done.returncode}")
        processes = json.loads(file.read_text())["figures"]
    return verdict_of(processes, cuda=True)


def verdict_of(processes: Sequence[Sequence[Mapping[str, Any]]], *, cuda: bool) -> Verdict:
    """Judge the figures of every process: a row for each model and strategy."""
    lines = {f"{rows[0]['model']} {rows[0]['strategy']}": rows for rows in zip(*processes, strict=True)}
    ratios = {name: [row["window"] for row in rows] for name, rows in lines.items()}
    medians = {name: statistics.median(found) for name, found in ratios.items()}
    text = ", ".join(f"{name} {medians[name]:.4f} ({min(r):.4f} to {max(r):.4f})" for name, r in ratios.items())
    if not cuda:
        return judged(all(0.2 < ratio < 5 for ratio in medians.values()) and len(medians) == 2, text, **medians)
    steps_s = {name: statistics.median(row["step_s"] for row in rows) for name, rows in lines.items()}
    bounds = {name: max(MOST_OVERHEAD, 1 + MOST_ADDED_S / step_s) for name, step_s in steps_s.items()}
    held = all(medians[name] <= bound for name, bound in bounds.items())
    return judged(held, f"{text}; bounds {', '.join(f'{bound:.4f}' for bound in bounds.values())}", **medians)


def resnet50(device: torch.device) -> Verdict:
    """ResNet-50 in bf16, channels_last, on synthetic data runs at 0.98 of a loop written by hand, or faster.

    Windows of both alternate. On a CPU a small ResNet takes its place, without a bound.
    """
    cuda = device.type == "cuda"
    grid = {"model": "resnet50", "data": "synthetic_device", "per_device_batch_size": 128} if cuda else SMALL
    options = {"workload_options": {"image_size": 224, "classes": 1000, "samples": 1024}} if cuda else {}
    training = {"channels_last": True, "cudnn_benchmark": True}
    sections = {"optimizer": {"name": "SGD", "lr": RATE, "momentum": 0.9}, "training": training, **options}
    cell = cell_of(device, {**grid, "precision": "bf16"}, **sections)
    stepper = stepper_of(cell, device)
    by_hand = hand_written(stepper, device)
    steps = steps_for(stepper, 1.0 if cuda else 0.1)
    by_hand(steps)
    ours, theirs = [], []
    for number in range(PAIRS):
        for which in (number % 2, 1 - number % 2):  # each goes first as often
            if which:
                ours.append(pace_s(stepper.window("timed", steps, detailed=False)))
            else:
                theirs.append(by_hand(steps))
    ratio = statistics.median(hand / own for hand, own in zip(theirs, ours, strict=True))
    rate = cell.global_batch_size / statistics.median(ours)
    text = f"{ratio:.3f} of the loop by hand; {rate:,.0f} images/s at batch {cell.global_batch_size}"
    if not cuda:
        return measured(text, ratio=ratio, images_per_s=rate)
    text += f"; bound {LEAST_OF_HAND_WRITTEN}"
    return judged(ratio >= LEAST_OF_HAND_WRITTEN, text, ratio=ratio, images_per_s=rate)


def hand_written(stepper: Stepper, device: torch.device) -> Callable[[int], float]:
    """Return a loop as one writes it without a harness, on a batch of the same size; it returns seconds a step."""
    images, labels = stepper.one_batch()  # type: ignore[misc]
    images, labels = images.to(device, memory_format=torch.channels_last), labels.to(device)
    model: nn.Module = stepper.training._workload.build_model()
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return loop_of(optimizer, lambda: nn.functional.cross_entropy(model(images), labels), device)


def loop_of(optimizer: Any, loss_of: Callable[[], torch.Tensor], device: torch.device) -> Callable[[int], float]:
    """Return a loop as one writes it without a harness, in bf16; it returns seconds a step."""

    def loop(steps: int) -> float:
        with no_garbage_collection():
            synchronize([device])
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = loss_of()
                loss.backward()
                optimizer.step()
            synchronize([device])
            return (time.perf_counter() - start) / steps

    return loop


def gpt(device: torch.device) -> Verdict:
    """A second instrument: the same GPT in a loop by hand has the harness's step time, peak and MFU.

    The loop's peak is the allocator's; its busy time is that of its kernels under torch.profiler, after a warm-up.
    """
    need_cuda(device)
    training = {"optimizer": {"name": "AdamW", "lr": 3e-4}, "workload": "language_model"}
    grid = {"model": "small", "data": "synthetic_device", "per_device_batch_size": 16, "precision": "bf16"}
    cell = cell_of(device, grid, workload_options={"samples": 64}, **training)
    stepper = stepper_of(cell, device)
    steps = steps_for(stepper, 1.0)
    torch.cuda.reset_peak_memory_stats(device)
    own_s = median_pace_s([stepper.window("timed", steps, detailed=False) for _ in range(3)])
    own_peak = torch.cuda.max_memory_allocated(device)
    workload, batch = stepper.training._workload, stepper.one_batch()
    per_token = count_flops(workload, batch, device).per_unit or 0.0
    tokens = cell.global_batch_size * workload.shape.context  # type: ignore[attr-defined]
    del stepper
    torch.cuda.empty_cache()
    loop = gpt_by_hand(workload.build_model().to(device), batch)
    loop(steps)
    torch.cuda.reset_peak_memory_stats(device)
    hand_s = statistics.median(loop(steps) for _ in range(3))
    hand_peak = torch.cuda.max_memory_allocated(device)
    busy_s = busy_seconds(loop)
    ratio, memory = own_s / hand_s, own_peak / hand_peak
    mfu = per_token * tokens / own_s / H100_BF16
    text = f"step {1000 * own_s:.2f} ms, {ratio:.3f} of the loop by hand; peak {own_peak / 2**30:.2f} GiB, {memory:.3f}"
    text += f"; kernels run {100 * busy_s / hand_s:.0f} % of the step; {tokens / own_s:,.0f} tokens/s, MFU {mfu:.2f}"
    text += "; bounds 1.02, 1.02; expected MFU 0.25 to 0.45"
    return judged(ratio <= 1.02 and memory <= 1.02, text, own_s=own_s, hand_s=hand_s, mfu=mfu, busy_s=busy_s)


H100_BF16 = 989e12
"""FLOP/s of an H100 SXM without sparsity, by its data sheet."""


def gpt_by_hand(model: nn.Module, batch: Any) -> Callable[[int], float]:
    """Return a loop as one writes it without a harness; it returns seconds a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens, wanted = batch[:, :-1], batch[:, 1:].flatten()
    return loop_of(optimizer, lambda: nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted), batch.device)


def busy_seconds(loop: Callable[[int], float], steps: int = 5) -> float:
    """Return the seconds of a step in which a kernel runs, by a profile that starts after a warm-up."""
    from torch.profiler import ProfilerActivity, profile, schedule

    found: list[Event] = []
    plan = schedule(wait=0, warmup=1, active=1, repeat=1)
    activities, take = [ProfilerActivity.CPU, ProfilerActivity.CUDA], lambda done: found.extend(events_of(done))
    with profile(activities=activities, schedule=plan, on_trace_ready=take) as profiler:
        for _ in range(2):
            loop(steps)
            profiler.step()
    kernels = [e.span for e in found if e.gpu is not None and not e.annotation]
    return sum(end - start for start, end in union(kernels)) / 1e9 / steps
