"""A copy of a training's state on the host."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor
from torch.utils._pytree import tree_map


class Snapshot(TypedDict):
    """The state of a training. ``optimizer``: its state dict, whose values differ by class.

    ``scaler``: that of the loss scale; empty unless fp16.
    """

    model: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]


def copy_on_host(state: Snapshot) -> Snapshot:
    """Return a copy of the state whose tensors are on the host."""
    copied: Snapshot = tree_map(_leaf_on_host, state)
    return copied


def _leaf_on_host(leaf: object) -> object:
    return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf
