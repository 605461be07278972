"""The training of a cell on one rank: wrapped model, optimizer, and the optimizer step."""

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
    """One training on one rank. The same seed gives every rank, and every strategy, the same initial parameters."""

    def __init__(self, cell: Cell, workload: Workload, seed: int, ranks: Ranks) -> None:
        set_precision(cell.precision)
        torch.manual_seed(seed)
        model = workload.build_model()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        units = getattr(workload, "shard_units", default_units)
        self.strategy = make_strategy(cell.strategy)
        self.model = self.strategy.wrap(model, ranks.devices, cell.strategy_options, units)
        if cell.compile:
            torch.compiler.reset()  # else compilations of earlier trials in this process affect this one's
            self.model.compile()
        self.optimizer = self.strategy.make_optimizer(self.model, cell.optimizer)
        self.effective_lr = scale_rate(self.optimizer, cell.lr_factor)
        self._clip = make_clip(cell.training)
        self.unit = workload.unit
        self._cell, self._workload, self._ranks = cell, workload, ranks
        self._micro_batches, self._counts_samples = cell.micro_batches, workload.unit == "samples"
        self._precision = _autocast(cell.precision, ranks.devices[0].type)
        self._alone = False
        torch.manual_seed(seed * 1_000_003 + ranks.rank)  # each rank has its own random stream, for dropout

    def set_first_rate(self) -> None:
        """Set the unscaled rate if the training has a warm-up: at the scaled rate its first steps may diverge."""
        if self._cell.training.get("warmup_epochs") and self._cell.lr_factor > 1:
            scale_rate(self.optimizer, 1 / self._cell.lr_factor)

    def step(self, batch: object, share: Share, mark: Mark = _no_mark) -> tuple[Tensor, Tensor]:
        """Take an optimizer step; return the sum of this rank's losses and its weight, as detached tensors.

        ``batch``: this rank's share, with accumulation an iterable of its micro-batches, each of which is taken after
        the backward pass of the one before. ``mark`` is called at each phase of the step from CLEARED on; FORWARD
        occurs once a micro-batch.

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
        """Add the gradient of one batch to that of the step; return the sum of its losses and its weight."""
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
        """Add the gradients of micro-batches, one after the other; return the sum of their losses and their weight."""
        shares = share.split(self._cell.micro_batches)
        losses, weights = [], []
        for number, (batch, part) in enumerate(zip(batches, shares, strict=True)):
            with self.strategy.gradient_sync(self.model, enabled=number == len(shares) - 1):
                loss, weight = self._backward(batch, part, mark)
            losses.append(loss)
            weights.append(weight)
        total_weight = sum(weights[1:], weights[0])
        if self._workload.unit == "tokens":  # the global weight is known only after all micro-batches
            scale = 1.0 / self._over_ranks(total_weight)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    local_part(parameter.grad).mul_(scale)
        return torch.stack(losses).sum(), total_weight

    def evaluate(self, batch: object, share: Share) -> dict[str, tuple[float, float]]:
        """Return this rank's sum and weight of the loss and of each metric on one batch, without gradients."""
        with torch.no_grad(), self._precision or nullcontext():
            totals: dict[str, tuple[Tensor | float, Tensor | float]] = {"loss": self._workload.loss(self.model, batch)}
            metrics: Callable[..., Mapping[str, tuple[Tensor | float, Tensor | float]]] | None
            if metrics := getattr(self._workload, "metrics", None):
                totals.update(metrics(self.model, batch))
        counts = share.samples > 0
        return {name: (float(total) * counts, float(weight) * counts) for name, (total, weight) in totals.items()}

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the values that the workload derives from the means of loss and metrics, such as a perplexity."""
        found: Callable[..., Mapping[str, Tensor | float]] | None = getattr(self._workload, "derived", None)
        return {name: float(value) for name, value in found(means).items()} if found else {}

    @property
    def unwrapped(self) -> nn.Module:
        """The workload's own model, without the strategy's wrapper."""
        return self.strategy.unwrap(self.model)

    @contextmanager
    def without_gradient_sync(self) -> Iterator[None]:
        """Disable the exchange of gradients for a block; the parameters of the ranks diverge in it."""
        self._alone = True
        try:
            with self.strategy.gradient_sync(self.model, enabled=False):
                yield
        finally:
            self._alone = False

    def snapshot(self) -> Snapshot:
        """Return a copy of parameters, buffers and optimizer state on the host."""
        state: Snapshot = {
            "model": self.model.state_dict(),
            "buffers": dict(self.model.named_buffers()),  # non-persistent buffers too
            "optimizer": self.optimizer.state_dict(),
        }
        copied: Snapshot = tree_map(_on_host, state)
        return copied

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot."""
        self.model.load_state_dict(snapshot["model"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(snapshot["buffers"][name])
        self.optimizer.state.clear()  # else entries that the snapshot lacks would remain
        # a copy: the optimizer keeps these tensors and updates them in place
        self.optimizer.load_state_dict(copy.deepcopy(snapshot["optimizer"]))

    def finite(self, losses: list[Tensor]) -> bool:
        """Return whether these losses and all parameters on this rank are finite."""
        values = [loss.float() for loss in losses] + [local_part(p).detach().sum() for p in self.model.parameters()]
        return bool(torch.isfinite(torch.stack([value.float() for value in values])).all())

    def _global_weight(self, weight: Tensor, share: Share) -> Tensor | float:
        """Return the weight of the global batch: the number of samples, or the sum of tokens over the ranks."""
        if self._counts_samples:
            return share.global_samples
        if self._micro_batches > 1:
            return 1.0  # not known before the last micro-batch: _accumulate divides the gradient afterwards
        return self._over_ranks(weight)

    def _over_ranks(self, weight: Tensor) -> Tensor:
        """Return the sum over the ranks; without gradient synchronisation, this rank's weight times their number."""
        if self._alone:
            return torch.as_tensor(weight).detach().float() * self._ranks.world_size
        # kept on the device: reading the value would make the host wait for the whole forward pass
        total = torch.as_tensor(weight, device=self._ranks.devices[0]).detach().clone().float()
        if self._ranks.world_size > 1:
            torch.distributed.all_reduce(total)
        return total


def set_precision(precision: str) -> None:
    """Enable TF32 for matrix products and convolutions, or disable it. Autocast is entered at each step."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _autocast(precision: str, device: str) -> torch.autocast | None:
    """Return the autocast context of forward passes, for bf16 only; weights and gradient reduction stay in float32.

    The one object is entered at every step, never nested.
    """
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else None


def _on_host(leaf: object) -> object:
    return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which fsdp creates; any other tensor is returned itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor
