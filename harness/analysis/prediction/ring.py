"""The time of a collective of any number of ranks in a ring, fitted to the measured ones of a placement's tier.

With n ranks, S bytes and h steps (2(n-1) for an all-reduce, n-1 for an all-gather or a reduce-scatter)::

    latency  = start + h max(0, hop - hidden S / (n B))
    transfer = h S / (n B)

The second is the bandwidth term of the ring (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2)). ``hidden``
is 0 if a step's latency adds to its transfer, and 1/2 if each step's part is sent in two segments, of which one is on
its way while the other is handled, as gloo does (gloo/allreduce.cc).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.analysis.waterfall import seconds_of
from harness.plan.rows import Collective

Array = npt.NDArray[np.float64]
HIDDEN = (0.0, 0.5)
BEYOND, FAR_WEIGHT = 4.0, 0.2
"""Sizes below the smallest exchanged one over the first, or above the largest times it, have the second as weight.

They show the latency of a step, which transfers may hide at the sizes that are exchanged.
"""
LEAST_POINTS = 4
"""The fewest measured sizes and placements of a fit."""
STARTS_S, HOPS_S = (1e-6, 1e-4, 2e-3), (1e-6, 1e-4, 2e-3)


@dataclass(frozen=True)
class Timed:
    """The measured time of one size of a collective."""

    ranks: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class RingCost:
    """The parameters of the formula: seconds, seconds, bytes per second, share of a step's transfer."""

    start_s: float
    hop_s: float
    bytes_per_s: float
    hidden: float

    def parts(self, operation: Collective, size_bytes: float, ranks: int) -> tuple[float, float]:
        """Return seconds of latency and of transfer; two zeros for one rank."""
        if ranks < 2:
            return 0.0, 0.0
        steps = (2 if operation == "all_reduce" else 1) * (ranks - 1)
        step_s = size_bytes / (ranks * self.bytes_per_s)
        return self.start_s + steps * max(0.0, self.hop_s - self.hidden * step_s), steps * step_s


@dataclass(frozen=True)
class RingFit:
    """A fit of one collective: its best parameters, others that the measurement admits, and how far it misses.

    ``miss``: the largest relative difference to the measured time of all exchanges of a step, over numbers of ranks.
    """

    cost: RingCost
    others: tuple[RingCost, ...]
    miss: float


def fit_ring(
    operation: Collective, measured: Sequence[Timed], sizes: Sequence[int], generator: np.random.Generator, draws: int
) -> RingFit | None:
    """Return the fit to times, above all those around the exchanged ``sizes`` (bytes); None if they were not measured.

    Least squares of relative differences. With times of one number of ranks alone, which cannot tell a call's start
    from its steps, the start is 0.
    """
    known = [t for t in measured if t.ranks > 1]
    near = near_times(known, sizes)
    if len(near) < LEAST_POINTS or max(t.size_bytes for t in near) * BEYOND < max(sizes):
        return None
    weights = np.array([1.0 if t in near else FAR_WEIGHT for t in known])
    fits = [_fit(operation, known, weights, hidden) for hidden in HIDDEN]
    vector, _, covariance, hidden = min(fits, key=lambda fit: fit[1])
    best = _cost(vector, hidden)
    others = generator.multivariate_normal(vector, covariance, size=draws, method="eigh")
    return RingFit(best, tuple(_cost(other, hidden) for other in others), _miss(operation, best, near, sizes))


def near_times(measured: Sequence[Timed], sizes: Sequence[int]) -> list[Timed]:
    """Return the times around the exchanged ``sizes``; of exchanges below all that was measured, the smallest ones."""
    if not measured:
        return []
    largest = max(*sizes, 2 * min(t.size_bytes for t in measured))
    return [t for t in measured if min(sizes) / BEYOND <= t.size_bytes <= largest * BEYOND]


def _fit(
    operation: Collective, known: Sequence[Timed], weights: Array, hidden: float
) -> tuple[Array, float, Array, float]:
    """Return log parameters, the sum of squared log differences, the covariance of the parameters, and ``hidden``."""
    from scipy.optimize import least_squares  # its import takes half a second

    several = len({t.ranks for t in known}) > 1
    largest = max(known, key=lambda t: t.size_bytes)
    speed = largest.size_bytes / largest.seconds

    def differences(free: Array) -> Array:
        cost = _cost(_full(free, several=several), hidden)
        times = np.array([sum(cost.parts(operation, t.size_bytes, t.ranks)) / t.seconds for t in known])
        weighted: Array = weights * np.log(times)
        return weighted

    best = None
    for start_s in STARTS_S if several else STARTS_S[:1]:
        for hop_s in HOPS_S:
            free = np.log([start_s, hop_s, speed] if several else [hop_s, speed])
            found = least_squares(differences, free, bounds=(np.log(1e-9), np.log(1e13)))
            if best is None or found.cost < best.cost:
                best = found
    assert best is not None
    near = np.square(best.fun[weights == 1.0])
    variance = float(near.sum()) / max(1, len(near) - len(best.x))
    jacobian = best.jac
    # parameters that the times do not determine may be anything: they are kept, not spread
    covariance = variance * np.linalg.pinv(jacobian.T @ jacobian, rcond=1e-4, hermitian=True)
    if not several:
        covariance = np.pad(covariance, ((1, 0), (1, 0)))
    return _full(best.x, several=several), 2 * float(best.cost), covariance, hidden


def _full(free: Array, *, several: bool) -> Array:
    return free if several else np.concatenate([np.log([1e-9]), free])


def _cost(vector: Array, hidden: float) -> RingCost:
    start_s, hop_s, bytes_per_s = np.exp(np.clip(vector, -25, 35)).tolist()
    return RingCost(start_s, hop_s, bytes_per_s, hidden)


def _miss(operation: Collective, cost: RingCost, known: Sequence[Timed], sizes: Sequence[int]) -> float:
    """Return the largest relative difference, over numbers of ranks, of all exchanges of a step together."""
    misses = []
    for ranks in {t.ranks for t in known}:
        expected = seconds_of(sizes, [(t.size_bytes, t.seconds) for t in known if t.ranks == ranks])
        fitted = sum(sum(cost.parts(operation, size, ranks)) for size in sizes)
        misses.append(abs(fitted / float(expected.sum()) - 1))
    return max(misses)


Costs = Mapping[Collective, RingCost]
