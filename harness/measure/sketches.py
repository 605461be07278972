"""Sketches for equivalence checks: of a gradient, and of updates from the same start on the same batches."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from harness.measure.generators import drawing
from harness.measure.stepper import TrainingData
from harness.plan.trial import SkipReason, SkipTrial
from harness.train.loader import Batches, NoDigest, Share, endless_shares, value_digest
from harness.train.model import build_model
from harness.train.optimizers import scale_rate
from harness.train.precision import LOW_PRECISIONS, REDUCED
from harness.train.ranks import Ranks
from harness.train.training import BACKWARD, PIECE, Phase, Training, whole_tensor
from harness.train.transfer import copier
from harness.train.workloads import Collate, Workload, Wrapper, as_loss, collate_of, innermost

STEPS = 2
"""Steps of the scaled update: the second is the first that uses the optimizer's state."""
RELATIVE_STEP = 1e-3
"""Norm of the first of these steps over that of the parameters: large against rounding, small against curvature."""
BUCKETS = 4096
"""Length of a sketch; the relative error of a difference's norm is sqrt(2 / BUCKETS) = 2 %."""
NORMS = (nn.modules.batchnorm._BatchNorm,)
PASSES = 50
"""Forward passes over one batch after which running statistics of a class of the user's are those of the batch."""
T = TypeVar("T")


@dataclass(frozen=True)
class Sketches:
    """The compared quantities over all parameters, as sketches, by their names in the table checks.

    gradient: of the first global batch, before clipping; missing under a strategy of the user's own, which may reduce
    gradients in its optimizer. first_update: one optimizer step at the recipe's learning rate. scaled_update: STEPS
    steps from the same start at a rate whose first step has RELATIVE_STEP of the parameters' norm, so that the result
    does not depend on whether the recipe's rate is stable. ``finite``: whether every number is.
    """

    quantities: dict[str, list[float]]
    parameters: int
    finite: bool
    low: str | None = None
    """The precision of the model's parameters of 16 bits, if it has some."""


def _on_host(leaf: Any) -> object:
    """Return a tensor, or a batch with a method ``to``, on the host."""
    return leaf.to(torch.device("cpu")) if callable(getattr(leaf, "to", None)) else leaf


