"""A few real steps of the wrapped training: losses, calls, parameters that do not change."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from harness.doctor.facts import (
    StepMemory,
    Steps,
    digests_in_objects,
    digests_of_state,
    moved_by_hand,
    padded_of,
    share_of_biases,
    sums_of_frozen,
    uses_own_statistics,
)
from harness.doctor.subject import SMALL, Subject, describe_error
from harness.measure.convergence import Evaluator
from harness.measure.exchanges import CollectiveMode, group_name
from harness.measure.generators import drawing
from harness.measure.scenarios import is_device_error
from harness.measure.sketches import acts_by_mode
from harness.measure.stepper import TrainingData
from harness.measure.window import synchronize
from harness.system.process import no_garbage_collection
from harness.train.loader import Share, value_digest
from harness.train.precision import LOW_PRECISIONS
from harness.train.training import BACKWARD, Mark, Phase, StepValues, Training, local_part
from harness.train.workloads import Workload, innermost

STEPS = 4


class OtherRanksNeeded(Exception):
    """A collective of the workload over ranks that do not take part in the pass."""


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Make a group of this rank alone the default one for a block; without several ranks do nothing.

    The workload's code then finds what it finds on one device: get_world_size() is 1, and a collective of its own
    waits for nobody. One over a group that the workload made earlier raises OtherRanksNeeded: it would wait for ever.
    The harness's own collectives must stay outside the block. All ranks enter it, even those that do nothing inside:
    torch numbers groups, and those that the workload makes later must have the same numbers on all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # local synchronisation: the others make no group. On CUDA NCCL, since gloo lacks collectives there; the group has
    # a part of the store of its own and, as no rank is bound to a device, splits no communicator of all ranks
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    own = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    assert isinstance(own, dist.ProcessGroup)
    everyone = dist.group.WORLD
    dist.group.WORLD = own
    try:
        with _Only(own):
            yield
    finally:
        dist.group.WORLD = everyone
        dist.destroy_process_group(own)


class _Only(CollectiveMode):
    """Raises OtherRanksNeeded at a collective over any other group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = group.group_name

    def collective(self, name: str, arguments: Sequence[object], run: Callable[[], object]) -> object:
        if others := sorted(each for each in map(group_name, arguments) if each and each != self._name):
            raise OtherRanksNeeded(f"{name} in a pass on one device is over a group of several ranks ({others[0]})")
        return run()


def observe(subject: Subject) -> Steps:
    """Train STEPS steps as a trial does; an error here would be an error of the trial."""
    training = subject.training()
    with no_garbage_collection():
        seen = _observed(subject, training)
    if subject.ranks.world_size > 1:
        seen.same_batch_loss = _same_batch_loss(subject, training.unwrapped)
    _rehearse(subject, training, seen)
    return seen


EVALUATION = "the evaluation of the last validation samples"
ALONE = "a step without exchange, by which a trial is explained (throughput.explain: false leaves it out)"
REHEARSED = (EVALUATION, ALONE)
"""The passes of a run beside its steps, in which the workload's code may find other batches, modes and ranks."""


def _rehearse(subject: Subject, training: Training, seen: Steps) -> None:
    """Make the passes of the run that are no steps.

    What an evaluation raises is noted, and costs trainings alone; another error is a trial's, with a note on the pass.
    """
    if subject.epochs and len(subject.datasets[1]) and subject.cell.global_batch_size <= subject.training_samples:
        with _noted(EVALUATION):
            _evaluate_last_samples(subject, training, seen)
    traits, several = subject.cell.traits, subject.ranks.world_size > 1 and subject.whole_model_fits
    has_step = several and (traits.wrapper_cost or traits.explained_by == "removal")
    if subject.explains and has_step and not subject.cell.strategy_options.get("static_graph"):
        ((share, batch),) = subject.stream(1)
        with _noted(ALONE), training.without_exchange():
            training.step(batch, share)
        subject.advance()


