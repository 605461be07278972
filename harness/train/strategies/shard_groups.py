"""The groups of parameters that fsdp gathers together, and hooks that report the passes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from harness.train.exchange_points import ExchangePoint, Report


@dataclass(frozen=True)
class Group:
    """Modules whose parameters are gathered together: a unit, layers with statistics, or what is left of the model.

    ``gather_bytes``, ``reduce_bytes``: of the whole parameters, and of their gradients. ``reshards``: whether a
    backward pass gathers them once more.
    """

    modules: tuple[nn.Module, ...]
    gather_bytes: int
    reduce_bytes: int
    reshards: bool


class Part(NamedTuple):
    """Modules to shard together, the dtype in which their parameters are gathered, None for their own, and reshards."""

    modules: Sequence[nn.Module]
    dtype: torch.dtype | None
    reshards: bool


def groups_of(parts: Sequence[Part]) -> list[Group]:
    """Return the group of each part, before any is sharded; a parameter is in the first one that has it.

    Gradients of parameters that are gathered in another dtype are reduced in float32.
    """
    taken: set[nn.Parameter] = set()
    groups = []
    for modules, dtype, reshards in parts:
        own = dict.fromkeys(p for module in modules for p in module.parameters() if p not in taken)
        taken.update(own)
        gathered = sum(p.numel() * (dtype or p.dtype).itemsize for p in own)
        reduced = sum(p.numel() * (torch.float32 if dtype else p.dtype).itemsize for p in own if p.requires_grad)
        groups.append(Group(tuple(modules), gathered, reduced, reshards))
    return groups


def observe_groups(groups: Sequence[Group], report: Report) -> None:
    """Add hooks to the groups' modules, whose parameters are gathered, so that each pass reports where it is."""
    taken: set[nn.Parameter] = set()
    for number, group in enumerate(groups):
        if not group.gather_bytes:  # every parameter of the model is in another group
            continue
        forward = ExchangePoint("forward", number, gather_bytes=group.gather_bytes)
        backward = ExchangePoint("backward", number, gather_bytes=group.gather_bytes if group.reshards else 0)
        gradients = ExchangePoint("gradients", number, reduce_bytes=group.reduce_bytes)
        for module in group.modules:
            module.register_forward_pre_hook(partial(_report_forward, report, forward))
            module.register_forward_hook(partial(_report_backward, report, backward))
        own = [p for module in group.modules for p in module.parameters() if p.requires_grad and p not in taken]
        taken.update(own)
        for parameter in dict.fromkeys(own):
            parameter.register_post_accumulate_grad_hook(partial(_report_gradient, report, gradients))


def _report_forward(report: Report, point: ExchangePoint, module: nn.Module, inputs: object) -> None:
    report(point)


def _report_backward(report: Report, point: ExchangePoint, module: nn.Module, inputs: object, outputs: object) -> None:
    """Report when the first gradient of the outputs arrives."""
    for output in tree_leaves(outputs):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: report(point))


def _report_gradient(report: Report, point: ExchangePoint, parameter: torch.Tensor) -> None:
    report(point)
