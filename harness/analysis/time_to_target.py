"""Time and price to a target by number of devices and global batch: samples that it takes, over throughput."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.common import Row, columns_of, grouped, is_no_claim, rows_of
from harness.analysis.doubts import LOUD
from harness.analysis.prediction.predictions import ASSUMED, Asked
from harness.analysis.results import Results, predict
from harness.analysis.stats import LEAST_BLOCKS, SIGNIFICANCE, half_width
from harness.analysis.trials import NO_METRIC, convergence
from harness.config.axes import WORK_AXES
from harness.config.sections import Target
from harness.plan.cell import MOST_MICRO_BATCH
from harness.plan.comparison import options_of
from harness.record.schema import DECISION, DESCRIPTION

LEAST_BATCHES, LEAST_SEEDS = 3, 3
"""The fewest global batches, and trainings of each that reach the target, of a fit."""
FARTHEST_BATCH = 2
"""The largest batch that is extrapolated to, as a multiple of the largest that was trained."""
LARGEST_PART = 0.1
"""The largest batch as a part of the training set: beyond it an epoch has too few steps for the law."""
ROUNDS = 50
OF_SPEED = frozenset(
    {"training.accumulation", f"training.{MOST_MICRO_BATCH}", "training.channels_last", "training.cudnn_benchmark"}
)
"""Options of the training that change its speed alone."""


@dataclass(frozen=True)
class SamplesToTarget:
    """The number of samples that trainings need to reach a target, by global batch B: E (1 + B / Bc).

    It follows from (S / S_min - 1) (E / E_min - 1) = 1 for S steps of E / S samples (McCandlish et al. 2018, arXiv
    1812.06162). ``efficient`` is E, the samples of a small batch; ``critical`` Bc, the batch that needs twice as many,
    infinite if larger ones need no more. ``covariance``: of (E, E / Bc). ``spread``: the relative standard deviation of
    one training around the law. ``trained``: the batches. ``lack_of_fit``: the p-value of the F test that the means of
    the batches lie on the law; None with fewer than three batches.
    """

    efficient: float
    critical: float
    covariance: np.ndarray
    spread: float
    freedom: int
    trained: tuple[int, ...]
    lack_of_fit: float | None

    def at(self, batch: int, resolution: float = 0.0) -> tuple[float, float]:
        """Return the samples of a training at a batch, and the half-width of the logarithm's 95 % prediction interval.

        That of one further training, with the uncertainty of the law by the delta method. ``resolution``: the relative
        standard deviation of the count itself, as the target is looked at after each epoch.
        """
        place = np.array([1.0, batch])
        samples = self.efficient * (1 + batch / self.critical)
        of_law = float(place @ self.covariance @ place) / samples**2
        return samples, half_width(math.sqrt(self.spread**2 + of_law + resolution**2), self.freedom)


def fit_samples(batches: Sequence[int], samples: Sequence[float], resolution: float = 0.0) -> SamplesToTarget:
    """Fit E (1 + B / Bc) to trainings with a relative spread that is the same at each batch.

    ``resolution``: the relative standard deviation of the counts themselves, which may be equal for that reason alone.

    Least squares of the relative residuals, by reweighting; E / Bc is at least 0. Raises ValueError with fewer than
    three trainings or two batches, and if the samples grow more than in proportion to the batch, as E is then below 0.
    """
    if len(set(batches)) < 2 or len(samples) < 3:
        raise ValueError(f"needs three trainings of two batches, got {list(batches)}")
    matrix = np.column_stack([np.ones(len(batches)), np.array(batches, dtype=float)])
    observed = np.array(samples, dtype=float)
    law = np.array([observed.mean(), 0.0])
    for _ in range(ROUNDS):
        weights = 1 / (matrix @ law)
        law, *_ = np.linalg.lstsq(matrix * weights[:, None], observed * weights, rcond=None)
        if law[0] <= 0:
            raise ValueError("samples grow more than in proportion to the batch")
        if law[1] < 0:
            law = np.array([float(observed.mean()), 0.0])
    weights = 1 / (matrix @ law)
    residuals = observed * weights - 1
    freedom = len(samples) - 2
    spread = math.sqrt(float(residuals @ residuals) / freedom)
    weighted = matrix * weights[:, None]
    covariance = spread**2 * np.linalg.pinv(weighted.T @ weighted)
    critical = float(law[0] / law[1]) if law[1] > 0 else math.inf
    trained = tuple(sorted(set(batches)))
    return SamplesToTarget(
        float(law[0]),
        critical,
        covariance,
        spread,
        freedom,
        trained,
        _lack_of_fit(batches, residuals, freedom, resolution),
    )


ROUNDED = 1e-12
"""The squared relative deviation that rounding leaves."""


def _lack_of_fit(batches: Sequence[int], residuals: np.ndarray, freedom: int, resolution: float) -> float | None:
    """Return the p-value of the F test of the batches' mean residuals against the spread within batches.

    That spread is at least ``resolution``.
    """
    by_batch = [residuals[np.array(batches) == batch] for batch in set(batches)]
    within, of_means = sum(float(((each - each.mean()) ** 2).sum()) for each in by_batch), len(by_batch) - 2
    free = freedom - of_means
    within = max(within, free * resolution**2)
    if of_means < 1 or free < 1:
        return None
    between = sum(len(each) * float(each.mean()) ** 2 for each in by_batch)
    if within <= 0:
        return 0.0 if between > ROUNDED else None
    from scipy import stats

    return float(stats.f.sf((between / of_means) / (within / free), of_means, free))


@dataclass(frozen=True)
class Work:
    """What trains the same thing in a run, with its trainings and the fastest setting of each size.

    ``trainings``: rows of the table convergence for the target. ``settings``: rows with devices, global batch and
    throughput, measured or predicted. ``measured``: all settings that were measured, of other sizes than asked for too.
    ``loud``: the doubts of a cell that no interval has.
    """

    name: str
    trainings: Sequence[Row]
    settings: Sequence[Row]
    measured: Sequence[Row] = ()
    loud: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def reached(self) -> dict[tuple[int, int], Row]:
        """By global batch and seed a training that reaches the target: strategies train the same, one counts."""
        known = (row for row in self.trainings if row.reached and not pd.isna(row.samples_to_target))
        by_key = grouped(
            (row for row in known if pd.isna(row.excluded)), lambda row: (int(row.global_batch_size), int(row.seed))
        )
        return {key: rows[0] for key, rows in by_key.items()}

    @cached_property
    def missed(self) -> list[int]:
        """The global batches at which some training does not reach the target, in ascending order."""
        late = (row for row in self.trainings if row.reached is False and pd.isna(row.excluded))
        return sorted({int(row.global_batch_size) for row in late})

    @cached_property
    def samples(self) -> dict[tuple[int, int], float]:
        """The samples to the target by global batch and seed, of the batches that have enough trainings."""
        seeds = Counter(batch for batch, _ in self.reached)
        enough = {batch for batch, count in seeds.items() if count >= LEAST_SEEDS and batch not in self.missed}
        return {key: float(row.samples_to_target) for key, row in self.reached.items() if key[0] in enough}

    @cached_property
    def refusal(self) -> str | None:
        """Why no batch can be compared, and what to measure; None if they can."""
        if not self.trainings:
            return "no training was measured; samples to a target follow from trainings at several global batches"
        if any(row.get("unit") == "tokens" for row in self.settings):
            return "its throughput counts tokens, and its trainings samples; only workloads of samples are answered"
        if all(row.target and NO_METRIC in row.target for row in self.trainings):
            return f"{self.trainings[0].target}; give the metric of a column val_<name> of epochs"
        if len({batch for batch, _ in self.samples}) < LEAST_BATCHES:
            seeds = sorted(Counter(batch for batch, _ in self.reached).items())
            known = ", ".join(f"{batch} ({count} seeds)" for batch, count in seeds) or "none"
            late = f"; not reached by each training at {', '.join(map(str, self.missed))}" if self.missed else ""
            needed = f"{LEAST_BATCHES} global batches with {LEAST_SEEDS} seeds each that reach the target"
            return f"needs {needed}, has {known}{late}"
        options = options_of(self.trainings[0])
        if "training.lr_scaling" not in options:
            return "the rule of its learning rate is the program's own, which is not known here"
        if options["training.lr_scaling"] == "none":
            return (
                "no rule of the learning rate is declared, so that it is not known what another batch would be trained "
                "with; set training.lr_scaling (linear, or sqrt for Adam) and lr_base_batch_size"
            )
        return None

    @cached_property
    def law(self) -> SamplesToTarget | None:
        """The fit to all trainings that reach the target; None if their samples are on no such law."""
        with suppress(ValueError):
            found = fit_samples([batch for batch, _ in self.samples], list(self.samples.values()), self.resolution)
            return None if found.lack_of_fit is not None and found.lack_of_fit <= SIGNIFICANCE else found
        return None

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The batches with enough trainings, in ascending order."""
        return tuple(sorted({batch for batch, _ in self.samples}))

    @property
    def off_law(self) -> str:
        """The words for batches whose samples are on no law."""
        return f"the samples at {', '.join(map(str, self.trained))} do not follow E (1 + B / Bc), beyond their spread"

    def samples_at(self, batch: int) -> tuple[float, float]:
        """Return the samples of a training at a batch, and the half-width of the logarithm's 95 % prediction interval.

        By the law or, without one, those of the batch's own trainings, with the spread of all batches' trainings.
        """
        if self.law:
            return self.law.at(batch, self.resolution)
        found = {own: [value for (b, _), value in self.samples.items() if b == own] for own in self.trained}
        apart = [value / fmean(values) - 1 for values in found.values() for value in values]
        freedom = len(apart) - len(found)
        variance = sum(each**2 for each in apart) / freedom * (1 + 1 / len(found[batch])) + self.resolution**2
        return fmean(found[batch]), half_width(math.sqrt(variance), freedom)

    @cached_property
    def resolution(self) -> float:
        """The relative standard deviation of a count that ends with an epoch: of k epochs that of 1 / k, uniform."""
        parts = [1 / float(row.epochs_to_target) for row in self.reached.values() if row.epochs_to_target]
        return math.sqrt(sum(part**2 for part in parts) / len(parts) / 12) if parts else 0.0

    def refusal_of(self, batch: int) -> str | None:
        """Return why nothing is said of a batch; None if it is known, or near enough to what is."""
        options = options_of(self.trainings[0])
        if batch in self.trained:
            return None
        if any(late <= batch for late in self.missed):
            return f"not each training at batch {min(self.missed)} reached the target"
        if batch > FARTHEST_BATCH * self.trained[-1]:
            return f"batch {batch} is beyond {FARTHEST_BATCH} times the largest that was trained ({self.trained[-1]})"
        size = self.trainings[0].training_samples
        if size and batch > LARGEST_PART * size:
            return f"batch {batch} is more than a tenth of the {size:,} training samples"
        if options.get("schedule.name") or options.get("training.warmup_epochs"):
            return f"batch {batch} was not trained, and the schedule is fixed in epochs or steps"
        return None if self.law else f"batch {batch} was not trained, and {self.off_law}"


