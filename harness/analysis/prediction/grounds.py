"""Why a size is not predicted, and what to measure so that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.prediction.observed import Family, Size
from harness.analysis.prediction.ring import BEYOND, LEAST_POINTS, RingFit, Timed, near_times
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.exchange_rows import Collective
from harness.plan.link_rows import LinkTier

FARTHEST = 8
"""Sizes beyond the largest measured one times this are predicted only with ``--far``."""
MOST_MISS = 0.2
"""The largest relative difference of a fit to a measured collective, and of a prediction to a held-out size."""

NO_OWN = "no step without exchange was measured; set throughput.explain: true"


def refusal_of_family(family: Family) -> str | None:
    """Return why none of its sizes is predicted; None if they are."""
    row = family.row
    strategy = str(row["strategy"])
    traits = BUILTIN_TRAITS.get(strategy)
    if traits is None:
        predicted = (name for name, known in BUILTIN_TRAITS.items() if not known.one_process)
        return f"{strategy} is not predicted; strategies that are: {', '.join(predicted)}"
    if traits.one_process:
        return (
            f"{strategy} is not predicted: one process drives all devices, and its threads are in no model of exchanges"
        )
    if row["oversubscribed"]:
        return "its ranks share devices, so that no rank's own time is known; measure ranks with a device each"
    if not family.exchanges:
        return (
            "the run recorded no exchanges; measure with this version, throughput.explain: true, and without a hybrid "
            "mesh, static_graph, or torch.compile of fsdp"
        )
    if not any(seen.own_s for size, seen in family.sizes.items() if size.devices > 1):
        return NO_OWN
    return None


def refusal_of_sizes(fitted: Sequence[Size]) -> str | None:
    """Return why so few sizes predict none; None if they are enough."""
    if len({size.devices for size in fitted}) < 2 or max(size.devices for size in fitted) < 2:
        measured = ", ".join(map(str, fitted)) or "none"
        return f"needs two numbers of devices, measured: {measured}; measure another"
    return None


def refusal_of_parts(fitted: Sequence[Size], unknown: Mapping[Size, str]) -> str | None:
    """Return why the smaller sizes whose parts are all known predict none; None if they do.

    ``unknown``: the other smaller sizes, with the reason.
    """
    if len({size.devices for size in fitted}) > 1:
        return None
    known = ", ".join(map(str, fitted)) or "none"
    lacking = "; ".join(f"of {size.words}, {reason}" for size, reason in unknown.items())
    return f"needs two numbers of devices whose parts are known, which are: {known}; {lacking}"


def refusal_of_distance(size: Size, fitted: Sequence[Size], *, far: bool) -> str | None:
    """Return why a size is too far from the measured ones; None if it is not, or ``far`` allows it."""
    largest = max(each.devices for each in fitted)
    if size.devices <= FARTHEST * largest or far:
        return None
    return (
        f"more than {FARTHEST} times the largest measured size ({largest}); measure at least "
        f"{-(-size.devices // FARTHEST)} devices, or allow it with --far"
    )


def refusal_of_links(tier: LinkTier, fits: Mapping[Collective, RingFit | str]) -> str | None:
    """Return why the collectives of a tier give no times; None if they do."""
    for operation, fit in fits.items():
        if isinstance(fit, str):
            return fit
        if fit.miss > MOST_MISS:
            return (
                f"the time of {operation.replace('_', '-')} {tier} is not that of a ring: the fit misses the measured "
                f"one by {fit.miss:.0%}; measure placements nearer to the asked one"
            )
    return None


def reason_of_links(
    operation: Collective, tier: LinkTier, where: str, known: Sequence[Timed], sizes: Sequence[int]
) -> str:
    """Return why the ``known`` times of a collective have no fit at the exchanged ``sizes`` (bytes)."""
    further = "give --links (the run folder of harness doctor FILE --links)"
    if not known:
        nodes = ", or, if one node has that many devices, say so with --nodes" * (tier == "between nodes")
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


def refusal_by_grade(error: float | None, size: Size) -> str | None:
    """Return why a family whose prediction of a held-out size was this wrong is not predicted further."""
    if error is None or abs(error) <= MOST_MISS:
        return None
    return f"predicted from smaller sizes, {size.words} were {abs(error):.0%} off; measure larger sizes"
