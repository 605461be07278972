"""The points of a training step between which its phases lie."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum


class Phase(IntEnum):
    """The points that a step passes, in this order, each named after what it begins or has finished.

    The next step's START ends a step. With accumulation the forward pass of each further micro-batch begins with
    CLEARED again, and ends with FORWARD: a phase's time is the sum over micro-batches.
    """

    START = 0
    FETCHED = 1
    COPIED = 2
    CLEARED = 3
    """Gradients are None: the forward pass begins."""
    FORWARD = 4
    BACKWARD = 5
    """The backward passes of all micro-batches are done."""
    OPTIMIZER = 6


# read once: in Python 3.11 a lookup on an enum costs 30 ns more than one of a global name
START, FETCHED, COPIED, CLEARED, FORWARD, BACKWARD, OPTIMIZER = Phase

Mark = Callable[[Phase], None]
"""Records that a step has passed a point; called inside timed windows, so it neither waits nor allocates much."""
