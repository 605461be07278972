"""Time and price to a target by number of devices and global batch: samples that it takes, over throughput."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.common import Record, columns_of, grouped, is_no_claim, rows_of, work_of
from harness.analysis.prediction import Asked
from harness.analysis.results import Results, predict
from harness.analysis.stats import half_width
from harness.analysis.trials import NO_METRIC, convergence
from harness.config.sections import Target
from harness.plan.comparison import options_of
from harness.record.schema import DECISION, DESCRIPTION

LEAST_BATCHES, LEAST_SEEDS = 3, 3
"""The fewest global batches, and trainings of each that reach the target, of a fit."""
FARTHEST_BATCH = 2
"""The largest batch that is extrapolated to, as a multiple of the largest that was trained."""
LARGEST_PART = 0.1
"""The largest batch as a part of the training set: beyond it an epoch has too few steps for the law."""
ROUNDS = 50


@dataclass(frozen=True)
class SamplesToTarget:
    """The number of samples that trainings need to reach a target, by global batch B: E (1 + B / Bc).

    It follows from (S / S_min - 1) (E / E_min - 1) = 1 for S steps of E / S samples (McCandlish et al. 2018, arXiv
    1812.06162). ``efficient`` is E, the samples of a small batch; ``critical`` Bc, the batch that needs twice as many,
    infinite if larger ones need no more. ``covariance``: of (E, E / Bc). ``spread``: the relative standard deviation of
    one training around the law. ``trained``: the batches.
    """

    efficient: float
    critical: float
    covariance: np.ndarray
    spread: float
    freedom: int
    trained: tuple[int, ...]

    def at(self, batch: int) -> tuple[float, float]:
        """Return the samples of a training at a batch, and the half-width of the logarithm's 95 % prediction interval.

        That of one further training, with the uncertainty of the law by the delta method.
        """
        place = np.array([1.0, batch])
        samples = self.efficient * (1 + batch / self.critical)
        of_law = float(place @ self.covariance @ place) / samples**2
        return samples, half_width(math.sqrt(self.spread**2 + of_law), self.freedom)


def fit_samples(batches: Sequence[int], samples: Sequence[float]) -> SamplesToTarget:
    """Fit E (1 + B / Bc) to trainings with a relative spread that is the same at each batch.

    Least squares of the relative residuals, by reweighting; E and E / Bc are at least 0. Raises ValueError with fewer
    than three trainings or two batches.
    """
    if len(set(batches)) < 2 or len(samples) < 3:
        raise ValueError(f"needs three trainings of two batches, got {list(batches)}")
    matrix = np.column_stack([np.ones(len(batches)), np.array(batches, dtype=float)])
    observed = np.array(samples, dtype=float)
    law = np.array([observed.mean(), 0.0])
    for _ in range(ROUNDS):
        weights = 1 / (matrix @ law)
        law, *_ = np.linalg.lstsq(matrix * weights[:, None], observed * weights, rcond=None)
        if law[1] < 0:
            law = np.array([float(np.average(observed)), 0.0])
        elif law[0] <= 0:
            law = np.array([1e-9 * observed.mean(), float(np.average(observed / matrix[:, 1]))])
    weights = 1 / (matrix @ law)
    residuals = observed * weights - 1
    freedom = len(samples) - 2
    spread = math.sqrt(float(residuals @ residuals) / freedom)
    weighted = matrix * weights[:, None]
    covariance = spread**2 * np.linalg.pinv(weighted.T @ weighted)
    critical = float(law[0] / law[1]) if law[1] > 0 else math.inf
    return SamplesToTarget(float(law[0]), critical, covariance, spread, freedom, tuple(sorted(set(batches))))


@dataclass(frozen=True)
class Work:
    """What trains the same thing in a run, with its trainings and the fastest setting of each size.

    ``trainings``: rows of the table convergence for the target. ``settings``: rows with devices, global batch and
    throughput, measured or predicted.
    """

    name: str
    trainings: Sequence[Record]
    settings: Sequence[Record]

    @cached_property
    def samples(self) -> dict[tuple[int, int], float]:
        """The samples to the target by global batch and seed: of several strategies, which train the same, the mean."""
        reached = [row for row in self.trainings if row.reached and pd.isna(row.excluded)]
        found = grouped(reached, lambda row: (int(row.global_batch_size), int(row.seed)))
        return {key: sum(row.samples_to_target for row in rows) / len(rows) for key, rows in found.items()}

    @property
    def refusal(self) -> str | None:
        """Why no batch can be compared, and what to measure; None if they can."""
        if not self.trainings:
            return "no training was measured; samples to a target follow from trainings at several global batches"
        if any(row.unit == "tokens" for row in self.settings):
            return "its throughput counts tokens, and its trainings samples; only workloads of samples are answered"
        if all(row.target and NO_METRIC in row.target for row in self.trainings):
            return f"{self.trainings[0].target}; give the metric of a column val_<name> of epochs"
        missed = grouped(
            [row for row in self.trainings if row.reached is False], lambda row: int(row.global_batch_size)
        )
        seeds = {batch: [seed for at, seed in self.samples if at == batch] for batch, _ in self.samples}
        enough = [batch for batch, of_batch in seeds.items() if len(of_batch) >= LEAST_SEEDS and batch not in missed]
        if len(enough) < LEAST_BATCHES:
            known = ", ".join(f"{batch} ({len(of_batch)} seeds)" for batch, of_batch in sorted(seeds.items())) or "none"
            late = f"; not reached by each training at {', '.join(map(str, sorted(missed)))}" if missed else ""
            needed = f"{LEAST_BATCHES} global batches with {LEAST_SEEDS} seeds each that reach the target"
            return f"needs {needed}, has {known}{late}"
        if {options_of(vars(row)).get("training.lr_scaling", "none") for row in self.trainings} == {"none"}:
            return (
                "no rule of the learning rate is declared, so that it is not known what another batch would be trained "
                "with; set training.lr_scaling (linear, or sqrt for Adam) and lr_base_batch_size"
            )
        return None

    @cached_property
    def law(self) -> SamplesToTarget:
        """The fit to all trainings that reach the target."""
        batches = [batch for batch, _ in self.samples]
        return fit_samples(batches, list(self.samples.values()))

    def refusal_of(self, batch: int) -> str | None:
        """Return why nothing is said of a batch; None if it is known, or near enough to what is."""
        trained, size = self.law.trained, next(row.training_samples for row in self.trainings)
        if batch in trained:
            return None
        if batch > FARTHEST_BATCH * trained[-1]:
            return f"batch {batch} is beyond {FARTHEST_BATCH} times the largest that was trained ({trained[-1]})"
        if batch > LARGEST_PART * size:
            return f"batch {batch} is more than a tenth of the {size:,} training samples"
        if any(options_of(vars(row)).get("schedule.name") for row in self.trainings):
            return f"batch {batch} was not trained, and the schedule is fixed in epochs or steps"
        return None


def decision(
    results: Results, target: Target, devices: Sequence[int] = (), price: float | None = None
) -> tuple[pd.DataFrame, list[Work]]:
    """Return the table DECISION, and what trains the same each, of which some may be refused.

    ``devices``: numbers of devices; those that were not measured are predicted. Without any those that were measured.
    ``price``: of a device for an hour.
    """
    works = list(_works(results, target, devices))
    start_s = _start_s(results)
    rows: list[Mapping[str, object]] = []
    for work in works:
        if work.refusal is None:
            own = [_row(work, setting, price, start_s) for setting in work.settings]
            known = [row for row in own if row.get("time_s")]
            for row in own:
                row["on_frontier"] = row in known and not any(_beats(other, row) for other in known)
            rows += own
    return DECISION.frame(rows), works


def _beats(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Return whether another setting is at least as fast and as cheap, and better in one of both."""
    ours, theirs = ((each["time_s"], each["device_hours"]) for each in (row, other))
    return theirs != ours and all(one <= two for one, two in zip(theirs, ours, strict=True))


