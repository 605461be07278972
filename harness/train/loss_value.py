"""The return value of a workload's loss(): the sum of the losses of a batch, and the weight of the batch."""

from __future__ import annotations

from torch import Tensor

from harness.errors import WorkloadError

PAIR = "loss() must return (sum, weight)"


def as_loss(returned: object) -> tuple[Tensor, Tensor]:
    """Return the sum and weight that loss() returned; raise WorkloadError if it returned anything else."""
    if wrong := wrong_loss(returned):
        raise WorkloadError(
            f"{PAIR}: the sum of the losses of the batch, a tensor of one number, and the number of its samples or "
            f"tokens; got {wrong}"
        )
    pair: tuple[Tensor, Tensor] = returned  # type: ignore[assignment]
    return pair[0], pair[1]


def wrong_loss(returned: object) -> str:
    """Return in words what loss() returned, if that is no sum with a weight; else nothing."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        return describe(returned)
    total, weight = returned
    counts = weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, int | float)
    if isinstance(total, Tensor) and total.numel() == 1 and counts:
        return ""
    return f"({describe(total)}, {describe(weight)})"


def describe(value: object) -> str:
    """Return a value in a few words: 'a float', 'a tensor of shape (64,)', 'a tuple of 3 items'."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.ndim else "a tensor without dimensions"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} items"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
