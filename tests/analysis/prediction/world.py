"""A family whose steps follow from parts that are known: what a prediction of it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.prediction.collective_times import Links, RingCost
from harness.analysis.prediction.observed import Exchange, Family, Observed, Size
from harness.analysis.prediction.step_model import exposed_s
from harness.config.axes import AXES
from harness.record.schema import COLLECTIVES

COST = RingCost(1e-4, 2e-4, 2.5e7, 0.5)
OWN_S, BATCH = 0.1, 4
EXCHANGES = (
    Exchange("all_reduce", 2**20, 0.05, 0.1),
    Exchange("all_reduce", 2**20, 0.08, 0.1),
    Exchange("all_reduce", 2**19, 0.1, 0.1),
)


def row(size: Size, **changed: Any) -> dict[str, Any]:
    """The columns of a trial that predictions read."""
    batch = changed.pop("batch", BATCH)
    named = {"family_id": "family", "cell_id": f"cell{size.devices}", "label": "ddp", "setting": "resnet8"}
    cell = {"strategy": "ddp", "scaling": "weak", "device": "cpu", "devices": size.devices, "nodes": size.nodes}
    batches = {"per_device_batch_size": batch, "global_batch_size": batch * size.devices}
    tags = {"own_options": "", "options": {"loader.workers": 0}, "oversubscribed": False, "emulated": False}
    return {**dict.fromkeys(AXES), **named, **cell, **batches, **tags, "throughput_per_s": 100.0, **changed}


def step_s(
    devices: int, *, own_s: float = OWN_S, cost: RingCost = COST, exchanges: Sequence[Exchange] = EXCHANGES
) -> float:
    """The step of ranks that are all alike."""
    costs = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), cost)
    return own_s + exposed_s(exchanges, costs, devices, own_s / OWN_S, 2)  # type: ignore[arg-type]


def observed(size: Size, *, ranks: Sequence[float] = (), wait_s: float = 0.0, **changed: Any) -> Observed:
    """What was measured of a size: ``ranks``: the own times; alike if not given."""
    own = tuple(ranks) or (OWN_S,) * size.devices
    mean = step_s(size.devices, own_s=max(own)) + wait_s
    return Observed(size, row(size, **changed), (mean, mean, mean), wait_s, own, (sum(own) / len(own),) * 3, 0.001)


def family(sizes: Mapping[Size, Observed] | None = None, **changed: Any) -> Family:
    known = sizes or {size: observed(size) for size in (Size(1, 1), Size(2, 2), Size(4, 4))}
    given: dict[str, Any] = {"alone": {BATCH: OWN_S}, "jitter": np.array([]), "exchanges": EXCHANGES, **changed}
    return Family(known, **given)


def collectives(
    ranks: Sequence[int] = (2, 4), cost: RingCost = COST, powers: Sequence[int] = range(12, 23), **changed: Any
) -> pd.DataFrame:
    """The table of measured collectives of sizes that are powers of two, of a rank a node."""
    fixed = {"backend": "gloo", "device_model": "CPU", "tier": "between nodes", **changed}
    return COLLECTIVES.frame(
        {"devices": n, "nodes": n, "operation": operation, "size_bytes": 2**power}
        | {"time_s": sum(cost.parts(operation, 2**power, n)), **fixed}
        for n in ranks
        for operation in ("all_reduce", "all_gather", "reduce_scatter")
        for power in powers
    )


LINKS = Links(collectives())
"""The links of most tests: their fits are made once for all."""
