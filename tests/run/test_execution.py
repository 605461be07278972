"""Working through a plan with a launcher that follows a script, and how often a trial is attempted."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.common import rows_of
from harness.analysis.results import load
from harness.errors import WriteError
from harness.launch.protocol import ByLauncher, GroupStarted, Message, TrialStarted
from harness.plan.cell import place
from harness.plan.planner import Plan, make_plan
from harness.plan.rows import Outcome
from harness.plan.trial import Trial, TrialResult, WorkerGroup
from harness.record.folder import RunFolder
from harness.run.events import Event, GroupStarting, Note, TrialEnded
from harness.run.execution import Execution
from harness.run.resume import pending
from tests.conftest import Make, laptop, variants
from tests.run_folders import NODE

GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [8, 16]}
Script = Callable[[Trial, int], Outcome]


class ScriptedLauncher:
    """Gives each trial the outcome that the script says; the group ends at the first that is not ok."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.tries: dict[str, int] = {}
        self.launches: list[list[str]] = []

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        self.launches.append([trial.id for trial in group.trials])
        yield GroupStarted((), ())
        for trial in group.trials:
            if deadline is not None and time.time() >= deadline:
                return
            yield TrialStarted(trial.id)
            self.tries[trial.id] = self.tries.get(trial.id, 0) + 1
            outcome = self.script(trial, self.tries[trial.id])
            yield TrialResult(trial.id, outcome, "" if outcome == "ok" else "why")
            if outcome not in ("ok", "diverged", "skipped"):
                return


def execute(
    plan: Plan, tmp_path: Path, how: Script | Any = lambda trial, tries: "ok", events: list[Event] | None = None
) -> tuple[Any, RunFolder]:
    """Work through a plan in the run folder that is there, or a new one, by a script or a launcher."""
    existing = list(tmp_path.glob("*/*/plan.json"))
    folder = RunFolder(existing[0].parent) if existing else RunFolder.create(tmp_path, plan.experiment, plan, "x")
    launcher = how if hasattr(how, "launch") else ScriptedLauncher(how)
    Execution(plan, folder, launcher, (events if events is not None else []).append).run()
    return launcher, folder


def outcomes(folder: RunFolder) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in folder.lines():
        found.setdefault(row["trial_id"], []).append(row["outcome"])
    return found


@pytest.fixture
def plan(make_experiment: Make) -> Plan:
    return make_plan(make_experiment(GRID, throughput={"blocks": 2}), laptop())


def trial_of(plan: Plan, strategy: str, devices: int, batch: int, block: int = 0) -> Trial:
    return next(
        t
        for t in plan.trials
        if (t.cell.strategy, t.cell.devices, t.cell.per_device_batch_size, t.block) == (strategy, devices, batch, block)
    )


def test_all_ok_is_one_launch_a_group_and_one_row_a_trial_with_group_and_position(plan: Plan, tmp_path: Path) -> None:
    launcher, folder = execute(plan, tmp_path)
    assert launcher.launches == [[t.id for t in group.trials] for group in plan.groups]
    assert {t.id: ["ok"] for t in plan.trials} | {t.id: ["skipped"] for t in plan.skips} == outcomes(folder)
    rows = {row["trial_id"]: row for row in folder.lines()}
    for group in plan.groups:
        for position, trial in enumerate(group.trials):
            assert (rows[trial.id]["group_id"], rows[trial.id]["position"]) == (group.id, position)
    execute(plan, tmp_path)
    assert all(len(rows) == 1 for rows in outcomes(folder).values()), "a resume repeats the same skips"


@pytest.mark.parametrize("outcome", ["error", "timeout", "diverged"])
def test_a_failure_ends_its_group_and_the_rest_runs_in_a_fresh_one(
    plan: Plan, tmp_path: Path, outcome: Outcome
) -> None:
    bad = trial_of(plan, "ddp", 2, 8)
    launcher, folder = execute(plan, tmp_path, lambda trial, tries: outcome if trial.id == bad.id else "ok")
    found = outcomes(folder)
    assert found[bad.id] == [outcome]
    assert all(found[t.id] == ["ok"] for t in plan.trials if t.id != bad.id)
    assert launcher.tries[bad.id] == 1