def decision(
    results: Results, target: Target, asked: Asked, price: float | None = None, links: pd.DataFrame | None = None
) -> tuple[pd.DataFrame, list[Work]]:
    """Return the table DECISION, and what trains the same each, of which some may be refused.

    ``asked``: numbers of devices; those that were not measured are predicted, with the collectives of ``links`` too.
    Without any those that were measured. ``price``: of a device for an hour.
    """
    works = _works(results, target, asked, links)
    start_s = _start_s(results)
    rows: list[Mapping[str, object]] = []
    for work in works:
        if work.refusal is None:
            own = [_row(work, setting, price, start_s) for setting in work.settings]
            known = [(row["time_s"], row["device_hours"]) for row in own if row.get("time_s")]
            for row in own:
                ours = (row.get("time_s"), row.get("device_hours"))
                row["on_frontier"] = ours in known and not any(
                    each != ours and each[0] <= ours[0] and each[1] <= ours[1] for each in known
                )
            rows += own
    return DECISION.frame(rows), works


def _row(work: Work, setting: Row, price: float | None, start_s: float) -> dict[str, Any]:
    batch, devices = setting.global_batch_size, int(setting.devices)
    reason = setting.refusal or (None if pd.isna(batch) else work.refusal_of(int(batch)))
    row: dict[str, Any] = {
        **columns_of(setting, *DESCRIPTION),
        "cell_id": setting.cell_id,
        "work": work.name,
        "source": setting.source,
        "throughput_per_s": setting.throughput_per_s,
        "reason": reason,
    }
    if reason:
        return row
    samples, of_samples = work.samples_at(int(batch))
    factor = math.exp(math.hypot(of_samples, setting.log_half))
    time_s = samples / setting.throughput_per_s
    ends = {"": time_s + start_s, "_low": time_s / factor + start_s, "_high": time_s * factor + start_s}
    row |= {f"time{end}_s": value for end, value in ends.items()}
    row |= {f"device_hours{end}": devices * value / 3600 for end, value in ends.items()}
    row |= {f"price{end}": price * devices * value / 3600 for end, value in ends.items()} if price else {}
    by_samples = of_samples**2 / (of_samples**2 + setting.log_half**2)
    told = {"samples": samples, "start_s": start_s, "by_samples": by_samples, "trained": batch in work.trained}
    return {**row, **told}


