"""The model of a family's step: computation, exposed exchange, optimizer, data, the rest; and simpler laws.

    step = E[max over ranks of own x jitter] + k x exposed(replay) + optimizer + rest, or the loader's time if longer

``k`` and ``rest`` are fitted to the measured sizes, from 1 and 0: ridge regression, as a normal prior and a normal
likelihood give it (Hoerl and Kennard 1970, Technometrics 12(1)). Ranks that were not measured are drawn from a
lognormal distribution with the measured ranks' spread, whose own uncertainty is that of so few. The interval is one of
prediction: of the links' fit, the ranks, the regression, blocks, and an error of the model that grows with doublings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from harness.analysis.prediction.collective_times import Costs, RingFit
from harness.analysis.prediction.observed import Array, Exchange, Family, Observed, Size
from harness.analysis.stats import LEAST_BLOCKS, deviation, half_width
from harness.plan.comparison import options_of
from harness.plan.rows import Collective, LinkTier

LANES = {"gloo": 2}
"""Collectives in flight at once: gloo's threads of a process group (torch's ProcessGroupGloo). Others have a stream."""


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


DRAWS, STEPS, BLOCK_STEPS = 60, 240, 8
"""Draws of the unknown parts; steps of a draw; steps that are resampled together, as they depend on each other."""
STRETCHES = 7
"""Points between which the exposed time is interpolated over the stretch of the computation."""
FACTOR_SPREAD = 0.2
"""Prior standard deviation of the factor k."""
REST_SPREAD, SHARDED_REST_SPREAD = 0.01, 0.3
"""The rest, over the step: a bare exchange has none; of shards the copies beside the exchange are in it."""
LEAST_ERROR = 0.01
"""Error of a measured step, over the step, if blocks show less."""
DOUBLING_ERROR = {"own": 0.01, "exposed": 0.05}
"""Error of the model for each doubling beyond the largest measured size, over that part."""
FAR_OUT = 3.0
"""Step times of one device are cut off this many interquartile ranges beyond the quartiles: a stall is no jitter."""
NO_PART = 1e-3
"""The part of the variance below which that between blocks has no say in the degrees of freedom."""
MOST_SPREAD = 3.0
"""The largest factor by which few ranks may have shown too small a spread."""


@dataclass(frozen=True)
class Predicted:
    """A step in seconds with its 95 % prediction interval, and its parts, which add up to it.

    ``low`` and ``high`` are None if the largest size was measured in fewer than LEAST_BLOCKS blocks.
    """

    step_s: float
    low: float | None
    high: float | None
    own_s: float
    exposed_s: float
    data_s: float
    other_s: float


@dataclass(frozen=True)
class _Parts:
    """The slowest rank's own time and the exposed exchange of one size: central values and draws, in seconds."""

    own_s: float
    exposed_s: float
    own_draws: Array
    exposed_draws: Array


