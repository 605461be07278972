"""The weight of a loss; losses and gradients of a strategy against those of one device at the same global batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.doctor.facts import Steps
from harness.doctor.gate import DIVERGENCE, diverges
from harness.doctor.real_steps import group_of_one, mean_losses
from harness.doctor.subject import Case, Check, Subject, any_error, copied, describe_error
from harness.measure.generators import drawing
from harness.measure.sketches import Frozen, in_comparable_mode, why_random
from harness.plan.checks import Finding, join_names
from harness.plan.comparison import MAX_DIFFERENCE
from harness.plan.rows import Severity
from harness.plan.trial import SkipTrial
from harness.train.loader import Share
from harness.train.precision import LOW_PRECISIONS
from harness.train.training import Training, whole_tensor
from harness.train.workloads import Workload, collate_of, innermost

LOSS_WEIGHT = "loss weight"
NAME = "gradient scaling"
SHARE = 0.02
"""Relative tolerance of a factor against the number of devices."""
ENOUGH = 64
"""A global batch of this many samples is large enough for the comparison."""
SMALL_DIFFERENCE = 0.25
"""A gradient that is nearer to one device's may be of a loss that is normalised in each part of the batch."""
NOISY = 0.4
"""Largest difference if the loss or the model draws random numbers in evaluation mode too."""


