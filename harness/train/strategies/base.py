"""The protocol of a strategy on one rank, the points of its exchange, and the default units of a sharded model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from harness.config.strategy_traits import BUILTIN_TRAITS, StrategyTraits
from harness.plan.cell import Options
from harness.plan.rows import Json
from harness.train.optimizers import make_optimizer
from harness.train.precision import Precision, without_autocast

Units = Callable[[nn.Module], Sequence[nn.Module]]


@dataclass(frozen=True)
class ExchangePoint:
    """A point of a step.

    ``kind``: "bucket": the gradients of a bucket are there, to be summed before the optimizer; "rows": those of a
    sparse gradient, which the ranks gather. Of a group of sharded parameters: "forward" and "backward": its computation
    in that pass begins, "gradients": a gradient of it is there. ``group``: its number; buckets have none.
    ``gather_bytes``: of its whole parameters, 0 where they are there already, or of the rows of all ranks, if they have
    as many as this one; ``reduce_bytes``: of the gradients to exchange.
    """

    kind: Literal["bucket", "rows", "forward", "backward", "gradients"]
    group: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0


Report = Callable[[ExchangePoint], None]
"""Takes a point when a step reaches it, on the thread that computes."""


@dataclass(frozen=True)
class WrapContext:
    """The circumstances in which a strategy wraps a model on one rank.

    ``devices``: this rank's. ``options``: the cell's values of the strategy's section. ``units``: returns the modules
    to shard one by one. ``nodes``: the number of nodes of the cell. ``init_weights``: the workload's, if it has one.
    """

    devices: Sequence[torch.device]
    options: Options
    units: Units
    precision: Precision
    nodes: int = 1
    init_weights: Callable[[nn.Module], object] | None = None


class Strategy(ABC):
    """How a model is trained on several devices. A subclass gives ``traits`` and ``wrap``, and the rest if it differs.

    Arguments of the methods: ``model`` is the return value of ``wrap`` on this rank.
    """

    traits: ClassVar[StrategyTraits]
    takes_meta: ClassVar[bool] = False
    """Whether ``wrap`` takes a model on the meta device, as a workload with ``init_weights`` may build it."""
    shard_units: int | None = None
    """The number of groups of parameters that are gathered together, after ``wrap``; None if none are sharded."""

    @abstractmethod
    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Return the model ready to train on this rank's devices.

        ``model``: as the workload built it, on the host, with the same parameters on every rank; under bf16 and fp16
        inside ``Autocast`` if the strategy ``autocasts``.
        """

    def autocasts(self, options: Options) -> bool:
        """Return whether forward passes run under autocast in bf16 and fp16; else ``wrap`` sets the dtypes."""
        return True

    def dtypes(self, context: WrapContext) -> str:
        """Return the dtypes of weights, gradients, forward pass and loss, for the trial's row."""
        return context.precision.text

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model that ``wrap`` was given; its parameters are those that are trained."""
        return model

    def compiled_part(self, model: nn.Module) -> nn.Module:
        """Return the module of the model, as ``wrap`` returned it, whose forward pass torch.compile compiles."""
        return model

    def make_optimizer(self, model: nn.Module, options: Options) -> torch.optim.Optimizer:
        """Return the optimizer that the file names, over the model's parameters; raise WorkloadError."""
        return make_optimizer(model, options)

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[object]:
        """Return a context whose backward passes exchange gradients between ranks only if ``enabled``."""
        return nullcontext()

    def alone(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context whose steps, after the first, exchange nothing between ranks."""
        return self.gradient_sync(model, enabled=False)

    def observed(self, model: nn.Module, context: WrapContext, report: Report) -> nn.Module | None:
        """Return the model, ready to train, whose steps report the points of their exchange; None if it has none.

        ``model``: what ``unwrap`` returned. Called once, after the steps that are timed.
        """
        return None

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Json:
        """Return the whole state by parameter name, on the host; other ranks' may be empty. Every rank calls it.

        The layout is that of torch.distributed.checkpoint.state_dict: ``{"state": ..., "param_groups": ...}``.
        """
        from torch.distributed.checkpoint import state_dict as dcp  # takes most of a second

        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: Json = dcp.get_optimizer_state_dict(without_autocast(self.unwrap(model)), optimizer, options=options)
        return state

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Json) -> None:
        """Set what ``optimizer_state`` returned, perhaps of another strategy. Every rank calls it."""
        from torch.distributed.checkpoint import state_dict as dcp

        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        dcp.set_optimizer_state_dict(without_autocast(self.unwrap(model)), optimizer, state, options=options)


def default_units(model: nn.Module) -> list[nn.Module]:
    """Return the children of each ModuleList and Sequential, lists among them replaced by their own children.

    No unit is inside another: the lists inside a block, such as a residual branch's, are part of the block.
    """
    return list(dict.fromkeys(_units_of(model, listed=False)))


def _units_of(module: nn.Module, *, listed: bool) -> list[nn.Module]:
    if listed and not _is_list(module):
        return [module]
    return [unit for child in module.children() for unit in _units_of(child, listed=_is_list(module))]


def _is_list(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.Sequential)


class Wrapping(Strategy):
    """A strategy whose ``wrap`` returns the model as the attribute ``module`` of a wrapper."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner


class Single(Strategy):
    """The model itself, on its device."""

    traits = BUILTIN_TRAITS["single"]

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        return model.to(context.devices[0])
