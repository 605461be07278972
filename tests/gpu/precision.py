"""Claims about numbers: dtypes inside every strategy, TF32, and updates that equal those of one device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.measure.sketches import measure_sketches
from harness.measure.stepper import TrainingData
from harness.plan.cell import Cell
from harness.train import workloads
from harness.train.precision import Precision
from harness.train.ranks import Ranks
from tests.gpu.setting import SMALL, cell_of, group_of_one, need_cuda, one_rank, stepper_of
from tests.gpu.verdict import NotRun, Verdict, judged

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIDE, SAMPLES, BATCH, STEPS = 8, 64, 16, 3


class Recorder(nn.Module):
    """Records the dtype of what passes, in whichever thread, under a name."""

    def __init__(self, name: str, seen: set[tuple[str, str]]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.name, str(x.dtype).removeprefix("torch.")))
        return x


class Probed:
    """A network with BatchNorm that records what is in which dtype: after each layer, and of the loss."""

    unit = "samples"

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def build_model(self) -> nn.Module:
        first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Recorder("convolution", self.seen), nn.BatchNorm2d(8))
        last = nn.Sequential(nn.Flatten(), nn.Linear(8 * SIDE * SIDE, 10), Recorder("linear", self.seen))
        return nn.Sequential(first, nn.ReLU(), last)

    def datasets(self) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator)
        data = TensorDataset(images, torch.randint(0, 10, (SAMPLES,), generator=generator))
        return data, data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = batch
        total = nn.functional.cross_entropy(model(images), labels, reduction="sum")
        return total, torch.full((), len(labels), device=total.device)


def dtypes(device: torch.device, strategy: str, precision: str) -> Verdict:
    """Layers compute in the cell's precision, in every thread; losses, parameters and gradients are float32."""
    slots = 2 if BUILTIN_TRAITS[strategy].replicates else 1  # threads start with two replicas, even on one GPU
    grid = {"strategy": strategy, "precision": precision, "per_device_batch_size": BATCH // slots}
    cell = cell_of(device, grid, devices=slots, workload="mlp")
    workload = Probed()
    with nullcontext() if BUILTIN_TRAITS[strategy].one_process else group_of_one(device):
        stepper = stepper_of(cell, device, one_rank(device, slots), workload)
        training = stepper.training
        losses = [training.step(stepper.one_batch(), stepper.share)[0] for _ in range(STEPS)]
        held = {
            "loss": {str(loss.dtype) for loss in losses},
            "parameters": {str(p.dtype) for p in training.model.parameters()},
            "gradients": {str(p.grad.dtype) for p in training.model.parameters() if p.grad is not None},
        }
        finite = training.finite([float(loss) for loss in losses])
    want = str(LOW[precision]).removeprefix("torch.")
    computed = {name: {dtype for where, dtype in workload.seen if where == name} for name in ("convolution", "linear")}
    holds = all(dtype == {want} for dtype in computed.values()) and all(d == {"torch.float32"} for d in held.values())
    shown = [f"{name} {'/'.join(sorted(dtype))}" for name, dtype in {**computed, **held}.items()]
    return judged(holds and finite, ", ".join(shown).replace("torch.", "") + ("" if finite else "; not finite"))


def tf32(device: torch.device) -> Verdict:
    """In fp32 a product has float32's error, in tf32 that of 10 bits of mantissa."""
    need_cuda(device)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = a @ b
    errors = {}
    for precision in ("fp32", "tf32"):
        Precision(precision, device.type).apply()
        product = (a.float().to(device) @ b.float().to(device)).double().cpu()
        errors[precision] = float((product - exact).norm() / exact.norm())
    Precision("fp32", device.type).apply()
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise NotRun("needs a GPU with TF32 (compute capability 8.0)")
    text = f"relative error {errors['fp32']:.1e} in fp32, {errors['tf32']:.1e} in tf32"
    return judged(errors["fp32"] < 1e-5 < 1e-4 < errors["tf32"], text, **errors)


def difference(own: list[float], alone: list[float]) -> float:
    """Return the norm of the difference of two updates' sketches over that of the second."""
    return float(np.linalg.norm(np.subtract(own, alone)) / np.linalg.norm(alone))


OPTIONS: Mapping[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "fused": ({}, {"optimizer.fused": True}, 0.01),
    "foreach off": ({}, {"optimizer.foreach": False}, 0.01),
    "channels last": ({}, {"training.channels_last": True}, 0.01),
    "cudnn benchmark": ({}, {"training.cudnn_benchmark": True}, 0.01),
    "bf16 hook": ({"strategy": "ddp"}, {"ddp.comm_hook": "bf16_compress"}, 0.05),
    "fp16 hook": ({"strategy": "ddp"}, {"ddp.comm_hook": "fp16_compress"}, 0.05),
}
"""Options of a CUDA study: the cell, the option, and how far its update may be from that without it."""


def options_train_alike(device: torch.device) -> Verdict:
    """Each option of a CUDA study is accepted by the device, and trains as without it."""
    off, bounds = {}, {}
    with group_of_one(device):
        for name, (cell, option, bound) in OPTIONS.items():
            cells = (cell_of(device, {**SMALL, **cell, **more}) for more in ({}, option))
            plain, own = (update_on(one_rank(device), one) for one in cells)
            off[name], bounds[name] = difference(own, plain), bound
    text = ", ".join(f"{name} {100 * value:.2g} %" for name, value in off.items())
    return judged(all(off[name] <= bounds[name] for name in off), f"{text}; bounds 1 %, hooks 5 %", **off)


def update_on(ranks: Ranks, cell: Cell) -> list[float]:
    """Return the update of one rank, as the equivalence check takes it."""
    workload = workloads.build(cell)
    found = measure_sketches(TrainingData(cell, 0, ranks, *workload.datasets(), workload), lambda: None)
    return found.quantities["scaled_update"]
