"""Tensors of a model that are neither parameters nor buffers: in attributes, and one level deep in containers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

OWN = frozenset(vars(nn.Module()))
"""The attributes of every module."""


def hidden_tensors(model: nn.Module) -> list[tuple[Tensor, str]]:
    """Return tensors in plain attributes, lists, tuples and dictionaries, with names; those of modules in them too."""
    found: list[tuple[Tensor, str]] = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in OWN:
                continue
            place = f"{path + '.' if path else ''}{name}"
            if isinstance(value, Tensor):
                found.append((value, f"{place} (a plain attribute of {type(module).__name__})"))
            for key, item in _items(value):
                kept = f"(in a plain {type(value).__name__})"
                found += [(tensor, f"{place}[{key!r}]{inner} {kept}") for tensor, inner in _tensors(item)]
    return found


def name_of(tensor: Tensor, hidden: Iterable[tuple[Tensor, str]]) -> str | None:
    """Return the name of a hidden tensor, or of the tensor that it is a view of; None if there is none."""
    for other, name in hidden:
        if other is tensor or (_address(other) and _address(other) == _address(tensor)):
            return name
    return None


def _address(tensor: Tensor) -> int:
    """Return the address of the storage; 0 if there is none, as on the "meta" device, or several (sparse tensors)."""
    has_one = tensor.device.type != "meta" and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if has_one else 0


def _tensors(item: object) -> Iterator[tuple[Tensor, str]]:
    if isinstance(item, Tensor):
        yield item, ""
    elif isinstance(item, nn.Module):
        for inner, tensor in chain(item.named_parameters(), item.named_buffers()):
            yield tensor, f".{inner}"


def _items(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()
