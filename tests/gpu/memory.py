"""Claims about memory: peaks of steps and of construction, shards before moves, a full device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harness.config.load import parse_experiment
from harness.launch.inline import InlineLauncher
from harness.launch.worker import outcome_of
from harness.measure.peak_memory import of_model
from harness.plan.inventory import Inventory, Node
from harness.plan.planner import make_plan
from harness.plan.trial import TrialResult
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.workloads import Workload
from harness.train.workloads.mlp import Mlp
from tests.gpu.setting import cell_of, need_cuda
from tests.gpu.verdict import Verdict, judged
from tests.worlds import fake_group

WIDTH, LAYERS = 4096, 8
BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
"""Bytes of the parameters of Tall: 0.5 GiB."""
RANKS = 8


class Tall:
    """A stack of wide linear layers, whose memory is nearly all parameters."""

    unit = "samples"

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def datasets(self) -> tuple[Any, Any]:
        data = TensorDataset(torch.zeros(64, WIDTH))
        return data, data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total = model(batch[0]).square().mean(dim=1).sum()
        return total, torch.full((), len(batch[0]), device=total.device)


def fsdp_shards_first(device: torch.device) -> Verdict:
    """Building a model under fsdp takes a rank's shards and one unit on the device, never the whole model."""
    need_cuda(device)
    cell = cell_of(device, {"strategy": "fsdp", "per_device_batch_size": 8}, devices=RANKS, workload="mlp")
    torch.cuda.set_device(device)
    with fake_group(RANKS):
        torch.zeros(1, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        ranks = Ranks(0, RANKS, 0, 0, "here", "127.0.0.1", (device,))
        training = Training(cell, Tall(), 0, ranks)
        peak = torch.cuda.max_memory_allocated(device)
        kept = torch.cuda.memory_allocated(device)
        del training
    bound = 1.25 * BYTES / RANKS + 2 * BYTES / LAYERS
    text = f"peak {peak / BYTES:.2f} of the model at 8 ranks, afterwards {kept / BYTES:.2f}; bound {bound / BYTES:.2f}"
    return judged(peak <= bound, text, peak_bytes=float(peak), kept_bytes=float(kept), model_bytes=float(BYTES))


def peak_of_steps(device: torch.device, strategy: str) -> Verdict:
    """The peak of a trial is that of its steps, with gradients and Adam's state; the construction's stands apart."""
    need_cuda(device)
    short = {"blocks": 1, "warmup_steps": 2, "warmup_rounds": 2, "windows": 1, "window_steps": 2}
    no_time = {"warmup_seconds": 0.0, "window_seconds": 0.0, "twin": False, "explain": False}
    content = {"name": "acceptance", "workload": "mlp", "device": "cuda", "equivalence": False, "preflight": False}
    content["grid"] = {"model": "large", "strategy": strategy, "per_device_batch_size": 8}
    content |= {"optimizer": {"name": "Adam", "lr": 1e-4}, "throughput": {**short, **no_time}}
    experiment = parse_experiment(content, source="tests.gpu")
    plan = make_plan(experiment, Inventory((Node("here", "127.0.0.1", "here", cores=1, gpus=1),)))
    trials = [(group, trial) for group in plan.groups for trial in group.trials if trial.cell.strategy == strategy]
    group, trial = trials[0]
    messages = InlineLauncher(experiment).launch(replace(group, trials=(trial,)), deadline=None)
    results = [message for message in messages if isinstance(message, TrialResult)]
    if results[0].outcome != "ok":
        raise RuntimeError(results[0].detail or results[0].reason)
    (row,) = results[0].ranks
    model, built = 4.0 * (results[0].parameters or 0), most_built(Mlp(model="large"), strategy)
    build, peak = (float(row[name] or 0) for name in ("build_peak_bytes", "peak_memory_bytes"))
    text = f"construction {build / model:.2f}, steps {peak / model:.2f} of the model; bounds {built:.2f}, 4 to 6"
    return judged(1 <= build / model <= built and 4 <= peak / model <= 6, text, build_bytes=build, peak_bytes=peak)


def most_built(workload: Workload, strategy: str) -> float:
    """Return the most that construction may take on the device, in sizes of the model.

    fully_shard holds a unit's parameters and their padded copy until it frees the first: of the last unit, beside all
    others. The other strategies move one parameter after the other.
    """
    if strategy != "fsdp":
        return 1.3
    with torch.device("meta"):
        sizes = of_model(workload.build_model(), workload)
    return 1 + max(sizes["unit_bytes"], sizes["root_bytes"]) / sizes["parameter_bytes"]


def cublas_on_a_full_gpu(device: torch.device) -> Verdict:
    """An error of a library that finds the GPU full is out of memory, whatever its text."""
    need_cuda(device)
    a = torch.ones(64, 64, device=device)
    taken = []
    size = 2**30
    while size >= 2**20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        torch.mm(a, a)  # creates cuBLAS's handle and its workspace
        torch.cuda.synchronize(device)
    except Exception as error:
        outcome, text = outcome_of(error), " ".join(str(error).split())[:80]
        return judged(outcome == "oom", f"outcome {outcome}: {text}")
    finally:
        taken.clear()
    return judged(True, "the product found room: cuBLAS needed no more memory")
