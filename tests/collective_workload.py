"""Workloads whose loss has collectives of its own, and ones that fail only while a trial is explained."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.equivalence import Regression


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


LATE_S = 0.1


class Collectives(Regression):
    """``kind``: contrastive (a differentiable all-gather), logged (.item() of an all-reduce), late (the same, for which
    rank 1 is LATE_S late), kept (as many values as
    the ranks that were there at the start), grouped (a group of its own), ring (each rank receives from one and sends
    to the other), sparse or beside (none in the loss, but a table with sparse gradients before the layers, or
    beside them), compiled (in the model), or none.
    """

    def __init__(self, kind: str = "none") -> None:
        super().__init__("samples")
        self.kind, self.kept = kind, world_size()
        self.group = dist.new_group(list(range(self.kept))) if kind == "grouped" and self.kept > 1 else None

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, weight = super().loss(model, batch)
        ranks = self.kept if self.kind in ("kept", "grouped") else world_size()
        if ranks > 1:
            self.exchange(total, ranks)
        return total, weight

    def exchange(self, total: Tensor, ranks: int) -> None:
        mean = total.detach().clone()
        if self.kind == "contrastive":
            from torch.distributed.nn import functional

            assert len(functional.all_gather(total)) == ranks
        elif self.kind in ("logged", "late"):
            time.sleep(LATE_S if self.kind == "late" and dist.get_rank() == 1 else 0.0)
            dist.all_reduce(mean)
            assert mean.item() >= 0
        elif self.kind == "kept":
            dist.all_gather([torch.zeros(()) for _ in range(ranks)], mean)
        elif self.kind == "ring":
            rank = dist.get_rank()
            waiting = dist.irecv(torch.zeros_like(mean), (rank - 1) % ranks)
            dist.send(mean, (rank + 1) % ranks)
            assert waiting is not None
            waiting.wait()
        elif self.group is not None:
            dist.all_reduce(mean, group=self.group)

    def build_model(self, *args: Any, **options: Any) -> nn.Module:
        model = super().build_model(*args, **options)
        if self.kind == "compiled":
            return Reducing(model)
        return WithTable(model, beside=self.kind == "beside") if self.kind in ("sparse", "beside") else model


class Reducing(nn.Module):
    """A model whose forward pass, which torch.compile may compile, has a functional all-reduce of one number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed import _functional_collectives as functional

        out: Tensor = self.model(x)
        if world_size() > 1:
            out = out + 0.0 * functional.all_reduce(out.detach().mean(), "sum", dist.group.WORLD)
        return out


class WithTable(nn.Module):
    """A model of five numbers, with a table of two rows before or beside it whose gradient is sparse."""

    def __init__(self, model: nn.Module, *, beside: bool) -> None:
        super().__init__()
        self.model, self.beside, self.table = model, beside, nn.Embedding(2, 1 if beside else 5, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x[:, 0] > 0).long())
        found: Tensor = self.model(x) + rows if self.beside else self.model(x + rows)
        return found


class FailsWhenExplained(Regression):
    """Fails on rank 1 if the model is in no wrapper, as only the count of FLOPs has it here."""

    def __init__(self, how: str = "raises") -> None:
        super().__init__("samples")
        self.how = how

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(model, nn.parallel.DistributedDataParallel) and world_size() > 1 and dist.get_rank() == 1:
            if self.how == "dies":
                os._exit(9)
            if self.how == "hangs":
                time.sleep(600)
        if not isinstance(model, nn.parallel.DistributedDataParallel) and world_size() > 1:
            dist.barrier()  # rank 0 waits
        return super().loss(model, batch)