class Model:
    """Fitted to some sizes of a family."""

    def __init__(
        self,
        family: Family,
        fitted: Sequence[Observed],
        fits: Mapping[LinkTier, Mapping[Collective, RingFit]],
        lanes: int,
        generator: np.random.Generator,
    ) -> None:
        """``fits``: by tier."""
        self._family, self._fitted, self._fits, self._lanes = family, fitted, fits, lanes
        self._generator = generator
        self._jitter = without_stalls(family.jitter)
        self._largest = fitted[-1]

    def predict(self, size: Size, batch: int) -> Predicted:
        """Return the step of a size at a per-device batch.

        Its interval is a t interval of the summed variances, with the degrees of freedom of Welch and Satterthwaite, of
        which only the variance between blocks has few.
        """
        several = [seen for seen in self._fitted if seen.size.devices > 1]
        alike = [seen for seen in several if seen.size.tier == size.tier] or several
        factor, rest, covariance = self._regression(alike)
        ranks = np.array(self._largest.own_s) / fmean(self._largest.own_s)
        parts = self._parts(size, self._own_at(batch), ranks)
        optimizer_s = self._optimizer_s(size)
        net_s = parts.own_s + factor * parts.exposed_s + optimizer_s + rest
        data_s = self._data_s(net_s, batch)
        weights = np.array([parts.exposed_s, 1.0])
        drawn = parts.own_draws + factor * parts.exposed_draws
        # a new run's mean step varies as that of the largest measured size
        block_error = net_s * _error_of_mean(self._largest.step_s) / self._largest.mean_s
        doublings = max(0.0, math.log2(size.devices / self._largest.size.devices))
        of_model = (DOUBLING_ERROR["own"] * parts.own_s, DOUBLING_ERROR["exposed"] * factor * parts.exposed_s)
        variances = [
            float(np.var(drawn, ddof=1)),
            float(weights @ covariance @ weights),
            block_error**2,
            (math.hypot(*of_model) * doublings) ** 2,
        ]
        step_s, blocks = net_s + data_s, len(self._largest.step_s)
        low = high = None
        if blocks >= LEAST_BLOCKS:
            part = block_error**2 / sum(variances)
            freedom = round((blocks - 1) / part**2) if part > NO_PART else None
            relative = half_width(math.sqrt(sum(variances)) / net_s, freedom)
            low, high = (step_s * math.exp(side * relative) for side in (-1, 1))
        return Predicted(step_s, low, high, parts.own_s, factor * parts.exposed_s, data_s, optimizer_s + rest)

    def _regression(self, seen: Sequence[Observed]) -> tuple[float, float, Array]:
        """Return the factor of the exposed time, the rest in seconds, and their covariance."""
        scale = self._largest.mean_s
        rest_spread = scale * (SHARDED_REST_SPREAD if self._family.is_sharded else REST_SPREAD)
        precision = np.diag([FACTOR_SPREAD**-2, rest_spread**-2])
        total = precision @ np.array([1.0, 0.0])
        for each in seen:
            parts = self._parts(each.size, fmean(each.own_by_block), np.array(each.own_s) / fmean(each.own_s))
            x = np.array([parts.exposed_s, 1.0])
            y = each.mean_s - each.wait_s - parts.own_s - self._optimizer_s(each.size)
            error = math.hypot(_error_of_mean(each.step_s), LEAST_ERROR * each.mean_s)
            precision = precision + np.outer(x, x) / error**2
            total = total + x * y / error**2
        covariance = np.linalg.inv(precision)
        factor, rest = (covariance @ total).tolist()
        return max(0.0, factor), rest, covariance

    def _parts(self, size: Size, own_s: float, ranks: Array) -> _Parts:
        """Return the parts of a step with this mean own time; ``ranks``: those measured, over their mean."""
        n = size.devices
        seen = ranks[:n]
        exchanges = self._timeline(own_s)
        own_error = _error_of_mean(self._largest.own_by_block) / fmean(self._largest.own_by_block)
        # each of STEPS steps: the slowest rank's time over the mean own time
        central = slowest_ranks(np.append(seen, np.ones(n - len(seen))), self._jitter, self._generator)
        fits = self._fits[size.tier]
        own, exposed = [], []
        for draw in range(DRAWS):
            unseen = np.exp(self._unseen(ranks, n - len(seen)))
            stretches = slowest_ranks(np.append(seen, unseen), self._jitter, self._generator)
            varied = stretches * (1 + own_error * self._generator.standard_normal())
            own.append(own_s * varied.mean())
            costs = {name: fit.others[draw] for name, fit in fits.items()}
            exposed.append(self._mean_exposed_s(exchanges, costs, n, varied, varied))
        own_draws, exposed_draws = np.array(own), np.array(exposed)
        # the centre of the own time is over the draws: the slowest of more ranks is slower
        centre = float(own_draws.mean())
        at = central * (centre / (own_s * central.mean()))
        best = {name: fit.cost for name, fit in fits.items()}
        return _Parts(centre, self._mean_exposed_s(exchanges, best, n, central, at), own_draws, exposed_draws)

    def _unseen(self, ranks: Array, count: int) -> Array:
        """Return the log factors of ranks that were not measured, as spread as those that were, or more."""
        if not count:
            return np.array([])
        if len(ranks) < 2:
            return np.zeros(count)
        freedom = len(ranks) - 1
        too_small = min(MOST_SPREAD, math.sqrt(freedom / self._generator.chisquare(freedom)))
        return self._generator.normal(0.0, deviation(np.log(ranks).tolist()) * too_small, size=count)

    def _mean_exposed_s(
        self, exchanges: Sequence[Exchange], costs: Costs, n: int, stretches: Array, at: Array
    ) -> float:
        """Return the mean exposed time ``at`` some stretches, interpolated over the range of ``stretches``."""
        points = np.linspace(stretches.min(), stretches.max() + 1e-9, STRETCHES)
        curve = [exposed_s(exchanges, costs, n, float(point), self._lanes) for point in points]
        return float(np.interp(at, points, curve).mean())

    def _timeline(self, own_s: float) -> list[Exchange]:
        """Return the exchanges with the times of a step of this own time, which ends with the optimizer."""
        end = max(exchange.needed_s for exchange in self._family.exchanges)
        within = 0.0 if self._family.is_sharded else self._largest.optimizer_s
        scale = max(own_s - within, 0.1 * own_s) / end
        return [
            Exchange(each.operation, each.size_bytes, scale * each.ready_s, scale * each.needed_s)
            for each in self._family.exchanges
        ]

    def _own_at(self, batch: int) -> float:
        """Return a rank's own time at a batch: that of the largest size; at another batch by a line through all."""
        own = fmean(self._largest.own_by_block)
        if batch == self._largest.batch:
            return own
        points = {**self._family.alone, **{seen.batch: fmean(seen.own_by_block) for seen in self._fitted}}
        batches = np.array([*points], dtype=float)
        if len(points) < 2:
            return own * batch / self._largest.batch
        slope, fixed = np.polyfit(batches, np.array([*points.values()]), 1)
        return max(0.05 * own, float(fixed + slope * batch))

    def _optimizer_s(self, size: Size) -> float:
        """Return the seconds of the optimizer that own times lack: shards get smaller with more ranks."""
        if not self._family.is_sharded:
            return 0.0
        return self._largest.optimizer_s * self._largest.size.devices / size.devices

    def _data_s(self, net_s: float, batch: int) -> float:
        """Return the wait for data: the fetch itself or, with loader workers, what they need beyond the step."""
        share = batch / self._largest.batch
        if not options_of(self._family.row).get("loader.workers"):
            return self._largest.wait_s * share
        if self._largest.wait_s < 0.02 * self._largest.mean_s:
            return 0.0
        return max(0.0, self._largest.mean_s * share - net_s)