class Frozen(Wrapper):
    """A workload whose model is in eval mode: with batch statistics or dropout, a split batch trains differently.

    ``train``: a model without either stays in train mode. Normalisation uses the statistics of one small batch, the
    same on every rank: with those of a new model the activations of a deep net would explode.
    """

    def __init__(self, workload: Workload, batch: object, *, train: bool = False) -> None:
        super().__init__(workload)
        self._train = train
        self._batch = tree_map(_on_host, batch)  # the model is on the host when it is built
        self.evaluates = False

    def build_model(self) -> nn.Module:
        model = build_model(self.inner)
        norms = [module for module in model.modules() if isinstance(module, NORMS)]
        for module in norms:
            module.momentum = None  # a plain mean over batches
        passes = PASSES if self._keeps_statistics(model) else min(1, len(norms))
        if self._train and not passes and not any(map(acts_by_mode, model.modules())):
            return model
        with torch.no_grad():
            for _ in range(passes):
                self.inner.loss(model, self._batch)
        model.eval()
        self.evaluates = True
        for part in model.modules():
            if isinstance(part, nn.RNNBase):  # cuDNN has no backward for one in eval mode
                part.train()
                part.dropout = 0.0
        return model

    def _keeps_statistics(self, model: nn.Module) -> bool:
        """Return whether a forward pass changes numbers that a layer keeps, other than those of torch's normalisation.

        As a batch normalisation of the user's own does: what such a layer does in train mode may depend on the batch.
        """
        others = (module for module in model.modules() if not isinstance(module, NORMS))
        kept = [
            (buffer, buffer.clone(), module, name)
            for module in others
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set
        ]
        if kept:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), suppress(Exception):  # a kernel of GPUs alone
                self.inner.loss(model, self._batch)
        return any(
            getattr(module, name) is not own or not torch.equal(own, before) for own, before, module, name in kept
        )

    def loss(self, model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
        """Return the workload's loss; raise SkipTrial if it fails in eval mode, in which some models have none."""
        model.training &= not self.evaluates  # the flag of a wrapper; that of the model inside it is set already
        try:
            total, weight = as_loss(self.inner.loss(model, batch))
        except Exception as error:
            if not self.evaluates or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = f"loss() fails in eval mode: {type(error).__name__}: {error}"
            raise SkipTrial(SkipReason("evaluation_fails", reason)) from error
        if self.evaluates and torch.is_grad_enabled() and not total.requires_grad:
            raise SkipTrial(SkipReason("evaluation_fails", "loss() has no gradient in eval mode"))
        return total, weight


def acts_by_mode(module: nn.Module) -> bool:
    """Return whether a layer acts differently in train mode: by dropout or batch statistics."""
    rate = getattr(module, "dropout", None)  # of recurrent layers and attention
    if isinstance(module, _DropoutNd):
        rate = float(module.p)
    return isinstance(module, NORMS) or (isinstance(rate, float) and rate > 0)


def in_comparable_mode(
    workload: Workload, batch: object, ranks: Ranks, attempt: Callable[[Frozen], tuple[T, bool]]
) -> tuple[Frozen, T, bool]:
    """Return what an attempt trained, its result, and whether some rank drew random numbers even in eval mode."""
    for train in (True, False):  # with a layer that acts by mode, the first is in eval mode already
        frozen = Frozen(workload, batch, train=train)
        result, drew = attempt(frozen)
        drew = any(ranks.gather(drew))
        if frozen.evaluates or not drew:
            break
    return frozen, result, drew


def why_random(load: Callable[[Collate], object], collate: Collate | None, ranks: Ranks) -> str:
    """Return why a batch depends on more than its samples; empty if it does not. ``load``: loads it with a collate."""
    drew: list[bool] = []

    def watched(samples: list[object]) -> object:
        with drawing() as drawn:
            batch = (collate or default_collate)(samples)
        drew.append(bool(drawn()))
        return batch

    differs = False
    with suppress(NoDigest):
        differs = len({value_digest(load(watched)) for _ in range(2)}) > 1
    if any(ranks.gather(any(drew))):
        return "collate draws random numbers"
    reason = "a batch changes when it is read again: the data set or collate draws from a generator of its own"
    return reason if any(ranks.gather(differs)) else ""


@dataclass(frozen=True)
class Steps:
    """Steps from the start: the gradient of the first and the update of all, flat, on the host of the first rank."""

    start: list[Tensor]
    gradient: list[Tensor]
    update: list[Tensor]
    parameters: int
    drew: bool
    low: str | None
    """The precision of parameters of 16 bits, if the model has some."""

    @property
    def scale(self) -> float:
        """The factor on the learning rate at which one step has RELATIVE_STEP of the parameters' norm."""
        start, update = norm(self.start), norm(self.update)
        return RELATIVE_STEP * start / update if start > 0 and 0 < update < math.inf else 1.0


def measure_by_precision(data: TrainingData, advance: Callable[[], None]) -> dict[str, Sketches]:
    """Return the sketches in fp32, and in the cell's precision if that computes in 16 bits; raise SkipTrial.

    Those of a model whose own parameters have 16 bits have their precision's name in any case.
    """
    cell = data.cell
    precisions = dict.fromkeys(("fp32", cell.precision if cell.precision in REDUCED else "fp32"))
    found = {name: measure_sketches(replace(data, cell=replace(cell, precision=name)), advance) for name in precisions}
    return {(name if name in REDUCED else each.low or name): each for name, each in found.items()}


def measure_sketches(data: TrainingData, advance: Callable[[], None]) -> Sketches:
    """Return the cell's sketches; raise SkipTrial if steps draw at random."""
    ranks = data.ranks
    parts, whole = _batches_of(data)

    def attempt(frozen: Frozen) -> tuple[tuple[Steps, Steps], bool]:
        def take(number: int, factor: float = 1.0) -> Steps:
            return take_steps(replace(data, workload=frozen), parts[:number], advance, factor)

        first = take(1)
        gc.collect()  # wrappers are in reference cycles: two models may not fit on the device
        # the same factor on every rank: copies that differ would take steps of different lengths
        scaled = take(STEPS, ranks.broadcast(first.scale))
        return (first, scaled), first.drew or scaled.drew

    _, (first, scaled), drew = in_comparable_mode(data.workload, whole, ranks, attempt)
    if drew:
        reason = (
            "loss or model draw random numbers even when the model only evaluates, or hold a generator whose state "
            "cannot be read: no two runs are alike"
        )
        raise SkipTrial(SkipReason("random_evaluation", reason))
    vectors = {"first_update": first.update, "scaled_update": scaled.update}
    if first.gradient:
        vectors["gradient"] = first.gradient
    quantities = dict(zip(vectors, fold(list(vectors.values())), strict=True))
    finite = all(math.isfinite(value) for sketch in quantities.values() for value in sketch)
    return Sketches(quantities, first.parameters, ranks.broadcast(finite), first.low)


def _batches_of(data: TrainingData) -> tuple[list[tuple[Share, object]], object]:
    """Return this rank's part of each step's batch, on its device, and the first global batch; raise SkipTrial."""
    ranks, seed = data.ranks, data.seed
    collate, place = collate_of(data.workload), (ranks.rank, ranks.world_size)

    def stream(rank: int, world_size: int, collate: Collate | None = collate) -> Iterator[tuple[Share, object]]:
        shares = endless_shares(data.samples, data.cell.global_batch_size, seed, rank, world_size)
        own = list(islice(shares, STEPS))
        loader = Batches(data.train, seed=seed, ranks=ranks, options={}, collate=collate)
        return zip(own, loader.of(own), strict=True)

    if reason := why_random(lambda watched: next(stream(*place, watched))[1], collate, ranks):
        raise SkipTrial(SkipReason("random_batches", reason))
    _, whole = next(stream(0, 1))
    copy = copier(ranks.devices[0], {})
    return [(share, copy(batch)) for share, batch in stream(*place)], whole


def take_steps(
    data: TrainingData, parts: Sequence[tuple[Share, object]], advance: Callable[[], None], factor: float = 1.0
) -> Steps:
    """Take a step on each part with a new training, at the recipe's learning rate times ``factor``."""
    training = Training(data.cell, data.workload, data.seed, data.ranks)
    training.expect_few_steps()
    scale_rate(training.optimizer, factor)
    keep = data.ranks.first
    start = _flat(training.model.parameters(), keep=keep)
    gradient: list[Tensor] = []

    def mark(point: Phase) -> None:
        if len(parts) == 1 and point == BACKWARD and not data.cell.own_traits:  # before it is clipped
            scale = training.loss_scale()
            parameters = training.model.parameters()
            whole = _flat((torch.zeros_like(p) if p.grad is None else p.grad for p in parameters), keep=keep)
            gradient.extend([part.div_(scale.scale) for part in whole] if scale else whole)

    drew = False
    for share, batch in parts:
        with drawing(training.unwrapped, innermost(data.workload)) as drawn:
            training.step(batch, share, mark)
        drew = drew or bool(drawn())
        advance()
    end = _flat(training.model.parameters(), keep=keep)
    update = [after.sub_(before) for after, before in zip(end, start, strict=True)]
    low = (LOW_PRECISIONS.get(parameter.dtype) for parameter in training.model.parameters())
    return Steps(start, gradient, update, training.parameters, drew, next(filter(None, low), None))


def fold(vectors: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """Return a count sketch of each vector (Charikar et al. 2002), given in parts: every number is added, with a
    random sign, to one of BUCKETS. All vectors have the same parts.

    Linear, so that the norm of two sketches' difference estimates that of the difference. Bucket and sign depend
    on the position alone.
    """
    totals = [torch.zeros(BUCKETS, dtype=torch.float64) for _ in vectors]
    generator = torch.Generator().manual_seed(20020708)
    pieces = (zip(*(part.split(PIECE) for part in parts), strict=True) for parts in zip(*vectors, strict=True))
    for parts in chain.from_iterable(pieces):
        bucket = torch.randint(BUCKETS, (parts[0].numel(),), generator=generator)
        sign = torch.randint(0, 2, (parts[0].numel(),), generator=generator, dtype=torch.float64) * 2 - 1
        for total, part in zip(totals, parts, strict=True):
            total.index_add_(0, bucket, part.double() * sign)
    return [[float(value) for value in total.tolist()] for total in totals]


def norm(vector: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of a vector given in parts."""
    return math.sqrt(sum(float(part.double().square().sum()) for part in vector))


def _flat(tensors: Iterable[Tensor], *, keep: bool) -> list[Tensor]:
    """Return each tensor whole and flat, on the host; none if not ``keep``. Collective if they are sharded."""
    return [tensor.detach().cpu().flatten().clone() for tensor in map(whole_tensor, tensors) if keep]
