"""The protocol of a strategy on one rank, and the default units of a model that are sharded one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from harness.config.strategy_traits import StrategyTraits
from harness.plan.cell import Options
from harness.train.optimizers import make_optimizer

Units = Callable[[nn.Module], Sequence[nn.Module]]


class Strategy(ABC):
    """How a model is trained on several devices. A subclass gives ``traits`` and ``wrap``, and the rest if it differs.

    Arguments of the methods: ``model`` is the return value of ``wrap`` on this rank.
    """

    traits: ClassVar[StrategyTraits]

    @abstractmethod
    def wrap(self, model: nn.Module, devices: Sequence[torch.device], options: Options, units: Units) -> nn.Module:
        """Return the model ready to train on this rank's devices.

        ``model``: as the workload built it, on the host, with the same parameters on every rank. ``options``: the
        cell's values of the strategy's section. ``units``: returns the modules to shard one by one.
        """

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the workload's own model; its parameters are those that are trained."""
        return model

    def make_optimizer(self, model: nn.Module, options: Options) -> torch.optim.Optimizer:
        """Return the optimizer that the file names, over the model's parameters; raise WorkloadError."""
        return make_optimizer(model, options)

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[object]:
        """Return a context whose backward passes exchange gradients between ranks only if ``enabled``."""
        return nullcontext()

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state by parameter name, on the host; other ranks' may be empty. Every rank calls it.

        The layout is that of torch.distributed.checkpoint.state_dict: ``{"state": ..., "param_groups": ...}``.
        """
        from torch.distributed.checkpoint import state_dict as dcp  # takes most of a second

        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = dcp.get_optimizer_state_dict(self.unwrap(model), optimizer, options=options)
        return state

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Set what ``optimizer_state`` returned, perhaps of another strategy. Every rank calls it."""
        from torch.distributed.checkpoint import state_dict as dcp

        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        dcp.set_optimizer_state_dict(self.unwrap(model), optimizer, state, options=options)


def default_units(model: nn.Module) -> list[nn.Module]:
    """Return the children of each ModuleList and Sequential, inner ones first, each once."""
    parents = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return list(dict.fromkeys(child for parent in reversed(parents) for child in parent.children()))
