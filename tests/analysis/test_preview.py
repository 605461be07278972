"""Estimates of plans from earlier runs, which of these counts, and what smaller studies save."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.durations import Durations, TimedRun, TrialTime, newest_with, timed_run
from harness.analysis.preview import estimate_of, savings
from harness.errors import RunFolderError
from harness.plan.inventory import Inventory
from harness.plan.planner import GROUP_START_S, Plan, make_plan
from harness.record.estimate import PartTime
from harness.record.folder import RunFolder
from tests.conftest import EXAMPLE, Make, laptop

GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
TRAINING = {"epochs": 2, "seeds": [0, 1]}


def plan_of(make: Make, inventory: Inventory | None = None, **sections: Any) -> Plan:
    return make_plan(make(GRID, **{"throughput": {"blocks": 4}, **sections}), inventory or laptop())


def earlier_of(plan: Plan, seconds: Callable[[Any], float], **more: Any) -> TimedRun:
    """An earlier run of all trials of a plan; a worker group took 10 s beside its trials."""
    durations = Durations(plan.experiment)
    for trial in plan.trials:
        durations.add(trial, TrialTime({"other": seconds(trial)}, power_w=more.get("power_w")))
    for group in plan.groups:
        durations.add_start(str(group), 10.0)
    return TimedRun(Path("results/x/y"), 0.0, ("a processor",), durations, 5.0, more.get("report_s", 7.0))


def parts_of(plan: Plan, earlier: TimedRun | None) -> Mapping[str, PartTime]:
    return {part.label: part for part in estimate_of(plan, earlier).parts}


def test_a_duration_is_the_mean_of_the_cell_else_of_its_kind_else_the_least(make_experiment: Make) -> None:
    plan, durations = plan_of(make_experiment), Durations()
    first = plan.trials[0]
    again = next(trial for trial in plan.trials[1:] if trial.cell == first.cell)
    other = next(trial for trial in plan.trials if trial.cell.devices != first.cell.devices)
    assert durations.trial(other, plan, by_kind=True) == (plan.least_trial_seconds(other), False, None)
    for seconds, power_w in ((3.0, 100.0), (5.0, None)):
        durations.add(first, TrialTime({"other": seconds}, power_w=power_w))
    assert durations.trial(again, plan, by_kind=False) == (4.0, True, 100.0)
    assert durations.trial(other, plan, by_kind=True).seconds == 4.0
    assert not durations.trial(other, plan, by_kind=False).is_known


@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
def test_a_worker_group_takes_as_long_as_earlier_ones_or_at_least_its_launchers_time(
    make_experiment: Make, launcher: str
) -> None:
    group = plan_of(make_experiment, launcher=launcher).groups[0]
    durations = Durations()
    assert durations.start(group) == (GROUP_START_S[launcher], False, None)
    durations.add_start(str(group), 12.0)
    assert durations.start(group) == (12.0, True, None)


def test_the_estimate_is_the_sum_of_what_each_part_took_before(make_experiment: Make) -> None:
    plan = plan_of(make_experiment)
    earlier = earlier_of(plan, lambda trial: 2.0 * trial.cell.devices)
    parts = parts_of(plan, earlier)
    cells = {label: (part.trials, part.seconds, part.device_s) for label, part in parts.items()}
    assert cells["single x1"] == (4, 8.0, 8.0)
    assert cells["ddp x2"] == (4, 16.0, 32.0)
    assert cells["start and end of worker groups"] == (len(plan.groups), 10.0 * len(plan.groups), 0.0)
    assert (cells["plan, Ray, records"][1], cells["report"][1]) == (5.0, 7.0)
    assert {part.basis for part in parts.values()} == {"earlier run"}
    whole = estimate_of(plan, earlier)
    assert whole.seconds == 8 + 8 + 16 + 10 * len(plan.groups) + 5 + 7
    assert (whole.bound, whole.devices, whole.at_once) == ("about", 2, 2)


def test_every_kind_of_trial_has_its_part(make_experiment: Make) -> None:
    plan = plan_of(make_experiment, diagnostics=True)
    estimate = estimate_of(plan, earlier_of(plan, lambda trial: 1.0))
    trials = sum(part.trials for part in estimate.parts if part.part != "worker groups")
    assert trials == len(plan.trials)
    assert {"twin", "equivalence", "doctor", "links"} <= {part.part for part in estimate.parts}
    assert estimate.seconds == len(plan.trials) + 10 * len(plan.groups) + 5 + 7


def test_without_an_earlier_run_windows_give_a_lower_bound_and_trainings_are_unknown(make_experiment: Make) -> None:
    timed = {"blocks": 2, "windows": 3, "window_seconds": 5.0, "warmup_seconds": 1.0}
    plan = plan_of(make_experiment, throughput=timed, convergence=TRAINING)
    estimate = estimate_of(plan, None)
    by_cell = {(p.part, p.basis, p.seconds) for p in estimate.parts if p.cell_id}
    assert by_cell == {("cell", "lower bound", 32.0), ("convergence", "unknown", None)}
    assert estimate.bound == "at least" and estimate.earlier is None
    trials = sum(map(plan.least_trial_seconds, plan.trials))
    assert estimate.seconds == GROUP_START_S["ray"] * len(plan.groups) + trials


def test_what_the_earlier_run_lacks_is_a_lower_bound(make_experiment: Make) -> None:
    plan = plan_of(make_experiment)
    small = make_plan(make_experiment({**GRID, "devices": 1}, throughput={"blocks": 4}), laptop())
    earlier = earlier_of(small, lambda trial: 2.0)
    bases = {label: part.basis for label, part in parts_of(plan, earlier).items() if part.part == "cell"}
    assert bases == {"single x1": "earlier run", "ddp x1": "earlier run", "ddp x2": "lower bound"}
    assert estimate_of(plan, earlier).bound == "at least"
    assert estimate_of(small, earlier_of(small, lambda trial: 2.0, report_s=None)).bound == "about"
    explained = plan_of(make_experiment, throughput={"blocks": 4, "explain": True})
    found = parts_of(explained, earlier_of(plan, lambda trial: 1.0))
    assert found["single x1"].basis == "lower bound"


def test_the_estimate_is_a_bound_by_its_rule_and_has_the_devices_that_work_at_once_and_their_energy(
    make_experiment: Make,
) -> None:
    plan = plan_of(make_experiment, throughput={"blocks": {"at_least": 2, "at_most": 4, "halfwidth": 0.1}})
    assert estimate_of(plan, earlier_of(plan, lambda trial: 1.0)).bound == "at most"
    assert estimate_of(plan, None).bound == "about"  # trials may take longer, and fewer blocks suffice
    plan = plan_of(make_experiment)
    for power_w, energy_j in ((100.0, 4 * 2 * 2 * 100), (None, None)):
        assert parts_of(plan, earlier_of(plan, lambda trial: 2.0, power_w=power_w))["ddp x2"].energy_j == energy_j
    estimate = estimate_of(plan_of(make_experiment, Inventory.assume(8, 8)), None)
    assert (estimate.devices, estimate.at_once) == (64, 2)


def test_a_smaller_study_saves_what_its_own_estimate_is_less(make_experiment: Make) -> None:
    plan = plan_of(make_experiment, convergence=TRAINING)
    earlier = earlier_of(plan, lambda trial: 50.0 if trial.kind == "convergence" else 2.0)
    found = savings(plan, earlier)
    cells = 3
    trainings = [trial for trial in plan.trials if trial.kind == "convergence"]
    assert found["3 instead of 4 blocks"] == cells * 2.0 + 10.0  # a worker group
    assert found["1 instead of 2 seeds"] == 50.0 * len(trainings) / 2
    largest = [trial for trial in plan.trials if trial.cell.devices == 2]
    trials_s = sum(50.0 if trial.kind == "convergence" else 2.0 for trial in largest)
    assert found["no cells on 2 devices"] == trials_s  # in groups that the others need too


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_smaller_study_of_a_resumed_run_has_the_blocks_that_are_there(make_experiment: Make, done: int) -> None:
    plan = plan_of(make_experiment, throughput={"blocks": 5})
    left = replace(plan, groups=tuple(group for group in plan.groups if group.block >= done))
    earlier = earlier_of(plan, lambda trial: 2.0)
    found = savings(left, earlier)
    cells = 3
    rest_s = 5.0 + 7.0 if done == 3 else 0.0  # nothing is left to plan and report
    assert found["3 instead of 5 blocks"] == 2 * (cells * 2.0 + 10.0) + rest_s


def test_one_block_of_one_size_has_no_smaller_study_and_one_size_is_not_left_for_its_base(
    make_experiment: Make,
) -> None:
    plan = make_plan(make_experiment({**GRID, "devices": 1}, throughput={"blocks": 1}), laptop())
    assert savings(plan, None) == {}
    grid = {**GRID, "devices": 2, "strategy": "ddp"}
    plan = make_plan(make_experiment(grid, throughput={"blocks": 4}), laptop())
    assert {trial.cell.devices for trial in plan.trials if not trial.purpose} == {1, 2}
    assert [*savings(plan, None)] == ["3 instead of 4 blocks"]


WINDOWS = {"windows": 2, "window_steps": 10, "window_seconds": 0.0, "warmup_steps": 5}


@pytest.mark.parametrize(
    ("now", "seconds"),
    [
        (WINDOWS, 1 + 2 + 4 + 3),
        ({**WINDOWS, "windows": 6}, 1 + 2 + 12 + 3),
        ({**WINDOWS, "window_steps": 20}, 1 + 2 + 8 + 3),
        ({**WINDOWS, "window_seconds": 8.1}, 1 + 2 + 2 * 8.2 + 3),
        ({**WINDOWS, "warmup_steps": 10}, 1 + 4 + 4 + 3),
        ({**WINDOWS, "explain": False}, 1 + 2 + 4 + 0),
    ],
)
def test_windows_of_other_length_take_other_time(make_experiment: Make, now: dict[str, Any], seconds: float) -> None:
    time = TrialTime({"build": 1.0, "warmup": 2.0, "windows": 4.0, "explain": 3.0}, step_s=0.2)
    then = make_experiment(throughput={"explain": True, **WINDOWS})
    assert time.under(then, make_experiment(throughput={"explain": True, **now}), "cpu") == pytest.approx(seconds)


def test_trainings_take_time_by_their_epochs(make_experiment: Make) -> None:
    then, now = (make_experiment(convergence={"epochs": epochs}) for epochs in (2, 6))
    assert TrialTime({"build": 1.0, "epochs": 4.0, "evaluation": 0.5}).under(then, now, "cpu") == 1 + 3 * 4.5


@pytest.mark.parametrize(("device", "seconds"), [("cuda", 5.0), ("cpu", 0.2)])
def test_the_default_warm_up_is_that_of_the_device(make_experiment: Make, device: str, seconds: float) -> None:
    """10 s of an earlier run become 5 s on a GPU, and on a CPU the least steps: 2 of 0.1 s."""
    settings = {"windows": 2, "warmup_steps": 2, "window_seconds": 1.0}
    then = make_experiment(throughput={**settings, "warmup_seconds": 10})
    now = make_experiment(throughput=settings)
    assert TrialTime({"warmup": 10.0}, step_s=0.1).under(then, now, device) == pytest.approx(seconds)


def test_the_plan_of_a_run_is_estimated_to_take_what_it_took() -> None:
    folder = RunFolder.open(EXAMPLE)
    earlier = timed_run(folder)
    plan = make_plan(folder.experiment(), Inventory.assume(1, 0, 2))
    (invocation,) = folder.environment()["invocations"]
    took_s = invocation["wall_s"] + invocation["report_s"]
    assert estimate_of(plan, earlier).seconds == pytest.approx(took_s, rel=0.001)
    assert earlier.hardware == (folder.environment()["groups"][0]["nodes"][0]["cpu"],)
    assert earlier.report_s == invocation["report_s"]


def cells_of(path: Path) -> set[str]:
    lines = RunFolder.open(path).lines()
    return {line["cell_id"] for line in lines if line["outcome"] == "ok" and line["kind"] == "throughput"}


def test_the_newest_run_with_all_cells_counts_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    first, second, third = (tmp_path / "scaling" / name for name in ("20260101-a", "20260102-b", "20260103-c"))
    for folder in (first, second, third):
        shutil.copytree(EXAMPLE, folder)
    (third / "trials.jsonl").write_text("")
    wanted = cells_of(EXAMPLE)
    found = newest_with(wanted, tmp_path)
    assert found and found.path == second
    with (second / "environment.jsonl").open("a") as file:
        file.write('{"invocation": 0, "facts": {"wall_s": "soon"}}\n')
    with pytest.raises(RunFolderError, match="is damaged or incomplete"):
        timed_run(RunFolder.open(second))
    found = newest_with(wanted, tmp_path)
    assert found and found.path == first
    (first / "trials.jsonl").write_text("nonsense\n")
    assert newest_with({*wanted}, tmp_path) is None


def test_a_run_with_most_of_the_cells_is_better_than_none_and_one_without_any_is_none(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "scaling" / "20260101-a")
    found = newest_with({*cells_of(EXAMPLE), "0123456789ab"}, tmp_path)
    assert found and found.path.name == "20260101-a"
    assert newest_with({"0123456789ab"}, tmp_path) is None
    assert newest_with({"0123456789ab"}, tmp_path / "nowhere") is None
