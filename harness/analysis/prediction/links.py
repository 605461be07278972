"""The measured collectives from which the times of exchanges are fitted: of the run itself, and further ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from harness.analysis.prediction.grounds import reason_of_links
from harness.analysis.prediction.observed import Size
from harness.analysis.prediction.ring import RingFit, Timed, fit_ring
from harness.plan.exchange_rows import Collective
from harness.plan.link_rows import LinkTier
from harness.record.frames import records

SEED = 0
Measured = Mapping[tuple[str, Collective, LinkTier], Sequence[tuple[Size, Timed]]]
"""Times with the size of their placement, by backend, collective and tier."""
Fits = Mapping[Collective, RingFit | str]
"""The fit of each collective, or why there is none."""
SAME = ["backend", "operation", "tier", "devices", "nodes", "size_bytes"]


@dataclass(frozen=True)
class Links:
    """The measured collectives of the run itself, and further ones of placements and sizes that it did not measure."""

    own: pd.DataFrame
    further: pd.DataFrame | None = None
    _known: dict[object, Fits] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Fits by what they were asked for: the sizes of a family share most of theirs."""

    @cached_property
    def _timed(self) -> Measured:
        if self.further is None:
            return timed_collectives(self.own)
        own, further = (pd.MultiIndex.from_frame(frame[SAME]) for frame in (self.own, self.further))
        return timed_collectives(pd.concat([self.own, self.further[~further.isin(own)]]))

    @cached_property
    def _placements(self) -> set[Size]:
        """The placements of the run's own."""
        return {Size(int(row["devices"]), int(row["nodes"])) for row in records(self.own)}

    def fits(
        self, backend: str, tier: LinkTier, needed: Mapping[Collective, Sequence[int]], most_devices: int, draws: int
    ) -> Fits:
        """Return the fit of each collective, or why there is none; ``needed``: the sizes in bytes that are exchanged.

        ``most_devices``: of larger placements of the run nothing is known; further ones were measured apart from it.
        """
        key = backend, tier, *((operation, *sizes) for operation, sizes in needed.items()), most_devices, draws
        if key not in self._known:
            self._known[key] = self._fits(backend, tier, needed, most_devices, draws)
        return self._known[key]

    def _fits(
        self, backend: str, tier: LinkTier, needed: Mapping[Collective, Sequence[int]], most_devices: int, draws: int
    ) -> Fits:
        generator = np.random.default_rng(SEED)
        fits: dict[Collective, RingFit | str] = {}
        for operation, sizes in needed.items():
            measured = self._timed.get((backend, operation, tier), ())
            known = [t for size, t in measured if size.devices <= most_devices or size not in self._placements]
            where = f"{tier} ({backend}" + f", up to {most_devices} devices" * (len(known) < len(measured)) + ")"
            fit = fit_ring(operation, known, sizes, generator, draws)
            fits[operation] = fit or reason_of_links(operation, tier, where, known, sizes)
        return fits


def timed_collectives(collectives: pd.DataFrame) -> dict[tuple[str, Collective, LinkTier], list[tuple[Size, Timed]]]:
    """Return the rows of a table of collectives by backend, collective and tier."""
    found: dict[tuple[str, Collective, LinkTier], list[tuple[Size, Timed]]] = {}
    for row in records(collectives):
        size = Size(int(row["devices"]), int(row["nodes"]))
        timed = Timed(size.devices, int(row["size_bytes"]), float(row["time_s"]))
        found.setdefault((str(row["backend"]), row["operation"], row["tier"]), []).append((size, timed))
    return found
