"""Bandwidth and latency of the links and collectives of a placement, by size, within a given time."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations, zip_longest
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from harness.measure.environment import capture_topology, describe_device, links_between
from harness.measure.scenarios import TrialContext
from harness.measure.window import Clock, synchronize
from harness.plan.diagnostics import seconds_of_links
from harness.plan.rows import LinkOperation, LinkRow, PairTier, TrialFacts
from harness.plan.run_environment import Topology
from harness.plan.trial import TrialResult
from harness.system.process import no_garbage_collection
from harness.train.ranks import Ranks

Call = Callable[[], object]
FLOAT_BYTES = 4
# the names of these collectives since torch 2.14, where the earlier ones warn, and before
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
SMALLEST_BYTES, LARGEST_BYTES = 2**10, 2**30
MEMORY_PARTS = 8
"""A size needs at most this part of the free memory; on a CPU, of each rank's share of it."""
REPETITIONS = 5
"""Timed repetitions of each size, after one call that is not timed."""
REPETITION_S, MOST_CALLS = 0.001, 20
"""A repetition makes calls for about this time, at most this many, back to back, as nccl-tests does."""
FIRST_CONTACT = 0.25
"""The part of the time in which every pair must have exchanged its first message; pairs beyond are left out."""
MOST_PAIRED, PAIRS_OF_TIER = 16, 8
"""Up to the first number of ranks every pair is measured; beyond it the second number of pairs of each tier: each size
of each pair is a barrier of all ranks, and the pairs of 512 ranks are 130,816."""
T = TypeVar("T")


