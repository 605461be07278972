"""The cost of nn.DataParallel's threads: replicas that train at once, against one replica alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from harness.measure.stepper import Stepper
from harness.measure.window import Clock, synchronize
from harness.plan.rows import TrialFacts
from harness.system.process import no_garbage_collection
from harness.train.strategies.cpu_replicas import scatter

ROUNDS = 2
LEAST_STEPS = 5

Loss = Callable[[nn.Module, object], Tensor]


def measure_replicas(stepper: Stepper, steps: int, *, clock: Clock = time.perf_counter) -> TrialFacts:
    """Return seconds a step that the replicas' threads cost, and that the replicas lose to each other.

    Forward and backward of the model on a device's chunk of one batch, with no parameter copied and no gradient added
    up, in rounds of three: one replica without a thread, one in a thread, and every replica in a thread of its own
    with one backward pass through all, as nn.DataParallel does.
    """
    devices = stepper.ranks.devices
    training = stepper.training
    model = training.strategy.unwrap(training.model)  # with its own autocast, which each thread enters by itself
    replicas = [copy.deepcopy(model).to(device) for device in devices]
    chunks = _chunks(stepper.one_batch(), devices)
    one, loss = list(zip(replicas, chunks, strict=True))[:1], training.own_loss
    every = list(zip(replicas, chunks, strict=True))
    ways: dict[str, Callable[[], None]] = {
        "direct": lambda: _backward([loss(*one[0])]),
        "thread": lambda: _backward(_in_threads(loss, one)),
        "at once": lambda: _backward(_in_threads(loss, every)),
    }
    count = max(LEAST_STEPS, -(-steps // 4))
    seconds = dict.fromkeys(ways, 0.0)
    for _ in range(ROUNDS):
        for name, step in ways.items():
            step()  # not kept: it follows another way
            seconds[name] += _timed(step, replicas, count, devices, clock)
    per_step = {name: total * stepper.micro_batches / (ROUNDS * count) for name, total in seconds.items()}
    return {
        "dp_threads_s": per_step["thread"] - per_step["direct"],
        "dp_side_by_side_s": per_step["at once"] - per_step["thread"],
    }


def _timed(
    step: Callable[[], None], replicas: Sequence[nn.Module], count: int, devices: Sequence[torch.device], clock: Clock
) -> float:
    with no_garbage_collection():
        synchronize(devices)
        start = clock()
        for _ in range(count):
            for replica in replicas:
                replica.zero_grad(set_to_none=True)
            step()
        synchronize(devices)
        return clock() - start


def _chunks(batch: Any, devices: Sequence[torch.device]) -> list[object]:
    """Return each device's chunk of a batch, as nn.DataParallel splits it."""
    if devices[0].type == "cuda":
        split: Sequence[object] = torch.nn.parallel.scatter(batch, list(devices))
        return list(split)
    return scatter(batch, len(devices))


def _in_threads(loss: Loss, work: Sequence[tuple[nn.Module, object]]) -> list[Tensor]:
    """Return the loss of each replica on its chunk, each computed in a thread of its own."""
    threads = torch.get_num_threads()

    def forward(pair: tuple[nn.Module, object]) -> Tensor:
        torch.set_num_threads(threads)
        device = next(pair[0].parameters()).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return loss(*pair)

    with ThreadPoolExecutor(max_workers=len(work)) as pool:
        return list(pool.map(forward, work))


def _backward(losses: Sequence[Tensor]) -> None:
    first = losses[0].device
    torch.stack([loss.to(first) for loss in losses]).sum().backward()
