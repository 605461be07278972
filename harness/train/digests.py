"""Digests: of values, so that ranks can compare them without sending them, and of whole objects, by their pickle."""

from __future__ import annotations

import hashlib
import pickle
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def value_digest(value: object) -> str:
    """Return 12 hexadecimal digits for a tensor, or for the tensors, arrays, numbers and texts in nested containers."""
    digest = hashlib.sha1(usedforsecurity=False)
    for leaf in tree_leaves(value):
        digest.update(_bytes(leaf))
    return digest.hexdigest()[:12]


def _bytes(leaf: object) -> bytes:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, str | bytes | int | float | complex | None):
        return repr(leaf).encode()
    if hasattr(leaf, "__array_interface__"):  # an array of NumPy, an image of Pillow
        array = np.asarray(leaf)
        return array.tobytes() if array.dtype != object else repr(array.shape).encode()
    return type(leaf).__name__.encode()  # its repr may contain its address, which changes with every object


def pickle_digest(thing: object) -> str | None:
    """Return a digest of an object's pickle; None if it cannot be pickled."""
    pickler = _Digest()
    try:
        pickler.dump(thing)
    except Exception:  # whatever an object of the user raises here
        return None
    return pickler.hash.hexdigest()


class _Digest(pickle.Pickler):
    """Pickles into a digest; the values of arrays and tensors go there without a copy.

    A lambda or an inner function, which pickle refuses, counts as what it holds.
    """

    def __init__(self) -> None:
        self.hash = hashlib.sha1(usedforsecurity=False)
        super().__init__(self, protocol=5, buffer_callback=lambda buffer: self.hash.update(buffer.raw()))

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, FunctionType) and "<" in obj.__qualname__:
            held = [cell.cell_contents for cell in obj.__closure__ or ()]
            return tuple, ((obj.__qualname__, held, obj.__defaults__, obj.__kwdefaults__),)
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.device.type == "meta":
            return NotImplemented
        self.hash.update(obj.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return str, (f"{obj.dtype} {tuple(obj.shape)}",)
