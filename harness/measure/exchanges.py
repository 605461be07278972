"""The collectives of a step: their order and sizes, and when computation is ready for each and needs it.

What a prediction replays with other ranks and links. Recorded after the timed windows, in a few steps that nobody
times: ddp's buckets by a hook in a new wrapper, fsdp's groups by hooks of their modules while nothing is exchanged.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from statistics import mean, median, median_low
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.config.strategy_traits import BROADCAST, OWN_COLLECTIVES, SPARSE
from harness.measure.stepper import Stepper
from harness.measure.window import elapsed_s, synchronize
from harness.plan.rows import Collective, ExchangeRow, TrialFacts
from harness.train.strategies.base import ExchangePoint
from harness.train.strategies.ddp import broadcasts_buffers
from harness.train.training import BACKWARD, CLEARED, Phase

RECORDED_STEPS, OWN_STEPS = 4, 8
"""Steps of a recording; of the workload's own collectives more, since the ranks may be late in turn."""
Timed = tuple[ExchangePoint, float]
"""A point and its seconds from the start of the forward pass."""


def record_exchanges(stepper: Stepper) -> tuple[ExchangeRow, ...]:
    """Return the exchanges of this rank's step; none if the strategy does not know them.

    The training is of no further use. All ranks call it: ddp's steps exchange gradients.
    """
    training, cell = stepper.training, stepper.data.cell
    sharded = cell.traits.shards_parameters
    recorder = Recorder(stepper.ranks.devices[0])
    with training.without_exchange() if sharded else nullcontext():
        if sharded:
            stepper.step()  # gathers the parameters whose gradients are observed
        if (sharded and cell.compile) or not training.observe_exchange(recorder.point):
            return ()
        if not sharded:
            stepper.step()  # after it ddp has its final buckets
        steps = [recorder.step(stepper) for _ in range(RECORDED_STEPS)]
    overlapped = stepper.ranks.devices[0].type == "cuda"
    if sharded:
        return _median([_of_groups(points, end, overlapped=overlapped) for points, end in steps])
    return _median([_of_buckets(points) for points, _ in steps])


class Recorder:
    """Records the points of steps on the clock of the device: the host's, or that of a GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._passed: list[tuple[ExchangePoint | Phase, Any]] = []
        """Points, each with the host's seconds or with an event of the stream."""

    def point(self, point: ExchangePoint | Phase) -> None:
        """Record that the step has reached a point."""
        on_gpu = self._device.type == "cuda"
        now = torch.cuda.Event(enable_timing=True) if on_gpu else time.perf_counter()
        if isinstance(now, torch.cuda.Event):
            now.record()
        self._passed.append((point, now))

    def step(self, stepper: Stepper) -> tuple[list[Timed], float]:
        """Take a step; return its points, and the seconds to the end of its backward pass."""
        self._passed = []
        stepper.step(lambda phase: self.point(phase) if phase in (CLEARED, BACKWARD) else None)
        synchronize([self._device])
        began, end = (now for point, now in self._passed if isinstance(point, Phase))

        def seconds(now: Any) -> float:
            return float(began.elapsed_time(now) / 1e3 if self._device.type == "cuda" else now - began)

        points = [(point, seconds(now)) for point, now in self._passed if isinstance(point, ExchangePoint)]
        return points, seconds(end)


def _of_buckets(points: Sequence[Timed]) -> list[ExchangeRow]:
    """Return ddp's exchanges: each bucket is needed at the end of the computation, when the last one is ready.

    The end of the backward pass itself comes later, after the exchange.
    """
    last = max((seconds for _, seconds in points), default=0.0)
    kinds: Mapping[str, Collective] = {"bucket": "all_reduce", "rows": "all_gather"}
    return [
        _row(number, kinds[point.kind], point.gather_bytes or point.reduce_bytes, seconds, last)
        for number, (point, seconds) in enumerate(points)
    ]


