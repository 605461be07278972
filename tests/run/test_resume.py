"""What is left of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.config.experiment import Experiment
from harness.plan.comparison import base_cell
from harness.plan.planner import Plan, make_plan
from harness.run.resume import attempts, pending
from tests.conftest import laptop

Make = Callable[..., Experiment]


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
    settings = {"epochs": 1, "seeds": [0, 1], "only": {"per_device_batch_size": 8}}
    return make_plan(make_experiment(grid, throughput={"blocks": 2}, convergence=settings), laptop())


def recorded(plan: Plan, outcome: str = "ok", keep: Callable[[Any], bool] = lambda trial: True) -> list[dict[str, Any]]:
    return [{"trial_id": trial.id, "outcome": outcome, "attempt": 1} for trial in plan.trials if keep(trial)]


def left(plan: Plan, lines: list[dict[str, Any]]) -> set[tuple[str, str, int, int]]:
    return {(t.kind, t.cell.strategy, t.cell.devices, t.block) for group in pending(plan, lines) for t in group.trials}


def test_nothing_recorded_leaves_everything(plan: Plan) -> None:
    assert pending(plan, []) == plan.groups


@pytest.mark.parametrize(("allow", "again"), [((), True), (("copies",), False), (("divergence",), True)])
def test_an_error_that_is_allowed_is_not_looked_for_again(plan: Plan, allow: tuple[str, ...], again: bool) -> None:
    allowing = replace(plan, experiment=plan.experiment.model_copy(update={"allow": allow}))
    found = {"findings": [{"check": "GPU copies", "severity": "error"}]}
    lines = recorded(allowing)
    assert bool(pending(allowing, [lines[0] | {"facts": found}, *lines[1:]])) == again  # type: ignore[list-item]


def test_everything_ok_leaves_nothing(plan: Plan) -> None:
    assert pending(plan, recorded(plan)) == ()


@pytest.mark.parametrize("outcome", ["error", "timeout", "lost", "diverged", "skipped"])
def test_only_ok_counts_as_done(plan: Plan, outcome: str) -> None:
    assert pending(plan, recorded(plan, outcome)) == plan.groups


def test_out_of_memory_is_not_retried_unless_configured(plan: Plan) -> None:
    assert pending(plan, recorded(plan, "oom")) == ()
    limits = plan.experiment.limits.model_copy(update={"prune_oom": False})
    free = replace(plan, experiment=plan.experiment.model_copy(update={"limits": limits}))
    assert pending(free, recorded(free, "oom")) == free.groups


def test_a_block_cut_in_two_measures_its_base_again(plan: Plan) -> None:
    missing = next(t for t in plan.trials if t.kind == "throughput" and t.cell.strategy == "ddp" and t.block == 1)
    lines = recorded(plan, keep=lambda trial: trial.id != missing.id)
    again = {trial.id for group in pending(plan, lines) for trial in group.trials}
    base = f"{base_cell(missing.cell).id}-b1"
    assert again == {missing.id, base}


def test_a_cell_without_its_base_is_measured_again_with_it(plan: Plan) -> None:
    base = next(t for t in plan.trials if t.kind == "throughput" and t.cell.strategy == "single" and t.block == 1)
    lines = recorded(plan, keep=lambda trial: trial.id != base.id)
    again = {trial.id for group in pending(plan, lines) for trial in group.trials}
    users = {t.id for t in plan.trials if t.timed and t.block == 1 and base_cell(t.cell) == base.cell}
    assert again == users and len(users) == 3
    rest = [line | {"attempt": 2, "invocation": 1} for line in recorded(plan, keep=lambda trial: trial.id in users)]
    assert pending(plan, lines + rest) == ()


def test_two_halves_that_were_measured_apart_make_no_pair(plan: Plan) -> None:
    lines = [line | {"invocation": number} for number, line in enumerate(recorded(plan))]
    again = {trial.id for group in pending(plan, lines) for trial in group.trials}
    assert again == {trial.id for trial in plan.trials if trial.timed}


@pytest.mark.parametrize(("outcome", "again"), [("oom", 0), ("error", 1), ("lost", 3)])
def test_a_base_that_would_fail_again_costs_no_more_than_itself(plan: Plan, outcome: str, again: int) -> None:
    base = next(t for t in plan.trials if t.kind == "throughput" and t.cell.strategy == "single" and t.block == 1)
    lines = [line | {"outcome": outcome if line["trial_id"] == base.id else "ok"} for line in recorded(plan)]
    assert len([trial for group in pending(plan, lines) for trial in group.trials]) == again


def test_a_missing_training_needs_no_base(plan: Plan) -> None:
    missing = next(t for t in plan.trials if t.kind == "convergence")
    lines = recorded(plan, keep=lambda trial: trial.id != missing.id)
    assert [t.id for group in pending(plan, lines) for t in group.trials] == [missing.id]


def test_attempts_are_the_highest_of_each_trial() -> None:
    lines = [{"trial_id": "a", "attempt": 1}, {"trial_id": "a", "attempt": 2}, {"trial_id": "b", "attempt": 1}]
    assert attempts(lines) == {"a": 2, "b": 1}


def test_if_the_base_failed_its_substitute_is_measured_again(make_experiment: Make) -> None:
    grid = {"strategy": "ddp", "devices": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, throughput={"blocks": 1}), laptop())
    by_cell = {(t.cell.strategy, t.cell.devices): t.id for t in plan.trials}
    lines = [
        {"trial_id": by_cell["ddp", 1], "outcome": "ok", "attempt": 1},
        {"trial_id": by_cell["single", 1], "outcome": "oom", "attempt": 1},
    ]
    again = {trial.id for group in pending(plan, lines) for trial in group.trials}
    assert again == {by_cell["ddp", 1], by_cell["ddp", 2]}  # the base itself lacks memory


def test_blocks_skipped_by_precision_stay_skipped_and_need_no_base(make_experiment: Make) -> None:
    rule = {"at_least": 2, "at_most": 3, "halfwidth": 0.1}
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, throughput={"blocks": rule}), laptop())
    lines = [
        {
            "trial_id": trial.id,
            "outcome": "skipped" if trial.block == 2 else "ok",
            "skip_code": "precise" if trial.block == 2 else None,
            "attempt": 1,
        }
        for trial in plan.trials
    ]
    assert pending(plan, lines) == ()
