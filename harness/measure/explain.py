"""The explanation of a trial's time, measured after its timed windows; the threads of nn.DataParallel among it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from harness.measure.exchanges import other_exchanges, record_exchanges
from harness.measure.flops import count_flops, first_samples, measured_peak
from harness.measure.profiles import ROUNDS, measure_communication, steps_of_a_round
from harness.measure.stepper import Stepper
from harness.measure.throughput import ThroughputMeasurement
from harness.measure.window import Clock, Window, elapsed_s
from harness.plan.rows import ExchangeRow, TrialFacts
from harness.system.process import no_garbage_collection
from harness.train.ranks import Cache
from harness.train.strategies.dp import scatter

Explanation = tuple[list[Window], TrialFacts, tuple[ExchangeRow, ...]]
"""Further windows of one rank, columns that the trial's row gains, and the exchanges of a step.

FLOPs, peaks and exchanges are rank 0's.
"""
Loss = Callable[[nn.Module, object], Tensor]
STATIC_GRAPH = "its communication cannot be taken away: with static_graph DDP has no step without exchange"
TOO_LARGE = "no steps without exchange: a device has no memory for the whole model beside its shards"
NOT_NAMED = (
    "the traits of this own strategy name no measurement of its communication: explained_by='removal' if "
    "gradient_sync() or alone() can turn it off, or 'profile'"
)
BYTES_OF_PARAMETER = 4
FLOPS_SAMPLES = 2
PROBE_S = 0.1


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
    batch: Any = stepper.one_batch()
    on_gpu = devices[0].type == "cuda"
    chunks: Sequence[object]  # of each device, as nn.DataParallel splits the batch
    chunks = torch.nn.parallel.scatter(batch, list(devices)) if on_gpu else scatter(batch, len(devices))
    every, loss = list(zip(replicas, chunks, strict=True)), training.own_loss
    one = every[:1]
    ways: dict[str, Callable[[], None]] = {
        "direct": lambda: _backward([loss(*one[0])]),
        "thread": lambda: _backward(_in_threads(loss, one)),
        "at once": lambda: _backward(_in_threads(loss, every)),
    }
    count = steps_of_a_round(steps)

    def repeated(step: Callable[[], None]) -> None:
        for _ in range(count):
            for replica in replicas:
                replica.zero_grad(set_to_none=True)
            step()

    seconds = dict.fromkeys(ways, 0.0)
    for _ in range(ROUNDS):
        for name, step in ways.items():
            step()  # not kept: it follows another way
            with no_garbage_collection():
                seconds[name] += elapsed_s(partial(repeated, step), devices, clock)
    per_step = {name: total * stepper.micro_batches / (ROUNDS * count) for name, total in seconds.items()}
    return {
        "exchange_s": {
            "threads": per_step["thread"] - per_step["direct"],
            "side by side": per_step["at once"] - per_step["thread"],
        }
    }


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


def explain(stepper: Stepper, speed: ThroughputMeasurement, cache: Cache, *, exchanges: bool = False) -> Explanation:
    """Measure what the timed windows do not show: steps without exchange, replicas, FLOPs and the device's peak.

    ``exchanges``: record the collectives of a step too, which are the same in every block.

    Nothing is profiled here: timed trials follow in this process.
    """
    cell = stepper.data.cell
    windows: list[Window] = []
    facts: TrialFacts = {}
    detailed = all(window.kind != "phases" for window in speed.windows)
    if cell.traits.wrapper_cost or cell.traits.explained_by == "removal":
        windows, facts = _without_exchange(stepper, speed.window_steps, detailed=detailed)
    elif cell.traits.replicates and cell.devices > 1:
        facts = measure_replicas(stepper, speed.window_steps)
    elif cell.own_traits and not cell.traits.explained_by and cell.devices > 1:
        facts = {"explain_error": NOT_NAMED}
    facts = {**facts, **_arithmetic(stepper, cache)}
    if windows and stepper.ranks.world_size > 1:
        others, late_s = other_exchanges(stepper)
        windows = [
            replace(each, late_s=min(late_s * each.steps, each.duration_s)) if each.kind == "alone" else each
            for each in windows
        ]
        exchange_s = {**facts.get("exchange_s", {}), **others.get("exchange_s", {})}
        facts = {**facts, **others, **({"exchange_s": exchange_s} if exchange_s else {})}
    # without those windows nothing is predicted
    recorded = record_exchanges(stepper) if exchanges and windows else ()
    return windows, facts, recorded


def _without_exchange(stepper: Stepper, steps: int, *, detailed: bool) -> tuple[list[Window], TrialFacts]:
    """Return windows of each rank's own steps, and facts; the reason if there can be no such step."""
    cell = stepper.data.cell
    if cell.strategy_options.get("static_graph"):
        return [], {"explain_error": STATIC_GRAPH} if cell.devices > 1 else {}
    if cell.traits.explained_by == "removal" and stepper.ranks.world_size > 1:
        return measure_communication(stepper, steps, detailed=detailed)
    if cell.traits.shards_parameters and not _whole_model_fits(stepper):
        return [], {"explain_error": TOO_LARGE}
    with stepper.training.without_exchange():  # after which the training is of no further use
        stepper.window("alone", 1, detailed=detailed)  # fsdp gathers its parameters once more: not kept
        return [stepper.window("alone", ROUNDS * steps_of_a_round(steps), detailed=detailed)], {}


def _whole_model_fits(stepper: Stepper) -> bool:
    """Return whether every rank has memory for the whole model and its gradients beside its training's peak."""
    needed = 2 * BYTES_OF_PARAMETER * stepper.training.parameters
    device, ranks = stepper.ranks.devices[0], stepper.ranks
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    else:
        free = psutil.virtual_memory().available // ranks.world_size
    return all(ranks.gather(needed < free))


def _arithmetic(stepper: Stepper, cache: Cache) -> TrialFacts:
    """Return the model's FLOPs and the device's peak, each measured once a process for a model and a precision.

    All ranks count, since loss() may have collectives; the peak is that of a device while the others are idle.
    """
    cell, device = stepper.data.cell, stepper.ranks.devices[0]
    options, size = repr(sorted(cell.workload_options.items())), stepper.ranks.world_size
    model = ("flops", cell.workload, cell.data, cell.model, options, size)  # of other sizes not all ranks have it
    if model not in cache:
        batch = first_samples(stepper.one_batch(), FLOPS_SAMPLES)
        cache[model] = count_flops(stepper.data.workload, batch, device, sharded=cell.traits.shards_parameters)
    peak = ("peak", cell.precision)
    if peak not in cache and stepper.ranks.first:
        cache[peak] = None
        with suppress(RuntimeError, MemoryError):  # no memory for the probe: torch.OutOfMemoryError is a RuntimeError
            cache[peak] = measured_peak(device, cell.precision, seconds=PROBE_S)
    return {
        "flops_per_unit": cache[model].per_unit,
        "flops_reason": cache[model].reason,
        "measured_peak_flops_per_s": cache.get(peak),
    }
