"""The time of a collective of any number of ranks in a ring, fitted to the measured ones of a placement's tier.

With n ranks, S bytes and h steps (2(n-1) for an all-reduce, n-1 for an all-gather or a reduce-scatter)::

    latency  = start + h max(0, hop - hidden S / (n B))
    transfer = h S / (n B)

The second is the bandwidth term of the ring (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2)). ``hidden``
is 0 if a step's latency adds to its transfer, and 1/2 if each step's part is sent in two segments, of which one is on
its way while the other is handled, as gloo does (gloo/allreduce.cc).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from harness.analysis.common import Lines, Rows, grouped, rows_of
from harness.analysis.hardware import collectives
from harness.analysis.prediction.observed import Array
from harness.analysis.waterfall import seconds_of
from harness.config.sections import AssumedLink
from harness.errors import PredictionError
from harness.plan.rows import Collective, LinkTier
from harness.record.folder import RunFolder
from harness.record.frames import records
from harness.record.schema import COLLECTIVES, DESCRIPTION, EXCHANGES

HIDDEN = (0.0, 0.5)
BEYOND, FAR_WEIGHT = 4.0, 0.2
"""Sizes below the smallest exchanged one over the first, or above the largest times it, have the second as weight.

They show the latency of a step, which transfers may hide at the sizes that are exchanged.
"""
LEAST_POINTS = 4
"""The fewest measured sizes and placements of a fit."""
STARTS_S, HOPS_S = (1e-6, 1e-4, 2e-3), (1e-6, 1e-4, 2e-3)


Number = TypeVar("Number", float, Array)


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

    def parts(self, operation: Collective, size_bytes: Number, ranks: Number) -> tuple[Number, Number]:
        """Return seconds of latency and of transfer, of one collective or of arrays; zeros for one rank."""
        steps = (2 if operation == "all_reduce" else 1) * (ranks - 1)
        step_s = size_bytes / (ranks * self.bytes_per_s)
        latency_s = self.start_s * (ranks > 1) + steps * np.maximum(0.0, self.hop_s - self.hidden * step_s)
        return latency_s, steps * step_s


Costs = Mapping[Collective, RingCost]


@dataclass(frozen=True)
class RingFit:
    """A fit of one collective: its best parameters, others that the measurement admits, and how far it misses.

    ``miss``: the largest relative difference to the measured time of all exchanges of a step, over numbers of ranks.
    ``assumed``: the name of the link, if it was not measured.
    """

    cost: RingCost
    others: tuple[RingCost, ...]
    miss: float
    assumed: str = ""


LINK_SHARES = (0.5, 0.8, 0.95)
"""The least, the expected and the largest share of a link's stated bandwidth that collectives reach; an assumption."""
LATENCY_FACTOR = 2.0
"""By how much the latency of an assumed link may be smaller or larger; an assumption."""


def assumed_ring(link: AssumedLink, per_node: int, most_bytes_per_s: float, draws: int) -> RingFit:
    """Return the cost of collectives over a link that was not measured, with others that its figures admit.

    ``per_node``: devices of a node, each of which uses one port. ``most_bytes_per_s``: those inside a node, which a
    ring that leaves it does not exceed. A draw is the same link for every collective.
    """
    least, share, most = LINK_SHARES
    generator = np.random.default_rng(SEED)
    hop_s, speed = link.latency_us / 1e6, link.gb_per_s * 1e9 * min(1.0, per_node / link.ports)
    shares = generator.uniform(least, most, draws)
    hops = hop_s * LATENCY_FACTOR ** generator.uniform(-1, 1, draws)
    others = [(float(hop), float(part)) for hop, part in zip(hops, shares, strict=True)]
    best, *costs = (
        RingCost(0.0, hop, min(part * speed, most_bytes_per_s), 0.0) for hop, part in [(hop_s, share), *others]
    )
    return RingFit(best, tuple(costs), 0.0, link.name)


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
    sizes, ranks, seconds = np.array([(t.size_bytes, t.ranks, t.seconds) for t in known], dtype=float).T

    def differences(free: Array) -> Array:
        latency, transfer = _cost(_full(free, several=several), hidden).parts(operation, sizes, ranks)
        weighted: Array = weights * np.log((latency + transfer) / seconds)
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


SEED = 0
Fits = Mapping[Collective, RingFit | str]
"""The fit of each collective, or why there is none."""
SAME = ["backend", "operation", "tier", "devices", "nodes", "size_bytes"]


