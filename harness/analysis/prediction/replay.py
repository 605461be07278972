"""The replay of a step's exchanges beside its computation: how much longer the step gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.prediction.ring import Costs
from harness.plan.exchange_rows import Collective

LANES = {"gloo": 2}
"""Collectives in flight at once: gloo's threads of a process group (torch's ProcessGroupGloo). Others have a stream."""


@dataclass(frozen=True)
class Exchange:
    """A collective of the step; ``ready_s``, ``needed_s``: as in ExchangeRow."""

    operation: Collective
    size_bytes: int
    ready_s: float
    needed_s: float


def exposed_s(exchanges: Sequence[Exchange], costs: Costs, ranks: int, stretch: float, lanes: int) -> float:
    """Return the seconds in which computation waits for exchanges in a step.

    Computation takes ``stretch`` times as long as recorded. Exchanges begin in the order in which they are ready, on
    the first free lane; the link carries one transfer at a time, so that lanes overlap latencies alone.
    """
    free = [0.0] * lanes
    link_free, waited = 0.0, 0.0
    pending: list[tuple[float, bool, float]] = []  # when it is needed, whether at once or later, when it ends
    for exchange in exchanges:
        ready = stretch * exchange.ready_s
        pending.sort()
        while pending and (pending[0][0] < ready or pending[0][:2] == (ready, False)):
            needed, _, end = pending.pop(0)
            waited = max(waited, end - needed)
        latency, transfer = costs[exchange.operation].parts(exchange.operation, exchange.size_bytes, ranks)
        lane = min(range(lanes), key=free.__getitem__)
        begins = max(ready + waited, free[lane]) + latency
        link_free = free[lane] = max(begins, link_free) + transfer
        later = exchange.needed_s > exchange.ready_s  # else the call itself waits, before the next one begins
        pending.append((stretch * exchange.needed_s, later, free[lane]))
    return max([waited, *(end - needed for needed, _, end in pending)])
