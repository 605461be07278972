"""The scenarios of a trial on one rank: timed steps, a profile, epochs, or the steps of an equivalence check."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from harness.config.experiment import Experiment
from harness.measure import peak_memory
from harness.measure.convergence import Epochs
from harness.measure.explain import Explanation, explain
from harness.measure.profiles import measure_collectives, traces_of
from harness.measure.sketches import measure_by_precision
from harness.measure.stepper import (
    Divergence,
    ScaleDiverged,
    Stepper,
    TrainingData,
    columns_of,
    earliest,
    first_in,
    of_all_ranks,
    outcome_columns,
    recorded,
    step_quantiles,
    step_seconds,
    window_rows,
)
from harness.measure.throughput import ThroughputMeasurement, measure_throughput
from harness.measure.window import timed_part
from harness.plan.cell import Cell
from harness.plan.rows import RankFacts, TrialFacts
from harness.plan.trial import Trial, TrialResult
from harness.train import workloads
from harness.train.checkpoint import CheckpointManager, trained_facts
from harness.train.loader import SharedData, need_full_batch
from harness.train.ranks import LOADER_WORKERS, Cache, Ranks, crowding, pinned
from harness.train.training import Training
from harness.train.workloads import Datasets, Workload


@dataclass
class TrialContext:
    """One trial on one rank, with the seconds of its parts. ``cache`` outlives the trial."""

    trial: Trial
    experiment: Experiment
    ranks: Ranks
    advance: Callable[[], None]
    cache: Cache
    let_others_run: Callable[[], None] | None = None
    """Lets the trials of other variants compute, with which this one alternates; None if it alternates with none."""
    keep: Callable[[TrialResult], None] = lambda result: None
    """Sends a result that counts if what follows ends the group; all ranks call it."""
    parts: dict[str, float] = field(default_factory=dict)
    rank_facts: RankFacts = field(default_factory=RankFacts)
    device_failed: bool = False
    """Whether a device reported an error that every later call in this process would report again."""
    others_s: float = 0.0
    """Seconds in which other trials computed."""

    def alternate(self) -> None:
        """Let the trials of other variants compute, if there are some; all ranks call it."""
        if self.let_others_run:
            start = time.perf_counter()
            self.let_others_run()
            self.others_s += time.perf_counter() - start

    @property
    def loading_cell(self) -> Cell:
        """The cell with the loader workers that the doctor found to be needed, if the file leaves them open."""
        cell, known = self.trial.cell, self.trial.loader_workers
        if known is None:
            known = self.cache.get(LOADER_WORKERS, {}).get(cell.loader_key)
        if known is None or cell.loader.get("workers") is not None:
            return cell
        return replace(cell, loader={**cell.loader, "workers": known})

    def part(self, name: str) -> AbstractContextManager[None]:
        """Add the block's time to this part of the trial."""
        return timed_part(self.parts, name)

    def workload(self) -> tuple[Workload, Datasets]:
        """Return a new workload and its data sets, which trials of a process share if they are as they were built."""
        cell = self.trial.cell
        options = repr(sorted(cell.workload_options.items()))
        key = (cell.workload, cell.data, cell.model, options, self.ranks.world_size)  # a data set may be a rank's share
        known: SharedData | None = self.cache.get(key)
        unchanged = all(self.ranks.gather(known is not None and known.is_unchanged))
        if known and unchanged:  # all ranks build, or none: datasets() may have collectives
            return known.new_workload(cell), known.datasets
        workload = workloads.build(cell)
        self.cache[key] = shared = SharedData.of(cell, workload)
        return workload, shared.datasets


NOTHING_COMPILED = "torch.compile made no graph"


@dataclass(frozen=True)
class Setup:
    """A trial's training, built on this rank. ``fresh_peak``: whether peak memory counts from after the build.

    ``build_peak_bytes``: the peak of the construction; None if it is not known. ``blank``: a result without figures.
    """

    training: Training
    data: TrainingData
    fresh_peak: bool
    build_peak_bytes: int | None
    blank: TrialResult

    def of_rank(self, context: TrialContext) -> RankFacts:
        """Return the rank's columns of memory (its peak, if that is the trial's own) and of process and thread."""
        ranks, settings = context.ranks, self.training.settings.names()
        peak = peak_memory.peak(ranks.devices) if self.fresh_peak else RankFacts()
        facts: RankFacts = {**peak, "build_peak_bytes": self.build_peak_bytes, **peak_memory.of_state(self.training)}
        settings += [] if context.trial.cell.oversubscribed else crowding(ranks)
        settings += [NOTHING_COMPILED] if self.training.compiled_nothing else []
        return {**facts, "settings": ", ".join(settings), "processors": ", ".join(map(str, sorted(pinned())))}


def _build(context: TrialContext) -> Setup:
    trial, ranks = context.trial, context.ranks
    with context.part("build"):
        workload, datasets = context.workload()
    fresh = peak_memory.reset_peak(ranks.devices)
    with context.part("build"):
        training = Training(trial.cell, workload, trial.seed, ranks)
    build_peak_bytes = peak_memory.peak(ranks.devices)["peak_memory_bytes"] if fresh else None
    data = TrainingData(context.loading_cell, trial.seed, ranks, *datasets, workload)
    blank = TrialResult(trial.id, "ok", unit=workload.unit, parameters=training.parameters)
    return Setup(training, data, peak_memory.reset_peak(ranks.devices), build_peak_bytes, blank)


