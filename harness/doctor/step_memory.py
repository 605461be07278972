"""Tensors that steps leave behind: found among the objects that are younger than the steps, which are few."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from itertools import pairwise
from weakref import ref

from torch import Tensor

from harness.system.units import MIB

GRAPH = MIB
"""Bytes that a tensor with a graph counts for beside its own: the graph keeps at least its nodes, and often more."""
LEAST = 1024
"""Bytes a step that count: a list of plain losses grows by less."""


class StepMemory:
    """Bytes of the tensors made since the construction that Python objects hold, after each step.

    The automatic garbage collector must be off as long as it counts: it would make the objects older.
    """

    def __init__(self) -> None:
        gc.collect(1)  # what is there already belongs to the oldest generation from now on
        self._after: list[int] = []

    def note_step(self) -> None:
        """Count the tensors at the end of a step."""
        self._after.append(_size(_young_tensors()))

    def kept_bytes(self) -> list[int]:
        """Return the bytes after each step; nothing if garbage that was not collected yet explains their growth."""
        if least_growth(self._after) < LEAST:
            return self._after
        references = [ref(tensor) for tensor in _young_tensors()]
        gc.collect()
        held = _size(tensor for reference in references if (tensor := reference()) is not None)
        return self._after if held > self._after[-1] / 2 else []


def least_growth(kept_bytes: Sequence[int]) -> int:
    """Return the smallest growth from one step to the next; 0 without two steps."""
    return min((after - before for before, after in pairwise(kept_bytes)), default=0)


def _young_tensors() -> list[Tensor]:
    # type(), since isinstance() asks objects that stand for others, some of which warn
    return [thing for thing in gc.get_objects(generation=0) if issubclass(type(thing), Tensor)]


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() + GRAPH * (tensor.grad_fn is not None) for tensor in tensors)
