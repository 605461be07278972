"""A cell's model, wrapped by its strategy, with its optimizer: what one rank trains, one step at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from harness.plan.cell import Cell
from harness.train.loader import Share
from harness.train.optimizers import make_clip, scale_rate
from harness.train.phases import BACKWARD, CLEARED, FORWARD, OPTIMIZER, Mark, Phase
from harness.train.ranks import Ranks
from harness.train.strategies import make_strategy
from harness.train.strategies.base import default_units
from harness.train.workloads import Workload


def _no_mark(point: Phase) -> None:
    """Record nothing: the step is in no window."""


class Snapshot(TypedDict):
    """A copy of a training's state on the host. ``optimizer``: its state dict, whose values differ by class."""

    model: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Any]


class Training:
    """One training on one rank. The same seed gives every rank, and every strategy, the same start."""

    def __init__(self, cell: Cell, workload: Workload, seed: int, ranks: Ranks) -> None:
        set_precision(cell.precision)
        torch.manual_seed(seed)
        model = workload.build_model()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        units = getattr(workload, "shard_units", default_units)
        self.strategy = make_strategy(cell.strategy)
        self.model = self.strategy.wrap(model, ranks.devices, cell.strategy_options, units)
        if cell.compile:
            torch.compiler.reset()  # else what an earlier trial of this process compiled decides how this one is
            self.model.compile()
        self.optimizer = self.strategy.make_optimizer(self.model, cell.optimizer)
        self.effective_lr = scale_rate(self.optimizer, cell.lr_factor)
        self._clip = make_clip(cell.training)
        self.unit = workload.unit
        self._cell, self._workload, self._ranks = cell, workload, ranks
        self._micro_batches, self._counts_samples = cell.micro_batches, workload.unit == "samples"
        self._precision = _autocast(cell.precision, ranks.devices[0].type)
        self._alone = False
        torch.manual_seed(seed * 1_000_003 + ranks.rank)  # dropout: each rank its own stream

    def set_first_rate(self) -> None:
        """The rate of a training's first steps, where it warms up: at the scaled rate it may diverge at once."""
        if self._cell.training.get("warmup_epochs") and self._cell.lr_factor > 1:
            scale_rate(self.optimizer, 1 / self._cell.lr_factor)

    def step(self, batch: object, share: Share, mark: Mark = _no_mark) -> tuple[Tensor, Tensor]:
        """One optimizer step; the sum of this rank's losses and its weight, detached and unread.

        ``batch``: this rank's share, with accumulation a tuple of its micro-batches. ``mark`` is called at
        each point of the step from CLEARED on; CLEARED and FORWARD come once a micro-batch.

        The gradient is that of (sum of all ranks' losses) / (sum of all ranks' weights). The strategies
        average over ranks, so each rank's loss is scaled by world size / global weight.
        """
        self.optimizer.zero_grad(set_to_none=True)
        mark(CLEARED)
        if self._micro_batches == 1:
            loss, weight = self._backward(batch, share, mark)
        else:
            loss, weight = self._accumulate(batch, share, mark)
        mark(BACKWARD)
        if self._clip:
            self._clip(self.model.parameters())
        self.optimizer.step()
        mark(OPTIMIZER)
        return loss, weight

    def _backward(self, batch: object, share: Share, mark: Mark) -> tuple[Tensor, Tensor]:
        """Adds the gradient of one batch to that of the step."""
        if self._precision is None:
            loss, weight = self._workload.loss(self.model, batch)
        else:
            with self._precision:
                loss, weight = self._workload.loss(self.model, batch)
        if share.samples == 0:
            loss, weight = loss * 0.0, weight * 0
        scale = self._ranks.world_size / self._global_weight(weight, share)
        loss_per_unit = loss * scale
        mark(FORWARD)
        loss_per_unit.backward()
        return loss.detach(), weight

    def _accumulate(self, batches: Any, share: Share, mark: Mark) -> tuple[Tensor, Tensor]:
        """The gradient of a step from its micro-batches, one after the other."""
        shares = share.split(self._cell.micro_batches)
        losses, weights = [], []
        for number, (batch, part) in enumerate(zip(batches, shares, strict=True)):
            if number:
                mark(CLEARED)
            with self.strategy.gradient_sync(self.model, enabled=number == len(shares) - 1):
                loss, weight = self._backward(batch, part, mark)
            losses.append(loss)
            weights.append(weight)
        total_weight = sum(weights[1:], weights[0])
        if self._workload.unit == "tokens":  # only now known
            scale = 1.0 / self._over_ranks(total_weight)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    local_part(parameter.grad).mul_(scale)
        return torch.stack(losses).sum(), total_weight

    def evaluate(self, batch: object, share: Share) -> dict[str, tuple[float, float]]:
        """This rank's sums and weights of the loss and of each metric on one batch; nothing is learnt."""
        with torch.no_grad(), self._precision or nullcontext():
            totals: dict[str, tuple[Tensor | float, Tensor | float]] = {"loss": self._workload.loss(self.model, batch)}
            metrics: Callable[..., Mapping[str, tuple[Tensor | float, Tensor | float]]] | None
            if metrics := getattr(self._workload, "metrics", None):
                totals.update(metrics(self.model, batch))
        counts = share.samples > 0
        return {name: (float(total) * counts, float(weight) * counts) for name, (total, weight) in totals.items()}

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """What follows from the means of the loss and of each metric, such as a perplexity."""
        found: Callable[..., Mapping[str, Tensor | float]] | None = getattr(self._workload, "derived", None)
        return {name: float(value) for name, value in found(means).items()} if found else {}

    @property
    def unwrapped(self) -> nn.Module:
        """The workload's own model inside what the strategy made of it."""
        return self.strategy.unwrap(self.model)

    @contextmanager
    def without_gradient_sync(self) -> Iterator[None]:
        """Let each rank step by itself in a block: gradients are not exchanged, so parameters drift apart."""
        self._alone = True
        try:
            with self.strategy.gradient_sync(self.model, enabled=False):
                yield
        finally:
            self._alone = False

    def snapshot(self) -> Snapshot:
        """Parameters, buffers and optimizer state, copied to the host."""
        state: Snapshot = {
            "model": self.model.state_dict(),
            "buffers": dict(self.model.named_buffers()),  # those too that no state_dict() holds
            "optimizer": self.optimizer.state_dict(),
        }
        copied: Snapshot = tree_map(_on_host, state)
        return copied

    def restore(self, snapshot: Snapshot) -> None:
        """Puts back what ``snapshot`` took."""
        self.model.load_state_dict(snapshot["model"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(snapshot["buffers"][name])
        self.optimizer.state.clear()  # else the old state would stand beside the new one
        # a copy: the optimizer keeps the tensors that it is given, and steps in them
        self.optimizer.load_state_dict(copy.deepcopy(snapshot["optimizer"]))

    def finite(self, losses: list[Tensor]) -> bool:
        """Whether these losses and every parameter on this rank are finite numbers."""
        values = [loss.float() for loss in losses] + [local_part(p).detach().sum() for p in self.model.parameters()]
        return bool(torch.isfinite(torch.stack([value.float() for value in values])).all())

    def _global_weight(self, weight: Tensor, share: Share) -> Tensor | float:
        """The weight of the global batch: known beforehand for samples, summed over the ranks for tokens."""
        if self._counts_samples:
            return share.global_samples
        if self._micro_batches > 1:
            return 1.0  # the other micro-batches' is not known yet: the gradient is divided when it is
        return self._over_ranks(weight)

    def _over_ranks(self, weight: Tensor) -> Tensor:
        """The sum over the ranks; where this rank steps alone, as if all had its weight."""
        if self._alone:
            return torch.as_tensor(weight).detach().float() * self._ranks.world_size
        # stays on the device: reading it here would make the host wait for the whole forward pass
        total = torch.as_tensor(weight, device=self._ranks.devices[0]).detach().clone().float()
        if self._ranks.world_size > 1:
            torch.distributed.all_reduce(total)
        return total


def set_precision(precision: str) -> None:
    """TF32 off everywhere, or on everywhere; autocast is set at each step."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _autocast(precision: str, device: str) -> torch.autocast | None:
    """What each forward pass is in: bfloat16 where it is asked for; weights and gradient reduction stay in float32.

    The object is entered again and again, never inside itself.
    """
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else None


def _on_host(leaf: object) -> object:
    return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, as fsdp makes them; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor
