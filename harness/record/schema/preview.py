"""Schema of the table of estimated and actual time, device-hours, cost and energy."""

from __future__ import annotations

from harness.record.schema.table import CELL_ID, Column, Table
from harness.record.schema.table import column as _c


def _both(name: str, unit: str, meaning: str, actual: str = "") -> tuple[Column, Column]:
    """Return the columns of a quantity as estimated before the run, and as it was."""
    return (
        _c(f"estimated_{name}", "Float64", f"{meaning}, estimated before the run", unit),
        _c(f"actual_{name}", "Float64", f"{actual or meaning}; `<NA>` before the run", unit),
    )


PREVIEW = Table(
    "preview",
    "one part of a run: a cell, its convergence, diagnostic trials of a kind, what is outside of trials, their sums",
    (
        _c(
            "part",
            "string",
            "cell, for its throughput; convergence; twin, explain, profile, equivalence, doctor or links; worker "
            "groups (outside of trials); command (outside of groups); measurement (their sum); report; total",
        ),
        CELL_ID,
        _c("label", "string", "readable label of the cell, or name of the part"),
        _c("devices", "Int64", "number of devices of the cell"),
        _c("planned_trials", "Int64", "number of planned trials; of worker groups that of the groups"),
        _c("measured_trials", "Int64", "number of those that were started"),
        *_both("s", "s", "wall time"),
        _c(
            "error", "Float64", "estimated over actual time, less 1; `<NA>` of a lower bound, and if trials are missing"
        ),
        *_both("device_hours", "h", "wall time times the machine's devices, working or not"),
        *_both("busy_device_hours", "h", "the same of the devices that trials occupied"),
        *_both("cost", "", "device-hours times the price of the experiment file"),
        _c("currency", "string", "currency of the cost"),
        *_both("energy_kwh", "kWh", "power in the timed windows times occupied device-hours; none without readings"),
        _c("fits", "string", "verdict of --memory: fits, may not fit, will not fit or unknown; `<NA>` without it"),
        _c("basis", "string", "source of the estimate: earlier run, lower bound, unknown"),
    ),
)
