"""The trials of a worker group, and exceptions in them; ``harness run FILE --inline``: all in this process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import harness
from harness.analysis.results import Results
from harness.cli.commands import app
from harness.launch import worker
from harness.launch.inline import InlineLauncher
from harness.launch.protocol import Job, TrialStarted
from harness.launch.worker import TrialFailed
from harness.measure.scenarios import TrialContext
from harness.plan.cell import place
from harness.plan.planner import Plan, make_plan, single_rank_only
from harness.plan.trial import TrialResult
from harness.record.folder import RunFolder
from harness.run.console import ConsoleSink, Lasting
from harness.run.execution import Execution
from harness.train.ranks import Ranks
from tests import faulty_workload
from tests.conftest import Make, laptop

pytestmark = pytest.mark.usefixtures("no_figures")


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


FAULTS = {
    "build": ("error", "ValueError on rank 0: a bad model", "build_model"),
    "unpicklable": ("error", "Unpicklable on rank 0: holds a generator", "in unpicklable"),
    "exits": ("error", "SystemExit on rank 0: 3", "sys.exit"),
    "cuda_memory": ("oom", "OutOfMemoryError on rank 0: CUDA out of memory", "in cuda_memory"),
}
IN_A_TRAINING = {"evaluation": ("error", "ValueError on rank 0: a bad validation sample", "in loss")}


def test_a_trial_with_all_threads_has_them_and_what_follows_has_not(
    make_experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "processors", lambda: 3)
    asked = {"throughput": {**SHORT, "twin": True}, "optimizer": {"name": "SGD", "lr": 0.01}}
    experiment = make_experiment(
        {"strategy": "single", "devices": [1, 4], "per_device_batch_size": 8}, workload="mlp", **asked
    )
    plan = make_plan(experiment, laptop(4))
    run = RunFolder.create(tmp_path, plan.experiment, plan, "name: test\n")
    own = torch.get_num_threads()
    Execution(plan, run, InlineLauncher(experiment), lambda event: None).run()
    threads = {line["purpose"]: {rank["threads"] for rank in line["ranks"]} for line in run.lines()}
    assert threads["threads"] == {3} and threads[""] == threads["twin"] == {1}
    torch.set_num_threads(own)
    with pytest.raises(ValueError, match="a bad step"), worker.computing_with(own + 1):
        raise ValueError("a bad step")
    assert torch.get_num_threads() == own


@pytest.mark.parametrize(("faults", "kind"), [(FAULTS, "throughput"), (IN_A_TRAINING, "convergence")])
def test_an_exception_is_a_row_with_its_reason(
    make_experiment: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, tuple[str, str, str]],
    kind: str,
) -> None:
    only = {"throughput": None, "convergence": {"epochs": 1, "seeds": 0}} if kind == "convergence" else {}
    run, lines = recorded(planned(make_experiment, [*faults, "none"], [8], **only), tmp_path, monkeypatch)
    by_fault = {line["options"]["workload.fault"]: line for line in lines}
    assert len(lines) == len(faults) + 1 and by_fault["none"]["outcome"] == "ok"
    for fault, (outcome, reason, log) in faults.items():
        row = by_fault[fault]
        assert (row["outcome"], row["attempt"], row["error_rank"], row["kind"]) == (outcome, 1, 0, kind)
        assert row["reason"].startswith(reason)
        assert log in (run.path / row["log"]).read_text()


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


GRID = {"strategy": "dp", "devices": 2, "per_device_batch_size": [8, 16]}
TWO = (torch.device("cpu"), torch.device("cpu"))
RANK = Ranks(0, 1, 0, 0, "n", "127.0.0.1", TWO)


@pytest.fixture
def run_group(make_experiment: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run the worker group of a plan whose cells have two devices; return what its rank sent."""
    plan = make_plan(make_experiment(GRID, diagnostics=True, throughput={"blocks": 1}), laptop())
    (shared,) = (group for group in plan.groups if group.placement.devices_per_worker == 2)
    group = shared.keeping(lambda trial: trial.cell.devices == 2)
    for name in ("_prepare_process", "_preload", "_announce", "_release"):
        monkeypatch.setattr(worker, name, lambda *asked, **how: None)
    monkeypatch.setattr(worker, "_rank_row", lambda *asked: {})

    def run(scenario: Callable[[TrialContext], TrialResult]) -> list[Any]:
        for name in worker.SCENARIOS:
            monkeypatch.setitem(worker.SCENARIOS, name, scenario)  # type: ignore[arg-type]
        sent: list[Any] = []
        job = Job(plan.experiment, group, 1, None)
        worker.run_group(job, RANK, lambda message: not sent.append(message), lambda: None, Path(os.devnull))
        return sent

    return run


