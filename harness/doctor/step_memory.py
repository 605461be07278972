"""Tensors that steps leave behind: those among the objects of Python that did not exist before the steps."""

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
    """Bytes of the tensors made since the start of its block that Python objects hold, after each step.

    Which tensors are new does not depend on the collector's generations, which differ between versions of Python.
    """

    def __init__(self) -> None:
        self._after: list[int] = []
        self._before: dict[int, ref[Tensor]] = {}
        self._froze = False

    def __enter__(self) -> StepMemory:
        # of a process without frozen objects, as the main one, each look would otherwise walk all that is imported
        self._froze = not gc.get_freeze_count()
        if self._froze:
            gc.freeze()
        self._before = {id(tensor): ref(tensor) for tensor in _tensors()}
        return self

    def __exit__(self, *_: object) -> None:
        if self._froze:
            gc.unfreeze()

    def note_step(self) -> None:
        """Count the tensors at the end of a step."""
        self._after.append(_size(self._new_tensors()))

    def kept_bytes(self) -> list[int]:
        """Return the bytes after each step; nothing if garbage that was not collected yet explains their growth."""
        if least_growth(self._after) < LEAST:
            return self._after
        references = [ref(tensor) for tensor in self._new_tensors()]
        gc.collect()
        held = _size(tensor for reference in references if (tensor := reference()) is not None)
        return self._after if held > self._after[-1] / 2 else []

    def _new_tensors(self) -> list[Tensor]:
        return [tensor for tensor in _tensors() if not self._existed(tensor)]

    def _existed(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one from before the steps, and not another one at the same address."""
        before = self._before.get(id(tensor))
        return before is not None and before() is tensor


def least_growth(kept_bytes: Sequence[int]) -> int:
    """Return the smallest growth from one step to the next; 0 without two steps."""
    return min((after - before for before, after in pairwise(kept_bytes)), default=0)


def _tensors() -> list[Tensor]:
    """Return the tensors that Python objects hold; those that gc.freeze() exempts are left out."""
    # type(), since isinstance() asks objects that stand for others, some of which warn; each type once, as it is slow
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, Tensor)}
    return [thing for thing in things if type(thing) in kinds]


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() + GRAPH * (tensor.grad_fn is not None) for tensor in tensors)
