"""How fast a training steps: warm-up, then timed windows of full batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from harness.cell import Cell
from harness.config import Throughput
from harness.errors import SkipTrial, WorkloadError
from harness.loader import Share, batches, endless_shares, resident_batch
from harness.measure.window import Window, marks_for, measure_window, synchronize
from harness.ranks import Ranks
from harness.training import Training


@dataclass(frozen=True)
class Speed:
    """One rank's windows; the first is the warm-up. ``finite`` is False where the training diverged."""

    windows: tuple[Window, ...]
    weights: tuple[float, ...]
    finite: bool

    @property
    def steps_s(self) -> float:
        return sum(window.duration_s for window in self.windows)


def measure_throughput(
    training: Training,
    dataset: Dataset[Any],
    cell: Cell,
    settings: Throughput,
    seed: int,
    ranks: Ranks,
    *,
    collate: Callable[[list[Any]], Any] | None,
    advance: Callable[[], None],
) -> Speed:
    """Warm-up steps, then windows that begin together on every rank. Raises SkipTrial, WorkloadError."""
    share = _full_share(dataset, cell, ranks)
    source = _endless_batches(dataset, cell, seed, ranks, collate)

    def window(steps: int) -> Window:
        ranks.barrier()
        return measure_window(
            lambda batch: training.step(batch, share),
            source,
            steps=steps,
            marks=marks_for(ranks.devices, steps),
            synchronize=lambda: synchronize(ranks.devices),
            advance=advance,
        )

    warmup = window(settings.warmup_steps)
    steps = ranks.broadcast(window_length(settings, warmup.step_s))
    windows = (warmup, *(window(steps) for _ in range(settings.windows)))
    weights = tuple(sum(float(weight) for weight in w.weights) for w in windows)
    if training.unit == "samples":
        _check_weights(weights, windows, share)
    flags = ranks.sum([float(training.finite(list(windows[-1].losses)))])
    return Speed(windows, weights, finite=flags[0] == ranks.world_size)


def window_length(settings: Throughput, warmup_step_s: Sequence[float]) -> int:
    """Steps a window takes: at least so many, and as many as fill its least seconds at the warm-up's pace.

    The pace is the median of the second half of the warm-up.
    """
    later = list(warmup_step_s)[len(warmup_step_s) // 2 :]
    pace = statistics.median(later) if later else 0.0
    wanted = math.ceil(settings.window_seconds / pace) if pace > 0 else 0
    return max(settings.window_steps, wanted)


def _full_share(dataset: Dataset[Any], cell: Cell, ranks: Ranks) -> Share:
    available = len(dataset)  # type: ignore[arg-type]
    if cell.global_batch_size > available:
        raise SkipTrial(f"global batch {cell.global_batch_size} exceeds the {available} training samples")
    return Share((), cell.global_batch_size // ranks.world_size, cell.global_batch_size)


def _endless_batches(
    dataset: Dataset[Any],
    cell: Cell,
    seed: int,
    ranks: Ranks,
    collate: Callable[[list[Any]], Any] | None,
) -> Iterator[Any]:
    shares = endless_shares(len(dataset), cell.global_batch_size, seed, ranks.rank, ranks.world_size)  # type: ignore[arg-type]
    device, options = ranks.devices[0], cell.loader
    loaded = batches(dataset, shares, seed=seed, device=device, options=options, collate=collate)
    return resident_batch(next(loaded)) if cell.data == "synthetic_device" else loaded


def _check_weights(weights: tuple[float, ...], windows: tuple[Window, ...], share: Share) -> None:
    """With unit "samples" the harness takes a batch's weight to be its length: here it makes sure."""
    for weight, window in zip(weights, windows, strict=True):
        expected = share.samples * window.steps
        if weight != expected:
            raise WorkloadError(
                f"loss() gave a weight of {weight:g} for {expected} samples; with unit 'samples' the weight "
                "is the length of the batch (unit 'tokens' lets it vary)"
            )
