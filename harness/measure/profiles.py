"""The cost of exchanging gradients and parameters: profiled collectives, and their exposed part."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from harness.config.strategy_traits import ALL_REDUCE, EXCHANGE_CPU, ProfiledPart
from harness.measure.stepper import Stepper
from harness.measure.window import Window, synchronize
from harness.plan.rows import TrialFacts
from harness.train.ranks import Ranks
from harness.train.strategies.ddp import broadcasts_buffers

Span = tuple[int, int]
Intervals = list[Span]
"""Disjoint stretches of time in order, each with its start and end in ns."""
MEMORY = ("Memcpy", "Memset")
"""The names of what a GPU does without a kernel begin with these; a copy computes nothing."""
OF_CUDA = re.compile(r"cu(da)?[A-Z]")
"""The names of calls of CUDA, which are numbered apart from torch's operators: a kernel has its operator's number."""
FIRST_STEPS, PROFILED_STEPS = 3, 5
"""Steps before the profile, which allocate buffers and connect the ranks, and those of the profile that count.

The first one of a profile does not: CUPTI may lose kernels there (pytorch/pytorch issue 192021, CUDA 12.6 to 13.0).
"""
MARK = "harness: end of a step"
"""The range that marks the end of a step. Nothing of another step runs on a GPU between the first and the last one."""
LAUNCH = re.compile(r"cu(da)?Launch(Cooperative)?Kernel")
"""The names of CUDA's calls that launch a kernel, which has the number of its call."""
LOST = "the profile lacks {} of {} kernels that a rank launched, so collectives are not known"
NO_KERNELS = "the profile has no kernel of a GPU: CUPTI is not permitted or not there, so collectives are not known"
ROUNDS = 2
LEAST_STEPS = 5
LOGGED_STEPS = 5


class Event(NamedTuple):
    """One event of a profile, as kineto records it. Calls on the host have no ``gpu``, GPUs' own events no ``thread``.

    ``thread``: None too for a call that ends in another thread than it began. ``correlation``: the number of a call.
    ``launched_by``: the number of the innermost call that launched a kernel. ``annotation``: a named stretch of time,
    on the host or on a GPU, in which nothing runs by itself.
    """

    name: str
    span: Span
    gpu: int | None = None
    thread: int | None = None
    correlation: int = 0
    launched_by: int = 0
    annotation: bool = False


class CollectiveTime(NamedTuple):
    """Seconds of a collective: ``total_s`` in which it ran, ``exposed_s`` of these in which nothing was computed."""

    total_s: float
    exposed_s: float


def events_of(profiler: torch.profiler.profile) -> list[Event]:
    """Return a profile's events, without building events()' tree of all calls: 0.5 s for three steps."""
    assert profiler.profiler and profiler.profiler.kineto_results
    results = profiler.profiler.kineto_results
    found = []
    for event in results.events():
        on_gpu = event.device_type() == DeviceType.CUDA
        start, thread = event.start_ns(), event.start_thread_id()
        found.append(
            Event(
                event.name(),
                (start, start + event.duration_ns()),
                event.device_index() if on_gpu else None,
                None if on_gpu or thread != event.end_thread_id() else thread,
                event.correlation_id(),
                event.linked_correlation_id(),
                event.is_user_annotation(),
            )
        )
    return found


def mark_step(devices: Sequence[torch.device]) -> None:
    """Mark the end of a step in a profile, after the work of these devices."""
    synchronize(devices)
    with record_function(MARK):
        pass


class MarkedSteps(NamedTuple):
    """The steps between the first mark of a profile and the last: their time, number and events."""

    span: Span
    steps: int
    events: list[Event]

    @property
    def launched(self) -> set[int]:
        """The numbers of the kernels that the host launched."""
        return {event.correlation for event in self.events if event.gpu is None and LAUNCH.match(event.name)}

    @property
    def lost(self) -> int:
        """The number of launched kernels that the profile lacks: any of them may have covered a collective."""
        seen = {event.correlation for event in self.events if event.gpu is not None and not event.annotation}
        return len(self.launched - seen)


def marked_steps(events: Sequence[Event]) -> MarkedSteps:
    """Return the steps of a profile between its marks; none with less than two of these."""
    marks = sorted(event.span for event in events if event.name == MARK and event.gpu is None)
    if len(marks) < 2:
        return MarkedSteps((0, 0), 0, [])
    start, end = marks[0][1], marks[-1][0]
    inside = [event for event in events if start <= event.span[0] and event.span[1] <= end]
    return MarkedSteps((start, end), len(marks) - 1, inside)