def measured(context: TrialContext) -> TrialResult:
    return TrialResult(context.trial.id, "ok", facts={"explain_error": context.trial.scenario})


def test_a_group_profiles_last_and_ends_after_an_error_of_the_device(run_group: Callable[..., list[Any]]) -> None:
    """The result is sent; the next trial of this process would fail in its place."""

    def failing(context: TrialContext) -> TrialResult:
        context.device_failed = context.trial.scenario == "throughput"
        return measured(context)

    sent = run_group(failing)
    assert isinstance(sent[-1], TrialResult) and sent[-1].facts["explain_error"] == "throughput"
    assert len([message for message in sent if isinstance(message, TrialStarted)]) == len(sent) // 2
    whole = run_group(measured)
    assert len(sent) < len(whole)
    scenarios = [result.facts["explain_error"] for result in whole if isinstance(result, TrialResult)]
    timed = [name for name in scenarios if name not in ("doctor", "equivalence")]
    assert timed == ["throughput"] * 2 + ["profile"] * 2, "CUPTI may stay attached, and slow what follows"


FILE = """
name: debug
workload: WORKLOAD
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}
throughput: {blocks: 1, warmup_steps: 2, warmup_rounds: 2, windows: 1, window_steps: 2, window_seconds: 0.0,
             twin: false, explain: false}
equivalence: false
preflight: false
"""
STOPS = """
from harness.train.workloads.mlp import Mlp


class Stops(Mlp):
    def loss(self, model, batch):
        breakpoint()
        return super().loss(model, batch)
"""


def run_inline(folder: Path, *more: str, workload: str = "mlp") -> Result:
    file = folder / "debug.yaml"
    file.write_text(FILE.replace("WORKLOAD", workload))
    (folder / "stops_here.py").write_text(STOPS)
    arguments = ["run", str(file), "--inline", "--output", str(folder / "out"), *more]
    return CliRunner(env={"RAY_ADDRESS": ""}).invoke(app, arguments)


def resumed(folder: Path) -> Result:
    (run_folder,) = (folder / "out" / "debug").iterdir()
    arguments = ["run", str(folder / "debug.yaml"), "--resume", str(run_folder)]
    return CliRunner(env={"RAY_ADDRESS": ""}).invoke(app, arguments)


def results_of(folder: Path) -> Results:
    (run_folder,) = (folder / "out" / "debug").iterdir()
    return harness.load(run_folder)


def test_cells_of_several_ranks_are_skipped_rows(make_experiment: Make) -> None:
    grid = {"strategy": ["single", "dp", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid), laptop())
    inline = single_rank_only(plan)
    assert {group.placement.workers for group in inline.groups} == {1}
    added = {trial: skip for trial, skip in inline.skips.items() if trial not in plan.skips}
    assert {trial.id for trial in added} == {trial.id for trial in plan.trials if place(trial.cell).workers > 1}
    assert {skip.code for skip in added.values()} == {"inline"}
    assert {skip.text for skip in added.values()} == {"--inline runs one rank in this process; this cell needs 2"}
    assert any(trial.cell.strategy == "dp" and trial.cell.devices == 2 for trial in inline.trials)


@pytest.mark.slow
def test_a_run_measures_in_this_process_and_its_rows_enter_no_ratio(tmp_path: Path) -> None:
    assert ConsoleSink(Lasting(force_terminal=True), live=False)._live is None, "the terminal is the debugger's"
    result = run_inline(tmp_path)
    assert result.exit_code == 0, result.output
    results = results_of(tmp_path)
    ok = results.trials[results.trials["outcome"] == "ok"]
    assert sorted(ok["strategy"]) == ["ddp", "single"] and set(ok["devices"]) == {1}
    assert ok["inline"].tolist() == [True, True]
    assert all("inline" in names for names in ok["doubts"])
    skipped = results.trials[results.trials["outcome"] == "skipped"]
    assert any(reason.startswith("--inline runs one rank") for reason in skipped["reason"])
    assert skipped["inline"].isna().all()
    assert results.scaling.empty and results.cells.empty and results.versus.empty
    assert set(results.ranks["node_id"]) == {"inline"}
    assert {rank["pid"] for group in results.environment["groups"] for rank in group["ranks"]} == {os.getpid()}
    result = resumed(tmp_path)
    assert result.exit_code == 2 and "start a new run instead" in result.output


