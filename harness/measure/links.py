"""Bandwidth and latency of the links and collectives of a placement, by size, within a given time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import psutil
import torch

from harness.measure.scenarios import TrialContext
from harness.measure.transfers import Call, Operation, operations_of
from harness.measure.window import Clock, synchronize
from harness.plan.diagnostics import seconds_of_links
from harness.plan.link_rows import LinkRow
from harness.plan.rows import TrialFacts
from harness.plan.trial import TrialResult
from harness.system.process import no_garbage_collection
from harness.train.ranks import Ranks

SMALLEST_BYTES, LARGEST_BYTES = 2**10, 2**30
MEMORY_PARTS = 8
"""A size needs at most this part of the free memory; on a CPU, of each rank's share of it."""
REPETITIONS = 5
"""Timed repetitions of each size, after one call that is not timed."""
REPETITION_S, MOST_CALLS = 0.001, 20
"""A repetition makes calls for about this time, at most this many, back to back, as nccl-tests does."""
FIRST_CONTACT = 0.25
"""The part of the time in which every pair must have exchanged its first message; pairs beyond are left out."""

T = TypeVar("T")


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
        times = []
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
    settings = context.experiment.throughput
    assert settings
    ranks = context.ranks
    with context.part("links"):
        rows, notes = measure_links(
            operations_of(ranks),
            Meter(ranks, context.advance),
            seconds_of_links(settings, ranks.devices[0].type),
            ranks,
        )
    facts: TrialFacts = {"links_error": "; ".join(notes)} if notes else {}
    return TrialResult(context.trial.id, "ok", steps_s=context.parts["links"], facts=facts, links=tuple(rows))


def measure_links(
    series: Sequence[Sequence[Operation]], meter: Meter, seconds: float, ranks: Ranks
) -> tuple[list[LinkRow], list[str]]:
    """Return the rows of every operation, and a note on each kind that failed or is incomplete.

    The kinds share the time: each may take an equal part of what those before it have left.
    """
    rows: list[LinkRow] = []
    notes = []
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