def collective_times(
    events: Sequence[Event], parts: Sequence[ProfiledPart], device: torch.device
) -> dict[str, CollectiveTime]:
    """Return the time of each part's collective by name, if some event of it was seen.

    Exposed time is the union of the collective's intervals minus the union of the intervals of computation, as
    Holistic Trace Analysis defines it. On a GPU both are those of kernels on ``device``. On a CPU the collective's are
    those of the call and of gloo's thread, for the caller waits while that runs, and computation's are those of
    torch's operators. Time in which two collectives run belongs to the first in ``parts``: exposed times add up.
    """
    classify = _on_gpu if device.type == "cuda" else _on_host
    collectives, computation = classify(events, parts, device.index or 0)
    covered = union(event.span for event in computation)
    times: dict[str, CollectiveTime] = {}
    for part in parts:
        running = union(event.span for event in collectives[part.name])
        exposed = minus(running, covered)
        if running:
            times[part.name] = CollectiveTime(_seconds(running), _seconds(exposed))
        covered = union([*covered, *running])
    return times


def union(intervals: Iterable[Span]) -> Intervals:
    """Return the union of intervals."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def minus(kept: Intervals, removed: Intervals) -> Intervals:
    """Return the part of the first union that lies outside the second."""
    left: Intervals = []
    position = 0
    for start, end in kept:
        while position < len(removed) and removed[position][1] <= start:
            position += 1
        at = position
        while at < len(removed) and removed[at][0] < end:
            if removed[at][0] > start:
                left.append((start, removed[at][0]))
            start = max(start, removed[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


Classified = tuple[Mapping[str, Sequence[Event]], Sequence[Event]]
"""The events of each collective, by the column of its part, and those of computation."""


def _on_host(events: Sequence[Event], parts: Sequence[ProfiledPart], index: int) -> Classified:
    """Classify calls: torch's operators compute, except those inside a collective's call, such as its copies.

    A call inside a later part's, in the same thread, is no time of that part.
    """
    host = [event for event in events if event.gpu is None]
    collectives: dict[str, Sequence[Event]] = {}
    earlier: list[Event] = []
    for part in parts:
        calls = _calls(host, part)
        taken = {call.thread: union(e.span for e in earlier if e.thread == call.thread) for call in calls}
        collectives[part.name] = [
            call._replace(span=span) for call in calls for span in minus([call.span], taken[call.thread])
        ]
        earlier += calls
    inside = _Inside(earlier)
    return collectives, [event for event in host if event.name.startswith("aten::") and event not in inside]


def _on_gpu(events: Sequence[Event], parts: Sequence[ProfiledPart], index: int) -> Classified:
    """Classify what one GPU ran: a collective's kernels by name, or by the call on the host that launched them.

    Kernels of an earlier part, and of NCCL if the part waits for no rank, were launched inside its call, but are not
    its own: fsdp's copies and its all-gather have one call.
    """
    host = [event for event in events if event.gpu is None]
    there = [event for event in events if event.gpu == index]
    kernels = [event for event in there if not event.annotation]
    collectives: dict[str, Sequence[Event]] = {}
    taken: set[Event] = set()
    for part in parts:
        inside = _Inside(_calls(host, part))
        operators = (event for event in host if event in inside and not OF_CUDA.match(event.name))
        launching = {event.correlation for event in operators} - {0}  # 0: launched by no call
        own = [k for k in kernels if k not in taken and (part.waits or not k.name.startswith("nccl"))]
        # of the first of the part's names that occurs: a kernel of NCCL and its annotation are one time
        names = (name for name in part.events if name.startswith("nccl"))
        of_nccl = next(filter(None, ([e for e in there if e.name.startswith(name)] for name in names)), None)
        collectives[part.name] = of_nccl or [k for k in own if k.launched_by in launching]
        taken.update(collectives[part.name])
    computation = [k for k in kernels if k not in taken and not k.name.startswith(("nccl", *MEMORY))]
    return collectives, computation


def _calls(host: Sequence[Event], part: ProfiledPart) -> list[Event]:
    """Return the host's calls with the part's names: calls of gloo, waits for it, and ranges of FSDP."""
    return [event for event in host if event.name.partition(" (")[0] in part.events]


class _Inside:
    """The events in some calls: in the same thread, those calls among them."""

    def __init__(self, calls: Sequence[Event]) -> None:
        by_thread: dict[int, Intervals] = {}
        for call in calls:
            if call.thread is not None:
                by_thread.setdefault(call.thread, []).append(call.span)
        self._intervals = {thread: union(spans) for thread, spans in by_thread.items()}

    def __contains__(self, event: Event) -> bool:
        intervals = self._intervals.get(event.thread, []) if event.thread is not None else []
        position = bisect_right(intervals, event.span[0], key=lambda span: span[0]) - 1
        return position >= 0 and event.span[1] <= intervals[position][1]


def _seconds(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals) / 1e9


def busy_s(profiled: MarkedSteps, devices: Sequence[torch.device]) -> float | None:
    """Return the seconds a step in which a GPU runs a kernel, copies or fills: of the least busy of these devices.

    None on a CPU, if one of them ran nothing, and if the profile lacks kernels.
    """
    ran = [
        union(event.span for event in profiled.events if event.gpu == (device.index or 0) and not event.annotation)
        for device in devices
        if device.type == "cuda"
    ]
    return min(map(_seconds, ran)) / profiled.steps if ran and all(ran) and not profiled.lost else None


def measure_collectives(stepper: Stepper) -> TrialFacts:
    """Return seconds a step of each collective that is seen, total and exposed, from a few profiled steps.

    Those of the rank that waits least for its collectives: the others wait for it, which is no cost of exchange. And
    the seconds in which the least busy GPU runs anything: NCCL's kernels wait on the others for its rank.
    """
    device, parts = stepper.ranks.devices[0], stepper.data.cell.traits.profiled_parts
    profiled = profiled_steps(stepper)
    times = collective_times(profiled.events, parts, device)
    busy = busy_s(profiled, stepper.ranks.devices)
    of_ranks = stepper.ranks.gather((times, profiled.lost, len(profiled.launched), busy))
    lost, launched = max((lost, launched) for _, lost, launched, _ in of_ranks)
    explained = bool(parts) and len(of_ranks) * len(stepper.ranks.devices) > 1
    if lost and not explained:
        return {}  # only busy_s is unknown
    if lost:
        return {"explain_error": LOST.format(lost, launched)}
    waiting = [part.name for part in parts if part.waits]

    def exposed_s(times: Mapping[str, CollectiveTime]) -> float:
        return sum(time.exposed_s for name, time in times.items() if name in waiting) or float("inf")

    seen = min((times for times, *_ in of_ranks), key=exposed_s)
    facts: TrialFacts = {
        "exchange_s": {name: time.total_s / profiled.steps for name, time in seen.items()},
        "exposed_s": {name: time.exposed_s / profiled.steps for name, time in seen.items()},
    }
    known = [busy for *_, busy in of_ranks if busy is not None]
    if len(known) == len(of_ranks):
        facts["busy_s"] = min(known)
    unseen = explained and device.type == "cuda" and all(event.gpu is None for event in profiled.events)
    return facts | ({"explain_error": NO_KERNELS} if unseen else {})


def profiled_steps(stepper: Stepper) -> MarkedSteps:
    """Return the events of a profile's steps."""
    return marked_steps(events_of(_profiled(stepper)))