def _of_groups(points: Sequence[Timed], end_s: float, *, overlapped: bool) -> list[ExchangeRow]:
    """Return fsdp's exchanges, in the order in which fully_shard calls them.

    A group is gathered before each of its passes and reduced after its backward one. ``overlapped``: as on GPUs, where
    a group is gathered while the one before it in its pass computes, and the optimizer alone needs the gradients.
    Otherwise, as on a CPU, the host waits in each call. Left out is the gather of the last group without gradients
    before the trained ones, which fully_shard makes in each backward pass and does not use.
    """
    passes: list[tuple[float, ExchangePoint]] = []
    state: dict[int, str] = {}  # of each group: the kind of its last point
    reduced: dict[int, tuple[float, ExchangePoint]] = {}
    trained = {point.group for point, _ in points if point.kind == "gradients"}
    for point, seconds in points:
        last = state.get(point.group)
        if point.kind != "forward":  # one whose outputs need no gradient has no backward pass before its next forward
            state = {group: kind for group, kind in state.items() if group in trained or kind != "forward"}
        if point.kind == "gradients":
            reduced[point.group] = (seconds, point)  # with accumulation, those of the last backward pass
            state[point.group] = "reduced"
        elif point.kind == "forward" and last == "backward" and point.group in trained:
            continue  # activation checkpointing computes it again, from the parameters of the backward pass
        elif point.kind != last and (point.kind, last) != ("backward", "reduced"):
            passes.append((seconds, point))
            state[point.group] = point.kind
    events: list[tuple[float, int, ExchangeRow]] = []
    before: dict[str, float] = {}
    for seconds, point in passes:
        ready = before.get(point.kind, seconds) if overlapped else seconds
        before[point.kind] = seconds
        if point.gather_bytes:
            events.append((ready, 1, _row(0, "all_gather", point.gather_bytes, ready, seconds)))
    for seconds, point in reduced.values():
        needed = end_s if overlapped else seconds
        events.append((seconds, 0, _row(0, "reduce_scatter", point.reduce_bytes, seconds, needed)))
    ordered = [row for _, _, row in sorted(events, key=lambda event: event[:2])]
    return [{**row, "position": number} for number, row in enumerate(ordered)]


def _row(position: int, operation: Collective, size_bytes: int, ready_s: float, needed_s: float) -> ExchangeRow:
    return {
        "position": position,
        "operation": operation,
        "size_bytes": size_bytes,
        "ready_s": ready_s,
        "needed_s": max(ready_s, needed_s),
    }


def _median(steps: Sequence[Sequence[ExchangeRow]]) -> tuple[ExchangeRow, ...]:
    """Return the exchanges of the last step, with medians over the steps that have the same ones.

    Steps vary in length: the medians are of times relative to a step's last one, times the median of that.
    """
    exchanged = [[(row["operation"], row["size_bytes"]) for row in rows] for rows in steps]
    alike = [rows for rows, own in zip(steps, exchanged, strict=True) if rows and own == exchanged[-1]]
    if not alike:
        return ()
    ends = [max(row["needed_s"] for row in rows) for rows in alike]
    scale = median(ends)

    def middle(position: int, name: Literal["ready_s", "needed_s"]) -> float:
        return scale * median(rows[position][name] / end if end else 0.0 for rows, end in zip(alike, ends, strict=True))

    return tuple(
        {**row, "ready_s": middle(place, "ready_s"), "needed_s": middle(place, "needed_s")}
        for place, row in enumerate(steps[-1])
    )


def other_exchanges(stepper: Stepper) -> tuple[TrialFacts, float]:
    """Return seconds and bytes of ddp's buffers and sparse gradients in a step, and of the user's own collectives.

    Empty if there are none; the reason, if the seconds cannot be known. Second, the seconds of a step in which this
    rank waits in its own collectives for later ranks. The training is of no further use. All ranks call it, and begin
    each measurement together.
    """
    model, ranks = stepper.training.model, stepper.ranks
    seconds, given = dict[str, float](), dict[str, float]()
    found, late_s = TrialFacts(), 0.0

    def together_s(call: Callable[[], object]) -> float:
        ranks.barrier()
        return elapsed_s(call, ranks.devices)

    def own_collectives() -> OwnCollectives:
        """Take a step without exchange; return the collectives that the user's code calls in it."""
        calls = OwnCollectives(ranks.devices)
        ranks.barrier()
        with calls:
            stepper.step()
        return calls

    if broadcasts_buffers(model):
        seconds[BROADCAST] = _usual(lambda: together_s(model._sync_buffers))
        given[BROADCAST] = _bytes_of(model.modules_buffers)
    with stepper.training.without_exchange():
        stepper.step()  # the first one without exchange still broadcasts buffers
        first = own_collectives()
        found_by = ranks.gather((bool(first.bytes), first.between_two))
        given |= first.bytes
        if any(between_two for _, between_two in found_by):
            found["explain_error"] = TO_ONE_RANK
        elif any(calls for calls, _ in found_by):
            steps = [split_wait(ranks.gather(own_collectives().calls)) for _ in range(OWN_STEPS)]
            seconds[OWN_COLLECTIVES] = mean(median_low(exchange for exchange, _ in of_ranks) for of_ranks in steps)
            late_s = mean(of_ranks[ranks.rank][1] for of_ranks in steps)
    if isinstance(model, DistributedDataParallel):
        known = [(name, each.grad) for name, each in model.module.named_parameters() if each.grad is not None]
        sparse = {name: grad for name, grad in known if grad.is_sparse and name not in model.parameters_to_ignore}
        if sparse and len(set(ranks.gather(tuple(sparse)))) == 1:  # else a rank has used other tables than another
            group = model.process_group
            rows = [grad.coalesce() for grad in sparse.values()]
            given[SPARSE] = _bytes_of(part for each in rows for part in (each.indices(), each.values()))
            seconds[SPARSE] = _usual(
                lambda: together_s(lambda: [dist.all_reduce(each.clone(), group=group) for each in sparse.values()])
            )
    synchronize(ranks.devices)
    if seconds:
        found["exchange_s"] = seconds
    if given:
        found["exchange_bytes"] = given
    return found, late_s


