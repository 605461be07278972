"""The transfer of a batch of any type from the host to a device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import cache

import torch
from torch import Tensor

from harness.errors import WorkloadError
from harness.plan.cell import Options

Move = Callable[[object], object]


def copier(device: torch.device, options: Options) -> Move:
    """Return a function that moves a batch to the device; on a CPU the identity."""
    if device.type == "cpu":
        return lambda batch: batch
    pinned = pins(device, options)
    return lambda batch: to_device(batch, device, non_blocking=pinned)


def pins(device: torch.device, options: Options) -> bool:
    """Return whether the loader pins the batches of this device."""
    return bool(options.get("pin_memory", True)) and device.type == "cuda"


def to_device(batch: object, device: torch.device, *, non_blocking: bool = False) -> object:
    """Return the batch with all its tensors on the device, and its own type.

    Tensors, whatever has a method ``to(device)``, and mappings, sequences, named tuples and dataclasses of them. What
    holds no tensor is returned as it is. Raises WorkloadError for any other object that holds a tensor.
    """

    def move(part: object) -> object:
        if isinstance(part, Tensor):
            return part.to(device, non_blocking=non_blocking)
        to = getattr(part, "to", None)
        if callable(to):
            kind: type = type(part)
            return to(device, **({"non_blocking": non_blocking} if _takes_non_blocking(kind) else {}))
        if isinstance(part, Mapping):
            return _mapping(part, move)
        if isinstance(part, tuple | list):
            return _sequence(part, move)
        return _object(part, move, device)

    return move(batch)


@cache
def _takes_non_blocking(kind: type) -> bool:
    """Return whether the method ``to`` of this class has a parameter ``non_blocking`` or takes any keyword."""
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return False
    return "non_blocking" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _mapping(part: Mapping[object, object], move: Move) -> Mapping[object, object]:
    """Return the mapping with moved values; a copy keeps the attributes of a class of the user's own."""
    moved = {key: move(value) for key, value in part.items()}
    if type(part) is dict:
        return moved
    try:
        if not isinstance(part, MutableMapping):
            return type(part)(moved)  # type: ignore[call-arg]
        other = copy.copy(part)
        for key, value in moved.items():
            other[key] = value
        return other
    except TypeError:  # a class that needs other arguments, or is read-only
        return moved


def _sequence(part: tuple[object, ...] | list[object], move: Move) -> object:
    moved = [move(value) for value in part]
    kind: Callable[..., object] = type(part)
    if kind is list:
        return moved
    if hasattr(part, "_fields"):
        return kind(*moved)
    try:
        return kind(moved)
    except TypeError:
        return tuple(moved) if isinstance(part, tuple) else moved


def _object(part: object, move: Move, device: torch.device) -> object:
    """Return a dataclass with moved fields, or an object without tensors; raise WorkloadError for one with tensors."""
    if is_dataclass(part) and not isinstance(part, type):
        other = copy.copy(part)
        for each in fields(part):
            if hasattr(part, each.name):
                object.__setattr__(other, each.name, move(getattr(part, each.name)))  # it may be frozen
        return other
    for name, value in getattr(part, "__dict__", {}).items():
        if _holds_tensor(value):
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            raise WorkloadError(
                f"batch: got an object of {kind} with tensors in {name!r}, which cannot be moved to {device}; allowed: "
                "tensors, objects with a method to(device), and lists, tuples, mappings and dataclasses of them; "
                f"give {type(part).__qualname__} a method to(device) that returns it with its tensors on the device"
            )
    return part


def _holds_tensor(value: object) -> bool:
    """Return whether a value is a tensor or a container of them."""
    if isinstance(value, Tensor):
        return True
    inside: Iterable[object] = value.values() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple | set | frozenset):
        inside = value
    return any(map(_holds_tensor, inside))