def _works(results: Results, target: Target, asked: Asked, links: pd.DataFrame | None) -> list[Work]:
    """Return what trains the same each: its trainings, and its fastest settings at each size and batch."""
    sizes = zip(asked.devices, asked.nodes or (None,) * len(asked.devices), strict=True)
    wanted = [*dict.fromkeys(sizes)]  # each once
    asked = replace(asked, devices=tuple(size for size, _ in wanted), nodes=tuple(of for _, of in wanted if of))
    rows = rows_of(convergence(results.trials, results.epochs, target, results.verdicts))
    trainings = grouped((row for row in rows if not is_no_claim(row)), _key)
    measured = grouped(_measured(results, on_nodes=bool(asked.nodes)), _key)
    predicted = grouped(_predicted(results, asked, links), _key)
    contents = {key: json.loads(key) for key in dict.fromkeys([*measured, *trainings])}
    always = ("model", "data", "precision")
    every = dict.fromkeys(name for content in contents.values() for name in content if name not in always)
    varied = [name for name in every if len({str(content.get(name)) for content in contents.values()}) > 1]
    loud = {
        str(row.cell_id): [doubt.name for doubt in row.doubts if doubt.name in LOUD] for row in rows_of(results.cells)
    }
    found = []

    def place(row: Row) -> tuple[int, int | None]:
        return int(row.devices), int(row.nodes) if asked.nodes else None

    for key, content in contents.items():
        named = [str(content[name]) for name in always if content.get(name)]
        named += [f"{name}={content.get(name)}" for name in varied]  # what tells it from the others
        own = measured.get(key, [])
        known = {place(row) for row in own}
        settings = [row for row in own if place(row) in wanted or not wanted]
        more = [row for row in predicted.get(key, []) if place(row) not in known]
        known |= {place(row) for row in more}
        none = "not measured, and not predicted: no exchanges of this setting were recorded"
        of_cell = ("cell_id", "label", "strategy", "global_batch_size", "per_device_batch_size")
        names = (*of_cell, "device_ids", "link", "throughput_per_s", "source")
        lacking = [one for one in wanted if own and one not in known]
        more += [Row(own[0], **dict.fromkeys(names), refusal=none, devices=size, nodes=of) for size, of in lacking]
        found.append(Work(" · ".join(named), trainings.get(key, []), [*settings, *more], own, loud))
    return found


