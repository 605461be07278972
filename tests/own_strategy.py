"""Strategies as a user writes them beside an experiment file: ``strategy: own_strategy:Zero1``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from harness.config.strategy_traits import StrategyTraits
from harness.train.optimizers import find_class
from harness.train.strategies.base import Strategy, WrapContext


class Zero1(Strategy):
    """DistributedDataParallel whose optimizer state is sharded over the ranks (ZeRO, stage 1)."""

    traits = StrategyTraits(calls_wrapper=True, needs_every_gradient=True)

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        device = context.devices[0]
        ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model.to(device), device_ids=ids, **context.options)

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner

    def make_optimizer(self, model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
        kind = find_class(torch.optim, torch.optim.Optimizer, options.get("name"), "optimizer.name")
        arguments = {name: value for name, value in options.items() if name != "name"}
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **arguments)

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if enabled else model.no_sync()


class Unsynchronised(Zero1):
    """Does not exchange gradients: each rank trains on its own."""

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        return nn.Sequential(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = next(model.children())
        return inner

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def make_optimizer(self, model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
        return Strategy.make_optimizer(self, model, options)


class WithoutTraits(Zero1):
    traits = None  # type: ignore[assignment]


class WithoutWrap(Strategy):
    traits = StrategyTraits()


class NoStrategy:
    def wrap(self) -> None: ...
