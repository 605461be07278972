"""Which trials are not started, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from harness.plan.planner import Plan, make_plan
from harness.plan.rows import FindingRow, Outcome, SkipCode, TrialFacts
from harness.plan.trial import Trial, TrialResult
from harness.run.skip_policy import Lines, SkipPolicy, needs_no_less
from tests.conftest import Make, laptop
from tests.records import line


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
    return make_plan(make_experiment(grid, preflight=True, throughput={"blocks": 2}), laptop())


def policy_of(plan: Plan, *lines: Any) -> SkipPolicy:
    return SkipPolicy(plan, list, 0.0, lines)


def trial_of(plan: Plan, strategy: str, batch: int, *, purpose: str = "") -> Trial:
    """Return the first trial of such a cell on the most devices."""
    wanted = (strategy, batch, purpose)
    of = (each for each in plan.trials if (each.cell.strategy, each.cell.per_device_batch_size, each.purpose) == wanted)
    return max(of, key=lambda trial: trial.cell.devices)


def reason_of(policy: SkipPolicy, trial: Trial) -> str | None:
    skipped = policy.skipped(trial)
    if skipped:
        assert (skipped.trial_id, skipped.outcome) == (trial.id, "skipped")
        assert skipped.skip_code in get_args(SkipCode)
    return skipped and skipped.reason


def test_no_trial_starts_after_a_limit(plan: Plan, make_experiment: Make) -> None:
    policy = policy_of(plan)
    assert policy.deadline is None and [trial for trial in plan.trials if policy.skipped(trial)] == []
    limited = make_plan(make_experiment(limits={"device_hours": 1}), laptop())
    assert SkipPolicy(limited, list, 3599.0).skipped(limited.trials[0]) is None
    of_hours = "time is up: limits.device_hours was reached (1 of the whole run; raise it to go on)"
    wall = make_plan(make_experiment(limits={"wall": 1e-9}), laptop())
    for some, spent, text in ((limited, 3600.0, of_hours), (wall, 0.0, "time is up: limits.wall was reached")):
        policy = SkipPolicy(some, list, spent)
        skipped = [policy.skipped(trial) for trial in some.trials]
        assert {(each.reason, each.skip_code) for each in skipped if each} == {(text, "time_up")} and all(skipped)
        assert policy.deadline is not None


@pytest.mark.parametrize(
    ("kind", "prunes", "pruned"),
    [("", True, True), ("doctor", True, False), ("links", True, False), ("", False, False)],
)
def test_a_cell_that_ran_out_of_memory_is_tried_at_smaller_batches_only(
    plan: Plan, kind: str, prunes: bool, pruned: bool
) -> None:
    limits = plan.experiment.limits.model_copy(update={"prune_oom": prunes})
    plan = replace(plan, experiment=plan.experiment.model_copy(update={"limits": limits}))
    policy = policy_of(plan)
    small, large = trial_of(plan, "ddp", 8), trial_of(plan, "ddp", 16)
    policy.learn(replace(large, purpose=kind) if kind else large, TrialResult(large.id, "oom"))
    expected = "a batch of 16 per device of the same cell ran out of memory (limits.prune_oom)" if pruned else None
    assert (reason_of(policy, small), reason_of(policy, large)) == (None, expected)
    assert reason_of(policy, trial_of(plan, "single", 16)) is None


def test_links_need_neither_a_cell_that_trains_nor_its_memory(plan: Plan) -> None:
    cell = trial_of(plan, "ddp", 8)
    links = replace(cell, purpose="links")
    earlier = {"trial_id": cell.id, "outcome": "oom", "reason": "", "facts": {}}
    policy = policy_of(plan, earlier)
    assert reason_of(policy, cell) and reason_of(policy, trial_of(plan, "ddp", 16)) and reason_of(policy, links) is None
    assert not needs_no_less(cell.cell, trial_of(plan, "ddp", 16).cell)
    policy = policy_of(plan)
    policy.learn(replace(cell, purpose="doctor"), TrialResult("t", "ok", facts={"findings": [finding("gradients")]}))
    assert reason_of(policy, cell) and reason_of(policy, links) is None


def finding(check: str) -> FindingRow:
    return {"check": check, "severity": "error", "seen": "7", "means": "m", "advice": "a"}


@pytest.mark.parametrize("outcome", ["ok", "error"])
def test_refused_cells_are_skipped_and_examined_again(plan: Plan, outcome: Outcome) -> None:
    policy = policy_of(plan)
    examination = next(trial for trial in plan.trials if trial.purpose == "doctor")
    policy.learn(examination, TrialResult(examination.id, outcome, facts={"findings": [finding("gradients")]}))
    refused = {trial.purpose for trial in plan.trials if reason_of(policy, trial) == "preflight: gradients: 7"}
    assert "" in refused and "doctor" not in refused


@pytest.mark.parametrize(
    ("outcome", "facts", "skips"),
    [
        ("timeout", {}, True),  # the user's code hung
        ("error", {}, True),  # the workload could not be built
        ("error", {"findings": [{**finding("execution"), "severity": "warning"}]}, False),  # a check raised
        ("oom", {}, False),
        ("lost", {}, False),
    ],
)
def test_cells_whose_examination_failed_in_the_users_code_are_skipped_with_that_reason(
    plan: Plan, outcome: Outcome, facts: TrialFacts, skips: bool
) -> None:
    policy = policy_of(plan)
    examination = next(trial for trial in plan.trials if trial.purpose == "doctor")
    policy.learn(examination, TrialResult(examination.id, outcome, "7", facts=facts))
    of_kind = [t for t in plan.trials if t.trains and t.cell.workload_key == examination.cell.workload_key]
    assert {reason_of(policy, trial) for trial in of_kind} == {"preflight: execution: 7" if skips else None}


def test_code_that_raises_is_tried_at_other_batches_until_it_raises_there_too(plan: Plan) -> None:
    policy = policy_of(plan)
    of_ddp = [t for t in plan.trials if t.trains and t.cell.strategy == "ddp" and t.purpose == ""]
    large = max(of_ddp, key=lambda trial: (trial.cell.devices, trial.cell.global_batch_size))
    examination = replace(large, purpose="doctor")
    policy.learn(examination, TrialResult("t", "error", "7", facts={"findings": [finding("execution")]}))
    same = [t for t in of_ddp if (t.cell.devices, t.cell.global_batch_size) == (2, large.cell.global_batch_size)]
    assert 0 < len(same) < len(of_ddp)
    for trial in of_ddp:
        assert reason_of(policy, trial) == ("preflight: execution: 7" if trial in same else None)
    alone = [t for t in plan.trials if t.trains and t.cell.strategy == "ddp" and t.cell.devices == 1]
    (as_large,) = {t.cell for t in alone if t.cell.per_device_batch_size == large.cell.per_device_batch_size}
    policy.learn(replace(large, cell=as_large, purpose="explain"), TrialResult("t", "error", "7"))
    assert {t.cell for t in alone if reason_of(policy, t)} == {as_large}  # of smaller batches that says nothing
    larger = replace(as_large, per_device_batch_size=None, global_batch_size=64, uneven=True)
    for cell in (larger, as_large):
        policy.learn(replace(large, cell=cell), TrialResult("t", "error", "7"))
    assert {t.cell for t in alone if reason_of(policy, t)} == {as_large}
    (single,) = {t.cell for t in plan.trials if t.cell.strategy == "single" and t.cell.per_device_batch_size == 8}
    for outcome, cell, refused in (("ok", None, False), ("error", single, False), ("error", None, True)):
        other = next(trial for trial in of_ddp if trial not in same and trial.cell != as_large)
        policy.learn(replace(other, cell=cell or other.cell), TrialResult("t", outcome, "7"))
        assert (reason_of(policy, other) is not None) == refused
    assert all(reason_of(policy, trial) for trial in (*of_ddp, *alone))  # it raised with fewer samples: the whole kind
    in_bf16 = [replace(trial, cell=replace(trial.cell, precision="bf16")) for trial in (*of_ddp, *alone)]
    assert not any(reason_of(policy, trial) for trial in in_bf16)
    policy.learn(in_bf16[0], TrialResult("t", "error", "7"))
    assert not any(reason_of(policy, trial) for trial in in_bf16[1:])


def diverging(plan: Plan, **more: Any) -> tuple[Trial, TrialResult]:
    """The examination of ddp, in which finite losses diverged."""
    trial = next(t for t in plan.trials if t.purpose == "doctor" and t.cell.strategy == "ddp" and t.cell.devices == 2)
    seen: Any = {**finding("divergence"), "severity": "warning", "stops": False, **more}
    return trial, TrialResult(trial.id, "ok", facts={"findings": [seen]})


GREW = {"loss": np.array([1.0, 20.0, 400.0, 100.0])}
ROSE = {"loss": np.array([0.2, 3.1, 4.2, 4.0])}
"""As of a queue of negatives, which is empty in the first step."""
FELL = {"loss": np.array([1.0, 3.0, 0.5])}
REASON = "preflight: divergence, also when tried once: 7 (to reproduce it on purpose: allow: [divergence])"


@pytest.mark.parametrize("severity", ["warning", "error"])
@pytest.mark.parametrize(
    ("outcome", "steps", "tried"),
    [
        ("diverged", {}, True),
        ("ok", GREW, True),
        ("ok", FELL, False),
        ("ok", ROSE, False),
        ("oom", {}, False),
        ("lost", {}, False),
    ],
)
def test_a_cell_that_the_doctor_saw_diverge_is_tried_once(
    plan: Plan, severity: str, outcome: Outcome, steps: Any, *, tried: bool
) -> None:
    policy = policy_of(plan)
    policy.learn(*diverging(plan, severity=severity))
    cells = [t for t in plan.trials if t.purpose == "" and t.cell == trial_of(plan, "ddp", 8).cell]
    assert [reason_of(policy, trial) for trial in cells] == [None, None]
    policy.learn(cells[0], TrialResult(cells[0].id, outcome, steps=steps))
    if outcome != "oom":
        assert reason_of(policy, cells[1]) == (REASON if tried else None)
        other = policy_of(plan)
        other.learn(*diverging(plan, severity=severity))
        other.learn(replace(cells[0], purpose="equivalence"), TrialResult(cells[0].id, outcome, steps=steps))
        assert reason_of(other, cells[1]) is None  # a check is no try
    assert reason_of(policy, trial_of(plan, "ddp", 16)) is None or outcome == "oom"  # another batch has another rate
    assert reason_of(policy, trial_of(plan, "single", 8)) is None


def test_a_cell_that_diverges_is_tried_in_every_block_if_the_doctor_saw_nothing_or_that_is_allowed(plan: Plan) -> None:
    cell = trial_of(plan, "ddp", 8)
    allowed = replace(plan, experiment=plan.experiment.model_copy(update={"allow": ("divergence",)}))
    for policy, examination in ((policy_of(plan), None), (policy_of(allowed), diverging(plan))):
        if examination:
            policy.learn(*examination)
        policy.learn(cell, TrialResult(cell.id, "diverged"))
        assert reason_of(policy, cell) is None


@pytest.mark.parametrize(
    ("outcome", "reason", "tried"),
    [("diverged", "", True), ("skipped", REASON, True), ("ok", "", False), ("skipped", "time is up", False)],
)
def test_a_resumed_run_does_not_try_it_again(plan: Plan, outcome: Outcome, reason: str, *, tried: bool) -> None:
    cell = trial_of(plan, "ddp", 8)
    trial, result = diverging(plan)
    lines: Any = [
        {"trial_id": trial.id, "outcome": "ok", "reason": "", "facts": result.facts},
        {"trial_id": cell.id, "outcome": outcome, "reason": reason, "facts": {}},
    ]
    assert reason_of(policy_of(plan, *lines), cell) == (REASON if tried else None)


def error(trial: Trial, reason: str) -> TrialResult:
    return TrialResult(trial.id, "error", reason, error_type="ValueError")


def test_what_raises_in_two_blocks_and_never_trained_is_not_tried_again(plan: Plan) -> None:
    policy = policy_of(plan)
    of_ddp = [t for t in plan.trials if t.trains and t.cell.strategy == "ddp" and t.purpose == ""]
    first, second = (trial for trial in of_ddp if trial.cell == of_ddp[0].cell)
    assert first.block != second.block
    not_of_the_cell = (TrialResult(first.id, "lost", "one"), TrialResult(first.id, "error", "the group did not start"))
    for result in (*not_of_the_cell, error(first, "one"), error(first, "again")):
        policy.learn(first, result)
        assert {reason_of(policy, trial) for trial in of_ddp} == {None}
    policy.learn(replace(first, purpose="twin"), error(first, "of the same block"))
    policy.learn(replace(second, purpose="profile"), error(second, "of the profile"))
    with_threads = replace(second, purpose="threads", threads=4)
    policy.learn(with_threads, error(second, "of other threads"))
    policy.learn(with_threads, TrialResult(second.id, "oom", "of their memory"))
    assert reason_of(policy, second) is None
    policy.learn(with_threads, TrialResult(second.id, "ok"))  # which does not train the cell as it is
    policy.learn(second, error(second, "two"))
    assert {trial.id for trial in of_ddp if reason_of(policy, trial)} == {first.id, second.id}
    assert reason_of(policy, first) == "raised in 2 blocks, last: two"
    assert reason_of(policy, replace(first, purpose="links")) is None
    policy.learn(second, TrialResult(second.id, "ok"))
    assert reason_of(policy, first) is None


def test_after_every_cell_raised_none_is_tried_again(plan: Plan) -> None:
    policy = policy_of(plan)
    timed = list({t.cell: t for t in plan.trials if t.timed}.values())
    for trial in timed:
        assert {reason_of(policy, one) for one in timed} == {None}
        policy.learn(trial, error(trial, trial.id))
    assert [reason_of(policy, one) for one in timed] == [f"every cell raised, this one: {one.id}" for one in timed]
    policy.learn(timed[0], TrialResult(timed[0].id, "ok"))
    assert {reason_of(policy, one) for one in timed} == {None}


def test_a_cell_that_trained_in_an_earlier_invocation_is_tried_again(plan: Plan) -> None:
    trial = trial_of(plan, "ddp", 8)
    earlier = {"trial_id": trial.id, "outcome": "ok", "reason": "", "facts": {}}
    policy = policy_of(plan, earlier)
    for block in range(3):
        policy.learn(replace(trial, block=block), error(trial, "now"))
    assert reason_of(policy, trial) is None


def test_the_number_of_blocks_is_decided_once_after_the_pilot(make_experiment: Make) -> None:
    rule = {"at_least": 3, "at_most": 5, "halfwidth": 0.1}
    plan = make_plan(make_experiment(throughput={"blocks": rule}), laptop())
    calls: list[int] = []

    def read_lines() -> Lines:
        calls.append(1)
        pilot = [trial for trial in plan.trials if trial.block < 3]
        return [line(t.cell.id, trial_id=t.id, block=t.block, kind=t.kind, purpose=t.purpose) for t in pilot]  # type: ignore[misc]

    policy = SkipPolicy(plan, read_lines)
    reasons = {trial.block: reason_of(policy, trial) for trial in plan.trials if trial.timed}
    assert [reasons[block] for block in (0, 1, 2)] == [None] * 3
    assert reasons[3] == reasons[4] == "precise enough: 3 blocks suffice for 10 %"
    assert calls == [1]


def test_what_has_no_result_in_a_block_is_not_profiled_there(make_experiment: Make) -> None:
    grid = {"strategy": ["single", "fsdp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, diagnostics=True, throughput={"blocks": 2}), laptop())
    policy = policy_of(plan)
    profiles = {trial.block: trial for trial in plan.trials if trial.purpose == "profile"}
    timed = {t.block: t for t in plan.trials if t.kind == "throughput" and t.cell == profiles[0].cell}
    policy.learn(timed[0], TrialResult(timed[0].id, "lost"))
    policy.learn(timed[1], TrialResult(timed[1].id, "ok"))
    skipped = policy.skipped(profiles[0])
    assert skipped and skipped.skip_code == "not_measured" and policy.skipped(profiles[1]) is None
    policy.learn(timed[0], TrialResult(timed[0].id, "ok"))
    assert policy.skipped(profiles[0]) is None, "a second attempt was ok"
    policy.learn(profiles[0], TrialResult(profiles[0].id, "oom"))
    assert policy.skipped(timed[0]) is None and policy.skipped(profiles[1]) is None, "its memory is the profiler's too"


def test_the_first_examination_of_data_decides_on_their_loader_workers(plan: Plan) -> None:
    trial, other = (trial_of(plan, name, 8) for name in ("single", "ddp"))
    examined = [replace(each, purpose="doctor") for each in (trial, other)]
    policy = policy_of(plan)
    group = plan.groups[0]
    assert policy.informed(group) == group
    for each, number in zip(examined, (3, 5), strict=True):
        policy.learn(each, TrialResult(each.id, "ok", facts={"loader_workers": number}))
    assert {each.loader_workers for each in policy.informed(group).trials} == {3}
    assert [each.id for each in policy.informed(group).trials] == [each.id for each in group.trials]