def _row(work: Work, setting: Record, price: float | None, start_s: float) -> dict[str, object]:
    batch, devices = int(setting.global_batch_size), int(setting.devices)
    row: dict[str, object] = {
        **columns_of(setting, *DESCRIPTION),
        "cell_id": setting.cell_id,
        "work": work.name,
        "source": setting.source,
        "throughput_per_s": setting.throughput_per_s,
        "reason": work.refusal_of(batch) or setting.refusal,
    }
    if row["reason"]:
        return row
    samples, of_samples = work.law.at(batch)
    factor = math.exp(math.hypot(of_samples, setting.log_half))
    time_s = samples / setting.throughput_per_s
    ends = {"": time_s + start_s, "_low": time_s / factor + start_s, "_high": time_s * factor + start_s}
    row |= {f"time{end}_s": value for end, value in ends.items()}
    row |= {f"device_hours{end}": devices * value / 3600 for end, value in ends.items()}
    row |= {f"price{end}": price * devices * value / 3600 for end, value in ends.items()} if price else {}
    by_samples = of_samples**2 / max(of_samples**2 + setting.log_half**2, 1e-12)
    return {**row, "samples": samples, "by_samples": by_samples, "trained": batch in work.law.trained}


def _works(results: Results, target: Target, devices: Sequence[int]) -> Iterator[Work]:
    """Yield what trains the same: its trainings, and its fastest settings at each size and batch."""
    trainings = rows_of(convergence(results.trials, results.epochs, target, results.verdicts))
    settings = [*_measured(results), *_predicted(results, devices)]
    wanted = [row for row in settings if row.devices in devices or not devices]
    by_work = {key: list(rows) for key, rows in grouped(wanted, work_of).items()}
    of_work = grouped((row for row in trainings if not is_no_claim(vars(row))), work_of)
    for key in dict.fromkeys([*by_work, *of_work]):
        first = [*by_work.get(key, []), *of_work.get(key, [])][0]
        name = " · ".join(str(each) for each in (first.model, first.data, first.precision) if not pd.isna(each))
        yield Work(name, of_work.get(key, []), by_work.get(key, []))