@pytest.mark.parametrize("second", ["ok", "lost"])
def test_a_lost_trial_is_tried_again_until_limits_attempts(plan: Plan, tmp_path: Path, second: Outcome) -> None:
    bad, events = trial_of(plan, "ddp", 2, 8), list[Event]()
    after: list[Outcome] = ["lost", second]
    _, folder = execute(plan, tmp_path, lambda trial, tries: after[tries - 1] if trial.id == bad.id else "ok", events)
    rows = [row for row in folder.lines() if row["trial_id"] == bad.id]
    assert [(row["attempt"], row["outcome"]) for row in rows] == [(1, "lost"), (2, second)]  # limits.attempts is 2
    ended = [event for event in events if isinstance(event, TrialEnded) and event.trial.id == bad.id]
    assert [event.again for event in ended] == [True, False]
    execute(plan, tmp_path, lambda trial, tries: after[tries - 1] if trial.id == bad.id else "ok")  # a resume
    rows = [row for row in folder.lines() if row["trial_id"] == bad.id]
    assert [row["attempt"] for row in rows] == ([1, 2] if second == "ok" else [1, 2, 3, 4]), "each invocation has two"


@pytest.mark.parametrize(("outcome", "in_launches"), [("error", [2, 2, 2]), ("lost", [2, 1, 1, 2])])
def test_after_a_loss_each_variant_has_a_worker_group_of_its_own(
    make_experiment: Make, tmp_path: Path, outcome: Outcome, in_launches: list[int]
) -> None:
    own = {"workload": "own:Own", "variants": {"before": "/before", "after": "/after"}}
    experiment = make_experiment(GRID, throughput={"blocks": 2}, **own)
    plan = make_plan(experiment, laptop(), variants=variants("before", "after"))
    first = plan.groups[0].trials[0]
    launcher, _ = execute(plan, tmp_path, lambda trial, tries: outcome if trial == first and tries == 1 else "ok")
    names = {trial.id: trial.cell.variant for trial in plan.trials}
    assert [len({names[trial_id] for trial_id in launch}) for launch in launcher.launches] == in_launches


def test_after_out_of_memory_as_large_a_batch_of_the_cell_is_skipped_also_after_a_resume(
    plan: Plan, tmp_path: Path
) -> None:
    bad = trial_of(plan, "ddp", 2, 8)

    def script(trial: Trial, tries: int) -> Outcome:
        return "oom" if trial.id == bad.id else "error" if trial.block == 1 else "ok"

    for how, alone in ((script, ["error"]), (ScriptedLauncher(lambda trial, tries: "ok"), ["error", "ok"])):
        _, folder = execute(plan, tmp_path, how)
        found = outcomes(folder)
        assert found[bad.id] == ["oom"]
        assert {*map(tuple, (found[trial_of(plan, "ddp", 2, batch, block=1).id] for batch in (8, 16)))} == {
            ("skipped",)
        }
        assert found[trial_of(plan, "ddp", 1, 16, block=1).id] == alone
    reasons = {row["reason"] for row in folder.lines() if row["trial_id"] == trial_of(plan, "ddp", 2, 16, 1).id}
    assert reasons == {"a batch of 8 per device of the same cell ran out of memory (limits.prune_oom)"}
    launcher, folder = execute(plan, tmp_path)
    assert launcher.launches == []  # nor is a base measured again for what is not tried


def test_a_group_without_messages_is_an_error(plan: Plan, tmp_path: Path) -> None:
    class Silent:
        def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
            yield from ()

    _, folder = execute(plan, tmp_path, Silent())
    found = outcomes(folder)
    assert all(found[trial.id] == ["error"] for trial in plan.trials)


