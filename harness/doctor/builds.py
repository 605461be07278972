"""A workload whose model is built once if that takes long: an examination needs several models that are the same."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import psutil
from torch import nn

from harness.train.workloads import Workload

SLOW_S = 1.0
"""A build that takes longer is not repeated."""
ROOM = 4
"""Models that must fit into the free memory of the host beside one that is kept."""
MOST_OBJECTS = 1_000_000
"""Objects of a workload that are searched for parts of its model."""


@dataclass
class Kept:
    """The model that was built first, as it was then; ``links``: the workload's attributes that are parts of it."""

    model: nn.Module | None = None
    links: dict[str, str] = field(default_factory=dict)
    kind: type[nn.Module] | None = None
    """The class of the models that were built."""


class FewBuilds:
    """A workload that hands out copies of its first model if a build takes longer than SLOW_S.

    A copy lacks the hooks of parameters, so that real steps are taken with ``inner``, which builds anew. If two models
    do not fit into memory, a model cannot be copied, or the workload keeps parts of it in another way than as modules
    in its attributes (in a list, a parameter), each is built.
    """

    def __init__(self, inner: Workload, kept: Kept | None = None) -> None:
        self.inner, self.kept = inner, kept or Kept()
        self.unit = inner.unit

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "kept"):  # while an object is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __copy__(self) -> FewBuilds:
        return FewBuilds(copy.copy(self.inner), self.kept)

    def build_model(self) -> nn.Module:
        """Return a new model, or a copy of the first."""
        if self.kept.model is not None:
            return self._linked(self.kept.model)
        start = time.perf_counter()
        model = self.inner.build_model()
        self.kept.kind = type(model)
        if time.perf_counter() - start > SLOW_S and _fits(model):
            names = {id(module): name for name, module in model.named_modules()}
            attributes = vars(self.inner).items()
            self.kept.links = {name: names[id(value)] for name, value in attributes if id(value) in names}
            with suppress(Exception):  # a model that cannot be copied is built each time
                if not _reaches((value for name, value in attributes if name not in self.kept.links), model):
                    self.kept.model = copy.deepcopy(model)
        return model

    def _linked(self, first: nn.Module) -> nn.Module:
        """Return a copy; what the workload keeps of the model in its attributes becomes part of the copy."""
        model = copy.deepcopy(first)
        for attribute, name in self.kept.links.items():
            setattr(self.inner, attribute, model.get_submodule(name))
        return model


def _reaches(values: Iterable[object], model: nn.Module) -> bool:
    """Return whether objects hold a module, parameter or buffer of the model; also if there are too many to know."""
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    waiting = list(values)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in parts or len(seen) > MOST_OBJECTS:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            waiting += _held(value)
    return False


def _held(value: object) -> Iterator[object]:
    """Yield the objects that an object holds; of code, what it was created with, not the modules that it uses."""
    if isinstance(value, type | ModuleType):
        return
    if isinstance(value, FunctionType):
        held = [value.__closure__, value.__defaults__, value.__kwdefaults__]
    else:
        held = gc.get_referents(value)
    yield from filter(gc.is_tracked, held)


def _fits(model: nn.Module) -> bool:
    """Return whether the host has the memory for copies; a model of the meta device is quick to build."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return False
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return ROOM * size < psutil.virtual_memory().available
