"""The table of predictions: each measured size from smaller ones, sizes that were asked for, and why one is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.analysis.common import Row, claim_tags
from harness.analysis.prediction.collective_times import SEED, Fits, Links, RingFit
from harness.analysis.prediction.observed import Family, Observed, Size
from harness.analysis.prediction.step_model import DRAWS, LANES, Model, Predicted, by_laws
from harness.analysis.stats import mean_interval
from harness.config.strategy_traits import BUILTIN_TRAITS
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


def refusal_by_grade(error: float | None, size: Size) -> str | None:
    """Return why a family whose prediction of a held-out size was this wrong is not predicted further."""
    if error is None or abs(error) <= MOST_MISS:
        return None
    return f"predicted from smaller sizes, {size.words} were {abs(error):.0%} off; measure larger sizes"


FITTED, HELD_OUT, ASKED = "measured", "held out", "asked"
DOUBLINGS = 3


@dataclass(frozen=True)
class Asked:
    """The sizes to predict.

    ``devices``: if empty, of cells with held-out sizes the next DOUBLINGS of the largest one. ``nodes``: of each number
    of devices; if empty, as few as hold them with ``per_node`` devices each, or with as many as the largest measured
    size has. ``far``: allow any distance from the measured sizes. ``most_fitted``: devices of the largest size to
    predict from; None for all that are smaller.
    """

    devices: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    per_node: int | None = None
    far: bool = False
    most_fitted: int | None = None

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
class _Ground:
    """What a size is predicted from: smaller sizes, and the fits of their collectives by tier.

    ``unknown``: the smaller sizes whose parts are not all known, with the reason.
    """

    fitted: Sequence[Size]
    fits: Mapping[LinkTier, Fits]
    unknown: Mapping[Size, str]


@dataclass(frozen=True)
class _FamilyTable:
    """The rows of one family."""

    family: Family
    links: Links
    excluded: str | None
    asked: Asked

    def rows(self) -> Iterator[Row]:
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
        grade = refusal_by_grade(graded[1], graded[0]) if graded else None
        for size in self.asked.sizes(sizes[-1], is_graded=graded is not None):
            if size not in self.family.sizes:
                yield self._row(size, ASKED, known, refusal or grade)

    def _row(self, size: Size, kind: str, smaller: Sequence[Size], refusal: str | None) -> dict[str, object]:
        """Return the row of one size, with the reason in place of a prediction if there is none."""
        ground = self._ground(size, smaller)
        row = {
            **self._described(size, kind),
            "fitted": tuple(map(str, ground.fitted)),
            "marks": tuple(self._marks(size, ground.fitted)),
        }
        steps = {each.devices: self.family.sizes[each].mean_s for each in smaller}
        laws = by_laws(steps, size.devices, strong=self.family.row["scaling"] == "strong")
        row |= {f"{law}_s": seconds for law, seconds in laws.items()}
        refusal = refusal or self._refusal(size, smaller, ground)
        return {**row, "refusal": refusal} if refusal else {**row, **self._predicted(size, ground)}

    def _described(self, size: Size, kind: str) -> dict[str, object]:
        first, batch = self.family.row, self._batch(size)
        return {
            **{name: first[name] for name in ("family_id", *DESCRIPTION)},
            "devices": size.devices,
            "nodes": size.nodes,
            "per_device_batch_size": batch or None,
            "global_batch_size": batch * size.devices or None,
            "kind": kind,
            **_measured(self.family.sizes.get(size)),
        }

    def _ground(self, size: Size, smaller: Sequence[Size]) -> _Ground:
        """Return the smaller sizes whose parts are all known, and the fits of the tiers of all of them and of ``size``.

        Without a size on several devices there are none: nothing shows what an exchange costs.
        """
        largest = max((each.devices for each in smaller), default=0)
        needed = self._needed()
        tiers = dict.fromkeys([size.tier, *(each.tier for each in smaller if each.devices > 1)])
        fits = {tier: self.links.fits(self.family.backend, tier, needed, largest, DRAWS) for tier in tiers}
        unknown = {each: refusal_of_links(each.tier, fits[each.tier]) for each in smaller if each.devices > 1}
        unknown |= {each: NO_OWN for each in smaller if not self.family.sizes[each].own_s}
        reasons = {each: reason for each, reason in unknown.items() if reason}
        return _Ground([each for each in smaller if each not in reasons], fits, reasons)

    def _refusal(self, size: Size, smaller: Sequence[Size], ground: _Ground) -> str | None:
        """Return why this size is not predicted; None if it is."""
        if not self._batch(size):
            return f"the global batch of {self.family.row['global_batch_size']} does not divide by {size.devices}"
        return (
            refusal_of_sizes(smaller)
            or refusal_of_links(size.tier, ground.fits[size.tier])
            or refusal_of_parts(ground.fitted, ground.unknown)
            or refusal_of_distance(size, ground.fitted, far=self.asked.far)
        )

    def _predicted(self, size: Size, ground: _Ground) -> dict[str, object]:
        batch = self._batch(size)
        sizes = [self.family.sizes[each] for each in ground.fitted]
        lanes = LANES.get(self.family.backend, 1)
        fits = {
            tier: {operation: fit for operation, fit in of.items() if not isinstance(fit, str)}
            for tier, of in ground.fits.items()
        }
        predicted = Model(self.family, sizes, fits, lanes, np.random.default_rng(SEED)).predict(size, batch)
        seen = self.family.sizes.get(size)
        return {
            **_columns(predicted),
            "throughput_per_s": self._units(size, batch) / predicted.step_s,
            "error": predicted.step_s / seen.mean_s - 1 if seen else None,
        }

    def _needed(self) -> dict[Collective, list[int]]:
        sizes: dict[Collective, list[int]] = {}
        for exchange in self.family.exchanges:
            sizes.setdefault(exchange.operation, []).append(exchange.size_bytes)
        return sizes

    def _batch(self, size: Size) -> int:
        """Return the per-device batch of a size; 0 if the global batch does not divide."""
        row = self.family.row
        if row["scaling"] != "strong":
            return int(row["per_device_batch_size"])
        batch, left = divmod(int(row["global_batch_size"]), size.devices)
        return 0 if left else batch

    def _units(self, size: Size, batch: int) -> float:
        """Return the samples or tokens of a step: as many a sample as in the last trial of the largest size."""
        row = self.family.row
        last_s = self.family.sizes[Size(int(row["devices"]), int(row["nodes"]))].step_s[-1]
        per_sample = float(row["throughput_per_s"]) * last_s / int(row["global_batch_size"])
        return per_sample * batch * size.devices

    def _marks(self, size: Size, fitted: Sequence[Size]) -> Iterator[str]:
        if fitted and size.devices > FARTHEST * max(each.devices for each in fitted):
            yield "far"
        yield from claim_tags(self.family.row)


def _measured(seen: Observed | None) -> dict[str, object]:
    """Return the columns of a measured step; missing without one."""
    if seen is None:
        return {}
    estimate = mean_interval(seen.step_s)
    return {"measured_s": estimate.value, "measured_low": estimate.low, "measured_high": estimate.high}


def _columns(predicted: Predicted) -> dict[str, object]:
    return {
        "step_s": predicted.step_s,
        "low": predicted.low_s,
        "high": predicted.high_s,
        "own_s": predicted.own_s,
        "exposed_s": predicted.exposed_s,
        "data_s": predicted.data_s,
        "other_s": predicted.other_s,
    }


def predictions(
    families: Iterable[Family], links: Links, excluded: Mapping[str, str], asked: Asked | None = None
) -> pd.DataFrame:
    """Return one row a size that is predicted, or refused with the reason.

    ``excluded``: the reason of each cell whose ratios mean nothing, by id.
    """
    rows: list[Row] = []
    for family in families:
        cells = [str(seen.row["cell_id"]) for seen in family.sizes.values()]
        reason = next((excluded[cell] for cell in cells if cell in excluded), None)
        rows += _FamilyTable(family, links, reason, asked or Asked()).rows()
    return PREDICTION.frame(rows)
