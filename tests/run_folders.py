"""Run folders made by hand, without measuring: what several runs of one experiment would have recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.config.experiment import Experiment
from harness.plan.cell import Cell
from harness.plan.planner import make_plan
from harness.plan.trial import Trial, TrialResult
from harness.record.folder import RunFolder
from tests.conftest import laptop
from tests.records import rank_row

HARDWARE = {"node_id": "n", "host": "vm", "cpu": "Some CPU", "cores": 2, "logical_cpus": 4, "memory_bytes": 2**34}
SOFTWARE = {"system": "Linux", "python": "3.11", "packages": {"torch": "2.15.0"}, "cuda": None}
DEVICE = {"kind": "cpu", "model": "Some CPU", "uuid": None, "memory_bytes": None}
NODE: Mapping[str, Any] = {**HARDWARE, **SOFTWARE, "devices": [DEVICE], "threads": 1, "variables": {}}
Rate = Callable[[Cell, int], float | None]
"""The samples/s of a cell in a block; None if its trial failed."""


def steps_of(devices: int, count: int, step_s: float) -> Any:
    """The steps of one timed window, all alike."""
    total = devices * count
    places = {"rank": [rank for rank in range(devices) for _ in range(count)], "step": [*range(count)] * devices}
    times = {"step_s": [step_s] * total, "wait_s": [0.0] * total, "loss": [1.0] * total}
    return {**places, "window": [1] * total, "warmup": [False] * total, **times}


def make_run(
    place: Path,
    experiment: Experiment,
    rate: Rate,
    *,
    started_at: float = 1.7e9,
    node: Mapping[str, Any] = NODE,
    invocation: Mapping[str, Any] | None = None,
    trials: Callable[[Trial], bool] = lambda trial: True,
    accuracy: Callable[[int], float] = lambda seed: 0.9,
    epochs: int = 1,
) -> Path:
    """A run folder of an experiment on a laptop of two cores, in which each trial measured what ``rate`` says.

    ``trials``: which ones were measured; the others have no result. ``accuracy``: of the training with a seed.
    """
    plan = make_plan(experiment, laptop())
    folder = RunFolder.create(place, experiment, plan, f"name: {experiment.name}\n")
    facts = {"started_at": started_at, "git_commit": "a" * 40, "wall_s": 9.0, "ended": "finished"}
    folder.set_invocation(0, {**facts, **(invocation or {})})  # type: ignore[typeddict-item]
    for number, trial in enumerate(plan.trials):
        group = f"b{trial.block}-g0"
        if trials(trial):
            at = {"attempt": 1, "invocation": 0, "group_id": group, "position": number}
            folder.append(trial, _result(trial, rate, accuracy, epochs), at)  # type: ignore[arg-type]
    for group in dict.fromkeys(f"b{trial.block}-g0" for trial in plan.trials):
        entry = {"group_id": group, "invocation": 0, "whole_s": 1.0, "nodes": [copy.deepcopy(dict(node))], "ranks": []}
        folder.add_environment(entry)  # type: ignore[typeddict-item, arg-type]
    for trial, skip in plan.skips.items():
        at = {"attempt": 1, "invocation": 0, "group_id": None, "position": None}
        skipped = TrialResult(trial.id, "skipped", skip.text, skip_code=skip.code)
        folder.append(trial, skipped, at)  # type: ignore[arg-type]
    return folder.path


def run_inline(experiment: Experiment, place: Path) -> RunFolder:
    """Run the cells of one process in this process; the run folder, without a report."""
    from harness.launch.inline import InlineLauncher
    from harness.run.execution import Execution

    plan = make_plan(experiment, laptop())
    folder = RunFolder.create(place, experiment, plan, "x")
    Execution(plan, folder, InlineLauncher(experiment), lambda event: None).run()
    return folder


def _result(trial: Trial, rate: Rate, accuracy: Callable[[int], float], count: int) -> TrialResult:
    ranks = tuple({**rank_row(rank), "peak_memory_bytes": 2**30} for rank in range(trial.cell.devices))
    done: dict[str, Any] = {"ranks": ranks, "unit": "samples", "trial_s": 2.0, "steps_s": 1.5}
    if trial.kind == "convergence":
        numbers, reached = range(1, count + 1), accuracy(trial.seed)
        curve = {"epoch": 1, "samples": 100.0, "train_s": 2.0}
        epochs = {name: [number * first for number in numbers] for name, first in curve.items()}
        same = {
            "evaluation_s": 0.1,
            "train_loss": 0.5,
            "val_loss": 0.6,
            "val_accuracy": reached,
            "reported_f1": reached,
        }
        epochs |= {name: [value] * len(numbers) for name, value in same.items()}
        return TrialResult(trial.id, "ok", epochs=epochs, **done)
    speed = rate(trial.cell, trial.block)
    if speed is None:
        return TrialResult(trial.id, "error", "ValueError on rank 0: bad", detail="Traceback ...")
    window = {"window": 1, "window_kind": "timed", "duration_s": 100.0 * trial.cell.devices / speed, "steps": 4}
    windows = tuple({**window, "rank": rank, "weight": 100.0} for rank in range(trial.cell.devices))
    return TrialResult(trial.id, "ok", windows=windows, steps=steps_of(1, 4, 0.1), **done)  # type: ignore[arg-type]
