"""The table of predictions: each measured size from smaller ones, and sizes that were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from harness.analysis.common import Row, is_no_claim
from harness.analysis.prediction.grounds import (
    FARTHEST,
    refusal_by_grade,
    refusal_of_distance,
    refusal_of_family,
    refusal_of_links,
    refusal_of_sizes,
)
from harness.analysis.prediction.laws import by_laws
from harness.analysis.prediction.model import DRAWS, Model, Predicted
from harness.analysis.prediction.observed import Family, Observed, Size, timed_collectives
from harness.analysis.prediction.replay import LANES
from harness.analysis.prediction.ring import RingFit, Timed, fit_ring
from harness.analysis.stats import mean_interval
from harness.errors import PredictionError
from harness.plan.exchange_rows import Collective
from harness.plan.link_rows import LinkTier
from harness.record.schema import DESCRIPTION, PREDICTION

SEED = 0
FITTED, HELD_OUT, ASKED = "measured", "held out", "asked"
DOUBLINGS = 3


@dataclass(frozen=True)
class Links:
    """The measured collectives: of the run itself, and further ones that hold where the run has none."""

    own: pd.DataFrame
    further: pd.DataFrame | None = None

    @cached_property
    def timed(self) -> Mapping[tuple[Collective, LinkTier], Sequence[tuple[Size, Timed]]]:
        """The times of the run's own, and of tiers that it lacks."""
        further = {} if self.further is None else timed_collectives(self.further)
        return {**further, **timed_collectives(self.own)}

    @property
    def backend(self) -> str:
        """The backend of the processes' collectives; empty if none were measured."""
        known = [*self.own["backend"], *([] if self.further is None else self.further["backend"])]
        return str(known[0]) if known else ""

    def fits(
        self, tier: LinkTier, needed: Mapping[Collective, Sequence[int]], most_devices: int
    ) -> dict[Collective, RingFit]:
        """Return the fit of each collective that was measured; ``needed``: the sizes in bytes that are exchanged.

        ``most_devices``: of larger placements of the run nothing is known.
        """
        generator = np.random.default_rng(SEED)
        fits: dict[Collective, RingFit] = {}
        for operation, sizes in needed.items():
            measured = self.timed.get((operation, tier), ())
            known = [timed for size, timed in measured if size.devices <= most_devices or self._is_further(size)]
            if fit := fit_ring(operation, known, sizes, generator, DRAWS):
                fits[operation] = fit
        return fits

    def _is_further(self, size: Size) -> bool:
        """Return whether a placement was measured apart from the run: there is nothing to hold out."""
        same = (self.own["devices"] == size.devices) & (self.own["nodes"] == size.nodes)
        return not bool(same.any())


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
class _FamilyTable:
    """The rows of one family."""

    family: Family
    links: Links
    excluded: str | None
    asked: Asked

    def rows(self) -> Iterator[Row]:
        sizes = [*self.family.sizes]
        usable = [each for each in sizes if each.devices <= (self.asked.most_fitted or each.devices)]
        refusal = refusal_of_family(self.family) or self.excluded
        graded: tuple[Size, float | None] | None = None
        for size in sizes:
            fitted = [each for each in usable if each.devices < size.devices]
            if len({each.devices for each in fitted}) > 1:
                row = self._row(size, HELD_OUT, fitted, refusal)
                graded = size, error if isinstance(error := row.get("error"), float) else None
                yield row
            else:
                yield self._described(size, FITTED)
        grade = refusal_by_grade(graded[1], graded[0]) if graded else None
        for size in self.asked.sizes(sizes[-1], is_graded=graded is not None):
            if size not in self.family.sizes:
                yield self._row(size, ASKED, usable, refusal or grade)

    def _row(self, size: Size, kind: str, fitted: Sequence[Size], refusal: str | None) -> dict[str, object]:
        """Return the row of one size, with the reason in place of a prediction if there is none."""
        row = {
            **self._described(size, kind),
            "fitted": tuple(map(str, fitted)),
            "marks": tuple(self._marks(size, fitted)),
        }
        steps = {each.devices: self.family.sizes[each].mean_s for each in fitted}
        laws = by_laws(steps, size.devices, strong=self.family.row["scaling"] == "strong")
        row |= {f"{law}_s": seconds for law, seconds in laws.items()}
        refusal = refusal or self._refusal(size, fitted)
        return {**row, "refusal": refusal} if refusal else {**row, **self._predicted(size, fitted)}

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

    def _refusal(self, size: Size, fitted: Sequence[Size]) -> str | None:
        """Return why this size is not predicted from these; None if it is."""
        if not self._batch(size):
            return f"the global batch of {self.family.row['global_batch_size']} does not divide by {size.devices}"
        refusal = refusal_of_sizes(fitted) or refusal_of_distance(size, fitted, far=self.asked.far)
        return refusal or self._refusal_of_links(size, fitted)

    def _predicted(self, size: Size, fitted: Sequence[Size]) -> dict[str, object]:
        batch = self._batch(size)
        predicted = self.model(size, fitted).predict(size, batch)
        seen = self.family.sizes.get(size)
        return {
            **_columns(predicted),
            "throughput_per_s": self._units(size, batch) / predicted.step_s,
            "error": predicted.step_s / seen.mean_s - 1 if seen else None,
        }

    def model(self, size: Size, fitted: Sequence[Size]) -> Model:
        """Return the model of this size fitted to these sizes."""
        largest = max(each.devices for each in fitted)
        tiers = dict.fromkeys([size.tier, *(each.tier for each in fitted if each.devices > 1)])
        fits = {tier: self.links.fits(tier, self._needed(), largest) for tier in tiers}
        usable = [
            self.family.sizes[each]
            for each in fitted
            if self.family.sizes[each].own_s
            and (each.devices == 1 or not refusal_of_links(each, [*self._needed()], fits[each.tier]))
        ]
        lanes = LANES.get(self.links.backend, 1)
        return Model(self.family, usable, fits, lanes, np.random.default_rng(SEED))

    def _refusal_of_links(self, size: Size, fitted: Sequence[Size]) -> str | None:
        needed = self._needed()
        fits = self.links.fits(size.tier, needed, max(each.devices for each in fitted))
        return refusal_of_links(size, [*needed], fits)

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
        """Return the samples or tokens of a step: as many a sample as in the largest measured one."""
        row = self.family.row
        largest = self.family.sizes[Size(int(row["devices"]), int(row["nodes"]))]
        per_sample = float(row["throughput_per_s"]) * largest.mean_s / int(row["global_batch_size"])
        return per_sample * batch * size.devices

    def _marks(self, size: Size, fitted: Sequence[Size]) -> Iterator[str]:
        if fitted and size.devices > FARTHEST * max(each.devices for each in fitted):
            yield "far"
        if is_no_claim(self.family.row):
            yield "emulated" if self.family.row["emulated"] else "faulty"


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