def test_a_breakpoint_stops_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda *_, **__: stopped.append(os.getpid()))
    result = run_inline(tmp_path, "--only", "strategy=single", workload="stops_here:Stops")
    assert result.exit_code == 0, result.output
    assert stopped and set(stopped) == {os.getpid()}


@pytest.mark.parametrize(
    ("place", "workload", "ok"),
    [("sys.breakpointhook", "stops_here:Stops", 0), ("harness.launch.worker._release", "mlp", 1)],
    ids=["in a trial", "between two trials"],
)
def test_ctrl_c_ends_the_run_and_keeps_the_trials_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, workload: str, ok: int
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    result = run_inline(tmp_path, workload=workload)
    assert result.exit_code == 130, result.output
    assert "Interrupted" in result.output
    outcomes = [line["outcome"] for line in results_of(tmp_path).lines]
    assert outcomes.count("ok") == ok and "error" not in outcomes
    result = resumed(tmp_path)
    assert result.exit_code == 2 and "--inline made this run" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--address", "head:6379"], "it runs in this process, on no cluster; leave out --address"),
        (["--resume", "some/folder"], "complete no run; leave out --resume"),
    ],
)
def test_a_cluster_or_an_earlier_run_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run_inline(tmp_path, *arguments)
    assert result.exit_code == 2 and message in result.output


STEADY = """
import json, resource, torch
from harness.launch import worker

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**20) for _ in range(10)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def least():
    return min(faults() for _ in range(4))

small = torch.tensor([1e-39])
before = least(), float(small * 1)
worker._keep_freed_memory()
with worker._without_denormals():
    within = least(), float(small * 1)
print(json.dumps([before, within, float(small * 1)]))
"""


@pytest.mark.slow
def test_what_a_process_computed_before_makes_no_step_on_the_cpu_slower() -> None:
    """Freed memory is used again without a fault a page, and denormal numbers, here 1e-39, are zero."""
    done = subprocess.run([sys.executable, "-c", STEADY], check=True, capture_output=True, text=True)
    (faults, value), (later, flushed), after = json.loads(done.stdout)
    assert value > 0 and flushed == 0 and after > 0
    assert later < 500
    if faults < 5000:
        pytest.skip("an import had freed a large block before")


class Kept:
    """What a compiled function holds, as the memory of its CUDA graphs."""

    def __call__(self, *inputs: object) -> object:
        return inputs


def test_compiled_code_and_what_it_holds_is_freed_before_the_next_trial() -> None:
    alive: list[weakref.ref[Kept]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        kept = Kept()
        alive.append(weakref.ref(kept))

        def run(*given: torch.Tensor) -> object:
            kept(given)
            return graph(*given)

        return run

    model = torch.nn.Linear(2, 2)
    torch.compile(model, backend=backend)(torch.ones(1, 2))
    del model
    worker._release(compiled=False)
    assert alive[0]() is not None
    worker._release(compiled=True)
    assert alive[0]() is None


@pytest.mark.parametrize(("purpose", "flushes"), [("", True), ("equivalence", False)])
def test_denormal_numbers_are_zero_in_timed_trials_alone(
    purpose: str, flushes: bool, make_experiment: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trains to a result, or is checked, has them."""
    plan = make_plan(make_experiment({**GRID, "strategy": "ddp"}, diagnostics=True, throughput={"blocks": 1}), laptop())
    trial = next(trial for trial in plan.trials if trial.purpose == purpose and trial.cell.devices == 1)
    found: list[bool] = []

    def scenario(context: TrialContext) -> TrialResult:
        found.append(float(torch.tensor([1e-39]) * 1) == 0)
        return TrialResult(trial.id, "ok")

    monkeypatch.setattr(worker, "run_scenario", scenario)
    alone = replace(RANK, devices=TWO[:1])
    worker._run_trial(TrialContext(trial, plan.experiment, alone, lambda: None, {}), lambda message: True, None)
    assert found == [flushes] and float(torch.tensor([1e-39]) * 1) > 0


def test_inline_a_group_uses_the_gpu_that_it_has(monkeypatch: pytest.MonkeyPatch, make_experiment: Make) -> None:
    """Where fsdp puts its shards."""
    experiment = make_experiment({"devices": 1, "per_device_batch_size": 8}, throughput={"blocks": 1})
    group = make_plan(experiment, laptop()).groups[0]
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("harness.launch.inline.devices_of", lambda *given: (torch.device("cuda", 3),))
    monkeypatch.setattr("harness.launch.inline.run_group", lambda *given: None)
    list(InlineLauncher(experiment).launch(group, deadline=None))
    assert chosen == [torch.device("cuda", 3)]
