"""Activation checkpointing of a model's shard units: backward computes each unit once more from its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.modules.batchnorm import _NormBase

NO_UNITS = (
    "activation_checkpointing applies to shard units, and the model has none: put its layers into an nn.ModuleList or "
    "nn.Sequential, or give the workload shard_units(model)"
)


class Checkpointed(CheckpointWrapper):
    """A unit that keeps its inputs for backward, which computes it once more in the same random state.

    A class beside torch's own, which the user's model may contain.
    """


def checkpointed(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Put each unit of a model, in place, into a ``Checkpointed``; return these. The model itself is left out."""
    wrappers = {unit: Checkpointed(unit) for unit in units if unit is not model}
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            if child in wrappers:
                setattr(parent, name, wrappers[child])
    return list(wrappers.values())


def norms_computed_again(model: nn.Module) -> list[_NormBase]:
    """Return the norms with running statistics in the ``Checkpointed`` units of a model in its strategy's wrapper."""
    inside = (module for unit in model.modules() if isinstance(unit, Checkpointed) for module in unit.modules())
    return [module for module in dict.fromkeys(inside) if isinstance(module, _NormBase) and module.track_running_stats]


@contextmanager
def statistics_kept(norms: Sequence[_NormBase]) -> Iterator[None]:
    """Undo what a backward pass in the block does to running statistics, which the forward pass has updated.

    Afterwards, since no code of a unit knows its pass: torch.compile takes parts of it, and leaves others as they are.
    """
    averages = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
    counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
    # copies of tensors of one type by one kernel
    kept = [(tensors, list(torch._foreach_add(tensors, 0))) for tensors in (averages, counts) if tensors]
    yield
    with torch.no_grad():
        for tensors, copies in kept:
            torch._foreach_copy_(tensors, copies)