TO_ONE_RANK = "the seconds of messages from one rank to another (send, recv) in the user's own code are unknown"


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


Call = tuple[str, float]
"""A collective: the name of its process group, and its seconds on one rank."""


def split_wait(ranks: Sequence[Sequence[Call]]) -> list[tuple[float, float]]:
    """Return the seconds of each rank's collectives in one step: of the exchange, and of waiting for later ranks.

    The last rank that enters a collective waits for none: the exchange takes as long as on the rank that is in it for
    the shortest time. ``ranks``: each rank's calls; those over one group come in the same order on all of its ranks.
    """
    least: dict[tuple[str, int], float] = {}
    numbered: list[dict[tuple[str, int], float]] = []
    for calls in ranks:
        counts = Counter[str]()
        own: dict[tuple[str, int], float] = {}
        for group, seconds in calls:
            key = (group, counts[group])
            counts[group] += 1
            own[key] = seconds
            least[key] = min(seconds, least.get(key, seconds))
        numbered.append(own)
    exchange_s = [sum(least[key] for key in own) for own in numbered]
    return [(exchange, sum(own.values()) - exchange) for own, exchange in zip(numbered, exchange_s, strict=True)]


def _usual(measure: Callable[[], float]) -> float:
    return median([measure() for _ in range(1 + RECORDED_STEPS)][1:])


class CollectiveMode(TorchDispatchMode):
    """Passes each collective of a block, of any thread's backward pass too, to ``collective``."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        run = partial(func, *args, **(kwargs or {}))
        if getattr(func, "namespace", "") not in ("c10d", "_c10d_functional"):
            return run()
        return self.collective(str(func).split(".")[1].strip("_"), (*args, *(kwargs or {}).values()), run)

    @abstractmethod
    def collective(self, name: str, arguments: Sequence[object], run: Callable[[], object]) -> object:
        """Return the result of a collective, which ``run`` calls; ``name``: that of its operator, 'allreduce'."""


BETWEEN_TWO = ("send", "recv")
SENDS_NOTHING = ("wait_tensor", "wrap_tensor_autograd")
"""Operators of functional collectives that await a result, or make it one of autograd."""


def group_name(argument: Any) -> str:
    """Return the name of a process group among an operator's arguments; empty for any other argument.

    Operators of c10d take the group itself, functional ones its name, beside names of reductions.
    """
    if isinstance(argument, str):
        return argument if argument in dist.distributed_c10d._world.pg_names.values() else ""
    with suppress(RuntimeError, TypeError):  # a reduction, and what is no object of C++
        return str(dist.ProcessGroup.unbox(argument).group_name)
    return ""


class OwnCollectives(CollectiveMode):
    """The collectives of a block: the group and seconds of each, with the wait for other ranks; bytes by operation.

    Each is awaited where it is called, so that one that would overlap with computation counts whole. Messages between
    two ranks are not, for the other may send only after it has been sent to: their seconds are not known.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.bytes, self._devices = list[Call](), dict[str, float](), devices
        self.between_two = False

    def collective(self, name: str, arguments: Sequence[object], run: Callable[[], object]) -> object:
        """Count a collective: the bytes that this rank gives are the last argument with tensors, after the outputs."""
        tensors = ([leaf for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)] for each in arguments[::-1])
        given = next(filter(None, tensors), [])
        if name not in SENDS_NOTHING:
            self.bytes[name] = self.bytes.get(name, 0) + _bytes_of(given)
        if name.startswith(BETWEEN_TWO):
            self.between_two = True
            return run()
        synchronize(self._devices)
        start = time.perf_counter()
        result = run()
        for leaf in tree_leaves(result):
            with suppress(RuntimeError, TypeError, AttributeError):  # no object of C++, or another one than its work
                dist.Work.unbox(leaf).wait()
        synchronize(self._devices)
        self.calls.append((next(filter(None, map(group_name, arguments)), ""), time.perf_counter() - start))
        return result