def slowest_ranks(ranks: Array, jitter: Array, generator: np.random.Generator) -> Array:
    """Return the slowest rank's time in each of STEPS steps, in the unit of ``ranks``, one mean time a rank.

    ``jitter``: step times over their mean, resampled for each rank in blocks of steps that follow one another (moving
    blocks: Kuensch 1989, The Annals of Statistics 17(3)).
    """
    if len(jitter) < 2:
        return np.full(STEPS, ranks.max())
    starts = generator.integers(0, len(jitter), size=(len(ranks), STEPS // BLOCK_STEPS))
    places = (starts[:, :, None] + np.arange(BLOCK_STEPS)) % len(jitter)
    slowest: Array = (ranks[:, None] * jitter[places.reshape(len(ranks), -1)]).max(axis=0)
    return slowest


def without_stalls(jitter: Array) -> Array:
    """Return step times over their mean, those that are far out cut off (Tukey 1977, Exploratory Data Analysis)."""
    if len(jitter) < 4:
        return np.array([])
    low, high = np.quantile(jitter, [0.25, 0.75])
    reach = FAR_OUT * (high - low)
    cut = np.clip(jitter, low - reach, high + reach)
    scaled: Array = cut / cut.mean()
    return scaled


def _error_of_mean(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 of one value."""
    return deviation(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def by_laws(steps: Mapping[int, float], devices: int, *, strong: bool) -> dict[str, float]:
    """Return the step time by each law; ``steps``: measured seconds by number of devices. Empty without one device."""
    if 1 not in steps:
        return {}
    from scipy.optimize import nnls  # its import takes half a second

    one = steps[1]
    several = [n for n in steps if n > 1]

    def base(n: int) -> float:
        return one / n if strong else one

    found = {"ideal": base(devices)}
    if several:
        lost = np.array([steps[n] - base(n) for n in several])
        (slope,), _ = nnls(np.array([[base(n) * (n - 1)] for n in several]), lost)
        (ring, growing), _ = nnls(np.array([[one * (n - 1) / n, one * (n - 1)] for n in several]), lost)
        found["amdahl"] = base(devices) * (1 + float(slope) * (devices - 1))
        lost_s = one * (float(ring) / devices + float(growing)) * (devices - 1)
        found["ring_line"] = base(devices) + lost_s
    return found
