"""The measured collectives from which the times of exchanges are fitted: of the run itself, and further ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from harness.analysis.common import Lines
from harness.analysis.hardware import collectives
from harness.analysis.prediction.observed import Size
from harness.analysis.prediction.ring import BEYOND, LEAST_POINTS, RingFit, Timed, fit_ring, near_times
from harness.errors import PredictionError
from harness.plan.rows import Collective, LinkTier
from harness.record.folder import RunFolder
from harness.record.frames import records
from harness.record.schema import COLLECTIVES, DESCRIPTION, EXCHANGES

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
                f"--links: the {what} of {path} are {_text(there)}, those of the run {_text(here)}; "
                "give links of the same kind of machine"
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


def _text(values: set[str]) -> str:
    return ", ".join(sorted(values))


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
        for exchange in line["exchanges"]
    )


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
