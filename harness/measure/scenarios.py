"""What one rank does in a trial: time steps, train epochs, or take the steps of an equivalence check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.config.experiment import Experiment
from harness.measure import memory
from harness.measure.convergence import Epochs
from harness.measure.divergence import Divergence, earliest, first_in, outcome_columns
from harness.measure.equivalence import measure_update
from harness.measure.explain import explain
from harness.measure.stepper import Stepper, TimedWindow, columns_of, joined, step_columns, window_rows
from harness.measure.throughput import ThroughputMeasurement, measure_throughput
from harness.plan.rows import RankFacts, RankRow
from harness.plan.trial import Trial, TrialResult
from harness.train import workloads
from harness.train.checkpoint import CheckpointManager
from harness.train.ranks import Ranks
from harness.train.training import Training


@dataclass
class TrialContext:
    """One trial on one rank, and where its time goes (``parts``, seconds). ``cache`` outlives the trial."""

    trial: Trial
    experiment: Experiment
    ranks: Ranks
    advance: Callable[[], None]
    cache: dict[Any, Any]
    parts: dict[str, float] = field(default_factory=dict)
    rank_facts: RankFacts = field(default_factory=RankFacts)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside counts as this part of the trial."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def workload(self) -> Any:
        """A workload and its data sets, read once a process for all trials that share them."""
        cell = self.trial.cell
        key = (cell.workload, cell.data, cell.model, repr(sorted(cell.workload_options.items())))
        if key not in self.cache:
            workload = workloads.build(cell)
            self.cache[key] = (workload, workload.datasets())
        return self.cache[key]


def _training(context: TrialContext, workload: Any) -> Training:
    with context.part("build"):
        training = Training(context.trial.cell, workload, context.trial.seed, context.ranks)
    return training


def throughput(context: TrialContext) -> TrialResult:
    settings = context.experiment.throughput
    assert settings
    trial, ranks = context.trial, context.ranks
    with context.part("build"):
        workload, datasets = context.workload()
    fresh_peak = memory.reset_peak(ranks.devices)
    training = _training(context, workload)
    collate = getattr(workload, "collate", None)
    stepper = Stepper(training, datasets[0], trial.cell, trial.seed, ranks, collate=collate, advance=context.advance)
    speed = measure_throughput(stepper, settings, shared=trial.cell.oversubscribe)
    context.rank_facts |= {
        **(memory.peak(ranks.devices) if fresh_peak else {}),
        **memory.of_state(training),
        **speed.load,
    }
    stretches = list(speed.stretches)
    facts: dict[str, Any] = {"steady": speed.steady, "effective_lr": training.effective_lr}
    if settings.explain and trial.purpose != "twin":
        more, told = _explained(context, stepper, speed, workload)
        stretches += more
        facts |= told
    elif not settings.explain:
        facts["flops_reason"] = "throughput.explain is off"
    for kind, name in (("warmup", "warmup"), ("timed", "windows"), ("phases", "phases")):
        context.parts[name] = sum(s.window.duration_s for s in stretches if s.kind == kind)
    seen = ranks.gather((window_rows(ranks.rank, stretches), step_columns(ranks.rank, stretches)))
    bad = earliest(first_in(steps["loss"], rank) for rank, (_, steps) in enumerate(seen))
    return TrialResult(
        trial.id,
        **outcome_columns(bad or (None if speed.finite else Divergence(0)), facts),
        unit=workload.unit,
        parameters=training.parameters,
        steps_s=stepper.spent_s,
        windows=tuple(row for windows, _ in seen for row in windows),
        steps=joined([steps for _, steps in seen]),
    )


def _explained(
    context: TrialContext, stepper: Stepper, speed: ThroughputMeasurement, workload: Any
) -> tuple[list[TimedWindow], dict[str, Any]]:
    """What explains the trial; where that fails, why: what was measured before it stays.

    Not so where ranks work together: one that went on alone would meet the others in another collective.
    """
    before = stepper.spent_s
    try:
        with context.part("explain"):
            return explain(context.trial.cell, stepper, speed, workload, context.cache)
    except Exception as error:
        if context.ranks.world_size > 1:
            raise
        return [], {"explain_error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        context.parts["explaining steps"] = stepper.spent_s - before
        context.parts["explain"] -= context.parts["explaining steps"]


def convergence(context: TrialContext) -> TrialResult:
    settings = context.experiment.convergence
    assert settings
    trial, ranks = context.trial, context.ranks
    with context.part("build"):
        workload, datasets = context.workload()
    fresh_peak = memory.reset_peak(ranks.devices)
    training = _training(context, workload)
    collate, keeper = getattr(workload, "collate", None), _keeper(context, training)
    epochs = Epochs(training, datasets, trial.cell, trial.seed, ranks, collate, keeper)
    epochs.run(settings, context.advance)
    context.parts |= {part: seconds for part, seconds in epochs.spent.items() if keeper or part != "checkpoints"}
    context.rank_facts |= {**(memory.peak(ranks.devices) if fresh_peak else {}), **memory.of_state(training)}
    facts = {"effective_lr": training.effective_lr, "resumed_epoch": epochs.resumed_epoch or None}
    return TrialResult(
        trial.id,
        **outcome_columns(epochs.diverged, facts),
        unit=workload.unit,
        parameters=training.parameters,
        steps_s=epochs.spent["epochs"],
        windows=tuple(row for row in ranks.gather(epochs.window) if row),
        epochs=columns_of(epochs.rows),
    )


def _keeper(context: TrialContext, training: Training) -> CheckpointManager | None:
    """What keeps the trial's checkpoints, in a folder of its own; None where none are asked for."""
    settings = context.experiment.checkpoint
    if settings is None or settings.folder is None:
        return None
    return CheckpointManager(Path(settings.folder) / context.trial.id, settings.every, training, context.ranks)


def equivalence(context: TrialContext) -> TrialResult:
    with context.part("build"):
        workload, datasets = context.workload()
    with context.part("check"):
        update = measure_update(
            context.trial.cell, workload, datasets[0], context.trial.seed, context.ranks, context.advance
        )
    return TrialResult(
        context.trial.id,
        **outcome_columns(None if update.finite else Divergence(0), {}),
        unit=workload.unit,
        parameters=update.parameters,
        steps_s=context.parts["check"],
        checks={"bucket": list(range(len(update.sketch))), "update": update.sketch},
    )


def with_times(
    result: TrialResult, context: TrialContext, started_at: float, trial_s: float, ranks: Sequence[RankRow]
) -> TrialResult:
    """The result with its times and ranks."""
    known = sum(context.parts.values())
    parts = {**context.parts, "other": max(0.0, trial_s - known)}
    return replace(result, started_at=started_at, trial_s=trial_s, parts=parts, ranks=tuple(ranks))