@dataclass(frozen=True)
class Operation:
    """A transfer between two devices, or a collective of all ranks, at any size.

    ``members``: the ranks that take part. ``prepare``: given a size in bytes, allocates the buffers and returns one
    call. ``granule``: sizes are multiples of this. ``legs``: the transfers of one call, one after the other.
    ``source``, ``target``: the numbers of the two devices in the placement; None for a collective. ``link``: the link
    between two GPUs in the terms of ``nvidia-smi topo -m``; None if not known.
    """

    name: LinkOperation
    backend: str
    members: frozenset[int]
    prepare: Callable[[int], Call]
    tier: PairTier
    granule: int = 1
    legs: int = 1
    source: int | None = None
    target: int | None = None
    link: str | None = None

    def size(self, wanted: int) -> int:
        """Return the largest multiple of the granule up to the wanted size, but at least one granule."""
        return max(self.granule, wanted // self.granule * self.granule)


@dataclass(frozen=True)
class Device:
    """One device of the placement, known on every rank."""

    node_id: str
    uuid: str | None
    topology: Topology | None
    """The links between the GPUs of its node; None without GPUs, or if they cannot be read."""

    @property
    def rail(self) -> int | None:
        """The number of this GPU among those of its node; None if there is one, or if it is not known."""
        gpus = self.topology["gpus"] if self.topology else []
        uuid = f"GPU-{(self.uuid or '').removeprefix('GPU-')}"  # NVML's, or torch's, which has no prefix
        return gpus.index(uuid) if uuid in gpus and len(gpus) > 1 else None


def operations_of(ranks: Ranks) -> list[list[Operation]]:
    """Return the operations by kind: copies between the devices of one process, or collectives and pairs of ranks."""
    topology = capture_topology() if ranks.devices[0].type == "cuda" else None
    own = [Device(ranks.node_id, describe_device(device)["uuid"], topology) for device in ranks.devices]
    devices = [device for devices in ranks.gather(own) for device in devices]
    if ranks.world_size == 1:
        return [copies(ranks.devices, devices)]
    backend = backend_of(ranks.devices[0].type)
    return [*collectives(ranks, backend, devices), pairs(ranks, backend, devices)]


def backend_of(device_type: str) -> str:
    """Return the backend of the process group for a type of device: nccl or gloo."""
    return dict(part.split(":") for part in dist.get_backend_config().split(","))[device_type]


def collectives(ranks: Ranks, backend: str, devices: Sequence[Device]) -> list[list[Operation]]:
    """Return DDP's all-reduce, and fully_shard's all-gather and reduce-scatter, which averages.

    A size is that of the whole tensor, of which each rank has a part before an all-gather or after a reduce-scatter.
    """
    device, world_size = ranks.devices[0], ranks.world_size

    calls: dict[LinkOperation, Callable[[Tensor, Tensor], object]] = {
        "all_reduce": lambda whole, shard: dist.all_reduce(whole),
        "all_gather": lambda whole, shard: getattr(dist, ALL_GATHER)(whole, shard),
        "reduce_scatter": lambda whole, shard: getattr(dist, REDUCE_SCATTER)(shard, whole, op=dist.ReduceOp.AVG),
    }

    def prepare(call: Callable[[Tensor, Tensor], object], size: int) -> Call:
        whole = torch.zeros(size // FLOAT_BYTES, device=device)
        return partial(call, whole, whole.new_zeros(len(whole) // world_size))

    everyone, granule = frozenset(range(world_size)), FLOAT_BYTES * world_size
    return [
        [Operation(name, backend, everyone, partial(prepare, call), _tier(*devices), granule)]
        for name, call in calls.items()
    ]


def pairs(ranks: Ranks, backend: str, devices: Sequence[Device]) -> list[Operation]:
    """Return a message that is sent and returned, for each two ranks; neighbours in the ring of ranks first.

    Of more than MOST_PAIRED ranks, for PAIRS_OF_TIER pairs of each tier, drawn at random, of ranks that no other pair
    of the tier has as far as there are some. gloo sends from the host's memory only.
    """
    device = ranks.devices[0] if backend == "nccl" else torch.device("cpu")
    size = ranks.world_size
    by_distance = sorted(
        combinations(range(size), 2), key=lambda two: (min(two[1] - two[0], size - two[1] + two[0]), two)
    )
    if size > MOST_PAIRED:
        by_tier: dict[PairTier, list[tuple[int, int]]] = {}
        for one, other in by_distance:
            by_tier.setdefault(_pair_tier(devices[one], devices[other]), []).append((one, other))
        drawn = [_drawn(of_tier) for of_tier in by_tier.values()]
        by_distance = [two for of_tiers in zip_longest(*drawn) for two in of_tiers if two]
    return [
        Operation(
            "send_receive",
            backend,
            frozenset((source, target)),
            partial(_there_and_back, ranks.rank, source, target, device),
            _pair_tier(devices[source], devices[target]),
            legs=2,
            source=source,
            target=target,
            link=_link(devices[source], devices[target]),
        )
        for source, target in by_distance
    ]


def _drawn(of_tier: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return PAIRS_OF_TIER of a tier's pairs, the same on every rank: one slow rank is in few of them."""
    order = random.Random(len(of_tier)).sample(of_tier, len(of_tier))
    apart: list[tuple[int, int]] = []
    for two in order:
        if not {*two} & {rank for other in apart for rank in other}:
            apart.append(two)
        if len(apart) == PAIRS_OF_TIER:
            break
    return [*dict.fromkeys([*apart, *order[:PAIRS_OF_TIER]])][:PAIRS_OF_TIER]


def _there_and_back(rank: int, source: int, target: int, device: torch.device, size: int) -> Call:
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    peer = target if rank == source else source
    directions = (dist.isend, dist.irecv) if rank == source else (dist.irecv, dist.isend)

    def call() -> None:
        for direction in directions:
            # as a batch NCCL uses the communicator of all ranks, else it makes one for each pair
            for work in dist.batch_isend_irecv([dist.P2POp(direction, message, peer)]):
                work.wait()

    return call


def copies(own: Sequence[torch.device], devices: Sequence[Device]) -> list[Operation]:
    """Return a copy from each GPU of this process to each other one, as nn.DataParallel makes them."""
    return [
        Operation(
            "copy",
            "cuda",
            frozenset((0,)),
            partial(_copy, own[source], own[target]),
            "inside a node",
            source=source,
            target=target,
            link=_link(devices[source], devices[target]),
        )
        for source, target in permutations(range(len(own)), 2)
    ]


def _copy(source: torch.device, target: torch.device, size: int) -> Call:
    message = torch.zeros(size, dtype=torch.uint8, device=source)
    arrived = torch.zeros(size, dtype=torch.uint8, device=target)
    return lambda: arrived.copy_(message, non_blocking=True)


def _tier(*devices: Device) -> PairTier:
    return "inside a node" if len({device.node_id for device in devices}) == 1 else "between nodes"


def _pair_tier(one: Device, other: Device) -> PairTier:
    tier = _tier(one, other)
    same_rail = tier == "between nodes" and one.rail is not None and one.rail == other.rail
    return "between nodes, same rail" if same_rail else tier


def _link(one: Device, other: Device) -> str | None:
    if one.node_id != other.node_id:
        return None
    links = links_between(one.topology, (one.uuid, other.uuid))
    return links[0] if links else None


class NotMeasuredError(Exception):
    """An operation cannot be prepared, or fails in its first measurement, on some rank; raised on all ranks alike."""


class Meter:
    """Times operations on all ranks at the same time. ``now``: rank 0's clock, the same value on every rank."""

    def __init__(
        self,
        ranks: Ranks,
        advance: Callable[[], None],
        clock: Clock = time.perf_counter,
        wait: Callable[[Sequence[torch.device]], None] = synchronize,
    ) -> None:
        self._ranks, self._advance, self._clock, self._wait = ranks, advance, clock, wait
        self.now: float = ranks.broadcast(clock())
        self._measured: set[Operation] = set()

    def seconds(self, operation: Operation, size: int, calls: int) -> list[float]:
        """Return the seconds of one call in each repetition, on the slowest rank; raises NotMeasuredError.

        An operation that the backend lacks fails on every rank alike, in its first measurement. A rank on which it
        fails later raises that error at once, which ends the group: its peers may wait in the call.
        """
        member = self._ranks.rank in operation.members
        own: list[float] = []
        call, error = _attempt(lambda: operation.prepare(size)) if member else (None, "")
        # a rank that lacks memory would keep the others waiting; the sum is also the barrier before the first call
        starts = not self._ranks.sum([float(bool(error))])[0]
        if starts and call is not None:
            if operation in self._measured and self._ranks.world_size > 1:
                own = self._repetitions(call, calls)
            else:
                timed, error = _attempt(lambda: self._repetitions(call, calls))
                own = timed or []
        seen = self._ranks.gather((own, error, self._clock()))
        self.now = seen[0][2]
        if errors := [f"{text} (rank {rank})" for rank, (_, text, _) in enumerate(seen) if text]:
            raise NotMeasuredError(errors[0])
        self._measured.add(operation)
        return [max(times) for times in zip(*(times for times, _, _ in seen if times), strict=True)]

    def _repetitions(self, call: Call, calls: int) -> list[float]:
        times: list[float] = []
        devices = self._ranks.devices
        with no_garbage_collection():
            call()
            for _ in range(REPETITIONS):
                self._wait(devices)
                start = self._clock()
                for _ in range(calls):
                    call()
                self._wait(devices)
                times.append((self._clock() - start) / calls)
                self._advance()
        return times


def _attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """Return the value and no error, or no value and the error as text."""
    try:
        return work(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def sweep(series: Sequence[Operation], meter: Meter, seconds: float, most_bytes: int) -> Iterator[LinkRow]:
    """Measure operations of one kind, each size of all before the next size, which is twice as large.

    Ends before the size that would exceed the time or ``most_bytes``. If the first messages of all pairs take more than
    FIRST_CONTACT of the time, the other pairs are left out. Raises NotMeasuredError.
    """
    began = meter.now
    typical: dict[Operation, float] = {}
    for operation in series:  # the first messages also set up connections: they are not recorded
        if typical and meter.now > began + FIRST_CONTACT * seconds:
            break
        typical[operation] = statistics.median(meter.seconds(operation, operation.size(SMALLEST_BYTES), 1))
    size = SMALLEST_BYTES
    while size <= max(most_bytes, SMALLEST_BYTES):
        size_began = meter.now
        for operation, before in typical.items():
            calls = max(1, min(MOST_CALLS, int(REPETITION_S / max(before, 1e-9))))
            times = meter.seconds(operation, operation.size(size), calls)
            typical[operation] = statistics.median(times)
            yield _row(operation, operation.size(size), calls, times)
        if meter.now + 2 * (meter.now - size_began) > began + seconds:
            return
        size *= 2


def _row(operation: Operation, size: int, calls: int, times: Sequence[float]) -> LinkRow:
    """Return the row of one size; times are of one transfer, or of one collective."""
    return {
        "operation": operation.name,
        "backend": operation.backend,
        "tier": operation.tier,
        "source": operation.source,
        "target": operation.target,
        "link": operation.link,
        "size_bytes": size,
        "repetitions": len(times),
        "calls": calls,
        "time_s": statistics.median(times) / operation.legs,
        "min_s": min(times) / operation.legs,
        "max_s": max(times) / operation.legs,
    }


def run_links_trial(context: TrialContext) -> TrialResult:
    """Measure the links and the collectives of the placement; an operation that fails is a note in ``links_error``."""
    settings, ranks = context.experiment.throughput, context.ranks
    assert settings
    series, seconds = operations_of(ranks), seconds_of_links(settings, ranks.devices[0].type)
    with context.part("links"):
        rows, notes = measure_links(series, Meter(ranks, context.advance), seconds, ranks)
    notes += left_out(series, ranks.world_size)
    facts: TrialFacts = {"links_error": "; ".join(notes)} if notes else {}
    return TrialResult(context.trial.id, "ok", steps_s=context.parts["links"], facts=facts, links=tuple(rows))


def left_out(series: Sequence[Sequence[Operation]], world_size: int) -> list[str]:
    """Return a note on the pairs of ranks that are not among the operations; none if all are."""
    tiers = Counter(pair.tier for alike in series for pair in alike if pair.name == "send_receive")
    every, sample = world_size * (world_size - 1) // 2, tiers.total()
    if sample == every:
        return []
    each = ", ".join(f"{count} {tier}" for tier, count in tiers.items())
    return [f"send_receive: all pairs but a sample of {sample} of {every} ({each}), beyond {MOST_PAIRED} ranks"]


def measure_links(
    series: Sequence[Sequence[Operation]], meter: Meter, seconds: float, ranks: Ranks
) -> tuple[list[LinkRow], list[str]]:
    """Return the rows of every operation, and a note on each kind that failed or is incomplete.

    The kinds share the time: each may take an equal part of what those before it have left.
    """
    rows: list[LinkRow] = []
    notes: list[str] = []
    end = meter.now + seconds
    most_bytes = min(LARGEST_BYTES, *ranks.gather(_free_bytes(ranks) // MEMORY_PARTS))
    for number, alike in enumerate(series):
        share = max(0.0, end - meter.now) / (len(series) - number)
        first = len(rows)
        try:
            rows.extend(sweep(alike, meter, share, most_bytes))
        except NotMeasuredError as error:
            notes.append(f"{alike[0].name}: {error}")
        else:
            measured = len({(row["source"], row["target"]) for row in rows[first:]})
            if measured < len(alike):
                notes.append(f"{alike[0].name}: {measured} of {len(alike)} pairs measured in the time")
    return rows, notes


def _free_bytes(ranks: Ranks) -> int:
    """Return the free memory of the fullest device, or this rank's share of the host's."""
    if ranks.devices[0].type == "cuda":
        return min(int(torch.cuda.mem_get_info(device)[0]) for device in ranks.devices)
    return int(psutil.virtual_memory().available) // ranks.world_size
