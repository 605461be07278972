"""The time left of a run: from durations of trials of unlike length, by a fake clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from harness.plan.planner import GROUP_START_S, Plan, make_plan
from harness.plan.trial import Trial
from harness.run.events import GroupReady, GroupStarting, Note, Repeating, TrialEnded, TrialStarting
from harness.run.time_left import TimeLeft, rounded
from tests.conftest import Make, laptop

GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
START_S = 4.0


class Run:
    """A run of a plan by a clock of its own; ``seconds``: the duration of each kind of trial."""

    def __init__(self, plan: Plan, seconds: Mapping[str, float]) -> None:
        self.now, self.seconds, self.plan = 100.0, seconds, plan
        self.left = TimeLeft(plan, plan.groups, lambda: self.now)

    def measure(self, trials: int, outcome: str = "ok") -> list[Trial]:
        """Measure the first trials; return the rest."""
        wanted = trials
        for group in self.plan.groups:
            if wanted == 0:
                break
            self.left.follow(GroupStarting(group))
            self.now += START_S
            self.left.follow(GroupReady(group, START_S))
            for trial in group.trials[:wanted]:
                self.left.follow(TrialStarting(trial))
                self.now += self.seconds[trial.scenario] * trial.cell.devices * (outcome != "skipped")
                self.left.follow(TrialEnded(trial, {"outcome": outcome}))
                wanted -= 1
        return list(self.plan.trials[trials:])


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    convergence = {"epochs": 1, "seeds": [0, 1]}
    return make_plan(make_experiment(GRID, throughput={"blocks": 3}, convergence=convergence), laptop())


SECONDS = {"throughput": 2.0, "convergence": 50.0}


def expected(trials: Iterable[Trial]) -> float:
    return sum(SECONDS[trial.scenario] * trial.cell.devices for trial in trials)


def first_block(plan: Plan) -> int:
    return sum(len(group.trials) for group in plan.groups if group.block == 0)


def test_trials_of_a_kind_and_cell_take_what_they_took_before_and_groups_that_never_start_nothing(plan: Plan) -> None:
    run = Run(plan, SECONDS)
    *left_out, last = run.measure(first_block(plan))
    groups = sum(group.block > 0 for group in plan.groups)
    assert run.left.seconds == pytest.approx(expected([*left_out, last]) + START_S * groups)
    assert run.left.text.startswith("about ")
    for trial in left_out:
        run.left.follow(TrialEnded(trial, {"outcome": "skipped"}))
    assert run.left.seconds == pytest.approx(START_S + expected([last]))


def test_before_any_trial_the_plan_says_the_least_and_a_lost_trial_is_still_to_be_measured(plan: Plan) -> None:
    left = TimeLeft(plan, plan.groups, lambda: 0.0)
    least = GROUP_START_S * len(plan.groups) + sum(map(plan.least_trial_seconds, plan.trials))
    assert left.seconds == pytest.approx(least) and left.text == f"at least {rounded(least)} left"
    for again, less in ((True, 0.0), (False, plan.least_trial_seconds(plan.trials[0]))):
        left.follow(TrialEnded(plan.trials[0], {"outcome": "lost"}, again=again))
        assert left.seconds == pytest.approx(least - less)


def test_within_a_trial_the_time_goes_on_and_never_below_the_rest(plan: Plan) -> None:
    run = Run(plan, SECONDS)
    rest = run.measure(first_block(plan))
    group = next(group for group in plan.groups if group.block == 1)
    run.left.follow(GroupStarting(group))
    run.now += START_S
    run.left.follow(GroupReady(group, START_S))
    run.left.follow(TrialStarting(rest[0]))
    before = run.left.seconds
    run.now += 1.0
    assert run.left.seconds == pytest.approx(before - 1.0)
    run.now += 1000.0
    assert run.left.seconds == pytest.approx(before - expected(rest[:1]))


def test_failed_and_skipped_trials_say_nothing_about_the_others(plan: Plan) -> None:
    for outcome in ("error", "skipped"):
        run = Run(plan, SECONDS)
        rest = run.measure(3, outcome)
        assert run.left.text.startswith("at least ")
        assert run.left.seconds < sum(map(plan.least_trial_seconds, rest)) + 12.0 * len(plan.groups)


def test_what_is_repeated_takes_its_time_again(plan: Plan) -> None:
    run = Run(plan, SECONDS)
    run.measure(len(plan.trials))
    assert run.left.seconds == 0
    group = plan.groups[0]
    run.left.follow(Repeating((group,)))
    assert run.left.seconds == pytest.approx(START_S + expected(group.trials)) and run.left.text


def test_a_limit_ends_the_run(make_experiment: Make) -> None:
    plan = make_plan(make_experiment(GRID, throughput={"blocks": 500}), laptop())
    now = [0.0]
    left = TimeLeft(plan, plan.groups, lambda: now[0], limit_s=300.0)
    assert left.seconds == 300.0
    now[0] = 100.0
    assert left.seconds == 200.0


def test_a_rule_may_need_fewer_blocks(make_experiment: Make) -> None:
    blocks = {"at_least": 2, "at_most": 9, "halfwidth": 0.1}
    run = Run(make_plan(make_experiment(GRID, throughput={"blocks": blocks}), laptop()), SECONDS)
    run.measure(first_block(run.plan))
    assert run.left.text.startswith("at most ")


def test_the_text_is_given_at_most_once_a_minute_and_not_at_the_end(plan: Plan) -> None:
    now = [0.0]
    left = TimeLeft(plan, plan.groups, lambda: now[0])
    said = []
    for now[0] in (0.0, 59.0, 60.0, 61.0):
        said.append(bool(left.once_a_minute()))
    assert said == [True, False, True, False]
    left.follow(Note("of no interest"))
    for trial in plan.trials:
        left.follow(TrialEnded(trial, {"outcome": "ok"}))
    assert left.text == ""


def test_estimates_are_rounded_up() -> None:
    texts = {0: "10 s", 41: "50 s", 90: "90 s", 91: "2 min", 3540: "59 min", 3541: "1 h 00 min", 4000: "1 h 10 min"}
    assert {seconds: rounded(seconds) for seconds in texts} == texts and rounded(90000) == "25 h 00 min"
