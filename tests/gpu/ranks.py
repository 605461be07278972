"""Claims about several ranks: one GPU shared over gloo, NCCL's monitor beside a file store, compiled shards."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from harness.plan.comparison import MAX_DIFFERENCE
from harness.train.ranks import Ranks
from tests.gpu.precision import difference, update_on
from tests.gpu.setting import cell_of, group_of_one, need_cuda, one_rank, stepper_of
from tests.gpu.verdict import Verdict, judged
from tests.gpu.world import run_ranks

MLP = {"model": "small", "global_batch_size": 16}


def shared_gpu(device: torch.device, strategy: str) -> Verdict:
    """Two ranks that share a GPU over gloo, as under oversubscribe, train as one device does."""
    updates = run_ranks(update_of, device, 2, strategy, share=True, within_s=80.0)
    off = difference(updates[0], update_of(one_rank(device), "single"))
    return judged(off <= MAX_DIFFERENCE, f"the update differs by {100 * off:.2g} %; bound {100 * MAX_DIFFERENCE:.0f} %")


def update_of(ranks: Ranks, strategy: str) -> list[float]:
    """Return the update of one rank, as the equivalence check takes it."""
    grid = {**MLP, "strategy": strategy}
    return update_on(ranks, cell_of(ranks.devices[0], grid, devices=ranks.world_size, workload="mlp"))


HEARTBEAT_S, IDLE_S = 5, 12.0


def heartbeat(device: torch.device) -> Verdict:
    """NCCL's monitor thread leaves ranks alone that meet in a file and do nothing for longer than its timeout."""
    need_cuda(device)
    os.environ |= {"TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT_S)}
    size = min(2, torch.cuda.device_count())
    sums = run_ranks(sum_after_idling, device, size, within_s=60.0)
    text = f"{size} rank{'s' * (size > 1)} idle for {IDLE_S:.0f} s, the monitor's timeout {HEARTBEAT_S} s"
    return judged(sums == [[size, size]] * size, text)


def sum_after_idling(ranks: Ranks) -> list[float]:
    """Return the sums of ones over the ranks, before and after a time without any collective."""
    found = []
    for idle_s in (0.0, IDLE_S):
        time.sleep(idle_s)
        ones = torch.ones(1, device=ranks.devices[0])
        dist.all_reduce(ones)
        found.append(float(ones))
    return found


def compiled_shards(device: torch.device) -> Verdict:
    """A whole model that is compiled over fully_shard takes the steps that it takes without compiling."""
    losses = {}
    with group_of_one(device):
        for compiles in (False, True):
            cell = cell_of(device, {**MLP, "strategy": "fsdp", "compile": compiles}, workload="mlp")
            stepper = stepper_of(cell, device)
            window = stepper.window("timed", 5, detailed=False)
            losses[compiles] = torch.tensor(window.values["loss"], dtype=torch.float64)
    off = float(((losses[True] - losses[False]) / losses[False]).abs().max())
    return judged(off <= MAX_DIFFERENCE, f"losses of 5 steps differ by {off:.1e}; bound {MAX_DIFFERENCE}")
