"""Optimizers and schedules of torch.optim by name, learning-rate scaling and warm-up, gradient clipping."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import ModuleType
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from harness.errors import Collected, WorkloadError, nearest
from harness.plan.cell import Options

T = TypeVar("T")


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Return an optimizer of torch.optim by name; raise WorkloadError at an unknown name or option."""
    found = find_class(torch.optim, torch.optim.Optimizer, options.get("name"), "optimizer.name")
    return _construct(found, model.parameters(), options, "optimizer")


def own_or_named(
    workload: object, method: Literal["optimizer", "schedule"], first: object, options: Options, named: Callable[[], T]
) -> T:
    """Return what the workload's own method makes of a model or optimizer and the file's options, else ``named()``.

    Raise WorkloadError if that is no optimizer, or no schedule and not None.
    """
    own: Callable[..., T] | None = getattr(workload, method, None)
    if not callable(own):
        return named()
    made = own(first, dict(options))
    kind = torch.optim.Optimizer if method == "optimizer" else torch.optim.lr_scheduler.LRScheduler
    if not isinstance(made, kind) and not (method == "schedule" and made is None):
        raise WorkloadError(f"{method}() must return a torch {kind.__name__}; got a {type(made).__name__}")
    return made


def make_schedule(optimizer: torch.optim.Optimizer, options: Options) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return a schedule of torch.optim.lr_scheduler by name; None without options. Raise WorkloadError.

    ``warmup_steps``: before it, that many steps in which the rate rises linearly, from rate / steps.
    """
    if not options:
        return None
    by_step(options)
    warmup = options.get("warmup_steps", 0)
    options = {name: value for name, value in options.items() if name not in ("interval", "warmup_steps")}
    schedules = torch.optim.lr_scheduler
    found = find_class(schedules, schedules.LRScheduler, options.get("name"), "schedule.name")
    if not warmup:
        return _construct(found, optimizer, options, "schedule")
    assert isinstance(warmup, int)  # by_step() has checked it
    rising = schedules.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    after = _construct(found, optimizer, options, "schedule")
    return schedules.SequentialLR(optimizer, [rising, after], milestones=[warmup])


def by_step(options: Options) -> bool:
    """Return whether the schedule is stepped after each optimizer step, not after each epoch; raise WorkloadError."""
    interval = options.get("interval", "epoch")
    if interval not in ("epoch", "step"):
        raise WorkloadError(f"schedule.interval: got {interval!r}; allowed: epoch, step")
    warmup = options.get("warmup_steps", 0)
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise WorkloadError(f"schedule.warmup_steps: got {warmup!r}; allowed: a number of steps, 0 or more")
    if warmup and interval != "step":
        raise WorkloadError(f"schedule.warmup_steps: needs schedule.interval: step; got {interval}")
    return interval == "step"


def _construct(found: Callable[..., T], first: object, options: Options, section: str) -> T:
    """Return an instance of a class of torch with these options; raise WorkloadError if the class rejects them."""
    arguments = {key: value for key, value in options.items() if key != "name"}
    allowed = [name for name in inspect.signature(found).parameters if name not in ("params", "optimizer")]
    problems = Collected()
    for key in arguments:
        if key not in allowed:
            problems.add(
                WorkloadError(f"{section}.{key}: {options['name']} has no such option; {nearest(key, allowed)}")
            )
    problems.raise_all()
    try:
        return found(first, **arguments)
    except Exception as error:  # each class rejects its options in its own way
        raise rejected(section, options, error) from None


def fast_forward(schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> None:
    """Advance a new schedule by ``steps`` steps; the optimizer's rates stay unchanged.

    The state of a schedule follows from its options and its number of steps. Its state dict cannot be stored as plain
    values: some contain counters and functions.
    """
    groups = schedule.optimizer.param_groups
    kept = [dict(group) for group in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the optimizer has taken no step yet
        for _ in range(steps):
            schedule.step()
    for group, values in zip(groups, kept, strict=True):
        group.update(values)


def scale_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Multiply the learning rate and return it: the rate without a schedule, after the warm-up."""
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return float(optimizer.param_groups[0]["lr"])


class WarmUp:
    """Linear warm-up of a scaled learning rate from the unscaled one (Goyal et al. 2017, section 2.2).

    ``factor``: scaled rate / unscaled rate; up to 1 there is no warm-up. A schedule keeps its course meanwhile: each
    rate of the warm-up is a fraction of the schedule's current rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float, steps: int) -> None:
        self._optimizer, self._factor = optimizer, factor
        self.steps = steps if factor > 1 else 0

    def part(self, step: int) -> float:
        """Return the fraction of the rate at a step, counted from 0: 1 / factor at first, 1 from step ``steps`` on."""
        if step >= self.steps:
            return 1.0
        return (1.0 + (self._factor - 1.0) * step / self.steps) / self._factor

    @contextmanager
    def rates_from(
        self, step: int, schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    ) -> Iterator[Callable[[], None]]:
        """Yield a function that sets the next step's rate, from this step on; at exit restore the schedule's.

        ``schedule``: one that advances after each of the steps, as it would without a warm-up.
        """
        if step >= self.steps and schedule is None:
            yield lambda: None
            return
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        steps = count(step)

        def set_rates(part: float) -> None:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * part

        def set_next() -> None:
            number = next(steps)
            if schedule and number > step:
                set_rates(1.0)
                schedule.step()
                rates[:] = [group["lr"] for group in groups]
            set_rates(self.part(number))

        yield set_next
        set_rates(1.0)
        if schedule and next(steps) > step:
            schedule.step()


def make_clip(options: Options) -> Callable[[Iterable[Tensor]], object] | None:
    """Return a function that clips gradients in place, by norm or by value; None if neither is asked for."""
    if isinstance(norm := options.get("clip_grad_norm"), int | float):
        return partial(clip_grad_norm_, max_norm=norm)
    if isinstance(value := options.get("clip_grad_value"), int | float):
        return partial(clip_grad_value_, clip_value=value)
    return None


def find_class(module: ModuleType, base: type[T], name: object, place: str) -> type[T]:
    """Return a subclass of ``base`` in a module by its name; raise WorkloadError, which offers the nearest."""
    names = [key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)]
    names = [key for key in names if not key.startswith("_") and getattr(module, key) is not base]
    if name not in names:
        raise WorkloadError(f"{place}: got {name!r}; {nearest(str(name), names)}")
    found: type[T] = getattr(module, str(name))
    return found


def rejected(section: str, options: Options, error: Exception) -> WorkloadError:
    """Return the error for options that torch rejects: the options, torch's message, a hint."""
    given = ", ".join(f"{key}: {value!r}" for key, value in options.items())
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    hint = "; a list is an axis, a value that is a list is written [[...]]"
    return WorkloadError(f"{section}: {options.get('name')} does not take {{{given}}} ({said}){hint}")
