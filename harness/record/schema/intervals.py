"""Columns that derived tables share: intervals over blocks, and ratios of two cells."""

from __future__ import annotations

from harness.record.schema.recorded import UNIT
from harness.record.schema.table import Column
from harness.record.schema.table import column as _c

PRECISE = _c(
    "precise",
    "boolean",
    "true if the interval meets throughput.blocks.halfwidth; `<NA>` without a rule, and for the throughput of a cell "
    "whose blocks follow from its ratios",
)
PAIRED_THROUGHPUT = _c("throughput_per_s", "Float64", "throughput, geometric mean over the paired blocks", "samples/s")


def ends(name: str = "", unit: str = "") -> tuple[Column, ...]:
    """Return the columns of the interval and of the range over blocks, of the row's one value or of ``name``."""
    prefix, of, of_block = (f"{name}_", f" of the {name}", name) if name else ("", "", "value")
    interval = f"of the 95 % confidence interval{of} over blocks; `<NA>` below 3 blocks"
    return (
        _c(f"{prefix}low", "Float64", f"lower end {interval}", unit),
        _c(f"{prefix}high", "Float64", f"upper end {interval}", unit),
        _c(f"{prefix}least", "Float64", f"smallest {of_block} of a block", unit),
        _c(f"{prefix}most", "Float64", f"largest {of_block} of a block", unit),
    )


INTERVAL = (_c("blocks", "Int64", "number of blocks in the estimate (n)"), *ends())


def paired(other_throughput: str, other: str, ratio: str) -> tuple[Column, ...]:
    """Return the columns of a ratio of two cells: their throughputs, the ratio and its interval."""
    return (
        UNIT,
        PAIRED_THROUGHPUT,
        _c(other_throughput, "Float64", f"throughput of {other}, geometric mean over blocks", "samples/s"),
        _c("ratio", "Float64", f"{ratio}, geometric mean over blocks"),
        *INTERVAL,
        _c("excludes_one", "boolean", "true if the interval does not contain 1; of equal cells 1 in 20 by chance"),
        _c("p_value", "Float64", "two-sided t test of the mean log ratio, not adjusted; `<NA>` below 3 blocks"),
        PRECISE,
    )
