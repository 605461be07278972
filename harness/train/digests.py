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


class NoDigest(TypeError):
    """Raised for a value of which nothing can be compared."""


def value_digest(value: object, *, objects: bool = True) -> str:
    """Return 12 hexadecimal digits for a tensor, or for the tensors, arrays, numbers and texts in nested containers.

    Of other objects their pickle counts, without ``objects`` the name of their type. Raises NoDigest without a pickle.
    """
    digest = hashlib.sha1(usedforsecurity=False)
    for leaf in tree_leaves(value):
        digest.update(_bytes(leaf, objects=objects))
    return digest.hexdigest()[:12]


def _bytes(leaf: object, *, objects: bool) -> bytes:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        return leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, str | bytes | int | float | complex | None):
        return repr(leaf).encode()
    if isinstance(leaf, set | frozenset):  # whose order differs between processes
        return repr(sorted(value_digest(item, objects=objects) for item in leaf)).encode()
    if hasattr(leaf, "__array_interface__") and (array := np.asarray(leaf)).dtype != object:  # of NumPy, or of Pillow
        return array.tobytes()
    if not objects:
        return type(leaf).__name__.encode()  # its repr may contain its address, which changes with every object
    if (found := pickle_digest(leaf)) is None:
        raise NoDigest(f"values of the type {type(leaf).__name__} cannot be compared: pickle refuses them")
    return found.encode()


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

    def persistent_id(self, obj: object) -> Any:
        """Return the content of a set, whose order differs between processes; None for other objects."""
        return ("set", sorted(pickle_digest(item) or "" for item in obj)) if isinstance(obj, set | frozenset) else None

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, FunctionType) and "<" in obj.__qualname__:
            held = [cell.cell_contents for cell in obj.__closure__ or ()]
            return tuple, ((obj.__qualname__, held, obj.__defaults__, obj.__kwdefaults__),)
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.device.type == "meta":
            return NotImplemented
        self.hash.update(obj.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return str, (f"{obj.dtype} {tuple(obj.shape)}",)