def throughput(context: TrialContext) -> TrialResult:
    """Time a training's steps: build, measure, explain, assemble."""
    settings = context.experiment.throughput
    assert settings
    setup = _build(context)
    stepper = Stepper(setup.training, setup.data, context.advance)
    try:
        between = context.alternate if context.let_others_run else None
        speed = measure_throughput(stepper, settings, shared=context.trial.cell.oversubscribed, between=between)
    except ScaleDiverged as error:  # the warm-up in fp16 found no loss scale
        context.rank_facts |= setup.of_rank(context)
        facts = setup.training.facts
        return replace(setup.blank, outcome="diverged", reason=str(error), steps_s=stepper.spent_s, facts=facts)
    context.rank_facts |= {**setup.of_rank(context), **speed.load, **step_quantiles(speed.windows)}
    for part, kind in {"warmup": "warmup", "windows": "timed", "phases": "phases"}.items():
        context.parts[part] = sum(each.duration_s for each in speed.windows if each.kind == kind)
    if compile_s := setup.training.compile_s:  # in the first steps
        context.parts |= {"compile": compile_s, "warmup": max(0.0, context.parts["warmup"] - compile_s)}
    windows, steps, by_rank = recorded(context.ranks, speed.windows, settings.keep_steps)
    facts = {"steady": speed.steady, **setup.training.facts, **speed.facts}
    diverged = earliest(first_in(columns["loss"], rank) for rank, columns in enumerate(by_rank))
    outcome = outcome_columns(diverged or (None if speed.finite else Divergence(0)), facts)
    measured = replace(setup.blank, **outcome, steps_s=stepper.spent_s, windows=windows, steps=steps)
    if not settings.explain:
        return replace(measured, facts={**measured.facts, "flops_reason": "throughput.explain is off"})
    if context.trial.repeats:
        return measured
    context.keep(measured)
    further, explained, exchanges = _explanation(context, stepper, speed)
    rows = window_rows(context.ranks.rank, further, first=len(speed.windows))
    of_ranks = context.ranks.gather_to_first((rows, step_seconds(further)))
    return replace(
        measured,
        facts={**measured.facts, **explained},
        steps_s=stepper.spent_s,
        windows=(*measured.windows, *of_all_ranks(of_ranks)),
        exchanges=exchanges,
    )


def profile(context: TrialContext) -> TrialResult:
    """Profile a few steps of a cell, for the time of its collectives or for their trace; no step is timed."""
    setup = _build(context)
    stepper = Stepper(setup.training, setup.data, context.advance)
    facts, traces, most_bytes = TrialFacts(), tuple[bytes, ...](), context.trial.trace_bytes
    with context.part("profile"):
        if most_bytes:
            traces = traces_of(stepper, most_bytes)
        else:
            facts = measure_collectives(stepper)
    return replace(setup.blank, steps_s=stepper.spent_s, facts=facts, traces=traces)


def _explanation(context: TrialContext, stepper: Stepper, speed: ThroughputMeasurement) -> Explanation:
    before = stepper.spent_s
    try:
        with context.part("explain"):
            return explain(stepper, speed, context.cache, exchanges=context.trial.block == 0)
    except Exception as error:
        if context.ranks.world_size > 1:  # the other ranks are in a collective that this one would not join
            raise
        context.device_failed = is_device_error(error)
        return [], {"explain_error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}, ()
    finally:
        context.parts["explaining steps"] = stepper.spent_s - before
        context.parts["explain"] -= context.parts["explaining steps"]


def is_device_error(error: Exception) -> bool:
    """Return whether an error may stay with the CUDA context of the process; one of memory does not."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    named = any(sign in str(error) for sign in ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL error"))
    return isinstance(error, torch.AcceleratorError) or named


def convergence(context: TrialContext) -> TrialResult:
    """Train and evaluate epoch by epoch, from the newest checkpoint if there is one."""
    settings = context.experiment.convergence
    assert settings
    trial, ranks = context.trial, context.ranks
    setup = _build(context)
    checkpoints, files = None, context.experiment.checkpoint
    if files and files.folder is not None:
        folder, trained = Path(files.folder) / trial.id, trained_facts(trial.cell, trial.seed)
        checkpoints = CheckpointManager(folder, files.every, setup.training, ranks, trained)
    epochs = Epochs(setup.training, setup.data, settings, context.advance, checkpoints)
    epochs.run()
    spent = epochs.spent
    context.parts |= {part: seconds for part, seconds in spent.items() if checkpoints or part != "checkpoints"}
    context.rank_facts |= setup.of_rank(context)
    facts: TrialFacts = {
        **setup.training.facts,
        "resumed_epoch": epochs.resumed_epoch or None,
        "training_samples": setup.data.samples,
    }
    return replace(
        setup.blank,
        **outcome_columns(epochs.diverged, facts),
        steps_s=spent["epochs"],
        windows=tuple(row for row in ranks.gather_to_first(epochs.window) if row),
        epochs=columns_of(epochs.rows),
        training_steps=epochs.steps.columns,
    )


def equivalence(context: TrialContext) -> TrialResult:
    """Measure what an equivalence check compares."""
    trial = context.trial
    with context.part("build"):
        workload, datasets = context.workload()
    with context.part("check"):
        need_full_batch(len(datasets[0]), trial.cell.global_batch_size, "the check's global batch")
        data = TrainingData(trial.cell, trial.seed, context.ranks, *datasets, workload)
        found = measure_by_precision(data, context.advance)
    finite = all(sketches.finite for sketches in found.values())
    rows = [
        {"computed_in": precision, "quantity": quantity, "bucket": bucket, "update": value}
        for precision, sketches in found.items()
        for quantity, sketch in sketches.quantities.items()
        for bucket, value in enumerate(sketch)
    ]
    return TrialResult(
        trial.id,
        **outcome_columns(None if finite else Divergence(0), {}),
        unit=workload.unit,
        parameters=next(iter(found.values())).parameters,
        steps_s=context.parts["check"],
        checks=columns_of(rows),
    )
