"""The update of an equivalence check: a few steps from the same start on the same global batches, as a sketch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from harness.plan.cell import Cell
from harness.plan.trial import SkipReason, SkipTrial
from harness.train.loader import Share, batches, endless_shares
from harness.train.model import build_model
from harness.train.precision import REDUCED
from harness.train.ranks import Ranks
from harness.train.training import Training
from harness.train.transfer import copier
from harness.train.workloads import SizedDataset, Workload, collate_of

STEPS = 3
BUCKETS = 4096
"""Length of the sketch of an update; the relative error of a difference's norm is sqrt(2 / BUCKETS) = 2 %."""
NORMS = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True)
class Update:
    """The sum of a few optimizer steps over all parameters, as a sketch. ``finite``: whether all of it is."""

    sketch: list[float]
    parameters: int
    finite: bool


class Frozen:
    """A workload whose model is in eval mode: with batch statistics or dropout, a split batch trains differently.

    Normalisation uses the statistics of one small batch, the same on every rank: with those of a new model the
    activations of a deep net would explode.
    """

    def __init__(self, workload: Workload, batch: object) -> None:
        self._workload, self._batch = workload, batch
        self.unit = workload.unit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def build_model(self) -> nn.Module:
        model = build_model(self._workload)
        norms = [module for module in model.modules() if isinstance(module, NORMS)]
        if norms:
            for module in norms:
                module.momentum = None  # a plain mean over batches
            with torch.no_grad():
                self._workload.loss(model, self._batch)
        model.eval()
        for part in model.modules():
            if isinstance(part, nn.RNNBase):  # cuDNN has no backward for one in eval mode
                part.train()
                part.dropout = 0.0
        return model


def measure_updates(
    cell: Cell, workload: Workload, dataset: SizedDataset, seed: int, ranks: Ranks, advance: Callable[[], None]
) -> dict[str, Update]:
    """Return the update in fp32, and in the cell's precision if that computes in 16 bits; raise SkipTrial."""
    precisions = dict.fromkeys(("fp32", cell.precision if cell.precision in REDUCED else "fp32"))
    return {
        name: measure_update(replace(cell, precision=name), workload, dataset, seed, ranks, advance)
        for name in precisions
    }


def measure_update(
    cell: Cell, workload: Workload, dataset: SizedDataset, seed: int, ranks: Ranks, advance: Callable[[], None]
) -> Update:
    """Return the cell's update after STEPS steps; raise SkipTrial if the data is too small or steps draw at random."""
    samples = len(dataset)
    if cell.global_batch_size > samples:
        reason = f"the check's global batch {cell.global_batch_size} exceeds the {samples} training samples"
        raise SkipTrial(SkipReason("too_few_samples", reason))
    collate = collate_of(workload)

    def stream(rank: int, world_size: int) -> Iterator[tuple[Share, object]]:
        shares = endless_shares(samples, cell.global_batch_size, seed, rank, world_size)
        own = list(islice(shares, STEPS))
        return zip(own, batches(dataset, own, seed=seed, ranks=ranks, options={}, collate=collate), strict=True)

    _, whole = next(iter(stream(0, 1)))
    training = Training(cell, Frozen(workload, whole), seed, ranks)
    training.expect_few_steps()
    start = _flat(training.model, keep=ranks.first)
    copy = copier(ranks.devices[0], {})
    drew = False
    for share, batch in stream(ranks.rank, ranks.world_size):
        with drawing() as drawn:
            training.step(copy(batch), share)
        drew = drew or drawn()
        advance()
    if any(ranks.gather(drew)):
        reason = "loss or model draw random numbers even when the model only evaluates: no two runs are alike"
        raise SkipTrial(SkipReason("random_evaluation", reason))
    end = _flat(training.model, keep=ranks.first)
    sketch = fold([after.sub_(before) for after, before in zip(end, start, strict=True)])
    finite = ranks.broadcast(all(math.isfinite(value) for value in sketch))
    return Update(sketch, training.parameters, finite)


@contextmanager
def drawing() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns, after the block, whether the block drew from torch's generators."""
    before = _generators()
    after: list[list[Tensor]] = []
    try:
        yield lambda: any(not torch.equal(a, b) for a, b in zip(before, after[0], strict=True))
    finally:
        after.append(_generators())


def _generators() -> list[Tensor]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if cuda else [])]


def fold(tensors: Sequence[Tensor], buckets: int = BUCKETS) -> list[float]:
    """Return a count sketch (Charikar et al. 2002): every number is added, with a random sign, to one of ``buckets``.

    Linear, so that the norm of two sketches' difference estimates that of the difference. Bucket and sign depend
    on the position alone.
    """
    total = torch.zeros(buckets, dtype=torch.float64)
    generator = torch.Generator().manual_seed(20020708)
    for tensor in tensors:
        bucket = torch.randint(buckets, (tensor.numel(),), generator=generator)
        sign = torch.randint(0, 2, (tensor.numel(),), generator=generator, dtype=torch.float64) * 2 - 1
        total.index_add_(0, bucket, tensor.double() * sign)
    return [float(value) for value in total.tolist()]


def _flat(model: nn.Module, *, keep: bool) -> list[Tensor]:
    """Return each parameter whole and flat, on the host; none if not ``keep``. Collective if parameters are sharded."""
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [tensor.detach().cpu().flatten().clone() for tensor in whole if keep]
