"""Digests of tensors and samples, so that ranks can compare them without sending them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def digest_of(value: object) -> str:
    """Return 12 hexadecimal digits for a tensor, or for the tensors, numbers and texts in nested containers."""
    digest = hashlib.sha1(usedforsecurity=False)
    for leaf in tree_leaves(value):
        digest.update(_bytes(leaf))
    return digest.hexdigest()[:12]


def _bytes(leaf: object) -> bytes:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, str | bytes | int | float | complex | None):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()  # its repr may contain its address, which changes with every object