def traces_of(stepper: Stepper, most_bytes: int) -> tuple[bytes, ...]:
    """Return, on rank 0, a trace of PROFILED_STEPS steps of each rank; empty if it is larger than ``most_bytes``.

    Compressed JSON in Chrome's format, which Perfetto and Holistic Trace Analysis read.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        _profiled(stepper).export_chrome_trace(str(path))
        content = path.read_bytes()
    found = stepper.ranks.gather_to_first(content if len(content) <= most_bytes else b"")
    return tuple(found) if stepper.ranks.first else ()


def _profiled(stepper: Stepper) -> torch.profiler.profile:
    """Profile PROFILED_STEPS steps after some that do not count; all ranks begin them together.

    A step's range has the name that torch's own schedule gives it, by which readers of traces find it.
    """
    devices = stepper.ranks.devices
    for _ in range(FIRST_STEPS):
        stepper.step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if devices[0].type == "cuda" else [])]
    profiler = profile(activities=activities)
    with profiler:
        stepper.step()
        stepper.ranks.barrier()
        mark_step(devices)
        for number in range(PROFILED_STEPS):
            with record_function(f"ProfilerStep#{number}"):
                stepper.step()
            mark_step(devices if number == PROFILED_STEPS - 1 else ())
    return profiler


def measure_communication(stepper: Stepper, steps: int, *, detailed: bool) -> tuple[list[Window], TrialFacts]:
    """Measure windows of a quarter of ``steps``, in turn without and with gradient exchange, and read DDP's own timers.

    Without exchange no rank waits for another, so the window shows the rank's own time. Parameters, buffers and
    optimizer state are restored. ``detailed``: as in the timed windows, with which they are compared.
    """
    training = stepper.training
    count = steps_of_a_round(steps)
    before = training.snapshot()
    windows: list[Window] = []
    for _ in range(ROUNDS):
        with training.without_exchange():
            stepper.window("alone", 1, detailed=detailed)  # this step still broadcasts buffers: not kept
            windows.append(stepper.window("alone", count, detailed=detailed))
        training.restore(before)
        stepper.window("together", 1, detailed=detailed)  # nor does this step broadcast them
        windows.append(stepper.window("together", count, detailed=detailed))
    timers = read_ddp_timers(training.model, lambda: stepper.window("together", 1), stepper.ranks)
    if stepper.ranks.devices[0].type == "cpu":
        cpu_s = {EXCHANGE_CPU: cpu_of_exchange(windows, training.model, stepper.ranks)}
        timers["exchange_s"] = {**timers.get("exchange_s", {}), **cpu_s}
    training.restore(before)
    return windows, timers


def cpu_of_exchange(windows: Sequence[Window], model: nn.Module, ranks: Ranks) -> float:
    """Return the CPU seconds of a step with exchange beyond those without, less those of its broadcast of buffers.

    The mean over ranks, of the thread that trains; of all threads, gloo's among them, if no processor is free for the
    others. With several threads a rank not of those: OpenMP's wait for work by spinning. All ranks call it.
    """
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    here = [theirs for node, theirs in ranks.gather((ranks.node_id, processors)) if node == ranks.node_id]
    is_full = torch.get_num_threads() == 1 and len(here) >= len(set.union(*here))
    clock = time.process_time if is_full else time.thread_time
    a_step: dict[str, float] = {}
    for kind in ("alone", "together"):
        of_kind = [window for window in windows if window.kind == kind]
        cpu_s = sum(window.process_cpu_s if is_full else window.thread_cpu_s for window in of_kind)
        a_step[kind] = cpu_s / sum(window.steps for window in of_kind)
    broadcasts_s: list[float] = []
    if broadcasts_buffers(model):
        for _ in range(1 + LOGGED_STEPS):
            ranks.barrier()
            start = clock()
            model._sync_buffers()
            broadcasts_s.append(clock() - start)
    (total,) = ranks.sum(
        [a_step["together"] - a_step["alone"] - (statistics.median(broadcasts_s[1:]) if broadcasts_s else 0.0)]
    )
    return total / ranks.world_size


def steps_of_a_round(steps: int) -> int:
    """Return the steps of one window of an explanation: a quarter of those of a timed window."""
    return max(LEAST_STEPS, -(-steps // 4))


def read_ddp_timers(model: nn.Module, step: Callable[[], object], ranks: Ranks) -> TrialFacts:
    """Return medians over a few steps of DDP's own timers, in seconds; empty if DDP records none, or is not used.

    Communication is the span from the first bucket that is ready to the last that is reduced; the part of it after
    the end of backward's computation is exposed (torch/csrc/distributed/c10d/logger.cpp). Of each step those of the
    rank that waits least: the others wait for it, which is no cost of exchange. All ranks call it.
    """
    if not isinstance(model, DistributedDataParallel):  # a strategy of the user's own
        return {}
    model._set_ddp_runtime_logging_sample_rate(1)
    spans: list[tuple[float, float]] = []
    for _ in range(LOGGED_STEPS):
        step()
        data = model._get_ddp_logging_data()
        span = data.get("backward_comm_time", 0)
        spans.append((max(0, span - data.get("backward_compute_comm_overlap_time", 0)) / 1e9, span / 1e9))
    model._set_ddp_runtime_logging_sample_rate(100)
    least = [min(of_step) for of_step in zip(*ranks.gather(spans), strict=True)]
    if not any(span for _, span in least):
        return {}
    return {
        "exchange_s": {ALL_REDUCE: statistics.median(span for _, span in least)},
        "exposed_s": {ALL_REDUCE: statistics.median(exposed for exposed, _ in least)},
    }
