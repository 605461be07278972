"""The step time of cells on more devices than were measured, from measured parts: with an interval, and graded."""

from __future__ import annotations

from harness.analysis.prediction.collective_times import LINK_SHARES, Links, read_links, recorded_exchanges
from harness.analysis.prediction.observed import Size, families
from harness.analysis.prediction.predictions import ASSUMED, Asked, predictions

__all__ = [
    "ASSUMED",
    "LINK_SHARES",
    "Asked",
    "Links",
    "Size",
    "families",
    "predictions",
    "read_links",
    "recorded_exchanges",
]
