"""The points of a training step: between which its phases lie, and at which its exchanges begin or must be over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class Phase(IntEnum):
    """The points that a step passes, in this order, each named after what it begins or has finished.

    The next step's START ends a step. With accumulation each further micro-batch begins with NEXT and passes FETCHED,
    COPIED and FORWARD again: a phase's time is the sum over micro-batches.
    """

    START = 0
    NEXT = 1
    """The backward pass of a micro-batch that is not the step's last is done."""
    FETCHED = 2
    COPIED = 3
    CLEARED = 4
    """Gradients are None: the forward pass begins."""
    FORWARD = 5
    BACKWARD = 6
    """The backward passes of all micro-batches are done."""
    OPTIMIZER = 7


# read once: in Python 3.11 a lookup on an enum costs 30 ns more than one of a global name
START, NEXT, FETCHED, COPIED, CLEARED, FORWARD, BACKWARD, OPTIMIZER = Phase
STEP = (START, FETCHED, COPIED, CLEARED, FORWARD, BACKWARD, OPTIMIZER)
"""The points of a step of one micro-batch."""

Mark = Callable[[Phase], None]
"""Records that a step has passed a point; called inside timed windows, so it neither waits nor allocates much."""


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