def judge_loss_weight(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    """Compare the weights of the real steps with the samples of each batch; the first deviation counts.

    A rank's part of a global batch may have no token, as where all are masked, if the part of another has some.
    """
    for rank, steps in enumerate(seen):
        for step, (weight, samples) in enumerate(zip(steps.weights, steps.samples, strict=False)):
            if steps.unit == "tokens" and weight == 0 and sum(each.weights[step] for each in seen) > 0:
                continue
            text = f"weight that loss() returns for a batch of {samples} samples: {weight:g}"
            if steps.unit == "samples" and weight != samples:
                means = "losses of batches of different sizes cannot be averaged, and the trial would stop: with unit "
                means += "'samples' the weight is the number of samples"
                advice = "return the sum of the losses of the samples, as with reduction='sum', and len(batch) as its "
                advice += "weight; tokens are counted with unit = 'tokens'"
                yield Finding(LOSS_WEIGHT, "error", f"{text} (rank {rank})", means, advice, stops=True)
                return
            if steps.unit == "tokens" and samples and not (math.isfinite(weight) and weight > 0):
                means = "the loss of the batch cannot be averaged: with unit 'tokens' the weight is the number of its "
                means += "tokens"
                advice = "return the number of tokens that the loss counts as its weight"
                yield Finding(LOSS_WEIGHT, "error", f"{text} (rank {rank})", means, advice, stops=True)
                return
            each_sample = steps.units_per_sample
            if steps.unit == "tokens" and each_sample and weight != samples * each_sample:
                means = f"gradients are divided by tokens_per_sample, {each_sample:g}, and the trial would stop"
                advice = "leave tokens_per_sample out where samples have different numbers of tokens"
                yield Finding(LOSS_WEIGHT, "error", f"{text} (rank {rank})", means, advice, stops=True)
                return
            if steps.unit == "tokens" and (weight < samples or weight != int(weight)):
                means = "throughput is counted in this weight, and gradients are divided by it: it is no number of "
                means += "tokens"
                advice = "return the sum of the losses of the tokens, and their number as its weight"
                yield Finding(LOSS_WEIGHT, "warning", f"{text} tokens (rank {rank})", means, advice)
                return


LOSS_WEIGHT_CHECK = Check(None, judge_loss_weight, about=("loss",), clue=r"return ")


def judge_divergence(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    cell, losses, alone = case.cell, mean_losses(seen), seen[0].single_device_losses
    if not diverges(losses):
        return
    stops = not all(map(math.isfinite, losses))
    here = (
        f"losses of {cell.strategy} on {cell.devices} device{'s' * (cell.devices > 1)} at a learning rate of "
        f"{seen[0].lr:g}: {_format_losses(losses)}"
    )
    if alone:
        here += f"; on one device, same batches: {_format_losses(alone)}"
    if alone and not diverges(alone):
        means = "the strategy is not equivalent to one device; the learning rate is not the cause"
        advice = "see the other findings; on pairs of GPUs without NVLink, check the copies between them (nccl-tests)"
        yield Finding(DIVERGENCE, "error", here, means, advice, stops=stops)
        return
    where = "divergence in the first steps" + ", on one device too" * bool(alone)
    fate = "not measured" if stops else "tried once, and not in further blocks if they diverge there too"
    advice = "use a smaller learning rate, or a learning-rate warm-up (training.warmup_epochs)"
    severity: Severity = "error" if stops else "warning"
    yield Finding(DIVERGENCE, severity, here, f"{where}: such cells are {fate}", advice, stops=stops)


def _format_losses(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.3g}" for loss in losses)


DIVERGENCE_CHECK = Check(None, judge_divergence, redundant=any_error, about=("loss", "forward"))


@dataclass(frozen=True)
class Products:
    """The products g.h, h.h and g.g of each parameter's gradient g and one device's gradient h; on rank 0 only."""

    products: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    noisy: bool = False
    """Some rank drew random numbers, or parameters, and so gradients, have 16 bits."""
    batch: int = 0
    """Samples of the global batch."""
    unknown: str = ""
    """Why the gradients were not compared."""
    sparse: bool = False
    """A table of the model has sparse gradients."""


def observe(subject: Subject) -> Products:
    """Compare the gradients of one step with those of one device on the same global batch.

    Batch statistics are frozen and dropout is off, since they may differ between a batch and its parts. A collate that
    draws random numbers mixes a batch otherwise than its parts: no comparison.
    """
    if subject.ranks.world_size == 1 and subject.replicas == 1:
        return Products()
    cell = subject.cell  # in float32, with a global batch that fits on one device: its share of the batch, or ENOUGH
    fits = max(ENOUGH, cell.global_batch_size // cell.devices)
    batch = min(cell.global_batch_size, max(1, fits // cell.devices) * cell.devices)
    subject = replace(
        subject,
        cell=replace(
            cell.eager,
            precision="fp32",
            training={},  # clipping would hide a wrong factor
            per_device_batch_size=batch // cell.devices,
            global_batch_size=batch,
        ),
    )
    if (collate := collate_of(subject.workload)) and (
        reason := why_random(lambda watched: subject.stream(1, collate=watched), collate, subject.ranks)
    ):
        return Products(unknown=reason)
    [(_, whole)] = subject.stream(1, whole=True)

    def attempt(frozen: Frozen) -> tuple[dict[str, Tensor], bool]:
        frozen.inner = copied(subject.workload)  # such as a teacher that its first loss() makes
        return _gradients(subject.training(frozen), subject.stream(1)[0], innermost(frozen), keep=subject.ranks.first)

    try:
        frozen, gradients, noisy = in_comparable_mode(subject.workload, whole, subject.ranks, attempt)
    except SkipTrial as error:
        return Products(unknown=str(error))
    try:
        with group_of_one(subject.device):
            if not subject.ranks.first:
                return Products()
            frozen.inner = copied(subject.workload)
            alone = subject.single_device_training(frozen)
            expected, _ = _gradients(alone, subject.stream(1, whole=True)[0], innermost(frozen))
    except (torch.OutOfMemoryError, SkipTrial):  # the global batch does not fit on one device: no comparison
        return Products()
    except Exception as error:  # steps on all ranks have succeeded, so it may be the pass on one device itself
        return Products(unknown=f"on one device, with the whole batch: {describe_error(error)}")
    subject.advance()
    lacking = [name for name, p in alone.unwrapped.named_parameters() if p.requires_grad and name not in expected]
    if lacking and frozen.evaluates and subject.cell.traits.needs_every_gradient:
        unused = f"parameters that eval mode does not use, as of heads for training: {join_names(lacking)}"
        return Products(unknown=f"{unused}; {subject.cell.strategy} leaves gradients beside them unreduced")
    products: dict[str, tuple[float, float, float]] = {}
    for name, one in expected.items():
        own = gradients.get(name)
        own = torch.zeros_like(one) if own is None else own
        products[name] = (float((own * one).sum()), float(one.square().sum()), float(own.square().sum()))
    sparse = any(getattr(module, "sparse", False) is True for module in alone.unwrapped.modules())
    noisy = noisy or any(parameter.dtype in LOW_PRECISIONS for parameter in alone.unwrapped.parameters())
    return Products(products, noisy, subject.cell.global_batch_size, sparse=sparse)


def judge(seen: Sequence[Products], case: Case) -> Iterator[Finding]:
    cell, products = case.cell, seen[0].products
    cross, one, own = (sum(values[i] for values in products.values()) for i in range(3))
    if (
        one == 0.0
        or not math.isfinite(one)
        or relative(cross, one, own) <= (NOISY if seen[0].noisy else MAX_DIFFERENCE)
    ):
        return
    factor = cross / one
    rest = own - factor * cross
    is_share = any(abs(factor / wanted - 1) <= SHARE for wanted in (cell.devices, 1 / cell.devices))
    if factor > 0 and rest <= (SHARE**2) * own and is_share:
        times = f"{cell.devices} times" if factor > 1 else f"1/{cell.devices} of"
        text = f"gradient of {cell.strategy} on {cell.devices} devices: {times} that of one device at the same global "
        text += f"batch of {seen[0].batch} (factor {factor:.3f})"
        means = "sum over the devices instead of a mean, or the reverse: the effective learning rate depends on the "
        means += "number of devices"
        advice = "loss() must return the sum over its batch and the weight of the batch (samples or tokens), both "
        advice += "unscaled: no mean, no factor of dist.get_world_size()"
        yield Finding(NAME, "error", text, means, advice)
        return
    differ = sorted(products, key=lambda name: relative(*products[name]), reverse=True)
    names = [name for name in differ if relative(*products[name]) > MAX_DIFFERENCE]
    advice = "loss() must be a sum of independent terms, one a sample: no normalisation over the batch, no dependence "
    advice += "between samples, no state of one rank; if samples are compared within a batch, gather their embeddings "
    advice += "on all ranks, or nothing if the recipe means each device's part"
    if seen[0].sparse:
        advice = (
            "compare the model with sparse=False: torch's ddp can divide the gradients of other layers twice beside a "
            f"table with sparse ones (seen in torch 2.14); if they differ then too, {advice}"
        )
    if relative(cross, one, own) < SMALL_DIFFERENCE:
        advice += "; nothing is to be done if the recipe asks for it, as PPO for advantages that are normalised in "
        advice += "each minibatch"
    text = f"relative difference of the gradient of {cell.strategy} on {cell.devices} devices from that of one "
    text += f"device: {100 * relative(cross, one, own):.0f} % (factor {factor:.3f}); largest in {join_names(names)}"
    means = "the strategy is not equivalent to one device at the same global batch: its speed is measured, without a "
    yield Finding(NAME, "error", text, f"{means}claim", advice)


def relative(cross: float, one: float, own: float) -> float:
    """Return ||g - h|| / ||h|| from g.h, h.h and g.g."""
    if one == 0.0:
        return 0.0 if own == 0.0 else float("inf")
    return float(max(0.0, own - 2 * cross + one) ** 0.5 / one**0.5)


def _gradients(
    training: Training, part: tuple[Share, object], workload: Workload, *, keep: bool = True
) -> tuple[dict[str, Tensor], bool]:
    """Return the full gradients by parameter, on the host in float64, and whether random numbers were drawn.

    Without ``keep`` no gradient. Collective if the strategy shards parameters.
    """
    share, batch = part
    with drawing(training.unwrapped, workload) as drew:
        training.step(batch, share)
    found: dict[str, Tensor] = {}
    for name, parameter in training.model.named_parameters():
        if parameter.grad is not None:
            whole = whole_tensor(parameter.grad)
            if keep:
                found[name.removeprefix("module.")] = whole.detach().cpu().double()
    return found, bool(drew())


CHECK = Check(
    observe,
    judge,
    figures=lambda seen, case: {"equivalence of gradients": f"unknown: {seen[0].unknown}"} if seen[0].unknown else {},
    needs_peers=True,
    # after any error but divergence, which wrong gradients would explain
    redundant=lambda findings: any_error([finding for finding in findings if finding.check != DIVERGENCE]),
    needs_whole_model=True,
    about=("loss", "forward"),
    clue=r"get_world_size|WORLD_SIZE",
)
