"""The return value of a workload's loss(), a sum and its weight; and the weight of a global batch in tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.errors import WorkloadError

PAIR = "loss() must return (sum, weight)"


def as_loss(returned: object) -> tuple[Tensor, Tensor]:
    """Return the sum and weight that loss() returned; raise WorkloadError if it returned anything else."""
    got = describe(returned)
    if isinstance(returned, tuple | list) and len(returned) == 2:
        total, weight = returned
        counts = weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, int | float)
        if isinstance(total, Tensor) and total.numel() == 1 and counts:
            return total, weight
        got = f"({describe(total)}, {describe(weight)})"
    raise WorkloadError(
        f"{PAIR}: the sum of the losses of the batch, a tensor of one number, and the number of its samples or "
        f"tokens; got {got}"
    )


def describe(value: object) -> str:
    """Return a value in a few words: 'a float', 'a tensor of shape (64,)', 'a tuple of 3 items'."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.ndim else "a tensor without dimensions"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} items"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


class TokenSum:
    """The sum of the ranks' weights in one step. The exchange begins at construction and is awaited by ``value``."""

    def __init__(self, weights: Sequence[Tensor], device: torch.device, *, world_size: int, alone: bool) -> None:
        """Begin the exchange of the sum of a rank's weights, one a micro-batch; ``alone``: as if all ranks had it."""
        own = on_device(sum(weights[1:], weights[0]), device)
        self._total = own * world_size if alone or world_size == 1 else own.clone()
        self._work = None if alone or world_size == 1 else dist.all_reduce(self._total, async_op=True)

    def value(self) -> Tensor:
        """Return the sum; on CUDA the stream waits for it, not the host."""
        if self._work is not None:
            self._work.wait()
        return self._total


def tokens_per_sample(tokens: Tensor, samples: float) -> Tensor:
    """Return the tokens of a sample, at least 1, as the nearest power of two: a division by that does not round."""
    return torch.exp2((tokens / samples).clamp(min=1.0).log2().round())


def on_device(weight: Tensor | float, device: torch.device) -> Tensor:
    """Return a weight as a float32 scalar on the device.

    The host does not wait for the device: a weight in its own memory is filled in, not copied.
    """
    if isinstance(weight, Tensor) and weight.device == device:
        return weight.detach().float()
    return torch.full((), float(weight), device=device)


def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply every gradient, or this rank's shard of it, by a scalar on its device."""
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    if gradients:  # without exchange, fsdp's shards have none; torch 2.11 takes no empty list
        torch._foreach_mul_(gradients, factor)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor whole and dense. Collective if it is sharded."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole if whole.layout is torch.strided else whole.to_dense()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which fsdp creates; any other tensor is returned itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor
