"""The points of a step at which its exchanges can begin or must be over, as a strategy reports them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExchangePoint:
    """A point of a step.

    ``kind``: "bucket": the gradients of a bucket are there, to be summed before the optimizer. Of a group of sharded
    parameters: "forward" and "backward": its computation in that pass begins, "gradients": a gradient of it is there.
    ``group``: its number; buckets have none. ``gather_bytes``: of its whole parameters, 0 where they are there already;
    ``reduce_bytes``: of the gradients to exchange.
    """

    kind: Literal["bucket", "forward", "backward", "gradients"]
    group: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0


Report = Callable[[ExchangePoint], None]
"""Takes a point when a step reaches it, on the thread that computes."""