def _measured(results: Results) -> Iterator[Record]:
    """Yield the fastest setting of each number of devices and global batch that was measured."""
    for row in rows_of(results.leaders):
        if row.cell_id == row.leader_id:
            log_half = math.log(row.throughput_high / row.throughput_per_s) if not pd.isna(row.throughput_high) else 0.0
            yield Record({**vars(row), "source": "measured", "refusal": None, "log_half": log_half})


def _predicted(results: Results, devices: Sequence[int]) -> Iterator[Record]:
    """Yield the settings of numbers of devices that were not measured, as far as they can be predicted."""
    measured = {int(row.devices) for row in rows_of(results.leaders)}
    asked = tuple(number for number in devices if number not in measured)
    if not asked or results.exchanges.empty:
        return
    for row in rows_of(predict(results, Asked(asked))):
        if row.kind == "asked":
            known = not pd.isna(row.step_s)
            log_half = math.log(row.high / row.step_s) if known else 0.0
            more = {"source": "predicted", "refusal": row.refusal, "log_half": log_half, "cell_id": None, "label": None}
            yield Record({**vars(row), **more})


def _start_s(results: Results) -> float:
    """Return the mean time of a worker group outside its trials, which a training takes to start."""
    ledger = results.ledger
    by_group = ledger[ledger["level"] == "group"].groupby("group_id")["seconds"].sum()
    return max(float(by_group.mean()), 0.0) if len(by_group) else 0.0