def test_what_needs_fewer_ranks_is_measured_if_the_whole_group_does_not_start(plan: Plan, tmp_path: Path) -> None:
    class TooLarge(ScriptedLauncher):
        def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
            if group.placement.workers == 1:
                yield from super().launch(group, deadline=deadline)
            else:
                yield from (TrialResult(trial.id, "lost", "did not start") for trial in group.trials)

    assert all(group.is_shared for group in plan.groups)
    _, folder = execute(plan, tmp_path, TooLarge(lambda trial, tries: "ok"))
    found = outcomes(folder)
    for trial in plan.trials:
        is_large = place(trial.cell).workers > 1
        assert found[trial.id] == (["lost", "lost"] if is_large else ["lost", "ok"])


def test_each_trial_is_on_disk_when_its_end_is_reported_and_before_the_next_group(plan: Plan, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")
    events: list[Event] = []

    def emit(event: Event) -> None:
        if isinstance(event, TrialEnded):
            assert folder.lines()[-1] == event.line
        events.append(event)

    Execution(plan, folder, ScriptedLauncher(lambda trial, tries: "ok"), emit).run()
    ended = [event for event in events if isinstance(event, TrialEnded)]
    assert [event.trial.id for event in ended] == [trial.id for trial in plan.trials]
    sizes = [len(group.trials) for group in plan.groups]
    starts = [index for index, event in enumerate(events) if isinstance(event, GroupStarting)]
    result = [sum(isinstance(event, TrialEnded) for event in events[:start]) for start in starts]
    assert result == [0, *accumulate(sizes)][:-1] and len(sizes) > 1


def test_a_write_error_ends_the_run_and_its_group(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunFolder.append

    def full(folder: RunFolder, trial: Trial, *rest: Any) -> Any:
        if trial is plan.groups[1].trials[1]:
            raise WriteError("trials.jsonl: cannot be written")
        return append(folder, trial, *rest)

    monkeypatch.setattr(RunFolder, "append", full)
    ends: list[str] = []

    class Ending(ScriptedLauncher):
        def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
            try:
                yield from super().launch(group, deadline=deadline)
            finally:
                ends.append(group.id)

    with pytest.raises(WriteError, match="cannot be written"):
        execute(plan, tmp_path, Ending(lambda trial, tries: "ok"))
    (folder,) = (RunFolder(path.parent) for path in tmp_path.glob("*/*/plan.json"))
    assert ends == [group.id for group in plan.groups[:2]]
    kept = [*plan.groups[0].trials, plan.groups[1].trials[0]]
    assert [line["trial_id"] for line in folder.lines() if line["outcome"] == "ok"] == [trial.id for trial in kept]


def test_the_wall_limit_ends_at_a_trials_boundary_and_resumes_finish_the_run(
    make_experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trial is measured twice, though no invocation holds a block."""
    limited = make_plan(make_experiment(GRID, throughput={"blocks": 2}, limits={"wall": 30.0}), laptop())
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])

    def slow(trial: Trial, tries: int) -> Outcome:
        now[0] += 12.0
        return "ok"

    trials, invocations = {t.id for t in limited.trials}, 0
    folder = RunFolder.create(tmp_path, limited.experiment, limited, "x")
    while pending(limited, folder.lines()):
        execute(limited, tmp_path, slow)
        invocations += 1
        assert invocations <= len(trials), "an invocation measured nothing"
        late = {row["skip_code"] for row in folder.lines() if row["position"] is None and row["group_id"]}
        assert invocations > 1 or late == {"time_up"}
    ok = [row for row in folder.lines() if row["outcome"] == "ok"]
    assert sorted(row["trial_id"] for row in ok) == sorted(trials) and invocations > 2


@pytest.mark.parametrize(
    ("other", "code", "equal"),
    [
        ({}, "1", True),
        ({"host": "n7", "node_id": "m"}, "1", True),  # another node of the same type
        ({}, "2", False),
        ({"cpu": "Another CPU"}, "1", False),
        ({"packages": {"torch": "2.15.1"}}, "1", False),
        ({"devices": [{"kind": "cuda", "model": "H100", "uuid": None, "memory_bytes": None}]}, "1", False),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "1", False),
    ],
)
def test_a_row_has_its_environment_which_is_equal_on_nodes_that_are_alike(
    make_experiment: Make, tmp_path: Path, other: dict[str, Any], code: str, equal: bool
) -> None:
    plan = make_plan(make_experiment(GRID, throughput={"blocks": 2}), laptop())
    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")

    class InEnvironment(ScriptedLauncher):
        def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
            node = {**NODE, **(other if group.id == plan.groups[-1].id else {})}
            yield GroupStarted((node,), ())  # type: ignore[arg-type]
            yield from list(super().launch(group, deadline=deadline))[1:]

    for group, version in ((plan.groups[0], "1"), (plan.groups[-1], code)):
        part = replace(plan, groups=(group,), skips={})
        Execution(part, folder, InEnvironment(lambda trial, tries: "ok"), lambda event: None, code=version).run()
    found = {row["environment"] for row in folder.lines()}
    assert None not in found and len(found) == (1 if equal else 2)


def test_variables_that_a_group_s_cells_have_are_no_part_of_its_environment(
    make_experiment: Make, tmp_path: Path
) -> None:
    """Cells that differ in them are compared, after an interruption too."""
    grid = {**GRID, "env.NCCL_ALGO": ["allreduce:ring", "allreduce:tree", None]}
    plan = make_plan(make_experiment(grid, throughput={"blocks": 1}), laptop())
    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")

    class WithVariables(ScriptedLauncher):
        def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
            yield GroupStarted(({**NODE, "variables": dict(group.variables)},), ())  # type: ignore[typeddict-item]
            yield from list(super().launch(group, deadline=deadline))[1:]

    Execution(plan, folder, WithVariables(lambda trial, tries: "ok"), lambda event: None, code="1").run()
    rows = list(folder.lines())
    assert len({row["cell_id"] for row in rows}) > 3 and len({row["environment"] for row in rows}) == 1


def test_device_hours_are_those_of_all_invocations(make_experiment: Make, tmp_path: Path) -> None:
    limits = {"device_hours": 1.0}
    limited = make_plan(make_experiment(GRID, throughput={"blocks": 1}, limits=limits), laptop())
    folder = RunFolder.create(tmp_path, limited.experiment, limited, "x")
    folder.set_invocation(0, {"started_at": 1.0, "wall_s": 1700.0, "ended": "interrupted"})
    execute(limited, tmp_path)
    assert {row["outcome"] for row in folder.lines()} == {"ok"}, "2 devices for 1700 s are less than an hour"
    folder.set_invocation(1, {"started_at": 2.0, "wall_s": 100.0, "ended": "finished"})
    more = make_plan(make_experiment(GRID, throughput={"blocks": 2}, limits=limits), laptop())
    execute(more, tmp_path)
    late = [row for row in folder.lines() if row["invocation"] == 2]
    assert {(row["block"], row["skip_code"]) for row in late} == {(1, "time_up")}


def test_the_end_of_a_group_is_its_own_part_of_the_time_accounting(plan: Plan, tmp_path: Path) -> None:
    class Slow(ScriptedLauncher):
        def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
            yield from super().launch(group, deadline=deadline)
            time.sleep(0.05)
            if group.block == 1:
                yield TrialStarted(group.trials[0].id)
                raise KeyboardInterrupt  # amid a trial: how much of the rest is its, and how much the end, is unknown

    with pytest.raises(KeyboardInterrupt):
        execute(plan, tmp_path, Slow(lambda trial, tries: "ok"))
    (folder,) = (RunFolder(path.parent) for path in tmp_path.glob("*/*/plan.json"))
    *whole, cut = folder.environment()["groups"]
    assert whole and all(0.05 <= group["parts"]["teardown"] <= group["whole_s"] for group in whole)
    assert cut["parts"] == {}
    kept = {row["trial_id"] for row in folder.lines() if row["outcome"] == "ok"}
    assert kept >= {trial.id for trial in plan.trials if trial.block == 0}, "an early end keeps what was recorded"


class MeasuringLauncher(ScriptedLauncher):
    """Every trial is ok with the throughput that ``speed`` gives it."""

    def __init__(self, speed: Callable[[Trial], float]) -> None:
        super().__init__(lambda trial, tries: "ok")
        self.speed = speed

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        self.launches.append([trial.id for trial in group.trials])
        for trial in group.trials:
            yield TrialStarted(trial.id)
            window = {"rank": 0, "window": 0, "window_kind": "timed", "duration_s": 1.0, "steps": 1}
            yield TrialResult(trial.id, "ok", windows=({**window, "weight": self.speed(trial)},))  # type: ignore[arg-type, typeddict-item]


RULE = {"at_least": 3, "at_most": 9, "halfwidth": 0.1}


def run_by_rule(
    make_experiment: Make, tmp_path: Path, speed: Callable[[Trial], float], rule: object = RULE
) -> tuple[Plan, RunFolder]:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, throughput={"blocks": rule, "twin": True}), laptop())
    return plan, execute(plan, tmp_path, MeasuringLauncher(speed))[1]


def test_blocks_beyond_the_required_precision_are_skipped_with_the_number_also_by_a_resumed_run(
    make_experiment: Make, tmp_path: Path
) -> None:
    plan, folder = run_by_rule(make_experiment, tmp_path, lambda trial: 100.0 * trial.cell.devices)
    assert {row["block"] for row in folder.lines() if row["outcome"] == "ok"} == {0, 1, 2}
    reasons = {row["reason"] for row in folder.lines() if row["block"] >= 3 and row["devices"] * row["nodes"] <= 2}
    assert "precise enough: 3 blocks suffice for 10 %" in reasons
    assert len({row["trial_id"] for row in folder.lines()}) >= len(plan.trials)
    again, _ = execute(plan, tmp_path, MeasuringLauncher(lambda trial: 1.0 + trial.block))
    assert again.launches == []


def test_base_and_twin_stay_until_the_last_cell_that_needs_them(make_experiment: Make, tmp_path: Path) -> None:
    def speed(trial: Trial) -> float:
        noisy = trial.cell.devices == 2
        return 100.0 * (1 + 0.05 * (trial.block % 3 - 1) * noisy)

    _, folder = run_by_rule(make_experiment, tmp_path, speed)
    ok = (row for row in folder.lines() if row["outcome"] == "ok")
    blocks = Counter((row["strategy"], row["devices"], row["purpose"]) for row in ok)
    most = blocks["ddp", 2, ""]
    assert 3 < most < 9
    assert blocks["single", 1, ""] == blocks["single", 1, "twin"] == most


@pytest.mark.parametrize(
    ("faster", "spread", "blocks"),
    [
        (2.0, 0.01, 3),  # clear at the first look
        (1.2, 0.12, 5),  # at the second
        (1.02, 0.10, 8),  # never
    ],
)
def test_looks_end_a_run_once_no_comparison_is_open_also_when_it_is_resumed(
    make_experiment: Make, tmp_path: Path, faster: float, spread: float, blocks: int
) -> None:
    def speed(trial: Trial) -> float:
        if trial.cell.devices == 2:
            return 100.0 * faster * (1 + spread * (trial.block % 2 - 0.5))
        return 100.0 if trial.cell.strategy == "single" else 50.0

    _, folder = run_by_rule(make_experiment, tmp_path, speed, "decide")
    assert {row["block"] for row in folder.lines() if row["outcome"] == "ok"} == set(range(blocks))
    reasons = {row["reason"] for row in folder.lines() if row["skip_code"] == "precise"}
    assert (f"decided: after {blocks} blocks no comparison of this cell was open, batches aside" in reasons) == (
        blocks < 8
    )
    results = load(folder.path)
    assert results.significance == 0.02
    of_two = next(row for row in rows_of(results.scaling) if row.devices == 2)
    assert (of_two.p_value <= 0.02) == (blocks < 8)
    logs = [math.log(faster * (1 + spread * (block % 2 - 0.5))) for block in range(blocks)]
    half = {3: 6.9646, 5: 3.7469, 8: 2.9980}[blocks] * statistics.stdev(logs) / math.sqrt(blocks)  # t of 98 %
    assert math.log(of_two.high / of_two.speedup) == pytest.approx(half, rel=1e-3)
    again, _ = execute(make_plan(results.experiment, laptop()), tmp_path, MeasuringLauncher(lambda trial: 1.0))
    assert again.launches == []


class Busy(ScriptedLauncher):
    """Finds so many cores busy, one value at each question."""

    def __init__(self, cores: list[float]) -> None:
        super().__init__(lambda trial, tries: "ok")
        self.cores = cores

    def busy_cores(self) -> dict[str, float]:
        return {"laptop": self.cores.pop(0), "other": 0.1}


def test_a_block_waits_until_the_processors_are_idle_but_not_for_ever(
    make_experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1000.0, 10.0)
    monkeypatch.setattr("harness.run.execution.time.time", lambda: next(clock))
    throughput = {"blocks": 3, "wait_for_quiet": "45s"}
    plan = make_plan(make_experiment(GRID, throughput=throughput), laptop())
    busy = [0.1, 1.5, 1.2, 0.2, *[2.0] * 100]
    events: list[Event] = []
    launcher, _ = execute(plan, tmp_path, Busy(busy), events)
    assert [event.text for event in events if isinstance(event, Note)] == [
        "1.5 cores on laptop busy before block 1: waiting until idle, at most 45 s.",
        "2.0 cores on laptop busy before block 2: waiting until idle, at most 45 s.",
        "2.0 cores on laptop busy after 45 s: block 2 is measured beside that.",
    ]
    assert 90 < len(busy) < 99, "the last block stopped asking after 45 s"
    assert len(launcher.launches) == len(plan.groups)


def test_a_wait_ends_with_the_time_of_the_run_and_says_nothing_of_its_bound(
    make_experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1000.0, 10.0)
    monkeypatch.setattr("time.time", lambda: next(clock))
    throughput = {"blocks": 1, "wait_for_quiet": "1h"}
    plan = make_plan(make_experiment(GRID, throughput=throughput, limits={"wall": "200s"}), laptop())
    events: list[Event] = []
    busy = Busy([2.0] * 100)
    _, folder = execute(plan, tmp_path, ByLauncher({"ray": busy}), events)
    (text,) = [event.text for event in events if isinstance(event, Note)]
    assert text == "2.0 cores on laptop busy before block 0: waiting until idle, at most 1 h 00 min."
    assert busy.launches == [] and {row["outcome"] for row in folder.lines()} == {"skipped"}


@pytest.mark.parametrize("earlier", ["ok", "error"])
def test_a_result_is_not_hidden_by_a_reason_not_to_start_its_trial_again(
    make_experiment: Make, tmp_path: Path, earlier: Outcome
) -> None:
    """As a resume on a smaller machine, or one whose time is up, has one for each trial that failed."""
    plan = make_plan(make_experiment(GRID, throughput={"blocks": 1}), laptop(2))
    _, folder = execute(plan, tmp_path, lambda trial, tries: earlier)
    before = outcomes(folder)
    assert {earlier} == {each for of_trial in before.values() for each in of_trial}
    smaller = make_plan(make_experiment(GRID, throughput={"blocks": 1}), laptop(1))
    late = make_plan(make_experiment(GRID, throughput={"blocks": 1}, limits={"wall": 1e-9}), laptop(2))
    assert smaller.skips and all(trial.id in before for trial in smaller.skips)
    for again in (smaller, late):
        execute(again, tmp_path, lambda trial, tries: earlier)
        last = {trial_id: found[-1] for trial_id, found in outcomes(folder).items()}
        assert last == {trial_id: earlier for trial_id in last}


def test_the_wall_time_of_an_invocation_counts_from_its_start(make_experiment: Make, tmp_path: Path) -> None:
    plan = make_plan(make_experiment(GRID, throughput={"blocks": 1}, limits={"wall": "1h"}), laptop(2))
    folder = RunFolder.create(tmp_path, plan.experiment, plan, "x")
    begun = Execution(plan, folder, ScriptedLauncher(lambda trial, tries: "ok"), lambda event: None, time.time() - 1800)
    assert begun.limit_s == pytest.approx(1800, abs=5)
