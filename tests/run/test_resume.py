"""What is left of a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from math import ceil
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from harness.config.experiment import parse_experiment
from harness.errors import ExperimentError
from harness.plan.comparison import base_cell, comparable
from harness.plan.planner import Plan, is_base, make_plan
from harness.run.resume import attempts, out_of_memory, pending
from tests.any_experiment import experiments
from tests.conftest import Make, laptop


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
    settings = {"epochs": 1, "seeds": [0, 1], "only": {"per_device_batch_size": 8}}
    return make_plan(make_experiment(grid, throughput={"blocks": 2}, convergence=settings), laptop())


def recorded(plan: Plan, outcome: str = "ok", keep: Callable[[Any], bool] = lambda trial: True) -> list[dict[str, Any]]:
    return [{"trial_id": trial.id, "outcome": outcome, "attempt": 1} for trial in plan.trials if keep(trial)]


@pytest.mark.parametrize("outcome", [None, "error", "timeout", "lost", "diverged", "skipped"])
def test_only_ok_counts_as_done(plan: Plan, outcome: str | None) -> None:
    assert pending(plan, recorded(plan, outcome) if outcome else []) == plan.groups
    invocations = [line | {"invocation": number} for number, line in enumerate(recorded(plan))]
    assert pending(plan, recorded(plan)) == pending(plan, invocations) == ()


@pytest.mark.parametrize(
    ("kind", "strategy", "block"), [("throughput", "ddp", 1), ("throughput", "single", 1), ("convergence", "ddp", 0)]
)
def test_a_block_cut_in_two_measures_what_is_missing_alone(plan: Plan, kind: str, strategy: str, block: int) -> None:
    """Neither what it is compared with, nor what is compared with it."""
    missing = next(t for t in plan.trials if (t.kind, t.cell.strategy, t.block) == (kind, strategy, block))
    lines = recorded(plan, keep=lambda trial: trial.id != missing.id)
    assert [trial.id for group in pending(plan, lines) for trial in group.trials] == [missing.id]


@pytest.mark.parametrize(("allow", "again"), [((), True), (("copies",), False), (("divergence",), True)])
def test_an_error_that_is_allowed_is_not_looked_for_again(plan: Plan, allow: tuple[str, ...], again: bool) -> None:
    allowing = replace(plan, experiment=plan.experiment.model_copy(update={"allow": allow}))
    found = {"findings": [{"check": "GPU copies", "severity": "error"}]}
    lines = recorded(allowing)
    assert bool(pending(allowing, [lines[0] | {"facts": found}, *lines[1:]])) == again  # type: ignore[list-item]


def test_out_of_memory_is_not_retried_unless_configured(plan: Plan) -> None:
    lines: Any = recorded(plan, "oom")
    assert pending(plan, lines) == () and {*out_of_memory(plan, lines)} == {trial.cell for trial in plan.trials}
    limits = plan.experiment.limits.model_copy(update={"prune_oom": False})
    free = replace(plan, experiment=plan.experiment.model_copy(update={"limits": limits}))
    assert pending(free, lines) == free.groups and out_of_memory(free, lines) == []


@pytest.mark.parametrize(("outcome", "again"), [("oom", 0), ("error", 1), ("lost", 1)])
def test_a_base_that_failed_costs_no_more_than_itself(plan: Plan, outcome: str, again: int) -> None:
    base = next(t for t in plan.trials if t.kind == "throughput" and t.cell.strategy == "single" and t.block == 1)
    lines = [line | {"outcome": outcome if line["trial_id"] == base.id else "ok"} for line in recorded(plan)]
    assert len([trial for group in pending(plan, lines) for trial in group.trials]) == again


def test_bases_come_first_in_a_block_that_was_begun_and_keep_their_random_place_in_a_new_one(plan: Plan) -> None:
    begun = next(t for t in plan.trials if t.timed and t.block == 0 and not is_base(t))
    groups = pending(plan, recorded(plan, keep=lambda trial: trial.id == begun.id))
    assert [is_base(t) for g in groups if g.block == 0 for t in g.trials if t.timed] == [True] * 2 + [False] * 3
    assert [g for g in groups if g.block == 1] == [g for g in plan.groups if g.block == 1]


class Resumed:
    """A run that is called again and again: each time it measures some of what is pending, then is interrupted."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.lines, self.invocations = plan, list[dict[str, Any]](), 0

    def invocation(self, most: int, failing: Collection[str] = ()) -> int:
        """Measure at most ``most`` trials; return how many are left. Trials of ``failing`` are lost."""
        before, invocation = pending(self.plan, self.lines), self.invocations  # type: ignore[arg-type]
        todo = [trial for group in before for trial in group.trials]
        begun = {line["block"] for line in self.lines if line["outcome"] == "ok"}
        for block in begun:
            timed = [t for t in todo if t.block == block and t.timed and t.purpose != "twin"]
            place = {t.cell: number for number, t in enumerate(timed)}
            for trial in timed:
                if comparable(trial.cell):
                    assert place.get(base_cell(trial.cell), -1) <= place[trial.cell], "its base comes first"
        done = {line["trial_id"] for line in self.lines if line["outcome"] == "ok"}
        assert not done & {trial.id for trial in todo} and len(done) + len(todo) == len(self.plan.trials)
        for trial in todo[:most]:
            outcome = "lost" if trial.id in failing else "ok"
            line = {"trial_id": trial.id, "outcome": outcome, "block": trial.block, "invocation": invocation}
            self.lines.append(line | {"facts": {}, "attempt": 1})
        self.invocations += 1
        return sum(len(group.trials) for group in pending(self.plan, self.lines))  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(experiments(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_any_plan_is_finished_however_it_is_interrupted(content: dict[str, Any], most: int, chance: Random) -> None:
    """Of any plan, with any number of trials an invocation: kills may lose all of an invocation, or trials of it."""
    try:
        plan = make_plan(parse_experiment(content, source="drawn"), laptop(4))
    except ExperimentError:
        assume(False)
    trials = len(plan.trials)
    assume(0 < trials <= 150)
    undisturbed, killed = Resumed(plan), Resumed(plan)
    while undisturbed.invocation(most):
        assert undisturbed.invocations < 2 * ceil(trials / most)
    assert undisturbed.invocations == ceil(trials / most) and len(undisturbed.lines) == trials
    for _ in range(chance.randint(1, 20)):
        lost = [trial.id for trial in plan.trials if chance.random() < 0.3]
        killed.invocation(chance.randint(0, most), lost)
    kills = killed.invocations
    while killed.invocation(most):
        assert killed.invocations < kills + 2 * ceil(trials / most)
    ok = [line["trial_id"] for line in killed.lines if line["outcome"] == "ok"]
    assert sorted(ok) == sorted(trial.id for trial in plan.trials)


def test_attempts_are_the_highest_of_each_trial() -> None:
    lines = [{"trial_id": "a", "attempt": 1}, {"trial_id": "a", "attempt": 2}, {"trial_id": "b", "attempt": 1}]
    assert attempts(lines) == {"a": 2, "b": 1}


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
