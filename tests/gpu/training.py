"""Claims about trainings on a device: they go on from a checkpoint, skip, recompute, load and need what is forecast."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.measure.memory_trace import examine
from harness.plan.inventory import Inventory, Node
from harness.plan.memory_forecast import forecast, traced_cell
from harness.train.checkpoint import CheckpointManager
from harness.train.loader import Share
from harness.train.training import Training
from tests.gpu.setting import SMALL, cell_of, need_cuda, stepper_of
from tests.gpu.verdict import Verdict, judged

STEPS, CLOSE = 4, 1e-4
"""Steps of each part of a training, and the largest relative difference of two that are to be alike."""
GIB = 2**30


def goes_on(device: torch.device) -> Verdict:
    """A training that resumes from a checkpoint ends with the parameters of one that was not interrupted."""
    cell = cell_of(device, {**SMALL, "precision": "fp16"}, optimizer={"name": "AdamW", "lr": 0.001})
    stepper = stepper_of(cell, device)
    batch, share = stepper.one_batch(), stepper.share
    with tempfile.TemporaryDirectory() as name:
        _take(stepper.training, batch, share)
        CheckpointManager(Path(name), 1, stepper.training, stepper.ranks).save(1, {}, last=True)
        _take(stepper.training, batch, share)
        other = stepper_of(cell, device).training
        resumed = CheckpointManager(Path(name), 1, other, stepper.ranks).resume()
        _take(other, batch, share)
    off = _difference(other, stepper.training)
    start = _difference(stepper_of(cell, device).training, stepper.training)
    text = f"parameters differ by {off:.1e} after {STEPS} steps before and {STEPS} after; bound {CLOSE:.0e}"
    return judged(bool(resumed) and off <= CLOSE < start, f"{text}; from the start {start:.1e}", off=off)


def skips(device: torch.device) -> Verdict:
    """In fp16 an infinite gradient halves the loss scale and changes no parameter; the next step changes them."""
    stepper = stepper_of(cell_of(device, {**SMALL, "precision": "fp16"}), device)
    training, batch, share = stepper.training, stepper.one_batch(), stepper.share
    training.expect_few_steps()
    update = training._scaled_update

    def overflow() -> None:
        gradient = next(p.grad for p in training.model.parameters() if p.grad is not None)
        gradient.view(-1)[0] = torch.inf
        update()

    training.step(batch, share)
    seen = [(_flat(training), training.loss_scale())]
    for scaled in (overflow, update):
        training._scaled_update = scaled  # type: ignore[method-assign]
        training.step(batch, share)
        seen.append((_flat(training), training.loss_scale()))
    (before, scale), (skipped, halved), (after, _) = seen
    assert scale and halved
    kept, moved = torch.equal(before, skipped), not torch.equal(skipped, after)
    text = f"scale {scale.scale:,.0f} to {halved.scale:,.0f}; parameters kept {kept}, moved by the next step {moved}"
    return judged(halved.scale == scale.scale / 2 and kept and moved, text)


def recomputed(device: torch.device) -> Verdict:
    """With activation checkpointing a model trains alike; on a GPU the peak of its steps falls."""
    peaks, trained = {}, {}
    grid: Mapping[str, Any] = SMALL
    sections: dict[str, Any] = {"optimizer": {"name": "SGD", "lr": 0.01}}
    if device.type == "cuda":
        grid = {"model": "small", "per_device_batch_size": 16}
        sections["workload"] = "language_model"
    for name in ("none", "full"):
        stepper = stepper_of(cell_of(device, {**grid, "activation_checkpointing": name}, **sections), device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _take(stepper.training, stepper.one_batch(), stepper.share)
        peaks[name] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        trained[name] = stepper.training
    off = _difference(trained["full"], trained["none"])
    text = f"parameters differ by {off:.1e}; bound {CLOSE:.0e}"
    if device.type != "cuda":
        return judged(off <= CLOSE, text, off=off)
    text += f"; peak {peaks['full'] / GIB:.3f} GiB of {peaks['none'] / GIB:.3f}"
    return judged(off <= CLOSE and peaks["full"] < peaks["none"], text, off=off)


def loads(device: torch.device) -> Verdict:
    """Batches of loader workers, pinned for a GPU, are those of the main process: the losses of steps are equal."""
    losses = {}
    for workers in (0, 2):
        stepper = stepper_of(cell_of(device, {**SMALL, "loader.workers": workers}), device)
        losses[workers] = torch.tensor(stepper.window("timed", 2 * STEPS).values["loss"])
    off = float((losses[2] - losses[0]).abs().max() / losses[0].abs().max())
    return judged(off <= CLOSE, f"losses differ by {off:.1e} in {2 * STEPS} steps; bound {CLOSE:.0e}", off=off)


FORECAST: Mapping[str, dict[str, Any]] = {
    "mlp": {"model": "large", "per_device_batch_size": 64},
    "language_model": {"model": "small", "per_device_batch_size": 16, "precision": "bf16"},
    "image_classification": {"model": "resnet18", "data": "synthetic", "per_device_batch_size": 64},
}
MOST_OFF = 0.2


def forecasts(device: torch.device) -> Verdict:
    """The peak of a step, traced without a GPU, is the peak that the allocator reports, but for its allowance."""
    need_cuda(device)
    told, ratios = [], {}
    for workload, grid in FORECAST.items():
        cell = cell_of(device, grid, workload=workload, optimizer={"name": "AdamW", "lr": 0.001})
        found = forecast(cell, examine(traced_cell(cell)), Inventory((Node("n", "", "n", 1, gpus=1),)))
        if found.peak is None:
            raise RuntimeError(f"{workload}: no forecast: {found.reason}")
        stepper = stepper_of(cell, device)
        torch.cuda.reset_peak_memory_stats(device)
        stepper.window("warmup", STEPS)
        peak = torch.cuda.max_memory_allocated(device)
        ratios[workload] = (found.peak - found.allowance) / peak
        told.append(f"{workload} {ratios[workload]:.3f} of {peak / GIB:.2f} GiB")
        del stepper
    holds = all(abs(ratio - 1) <= MOST_OFF for ratio in ratios.values())
    return judged(holds, f"forecast / peak: {', '.join(told)}; bound 1 +- {MOST_OFF}", **ratios)


def _take(training: Training, batch: object, share: Share) -> None:
    for _ in range(STEPS):
        training.step(batch, share)


def _difference(one: Training, other: Training) -> float:
    mine, others = _flat(one), _flat(other)
    return float((mine - others).norm() / others.norm())


def _flat(training: Training) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])