@contextmanager
def _noted(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def _evaluate_last_samples(subject: Subject, training: Training, seen: Steps) -> None:
    """Evaluate the last two batches: of the last one each rank may have another number of samples, or none.

    A metric may have no weight there, so nothing is divided. Note what some rank raises, else the names that evaluate()
    returns, or its error. A rank may raise alone, as in a loss that eval mode lacks, so that no collective of the
    harness follows from it.
    """
    validation, batch = subject.datasets[1], subject.cell.global_batch_size
    first = max(0, len(validation) - batch - len(validation) % batch)
    few: Subset[object] = Subset(cast("Dataset[object]", validation), range(first, len(validation)))
    workload = innermost(subject.workload)
    data = TrainingData(subject.cell, subject.seed, subject.ranks, subject.datasets[0], few, workload)
    evaluator = Evaluator(training, data, subject.advance)
    raised = subject.ranks.gather(_raised_by(lambda: evaluator.own_sums(few)))
    seen.evaluation_error = next(filter(None, raised), "")
    if not seen.evaluation_error:
        names = list[str]()
        seen.evaluated = _raised_by(lambda: names.extend(sorted(evaluator.own_values()))) or names


def _raised_by(call: Callable[[], object]) -> str:
    """Return what a call raises, in words, but raise what says nothing of the user's code; empty if nothing."""
    try:
        call()
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or is_device_error(error):
            raise
        return describe_error(error)
    return ""


def observe_own_part(subject: Subject) -> Steps:
    """Train STEPS steps on this rank's part of the batches, without wrapper and without the other ranks."""
    with no_garbage_collection():
        return _observed(subject, subject.single_device_training())


def _same_batch_loss(subject: Subject, model: nn.Module) -> float | None:
    """Return the loss of a batch that every rank has, in train mode; None if the workload needs more samples."""
    torch.manual_seed(subject.seed)
    try:
        with torch.no_grad():
            total, weight = subject.loss(model, subject.first_samples(SMALL))
    except Exception:
        return None
    return float(total) / max(float(weight), 1.0)


def _observed(subject: Subject, training: Training) -> Steps:
    training.set_first_rate()
    training.expect_few_steps()
    inner, wrappers = training.unwrapped, (nn.DataParallel, nn.parallel.DistributedDataParallel)
    layers = [(path or "the model", module) for path, module in inner.named_modules()]
    found = (f"{name}: {type(module).__name__}" for name, module in layers if isinstance(module, wrappers))
    seen = Steps(wrapped_by_itself=next(found, ""), unit=training.unit, units_per_sample=training.units_per_sample)
    seen.lr = float(training.optimizer.param_groups[0]["lr"])
    seen.parameter_bytes = sum(p.numel() * p.element_size() for p in training.model.parameters())
    before = {name: local_part(p).detach().clone() for name, p in inner.named_parameters() if p.requires_grad}
    ids = {name: id(p) for name, p in inner.named_parameters()}
    with_gradient: dict[str, str] = {}

    def mark(point: Phase) -> None:
        if point == BACKWARD and not seen.losses:
            seen.moved_by_hand = moved_by_hand(inner, before, training.optimizer)

    batches, own = subject.stream(STEPS), innermost(subject.workload)
    state_before, frozen_before = _state_of(inner, own), sums_of_frozen(inner)
    seen.padded = padded_of([batch for _, batch in batches])
    with drawing(inner, own) as drawn, StepMemory() as memory:
        for number, (values, seconds) in enumerate(_taken(subject, training, batches, seen, mark)):
            seen.losses.append(float(values.loss))
            seen.weights.append(float(values.weight))
            _note_gradients(inner, with_gradient)
            if number:  # in the first step a hand-written update is looked for, and the optimizer's state is created
                seen.step_s = min(seen.step_s or seconds, seconds)
                memory.note_step()
            subject.advance()
        seen.kept_bytes = memory.kept_bytes()
    seen.random_states = drawn()
    state_after = _state_of(inner, own)
    seen.state = {name: digest for name, digest in state_after.items() if state_before.get(name) != digest}
    if not subject.cell.traits.shards_parameters:
        written = {name for name, total in sums_of_frozen(inner).items() if frozen_before.get(name) != total}
        seen.state |= {name: value_digest(p.detach()) for name, p in inner.named_parameters() if name in written}
    seen.buffers = [name for name, _ in inner.named_buffers() if name in seen.state]
    layers = [(path or "the model", module) for path, module in inner.named_modules()]
    seen.mode_layers = [name for name, module in layers if acts_by_mode(module)]
    seen.batch_norms = [name for name, module in layers if uses_own_statistics(module)]
    seen.share_of_biases = share_of_biases(inner)
    seen.trainable = len(before)
    replaced = {name for name, p in inner.named_parameters() if ids.get(name) != id(p)}
    _note_unchanged(seen, inner, before, with_gradient, training.optimizer, replaced)
    if not subject.cell.traits.shards_parameters:
        seen.digests = {name: value_digest(p.detach()) for name, p in inner.named_parameters() if p.requires_grad}
    return seen


def _state_of(model: nn.Module, workload: Workload) -> dict[str, str]:
    return {**digests_in_objects(model, workload), **digests_of_state(model)}


def _note_unchanged(
    seen: Steps,
    model: nn.Module,
    before: Mapping[str, Tensor],
    with_gradient: Mapping[str, str],
    optimizer: torch.optim.Optimizer,
    replaced: Collection[str],
) -> None:
    """Note each parameter that no step changed, with the kind of its gradient, or why that has no effect."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(map(id, model.parameters())):  # as of shards that stand for them
        stepped |= {*map(id, model.parameters())}
    for name, parameter in model.named_parameters():
        if name not in before or not torch.equal(before[name], local_part(parameter).detach()):
            continue
        kind = with_gradient.get(name, "none")
        if kind == "some" and id(parameter) not in stepped and name not in replaced:
            kind = "not stepped"
        elif kind == "some" and parameter.dtype in LOW_PRECISIONS:
            kind = "rounded"
        if kind != "some" or not _is_rounding(parameter, optimizer):
            seen.unchanged[name] = kind


def _taken(
    subject: Subject, training: Training, batches: Sequence[tuple[Share, object]], seen: Steps, mark: Mark
) -> Iterator[tuple[StepValues, float]]:
    """Take the steps; yield what each reports, and its seconds."""
    outer, inner = training.model, training.unwrapped

    def called(module: nn.Module, *_: object) -> None:
        seen.calls += module is outer
        seen.inner_calls += module is inner
        # not of a copy, as an average of weights; without gradients it makes labels or pictures
        seen.evaluates |= module in (outer, inner) and not inner.training and torch.is_grad_enabled()

    hooks = [module.register_forward_hook(called) for module in {outer, inner}]
    for share, batch in batches:
        synchronize(subject.ranks.devices)
        start = time.perf_counter()
        values = training.step(batch, share, mark)
        synchronize(subject.ranks.devices)
        seen.samples.append(share.samples)
        yield values, time.perf_counter() - start
    for hook in hooks:
        hook.remove()


def add_single_device_losses(subject: Subject, seen: Steps) -> None:
    """Train on the same global batches on one device of rank 0, and add the losses to ``seen``."""
    if subject.ranks.world_size == 1 and subject.replicas == 1:
        return
    try:
        with group_of_one(subject.device):
            if not subject.ranks.first:
                return
            training = subject.single_device_training()
            training.set_first_rate()
            training.expect_few_steps()
            for share, batch in subject.stream(STEPS, whole=True):
                values = training.step(batch, share)
                seen.single_device_losses.append(float(values.loss) / max(float(values.weight), 1.0))
                subject.advance()
    except Exception:  # the global batch does not fit on one device, or the loss needs its peers: no comparison
        seen.single_device_losses.clear()


def mean_losses(seen: Sequence[Steps]) -> list[float]:
    """Return the loss of each global batch: the sum over the ranks over the sum of their weights."""
    return [
        sum(rank.losses[step] for rank in seen) / max(1.0, sum(rank.weights[step] for rank in seen))
        for step in range(len(seen[0].losses))
    ]


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
