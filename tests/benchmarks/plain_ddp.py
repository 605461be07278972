"""A training script as one writes it without a harness, for torchrun; prints its seconds a step. See overhead.py."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, WARMUP, STEPS = 64, 40, 400


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4096, 128, generator=generator), torch.randint(0, 10, (4096,), generator=generator)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, world_size, rank, shuffle=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    done, start = 0, 0.0
    while done < WARMUP + STEPS:
        sampler.set_epoch(done)
        for x, y in loader:
            if done == WARMUP:
                dist.barrier()
                start = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == WARMUP + STEPS:
                break
    seconds = torch.tensor((time.perf_counter() - start) / STEPS)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if rank == 0:
        sys.stdout.write(f"{float(seconds)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