def _key(row: Row) -> str:
    """Return what cells of one training have in common, as text: work, version of the code, recipe."""
    recipe = {
        name: value
        for name, value in options_of(row).items()
        if name.startswith(("workload.", "optimizer.", "schedule.", "training.")) and name not in OF_SPEED
    }
    return json.dumps({**columns_of(row, *WORK_AXES, "variant"), **recipe}, sort_keys=True, default=str)


FEW_BLOCKS = f"needs {LEAST_BLOCKS} blocks for an interval"


def _measured(results: Results, *, on_nodes: bool = False) -> Iterator[Row]:
    """Yield the fastest setting of each number of devices, ``on_nodes`` also of nodes, and global batch.

    Its interval is that of one further process: the interval of the mean of n blocks times sqrt(n + 1).
    """
    found = rows_of(results.leaders)
    # not the leaders, which are the fastest of all recipes
    by_size = grouped(found, lambda row: (_key(row), row.devices, row.nodes if on_nodes else 0, row.global_batch_size))
    for row in [max(rows, key=lambda row: float(row.throughput_per_s)) for rows in by_size.values()]:
        few, of_mean = f"{FEW_BLOCKS}, has {row.blocks}", 0.0
        if not pd.isna(row.throughput_high):
            few, of_mean = "", math.log(row.throughput_high / row.throughput_per_s)
        log_half = of_mean * math.sqrt(row.blocks + 1)
        yield Row(row, source="measured", refusal=few or None, log_half=log_half)


def _predicted(results: Results, asked: Asked, links: pd.DataFrame | None) -> Iterator[Row]:
    """Yield the settings of numbers of devices that are asked for, as far as they can be predicted."""
    if not asked.devices or results.exchanges.empty:
        return
    for row in rows_of(predict(results, asked, links)):
        if row.kind == "asked" and not is_no_claim(row):
            known = not pd.isna(row.step_s)
            few = known and pd.isna(row.high)
            log_half = math.log(row.high / row.step_s) if known and not few else 0.0
            refusal = row.refusal or (FEW_BLOCKS if few else None if known else "not predicted")
            over = [mark for mark in row.marks if mark.startswith(ASSUMED)]
            source = ", ".join(["predicted", *over])
            yield Row(row, source=source, refusal=refusal, log_half=log_half, cell_id=None, label=None)


def _start_s(results: Results) -> float:
    """Return the mean time of a worker group outside its trials, which a training takes to start."""
    of_groups = results.ledger[results.ledger["level"] == "group"].groupby(["invocation", "group_id"])["seconds"].sum()
    return max(float(of_groups.mean()), 0.0) if len(of_groups) else 0.0
