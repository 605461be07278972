"""A workload whose model is built once if that takes long: an examination needs several models that are the same."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import IO, Any
from weakref import finalize

import psutil
import torch
from torch import nn

from harness.train.workloads import Workload

SLOW_S = 1.0
"""A build that takes longer is not repeated."""
ROOM = 4
"""Models that must fit into the free memory of the host, or on its disk, for one to be kept there."""
MOST_OBJECTS = 1_000_000
"""Objects of a workload that are searched for parts of its model."""


@dataclass
class Kept:
    """The model that was built first, as it was then, in memory or, if several do not fit there, in a file.

    ``links``: the workload's attributes that are parts of it. The file has no name, so that it ends with the process.
    """

    model: nn.Module | None = None
    file: IO[bytes] | None = None
    links: dict[str, str] = field(default_factory=dict)
    kind: type[nn.Module] | None = None
    """The class of the models that were built."""

    @property
    def is_copied(self) -> bool:
        """Whether later models are copies of the first."""
        return self.model is not None or self.file is not None

    def keep(self, model: nn.Module) -> None:
        """Keep a copy where there is room for it, if anywhere. Raises whatever copying a model of the user raises."""
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if _fits_into_memory(size):
            self.model = copy.deepcopy(model)
        elif ROOM * size < shutil.disk_usage(_disk()).free:
            with ExitStack() as stack:
                file = stack.enter_context(tempfile.TemporaryFile(dir=_disk()))
                torch.save(model, file)
                self.file, _ = file, finalize(self, stack.pop_all().close)

    def copied(self) -> nn.Module | None:
        """Return a copy of the model; None if there is none."""
        if self.file is None:
            return copy.deepcopy(self.model)
        self.file.seek(0)
        # of the user's own class; nothing but keep() can write the file
        model: nn.Module = torch.load(self.file, weights_only=False)
        return model


def _fits_into_memory(size: int) -> bool:
    return ROOM * size < psutil.virtual_memory().available


def _disk() -> str:
    """Return a folder on a disk: that for temporary files may be in memory."""
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()


class FewBuilds:
    """A workload that hands out copies of its first model if a build takes longer than SLOW_S.

    A copy lacks the hooks of parameters, so that real steps are taken with ``inner``, which builds anew. If a model
    cannot be copied, or the workload keeps parts of it in another way than as modules in its attributes (in a list, a
    parameter), each is built.
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
        if (model := self.kept.copied()) is not None:
            return self._linked(model)
        start = time.perf_counter()
        model = self.inner.build_model()
        self.kept.kind = type(model)
        if time.perf_counter() - start > SLOW_S and not any(parameter.is_meta for parameter in model.parameters()):
            names = {id(module): name for name, module in model.named_modules()}
            attributes = vars(self.inner).items()
            self.kept.links = {name: names[id(value)] for name, value in attributes if id(value) in names}
            with suppress(Exception):  # a model that cannot be copied is built each time
                if not _reaches((value for name, value in attributes if name not in self.kept.links), model):
                    self.kept.keep(model)
        return model

    def _linked(self, model: nn.Module) -> nn.Module:
        """Return a copy; what the workload keeps of the model in its attributes becomes part of the copy."""
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
