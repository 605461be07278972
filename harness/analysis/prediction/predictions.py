"""The table of predictions: each measured size from smaller ones, sizes that were asked for, and why one is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

import numpy as np
import pandas as pd

from harness.analysis.common import AnyRow, claim_tags, grouped
from harness.analysis.prediction.collective_times import SEED, Fits, Links, RingFit
from harness.analysis.prediction.observed import Family, Size
from harness.analysis.prediction.step_model import DRAWS, LANES, Model, by_laws
from harness.analysis.stats import mean_interval
from harness.config.sections import AssumedLink
from harness.config.strategy_traits import BUILTIN_TRAITS, OWN_COLLECTIVES
from harness.errors import PredictionError
from harness.plan.rows import Collective, LinkTier
from harness.record.schema import DESCRIPTION, PREDICTION

FARTHEST = 8
"""Sizes beyond the largest measured one times this are predicted only with ``--far``."""
MOST_MISS = 0.2
"""The largest relative difference of a fit to a measured collective, and of a prediction to a held-out size."""

NO_OWN = "no step without exchange was measured; set throughput.explain: true"


def refusal_of_family(family: Family) -> str | None:
    """Return why none of its sizes is predicted; None if they are."""
    strategy = str(family.row["strategy"])
    traits = BUILTIN_TRAITS.get(strategy)
    if traits is None:
        predicted = (name for name, known in BUILTIN_TRAITS.items() if not known.one_process)
        return f"{strategy} is not predicted; strategies that are: {', '.join(predicted)}"
    if traits.one_process:
        return (
            f"{strategy} is not predicted: one process drives all devices, and its threads are in no model of exchanges"
        )
    if family.row["oversubscribed"]:
        return "its ranks share devices, so that no rank's own time is known; measure ranks with a device each"
    if not family.exchanges:
        return (
            "the run recorded no exchanges; measure with this version, throughput.explain: true, and without a hybrid "
            "mesh, static_graph, or torch.compile of fsdp"
        )
    if family.is_sharded and not traits.shards_parameters:
        return "its sparse gradients are gathered, as many rows as each rank's samples have: no ring of a known size"
    if any(OWN_COLLECTIVES in (seen.row.get("exchange_s") or {}) for seen in family.sizes.values()):
        return "the user's own code exchanges values in each step, which are in no model of exchanges"
    if not any(seen.own_s for size, seen in family.sizes.items() if size.devices > 1):
        return NO_OWN
    return None


@dataclass(frozen=True)
class Ground:
    """What a size is predicted from: smaller sizes, and the fits of their collectives by tier.

    ``unknown``: the smaller sizes whose parts are not all known, with the reason.
    """

    fitted: Sequence[Size]
    fits: Mapping[LinkTier, Fits]
    unknown: Mapping[Size, str]


def refusal_of_sizes(size: Size, smaller: Sequence[Size], ground: Ground, *, far: bool) -> str | None:
    """Return why the smaller sizes do not predict this one; None if they do.

    They are too few, or their parts are unknown, or it is too far from those that are known and ``far`` is not set.
    """
    if len({each.devices for each in smaller}) < 2:
        measured = ", ".join(map(str, smaller)) or "none"
        return f"needs two numbers of devices, measured: {measured}; measure another"
    if refusal := refusal_of_links(size.tier, ground.fits[size.tier]):
        return refusal
    if len({each.devices for each in ground.fitted}) < 2:
        known = ", ".join(map(str, ground.fitted)) or "none"
        lacking = "; ".join(f"of {each.words}, {reason}" for each, reason in ground.unknown.items())
        return f"needs two numbers of devices whose parts are known, which are: {known}; {lacking}"
    largest = max(each.devices for each in ground.fitted)
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


ASSUMED = "assumed link: "
"""The beginning of the mark of a prediction over a link that was not measured."""
FITTED, HELD_OUT, ASKED = "measured", "held out", "asked"
DOUBLINGS = 3


@dataclass(frozen=True)
class Asked:
    """The sizes to predict.

    ``devices``: if empty, of cells with held-out sizes the next DOUBLINGS of the largest one. ``nodes``: of each number
    of devices; if empty, as few as hold them with ``per_node`` devices each, or with as many as the largest measured
    size has. ``far``: allow any distance from the measured sizes. ``most_fitted``: devices of the largest size to
    predict from; None for all that are smaller. ``between``: the link between nodes, if none was measured.
    """

    devices: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    per_node: int | None = None
    far: bool = False
    most_fitted: int | None = None
    between: AssumedLink | None = None

    def check(self) -> None:
        """Raise PredictionError if the nodes are not those of the devices."""
        if not self.nodes:
            return
        if len(self.nodes) != len(self.devices):
            raise PredictionError(
                f"--nodes: got {len(self.nodes)} numbers for {len(self.devices)} of --devices; give one for each"
            )
        for devices, nodes in zip(self.devices, self.nodes, strict=True):
            if devices % nodes:
                raise PredictionError(f"--nodes: {devices} devices do not divide over {nodes} nodes evenly")

    def sizes(self, largest: Size, *, is_graded: bool) -> list[Size]:
        """Return the sizes of one family, whose largest measured one is given."""
        if not self.devices and not is_graded:
            return []
        devices = self.devices or tuple(largest.devices * 2**power for power in range(1, DOUBLINGS + 1))
        if self.nodes:
            return [Size(*pair) for pair in zip(devices, self.nodes, strict=True)]
        here = self.per_node if largest.nodes == 1 else largest.devices // largest.nodes
        return [Size(number, -(-number // (here or number))) for number in devices]


@dataclass(frozen=True)
class _FamilyTable:
    """The rows of one family."""

    family: Family
    links: Links
    excluded: str | None
    asked: Asked
    base_per_s: float | None

    def rows(self) -> Iterator[AnyRow]:
        sizes = [*self.family.sizes]
        known = [each for each in sizes if each.devices <= (self.asked.most_fitted or each.devices)]
        refusal = refusal_of_family(self.family) or self.excluded
        graded: tuple[Size, float | None] | None = None
        for size in sizes:
            smaller = [each for each in known if each.devices < size.devices]
            if len({each.devices for each in smaller}) > 1:
                row = self._row(size, HELD_OUT, smaller, refusal)
                graded = size, error if isinstance(error := row.get("error"), float) else None
                yield row
            else:
                yield self._described(size, FITTED)
        if graded and graded[1] is not None and abs(graded[1]) > MOST_MISS:
            off = f"predicted from smaller sizes, {graded[0].words} were {abs(graded[1]):.0%} off"
            refusal = refusal or f"{off}; measure larger sizes"
        for size in self.asked.sizes(sizes[-1], is_graded=graded is not None):
            if size not in self.family.sizes:
                yield self._row(size, ASKED, known, refusal)

    def _row(self, size: Size, kind: str, smaller: Sequence[Size], refusal: str | None) -> dict[str, object]:
        """Return the row of one size, with the reason in place of a prediction if there is none."""
        ground = self._ground(size, smaller)
        far = ground.fitted and size.devices > FARTHEST * max(each.devices for each in ground.fitted)
        assumed = dict.fromkeys(
            f"{ASSUMED}{fit.assumed}"
            for fit in ground.fits[size.tier].values()
            if isinstance(fit, RingFit) and fit.assumed
        )
        row = {
            **self._described(size, kind),
            "fitted": tuple(map(str, ground.fitted)),
            "marks": (*(["far"] if far else []), *assumed, *claim_tags(self.family.row)),
        }
        steps = {each.devices: self.family.sizes[each].mean_s for each in smaller}
        laws = by_laws(steps, size.devices, strong=self.family.row["scaling"] == "strong")
        row |= {f"{law}_s": seconds for law, seconds in laws.items()}
        if not (refusal or self._batch(size)):
            batch = self.family.row["global_batch_size"]
            refusal = f"the global batch of {batch} does not divide by {size.devices}"
        refusal = refusal or refusal_of_sizes(size, smaller, ground, far=self.asked.far)
        return {**row, "refusal": refusal} if refusal else {**row, **self._predicted(size, ground)}

    def _described(self, size: Size, kind: str) -> dict[str, object]:
        first, batch = self.family.row, self._batch(size)
        seen = self.family.sizes.get(size)
        measured = mean_interval(seen.step_s) if seen else None
        return {
            **{name: first[name] for name in ("family_id", *DESCRIPTION)},
            "devices": size.devices,
            "nodes": size.nodes,
            "per_device_batch_size": batch or None,
            "global_batch_size": batch * size.devices or None,
            "kind": kind,
            "measured_s": measured and measured.value,
            "measured_low": measured and measured.low,
            "measured_high": measured and measured.high,
        }

    def _ground(self, size: Size, smaller: Sequence[Size]) -> Ground:
        """Return the smaller sizes whose parts are all known, and the fits of the tiers of all of them and of ``size``.

        Without a size on several devices there are none: nothing shows what an exchange costs.
        """
        largest = max((each.devices for each in smaller), default=0)
        exchanges = grouped(self.family.exchanges, lambda exchange: exchange.operation)
        needed = {operation: [exchange.size_bytes for exchange in each] for operation, each in exchanges.items()}
        tiers = dict.fromkeys([size.tier, *(each.tier for each in smaller if each.devices > 1)])
        per_node = size.devices // size.nodes
        fits = {tier: self.links.fits(self.family.backend, tier, needed, largest, DRAWS, per_node) for tier in tiers}
        unknown = {each: refusal_of_links(each.tier, fits[each.tier]) for each in smaller if each.devices > 1}
        unknown |= {each: NO_OWN for each in smaller if not self.family.sizes[each].own_s}
        reasons = {each: reason for each, reason in unknown.items() if reason}
        return Ground([each for each in smaller if each not in reasons], fits, reasons)

    def _predicted(self, size: Size, ground: Ground) -> dict[str, object]:
        batch = self._batch(size)
        sizes = [self.family.sizes[each] for each in ground.fitted]
        lanes = LANES.get(self.family.backend, 1)
        fits = {
            tier: {operation: fit for operation, fit in of.items() if not isinstance(fit, str)}
            for tier, of in ground.fits.items()
        }
        predicted = Model(self.family, sizes, fits, lanes, np.random.default_rng(SEED)).predict(size, batch)
        seen = self.family.sizes.get(size)
        # as many samples or tokens a sample as in the last trial of the largest size
        row = self.family.row
        last_s = self.family.sizes[Size(int(row["devices"]), int(row["nodes"]))].step_s[-1]
        per_sample = float(row["throughput_per_s"]) * last_s / int(row["global_batch_size"])
        of_a_device = per_sample * batch / predicted.step_s
        return {
            **asdict(predicted),
            "throughput_per_s": of_a_device * size.devices,
            "efficiency": of_a_device / self.base_per_s if self.base_per_s else None,
            "error": predicted.step_s / seen.mean_s - 1 if seen else None,
        }

    def _batch(self, size: Size) -> int:
        """Return the per-device batch of a size; 0 if the global batch does not divide."""
        row = self.family.row
        if row["scaling"] != "strong":
            return int(row["per_device_batch_size"])
        batch, left = divmod(int(row["global_batch_size"]), size.devices)
        return 0 if left else batch


def predictions(
    families: Iterable[Family],
    links: Links,
    excluded: Mapping[str, str],
    asked: Asked | None = None,
    bases: Mapping[str, float] = MappingProxyType({}),
) -> pd.DataFrame:
    """Return one row a size that is predicted, or refused with the reason.

    ``excluded``: the reason of each cell whose ratios mean nothing, by id. ``bases``: the throughput a device of the
    base of each cell, by the cell's id.
    """
    rows: list[AnyRow] = []
    for family in families:
        cells = [str(seen.row["cell_id"]) for seen in family.sizes.values()]
        reason = next((excluded[cell] for cell in cells if cell in excluded), None)
        base = next((bases[cell] for cell in cells if cell in bases), None)
        rows += _FamilyTable(family, links, reason, asked or Asked(), base).rows()
    return PREDICTION.frame(rows)
