"""The price of a device's hour, from which preview and report compute money, and limits.cost its end."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from harness.config.strategy_traits import Strict

MOST = 1e9
Amount = Annotated[float, Field(gt=0, le=MOST, allow_inf_nan=False)]
"""An amount of money, or a number of device-hours."""


class Cost(Strict):
    """The price of one device for an hour, whether it works or waits, and its currency; no part of any cell's id."""

    per_device_hour: Amount
    currency: Annotated[str, Field(min_length=1, max_length=20)]
