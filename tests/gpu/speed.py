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

from harness.measure.stepper import Stepper
from harness.system.process import no_garbage_collection
from tests.gpu.setting import SMALL, cell_of, pace_s, stepper_of, steps_for
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
    cuda = device.type == "cuda"
    short = "--processes 3 --pairs 15 --window 0.1" if cuda else "--processes 1 --pairs 7 --window 0.05"
    models = [] if cuda else ["--models", "small MLP"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "tests.benchmarks.overhead", "--device", device.type, *short.split(), *models]
        done = subprocess.run([*command, "--json", str(file)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if not file.exists():
            raise RuntimeError(f"tests.benchmarks.overhead left with exit code {done.returncode}")
        processes = json.loads(file.read_text())["figures"]
    return verdict_of(processes, cuda=cuda)


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

    def loop(steps: int) -> float:
        with no_garbage_collection():
            _wait(device)
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
            _wait(device)
            return (time.perf_counter() - start) / steps

    return loop


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
