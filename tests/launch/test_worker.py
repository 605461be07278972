"""Exceptions in a trial, each of them in this process: its row says why, and the trials after it are measured."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config.experiment import Experiment
from harness.launch.inline import InlineLauncher
from harness.launch.worker import TrialFailed
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import TrialResult
from harness.record.folder import RunFolder
from harness.run.execution import Execution
from tests import faulty_workload
from tests.conftest import laptop

Make = Callable[..., Experiment]
SHORT = {"blocks": 1, "warmup_steps": 3, "warmup_rounds": 2, "windows": 1, "window_steps": 4, "window_seconds": 0}


def planned(make: Make, faults: list[str], batches: list[int], **sections: Any) -> Plan:
    """The plan of these faults on one device, whose rank is the faulty one."""
    grid = {"strategy": "single", "workload.fault": faults, "per_device_batch_size": batches}
    workload = {"workload": "tests.faulty_workload:Faulty", "optimizer": {"name": "SGD", "lr": 0.01}}
    return make_plan(make(grid, **{"throughput": SHORT, **workload, **sections}), laptop())


def recorded(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, list[dict[str, Any]]]:
    monkeypatch.setattr(faulty_workload, "is_faulty_rank", lambda: True)
    monkeypatch.setattr(faulty_workload.Faulty, "mark", lambda faulty: None)
    run = RunFolder.create(folder, plan.experiment, plan, "name: test\n")
    Execution(plan, run, InlineLauncher(plan.experiment), lambda event: None).run()
    return run, [dict(line) for line in run.lines()]


@pytest.mark.parametrize(
    ("fault", "outcome", "reason", "log", "section"),
    [
        ("build", "error", "ValueError on rank 0: a bad model", "build_model", "throughput"),
        ("evaluation", "error", "ValueError on rank 0: a bad validation sample", "in loss", "convergence"),
        ("unpicklable", "error", "Unpicklable on rank 0: holds a generator", "in unpicklable", "throughput"),
        ("exits", "error", "SystemExit on rank 0: 3", "sys.exit", "throughput"),
        ("cuda_memory", "oom", "OutOfMemoryError on rank 0: CUDA out of memory", "in cuda_memory", "throughput"),
    ],
)
def test_an_exception_is_a_row_with_its_reason(
    make_experiment: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    outcome: str,
    reason: str,
    log: str,
    section: str,
) -> None:
    only = {"throughput": None, "convergence": {"epochs": 1, "seeds": 0}} if section == "convergence" else {}
    run, lines = recorded(planned(make_experiment, [fault, "none"], [8], **only), tmp_path, monkeypatch)
    by_fault = {line["options"]["workload.fault"]: line for line in lines}
    assert len(lines) == 2 and by_fault["none"]["outcome"] == "ok"
    row = by_fault[fault]
    assert (row["outcome"], row["attempt"], row["error_rank"], row["kind"]) == (outcome, 1, 0, section)
    assert row["reason"].startswith(reason)
    assert log in (run.path / row["log"]).read_text()


def test_a_larger_batch_than_one_that_lacked_memory_is_not_tried(
    make_experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = (planned(make_experiment, ["cuda_memory"], [8, 16], seed=seed) for seed in range(20))
    plan = next(plan for plan in plans if plan.trials[0].cell.per_device_batch_size == 8)
    _, lines = recorded(plan, tmp_path, monkeypatch)
    assert [(line["per_device_batch_size"], line["outcome"]) for line in lines] == [(8, "oom"), (16, "skipped")]
    assert lines[1]["reason"] == "a batch of 8 per device of the same cell ran out of memory (limits.prune_oom)"


def test_messages_and_errors_of_a_worker_can_be_pickled_if_the_exception_cannot(
    make_experiment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty_workload, "is_faulty_rank", lambda: True)
    monkeypatch.setattr(faulty_workload.Faulty, "mark", lambda faulty: None)
    raised: list[TrialFailed] = []

    def run(launcher: InlineLauncher, *arguments: Any) -> None:
        try:
            original(launcher, *arguments)
        except TrialFailed as error:
            raised.append(error)
            raise

    original = InlineLauncher._run
    monkeypatch.setattr(InlineLauncher, "_run", run)
    plan = planned(make_experiment, ["unpicklable"], [8])
    messages = list(InlineLauncher(plan.experiment).launch(plan.groups[0], deadline=None))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(faulty_workload.Unpicklable())
    assert isinstance(messages[-1], TrialResult) and pickle.loads(pickle.dumps(messages)) == messages
    (error,) = raised
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
