"""The step time of cells on more devices than were measured, from measured parts: with an interval, and graded."""

from __future__ import annotations

from harness.analysis.prediction.collective_times import Links, read_links, recorded_exchanges
from harness.analysis.prediction.observed import Size, families
from harness.analysis.prediction.predictions import Asked, predictions

__all__ = ["Asked", "Links", "Size", "families", "predictions", "read_links", "recorded_exchanges"]
