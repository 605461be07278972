"""Measurements of links and collectives -> transfers between devices, and collectives, by placement and size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from harness.analysis.common import Lines, Row
from harness.plan.link_rows import LinkOperation
from harness.record.schema import COLLECTIVES, LINKS

PLACEMENT = ("trial_id", "device", "device_ids", "devices", "nodes")
TRANSFERS: tuple[LinkOperation, ...] = ("copy", "send_receive")


def bus_factor(operation: LinkOperation, devices: int) -> float:
    """Return the bus bandwidth over the algorithm bandwidth, as nccl-tests defines it (doc/PERFORMANCE.md there).

    All-reduce of n devices: 2(n-1)/n; all-gather and reduce-scatter: (n-1)/n; from one device to another: 1.
    """
    factors: Mapping[LinkOperation, float] = {
        "all_reduce": 2 * (devices - 1) / devices,
        "all_gather": (devices - 1) / devices,
        "reduce_scatter": (devices - 1) / devices,
    }
    return factors.get(operation, 1.0)


def links(lines: Lines) -> pd.DataFrame:
    """Return one row a pair of devices and size, of each placement."""
    return LINKS.frame(row for row in _measured(lines) if row["operation"] in TRANSFERS)


def collectives(lines: Lines) -> pd.DataFrame:
    """Return one row a collective and size, of each placement."""
    return COLLECTIVES.frame(
        {name: value for name, value in row.items() if name not in ("source", "target", "link")}
        for row in _measured(lines)
        if row["operation"] not in TRANSFERS
    )


def _measured(lines: Lines) -> Iterator[Row]:
    """Yield the rows of the latest measurement of each placement, with the placement and the bandwidths."""
    latest = {line["trial_id"]: line for line in lines if line.get("links")}
    for line in latest.values():
        placement = {name: line.get(name) for name in PLACEMENT}
        model = line["ranks"][0].get("device_model") if line["ranks"] else None
        for row in line["links"]:
            bandwidth = row["size_bytes"] / row["time_s"] if row["time_s"] > 0 else None
            factor = bus_factor(row["operation"], line["devices"])
            yield {
                **placement,
                "device_model": model,
                **row,
                "algorithm_bytes_per_s": bandwidth,
                "bus_bytes_per_s": None if bandwidth is None else factor * bandwidth,
            }
