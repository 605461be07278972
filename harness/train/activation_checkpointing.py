"""Activation checkpointing of a model's shard units: backward computes each unit once more from its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

NO_UNITS = (
    "activation_checkpointing applies to shard units, and the model has none: put its layers into an nn.ModuleList or "
    "nn.Sequential, or give the workload shard_units(model)"
)


class Checkpointed(ActivationWrapper):
    """A unit that keeps its inputs for backward, which computes it once more in the same random state.

    The statistics of its norms are updated by the first pass alone, except in a ``compiled`` model, whose second pass
    is made by torch.compile and updates nothing. It reads its own unit at each call, since nn.DataParallel copies it.
    """

    def __init__(self, unit: nn.Module, *, compiled: bool) -> None:
        super().__init__(unit)  # type: ignore[no-untyped-call]
        self.has_statistics = not compiled and any(
            isinstance(module, _NormBase) and module.track_running_stats for module in unit.modules()
        )

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return what the unit returns."""
        unit = self._checkpoint_wrapped_module
        contexts: dict[str, Any] = {"context_fn": partial(_contexts, unit)} if self.has_statistics else {}
        outputs: object = checkpoint(unit, *args, use_reentrant=False, **contexts, **kwargs)  # type: ignore[call-overload]
        return outputs


def checkpointed(model: nn.Module, units: Sequence[nn.Module], *, compiled: bool = False) -> list[nn.Module]:
    """Put each unit of a model, in place, into a ``Checkpointed``; return these. The model itself is left out."""
    wrappers = {unit: Checkpointed(unit, compiled=compiled) for unit in units if unit is not model}
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            if child in wrappers:
                setattr(parent, name, wrappers[child])
    return list(wrappers.values())


def _contexts(unit: nn.Module) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of the first pass through a unit and of the second one."""
    return nullcontext(), _statistics_kept(unit)


@contextmanager
def _statistics_kept(unit: nn.Module) -> Iterator[None]:
    """Keep the running statistics of norms as they are in a block; without them other tensors would be saved."""
    norms = [module for module in unit.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, counted) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counted
