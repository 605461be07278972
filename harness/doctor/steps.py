"""A few real steps of the wrapped training: losses, calls, and the parameters that do not change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from harness.doctor.batch_facts import Padded, padded_of
from harness.doctor.digest import digest_of
from harness.doctor.process_group import group_of_one
from harness.doctor.subject import Subject
from harness.measure.window import synchronize
from harness.plan.trial import SkipTrial
from harness.train.token_weights import local_part
from harness.train.training import Training

STEPS = 4


@dataclass
class Steps:
    """The real steps of one rank. Names are those of the model inside the wrapper."""

    calls: int = 0
    """Forward passes of the wrapper."""
    inner_calls: int = 0
    """Forward passes of the model inside the wrapper, without those of replicas."""
    losses: list[float] = field(default_factory=list)
    """Sum of the losses of this rank's part of the batch, by step."""
    weights: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    """Samples of this rank's part of the batch, by step."""
    unit: str = "samples"
    """The unit of the weights."""
    single_device_losses: list[float] = field(default_factory=list)
    """Mean loss of the same global batches on one device, on rank 0."""
    unchanged: dict[str, str] = field(default_factory=dict)
    """Trainable parameters that did not change, and their gradient: "none", "zero" or "some"."""
    trainable: int = 0
    parameter_bytes: int = 0
    """Size of the whole model, before sharding."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digest of every parameter after the steps; empty if the strategy shards parameters."""
    wrapped_by_itself: str = ""
    """A wrapper inside the workload's own model."""
    draws: bool = False
    """The steps drew random numbers on the CPU."""
    random_state: str = ""
    """Digest of the generator's state after the steps."""
    step_s: float = 0.0
    """Time of the fastest step."""
    padded: Padded = field(default_factory=Padded)
    """The padding of the first batch."""
    lr: float = 0.0
    """Learning rate of the steps."""


def observe(subject: Subject) -> Steps:
    """Train STEPS steps as a trial does; an error here would be an error of the trial."""
    return _observed(subject, subject.training())


def observe_own_part(subject: Subject) -> Steps:
    """Train STEPS steps on this rank's part of the batches, without wrapper and without the other ranks."""
    return _observed(subject, subject.single_device_training())


def _observed(subject: Subject, training: Training) -> Steps:
    training.set_first_rate()
    training.expect_few_steps()
    rate = float(training.optimizer.param_groups[0]["lr"])
    seen = Steps(wrapped_by_itself=_own_wrapper(training), lr=rate, unit=training.unit)
    seen.parameter_bytes = sum(p.numel() * p.element_size() for p in training.model.parameters())
    batches = subject.stream(STEPS)
    inner = training.unwrapped
    before = {name: local_part(p).detach().clone() for name, p in inner.named_parameters() if p.requires_grad}
    seen.padded = padded_of([batch for _, batch in batches], training.unit)
    state = torch.get_rng_state()
    hooks = _count_calls(training.model, inner, seen)
    with_gradient: dict[str, str] = {}
    times = []
    for share, batch in batches:
        synchronize(subject.ranks.devices)
        start = time.perf_counter()
        loss, weight = training.step(batch, share)
        synchronize(subject.ranks.devices)
        times.append(time.perf_counter() - start)
        seen.losses.append(float(loss))
        seen.weights.append(float(weight))
        seen.samples.append(share.samples)
        _note_gradients(inner, with_gradient)
        subject.advance()
    for hook in hooks:
        hook.remove()
    seen.step_s = min(times)
    after = torch.get_rng_state()
    seen.draws, seen.random_state = not torch.equal(state, after), digest_of(after)
    seen.trainable = len(before)
    for name, parameter in inner.named_parameters():
        if name in before and torch.equal(before[name], local_part(parameter).detach()):
            kind = with_gradient.get(name, "none")
            if kind != "some" or not _is_rounding(parameter, training.optimizer):
                seen.unchanged[name] = kind
    if not subject.cell.traits.shards_parameters:
        seen.digests = {name: digest_of(p.detach()) for name, p in inner.named_parameters() if p.requires_grad}
    return seen


def add_single_device_losses(subject: Subject, seen: Steps) -> None:
    """Train on the same global batches on one device of rank 0, and add the losses to ``seen``."""
    if not subject.ranks.first or (subject.ranks.world_size == 1 and subject.replicas == 1):
        return
    try:
        with group_of_one():
            training = subject.single_device_training()
            training.set_first_rate()
            training.expect_few_steps()
            for share, batch in subject.stream(STEPS, whole=True):
                loss, weight = training.step(batch, share)
                seen.single_device_losses.append(float(loss) / max(float(weight), 1.0))
                subject.advance()
    except (torch.OutOfMemoryError, SkipTrial):  # the global batch does not fit on one device: no comparison
        seen.single_device_losses.clear()


def mean_losses(seen: Sequence[Steps]) -> list[float]:
    """Return the loss of each global batch: the sum over the ranks over the sum of their weights."""
    return [
        sum(rank.losses[step] for rank in seen) / max(1.0, sum(rank.weights[step] for rank in seen))
        for step in range(len(seen[0].losses))
    ]


def _own_wrapper(training: Training) -> str:
    """Return the name of a wrapper inside the workload's own model, or ''."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    inner = training.unwrapped
    found = [
        f"{path or 'the model'}: {type(m).__name__}" for path, m in inner.named_modules() if isinstance(m, wrappers)
    ]
    return found[0] if found else ""


def _count_calls(model: nn.Module, inner: nn.Module, seen: Steps) -> list[RemovableHandle]:
    def outer_called(*_: object) -> None:
        seen.calls += 1

    def inner_called(*_: object) -> None:
        seen.inner_calls += 1

    return [model.register_forward_hook(outer_called), inner.register_forward_hook(inner_called)]


def _note_gradients(model: nn.Module, noted: dict[str, str]) -> None:
    """Update the largest kind of gradient of each parameter: none, zero, or some."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and noted.get(name) != "some":
            noted[name] = "some" if bool(local_part(parameter.grad).any()) else "zero"


def _is_rounding(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether SGD's step is below the parameter's precision: a bias before BatchNorm gets only noise."""
    rate = max(float(group["lr"]) for group in optimizer.param_groups)
    if parameter.grad is None or not rate or not isinstance(optimizer, torch.optim.SGD):
        return False  # other optimizers turn a small gradient into a large step
    number = torch.finfo(parameter.dtype)
    digit = number.eps * local_part(parameter).detach().abs().clamp_min(number.tiny)
    return bool((rate * local_part(parameter.grad).abs() <= digit).all())
