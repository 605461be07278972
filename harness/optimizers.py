"""Optimizers and schedules of torch.optim, by the name and options that the experiment gives."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harness.errors import WorkloadError, nearest


def make_optimizer(model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of torch.optim by name; raises WorkloadError at an unknown name or option."""
    found = find_class(torch.optim, torch.optim.Optimizer, options.get("name"), "optimizer.name")
    arguments = {key: value for key, value in options.items() if key != "name"}
    check_arguments(found, arguments, "optimizer")
    try:
        return found(model.parameters(), **arguments)  # type: ignore[no-any-return]
    except Exception as error:  # each class has its own way to refuse its options
        raise refused("optimizer", options, error) from None


def make_schedule(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any]
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """A schedule of torch.optim.lr_scheduler by name, stepped once an epoch; None where none is asked for."""
    if not options:
        return None
    base = torch.optim.lr_scheduler.LRScheduler
    found = find_class(torch.optim.lr_scheduler, base, options.get("name"), "schedule.name")
    arguments = {key: value for key, value in options.items() if key != "name"}
    check_arguments(found, arguments, "schedule")
    try:
        return found(optimizer, **arguments)  # type: ignore[no-any-return]
    except Exception as error:
        raise refused("schedule", options, error) from None


def find_class(module: Any, base: type, name: object, place: str) -> Any:
    """A subclass of ``base`` in a module by its name; raises WorkloadError that offers the nearest."""
    names = [key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)]
    names = [key for key in names if not key.startswith("_") and getattr(module, key) is not base]
    if name not in names:
        raise WorkloadError(f"{place}: got {name!r}; {nearest(str(name), names)}")
    return getattr(module, str(name))


def check_arguments(found: Any, arguments: Mapping[str, Any], place: str) -> None:
    """Every argument is a parameter of the class; raises WorkloadError that offers the nearest."""
    allowed = [name for name in inspect.signature(found).parameters if name not in ("params", "optimizer")]
    for key in arguments:
        if key not in allowed:
            raise WorkloadError(f"{place}.{key}: {found.__name__} has no such option; {nearest(key, allowed)}")


def refused(section: str, options: Mapping[str, Any], error: Exception) -> WorkloadError:
    """The error for options that torch does not take: which, what it said, what may help."""
    given = ", ".join(f"{key}: {value!r}" for key, value in options.items())
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    hint = "; a list is an axis, a value that is a list is written [[...]]"
    return WorkloadError(f"{section}: {options.get('name')} does not take {{{given}}} ({said}){hint}")
