"""Why a size is not predicted, and what to measure so that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.prediction.observed import Family, Size
from harness.analysis.prediction.ring import RingFit
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.exchange_rows import Collective

FARTHEST = 8
"""Sizes beyond the largest measured one times this are predicted only with ``--far``."""
MOST_MISS = 0.2
"""The largest relative difference of a fit to a measured collective, and of a prediction to a held-out size."""


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
        return "no step without exchange was measured; set throughput.explain: true"
    return None


def refusal_of_sizes(fitted: Sequence[Size]) -> str | None:
    """Return why so few sizes predict none; None if they are enough."""
    if len({size.devices for size in fitted}) < 2 or max(size.devices for size in fitted) < 2:
        measured = ", ".join(map(str, fitted)) or "none"
        return f"needs two numbers of devices, measured: {measured}; measure another"
    return None


def refusal_of_parts(fitted: Sequence[Size]) -> str | None:
    """Return why these sizes, those of the smaller ones whose parts are all known, predict none; None if they do."""
    if len({size.devices for size in fitted}) > 1:
        return None
    known = ", ".join(map(str, fitted)) or "none"
    return (
        "needs two numbers of devices with steps without exchange and collectives that a ring fits, of those measured: "
        f"{known}; set throughput.explain: true, and measure placements of one tier"
    )


def refusal_of_distance(size: Size, fitted: Sequence[Size], *, far: bool) -> str | None:
    """Return why a size is too far from the measured ones; None if it is not, or ``far`` allows it."""
    largest = max(each.devices for each in fitted)
    if size.devices <= FARTHEST * largest or far:
        return None
    return (
        f"more than {FARTHEST} times the largest measured size ({largest}); measure at least "
        f"{-(-size.devices // FARTHEST)} devices, or allow it with --far"
    )


def refusal_of_links(size: Size, needed: Sequence[Collective], fits: Mapping[Collective, RingFit]) -> str | None:
    """Return why the collectives of its tier give no times; None if they do."""
    for operation in needed:
        name = operation.replace("_", "-")
        if operation not in fits:
            fewer = ", or, if one node has that many devices, say so with --nodes" if size.nodes > 1 else ""
            return (
                f"{name} {size.tier} was not measured at the sizes that are exchanged; measure a placement "
                f"{size.tier}, or give --links (the run folder of harness doctor FILE --links){fewer}"
            )
        if fits[operation].miss > MOST_MISS:
            return (
                f"the time of {name} {size.tier} is not that of a ring: the fit misses the measured one by "
                f"{fits[operation].miss:.0%}; measure placements nearer to the asked one"
            )
    return None


def refusal_by_grade(error: float | None, size: Size) -> str | None:
    """Return why a family whose prediction of a held-out size was this wrong is not predicted further."""
    if error is None or abs(error) <= MOST_MISS:
        return None
    return f"predicted from smaller sizes, {size.words} were {abs(error):.0%} off; measure larger sizes"