@dataclass(frozen=True)
class Links:
    """The measured collectives of the run itself, and further ones of placements and sizes that it did not measure.

    ``assumed``: the link of each tier, if any, for collectives that neither measured.
    """

    own: pd.DataFrame
    further: pd.DataFrame | None = None
    assumed: Mapping[LinkTier, AssumedLink | None] = field(default_factory=dict)
    _known: dict[object, Fits] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Fits by what they were asked for: the sizes of a family share most of theirs."""

    @cached_property
    def _measured(self) -> Mapping[tuple[str, Collective, LinkTier], Rows]:
        """The rows by backend, collective and tier."""
        frame = self.own
        if self.further is not None:
            own, further = (pd.MultiIndex.from_frame(of[SAME]) for of in (self.own, self.further))
            frame = pd.concat([self.own, self.further[~further.isin(own)]])
        return grouped(rows_of(frame), lambda row: (row.backend, row.operation, row.tier))

    def fits(
        self,
        backend: str,
        tier: LinkTier,
        needed: Mapping[Collective, Sequence[int]],
        most_devices: int,
        draws: int,
        per_node: int = 1,
    ) -> Fits:
        """Return the fit of each collective, or why there is none; ``needed``: the sizes in bytes that are exchanged.

        ``most_devices``: of larger placements of the run nothing is known; further ones were measured apart from it.
        ``per_node``: devices of a node, for an assumed link.
        """
        exchanged = tuple((operation, *sizes) for operation, sizes in needed.items())
        key = (backend, tier, per_node, exchanged, most_devices, draws)
        if key in self._known:
            return self._known[key]
        generator = np.random.default_rng(SEED)
        placements = {(row.devices, row.nodes) for row in rows_of(self.own)}
        fits: dict[Collective, RingFit | str] = {}
        for operation, sizes in needed.items():
            measured = self._measured.get((backend, operation, tier), ())
            rows = [r for r in measured if r.devices <= most_devices or (r.devices, r.nodes) not in placements]
            known = [Timed(row.devices, row.size_bytes, row.time_s) for row in rows]
            where = f"{tier} ({backend}" + f", up to {most_devices} devices" * (len(known) < len(measured)) + ")"
            fit = fit_ring(operation, known, sizes, generator, draws)
            if fit is None and not known and (link := self.assumed.get(tier)):
                ports_used = per_node if tier == "between nodes" else link.ports
                most = math.inf  # bytes per second
                if tier == "between nodes":  # a ring that leaves a node is no faster than one inside it
                    inside = self.fits(backend, "inside a node", {operation: sizes}, most_devices, 1)[operation]
                    most = math.inf if isinstance(inside, str) else inside.cost.bytes_per_s
                fit = assumed_ring(link, ports_used, most, draws)
            fits[operation] = fit or reason_of_links(operation, tier, where, known, sizes)
        self._known[key] = fits
        return fits


FORMATS = (".csv", ".parquet")


def read_links(path: Path, own: pd.DataFrame) -> pd.DataFrame:
    """Return the collectives in a run folder or a table's file.

    Raises PredictionError if there are none, or if they are not of devices and a backend as the run's ``own``.
    """
    found = collectives(RunFolder.open(path).lines()) if path.is_dir() else _read_table(path)
    if found.empty:
        raise PredictionError(f"--links: {path} has no collectives; measure them: harness doctor FILE --links")
    for name, what in (("device_model", "devices"), ("backend", "backend")):
        here, there = ({*frame[name].dropna()} for frame in (own, found))
        if here and there and not here & there:
            raise PredictionError(
                f"--links: the {what} of {path} are {', '.join(sorted(there))}, those of the run "
                f"{', '.join(sorted(here))}; give links of the same kind of machine"
            )
    return found


def _read_table(path: Path) -> pd.DataFrame:
    if path.suffix not in FORMATS or not path.is_file():
        raise PredictionError(
            f"--links: got {path}; allowed: a run folder, or its tables/collectives.csv or collectives.parquet"
        )
    try:
        frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
        needed = ("operation", "tier", "devices", "nodes", "size_bytes", "time_s", "device_model", "backend")
        if missing := [name for name in needed if name not in frame.columns]:
            raise PredictionError(f"--links: {path} lacks the columns {', '.join(missing)}; give a table collectives")
        return COLLECTIVES.typed(frame)
    except (OSError, ValueError, TypeError) as error:
        raise PredictionError(
            f"--links: {path} cannot be read as a table: {' '.join(str(error).split())[:200]}"
        ) from None


def recorded_exchanges(lines: Lines, trials: pd.DataFrame) -> pd.DataFrame:
    """Return one row a collective of each cell: those of the latest trial that recorded them."""
    latest = {line["cell_id"]: line for line in lines if line.get("exchanges")}
    if not latest:
        return EXCHANGES.frame([])
    described = trials[["cell_id", *DESCRIPTION]].drop_duplicates("cell_id")
    cells = {row["cell_id"]: row for row in records(described)}
    return EXCHANGES.frame(
        {**cells[cell_id], "trial_id": line["trial_id"], **exchange}
        for cell_id, line in latest.items()
        for exchange in line["exchanges"] or ()
    )


def reason_of_links(
    operation: Collective, tier: LinkTier, where: str, known: Sequence[Timed], sizes: Sequence[int]
) -> str:
    """Return why the ``known`` times of a collective have no fit at the exchanged ``sizes`` (bytes)."""
    further = "give --links (the run folder of harness doctor FILE --links)"
    if not known:
        nodes = ", or assume a link, as --between-nodes '8x infiniband-ndr'"
        nodes = f"{nodes}; if one node has that many devices, say so with --nodes" * (tier == "between nodes")
        return (
            f"not every collective of its step was measured {where}; measure a placement {tier}, with "
            f"throughput.links_seconds above 0, or {further}{nodes}"
        )
    near, largest = near_times(known, sizes), max(t.size_bytes for t in known)
    exchanged = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
    found = f"{len(near)} of the {LEAST_POINTS} times that a fit needs within a factor of {BEYOND:g} of the exchanged "
    found += f"{exchanged} bytes were measured"
    if len(near) >= LEAST_POINTS:
        found = f"measured up to {largest:,} bytes, of {exchanged} that are exchanged"
    return f"{operation.replace('_', '-')} {where}: {found}; raise throughput.links_seconds, or {further}"
