"""The sections of an experiment file about the data loader and about an optimizer step."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from harness.config.conflicts import Conflict, raise_conflicts
from harness.config.strategy_traits import Strict
from harness.config.values import Axis, Batch

LrScaling = Literal["none", "linear", "sqrt"]


class Loader(Strict):
    """Options of the data loader, the same for every strategy. A list is an axis.

    ``workers``: worker processes of each device; dp, whose one process drives n devices, has n times as many.
    """

    workers: Axis[Annotated[int, Field(ge=0, le=256)]] = (0,)
    pin_memory: Axis[bool] = (True,)
    prefetch_factor: Axis[Annotated[int, Field(ge=1, le=1024)]] = (2,)


class TrainingOptions(Strict):
    """Options of an optimizer step, and of its learning rate's dependence on the global batch. A list is an axis.

    ``accumulation``: micro-batches a step, into which each device's share of the global batch is split.
    ``clip_grad_norm``: the maximum 2-norm of the whole gradient. ``clip_grad_value``: the maximum absolute value of its
    elements.
    ``lr_scaling``: the learning rate is multiplied by k (linear: Goyal et al. 2017, arXiv 1706.02677) or by the
    square root of k (sqrt: Krizhevsky 2014, arXiv 1404.5997), where k = global batch / ``lr_base_batch_size``.
    ``channels_last``: weights and inputs of convolutions are stored channels last; under fsdp inputs only, since
    fully_shard keeps shards contiguous. ``cudnn_benchmark``: cuDNN times its algorithms for each new shape.
    ``warmup_epochs``: epochs over which the rate rises, step by step, from the rate in the file to the scaled rate.
    """

    accumulation: Axis[Annotated[int, Field(ge=1, le=65_536)]] = (1,)
    clip_grad_norm: Axis[Annotated[float, Field(gt=0, allow_inf_nan=False)] | None] = (None,)
    clip_grad_value: Axis[Annotated[float, Field(gt=0, allow_inf_nan=False)] | None] = (None,)
    lr_scaling: Axis[LrScaling] = ("none",)
    lr_base_batch_size: Axis[Batch | None] = (None,)
    warmup_epochs: Axis[Annotated[int, Field(ge=0, le=100_000)]] = (0,)
    channels_last: Axis[bool] = (False,)
    cudnn_benchmark: Axis[bool] = (False,)

    @model_validator(mode="after")
    def _check(self) -> Self:
        scales = set(self.lr_scaling) != {"none"}
        clips = set(self.clip_grad_norm) != {None} and set(self.clip_grad_value) != {None}
        raise_conflicts(
            Conflict(
                scales and None in self.lr_base_batch_size,
                "lr_scaling: needs lr_base_batch_size, the global batch size that the optimizer's lr was chosen for",
                ("lr_scaling", "lr_base_batch_size"),
            ),
            Conflict(
                any(self.warmup_epochs) and not scales,
                "warmup_epochs: needs lr_scaling linear or sqrt; it rises from the optimizer's lr to the scaled one",
                ("warmup_epochs", "lr_scaling"),
            ),
            Conflict(
                clips,
                "clip_grad_norm: not together with clip_grad_value; to compare them, give each a grid of its own",
                ("clip_grad_norm", "clip_grad_value"),
            ),
        )
        return self
