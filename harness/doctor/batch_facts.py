"""What a batch is made of: padding, read from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types of tokens."""


@dataclass(frozen=True)
class Padded:
    """The first padded tensor of a rank's batch; ``places`` 0 if there is none."""

    places: int = 0
    real: int = 0
    counts_tokens: bool = False

    @property
    def share(self) -> float:
        return self.real / self.places if self.places else 1.0


def padded_of(batches: Sequence[object], unit: str) -> Padded:
    """Look for tensors of whole numbers, of shape (batch, length), whose rows end in the same number in every batch."""
    for leaves in zip(*map(tree_leaves, batches), strict=False):
        found = [_padding(leaf) for leaf in leaves]
        if found and all(found) and len({padding for padding, _ in filter(None, found)}) == 1:
            first = leaves[0]
            assert found[0] and isinstance(first, Tensor)
            return Padded(first.numel(), found[0][1], unit == "tokens")
    return Padded()


def _padding(leaf: object) -> tuple[int, int] | None:
    """Return the number that pads a tensor, and how many others it has; None if it is not padded."""
    if not isinstance(leaf, Tensor) or leaf.dtype not in WHOLE or leaf.ndim != 2 or min(leaf.shape) < 2:
        return None
    lengths = real_lengths(leaf)
    return None if lengths is None else (int(leaf[:, -1].mode().values), int(lengths.sum()))


def real_lengths(rows: Tensor) -> Tensor | None:
    """Return the length of each row without padding; None if the rows are not padded.

    Padding is the number in which most rows end. The longest row of a padded batch has none, and several have some.
    """
    padding = rows[:, -1].mode().values
    is_padding = rows == padding
    trailing = is_padding.flip(1).long().cumprod(1).sum(1)
    # a row of other values may end in the same one by chance: padding is also found nowhere before the end
    inside = is_padding.sum(1) - trailing
    several = int((trailing > 1).sum()) > 1 and len(torch.unique(trailing)) > 1
    return rows.size(1) - trailing if several and not bool(inside.any()) else None
