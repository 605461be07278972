"""The doctor before a run: faulty cells are skipped and reported; the doctor as a command of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import harness
from harness.analysis.findings import static_findings
from harness.cli.commands import app
from harness.config.experiment import Experiment
from harness.launch.inline import InlineLauncher
from harness.plan.diagnostics import doctor_trials
from harness.plan.labels import Labels
from harness.plan.planner import Plan, make_plan
from harness.record.folder import RunFolder
from harness.report.html import write_report
from harness.report.tables.trust import finding_rows, findings_table, memory_table
from harness.run import pipeline
from harness.run.execution import Execution
from tests.conftest import FEW_STEPS, Make, gpu_cluster, laptop
from tests.forked_launch import command_here

pytestmark = pytest.mark.usefixtures("no_figures", "no_timed_checks")

Measured = Callable[..., tuple[Plan, RunFolder]]
SHORT = FEW_STEPS | {"blocks": 2}
SGD = {"name": "SGD", "lr": 0.05}


def executed(experiment: Experiment, place: Path, plan: Plan | None = None) -> tuple[Plan, RunFolder]:
    """The plan and the folder of a run in this process."""
    plan = plan or make_plan(experiment, laptop())
    folder = RunFolder.create(place, experiment, plan, "name: test\n")
    Execution(plan, folder, InlineLauncher(experiment), lambda event: None).run()
    return plan, folder


@pytest.fixture
def measured(make_experiment: Make, tmp_path: Path) -> Measured:
    """A run in this process, with the doctor, of a workload of these tests: dp on two devices, the others on one."""

    def run(workload: str = "faulty:Healthy", *strategies: str, **sections: Any) -> tuple[Plan, RunFolder]:
        grid = {"strategy": list(strategies or ("single",)), "devices": [1, 2], "per_device_batch_size": 32}
        left_out = [{"strategy": "single", "devices": 2}, {"strategy": "dp", "devices": 1}]
        fixed = {"optimizer": SGD, "throughput": FEW_STEPS, "preflight": True, "exclude": left_out}
        experiment = make_experiment(grid, workload=f"tests.doctor.{workload}", **{**fixed, **sections})
        return executed(experiment, tmp_path)

    return run


@pytest.mark.slow
def test_a_healthy_cell_is_examined_first_and_then_measured(measured: Measured) -> None:
    plan, folder = measured("faulty:Healthy", "single", "dp")
    lines = folder.lines()
    assert {line["outcome"] for line in lines} == {"ok"} and pipeline._exit_code(folder, plan) == 0
    purposes = [line["purpose"] for line in lines if line["group_id"].startswith("b0") and line["strategy"] == "dp"]
    assert purposes == ["doctor", ""]
    results = harness.load(folder.path)
    assert results.findings.empty
    assert results.cells["estimated_peak_bytes"].between(2**20, 2**36).all()
    table = memory_table(results.cells, results.ranks, results.trials)
    titles = [heading.title for heading in table.columns]
    assert "parameters" in titles and "peak" not in titles and table.rows  # on a CPU the peak is the process's


@pytest.mark.slow
def test_cells_that_would_crash_are_not_measured_and_a_resumed_run_examines_them_again(measured: Measured) -> None:
    plan, folder = measured("faulty:NoTotalLength", "single", "dp", throughput=SHORT)
    lines = {(line["strategy"], line["block"], line["purpose"]): line for line in folder.lines()}
    for block in (0, 1):  # in its own worker group, and in a later one
        dp = lines["dp", block, ""]
        assert dp["outcome"] == "skipped" and dp["reason"].startswith("preflight: output shapes: ")
        assert lines["single", block, ""]["outcome"] == "ok"
    assert pipeline._exit_code(folder, plan) == 1
    results = write_report(folder.path)
    assert list(results.findings["check"]) == ["output shapes"] and results.findings["stops"].tolist() == [True]
    assert "2 cells examined: 1 error." in folder.report.read_text()
    before = len(folder.lines())
    Execution(plan, folder, InlineLauncher(plan.experiment), lambda event: None).run()
    added = [line for line in folder.lines()[before:] if line["strategy"] == "dp"]
    again = [(line["purpose"], line["outcome"]) for line in added]
    assert again == [("doctor", "ok"), ("", "skipped"), ("", "skipped")]


@pytest.mark.slow
def test_cells_with_other_errors_are_measured_and_marked(measured: Measured) -> None:
    plan, folder = measured("faulty:KeepsItsOwnModel", "single", "dp", throughput=SHORT)
    assert {line["outcome"] for line in folder.lines()} == {"ok"} and pipeline._exit_code(folder, plan) == 0
    results = write_report(folder.path)
    assert list(results.findings["check"]) == ["wrapper use"] and results.findings["stops"].tolist() == [False]
    cells = results.scaling.set_index("strategy")
    assert cells["faulty"].to_dict() == {"single": False, "dp": True} and cells["speedup"].notna().all()
    assert set(results.leaders["strategy"]) == {"single"}
    report = folder.report.read_text()
    assert "2 cells examined: 1 error." in report and "0; the model inside it 4" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "equivalence", "reason"),
    [
        ("recipes:MixesUp", "unknown", "unknown: collate draws random numbers"),
        ("recipes:PadsInCollate", "equivalent", None),
        ("faulty:MeanOverReplicas", "not equivalent", "not equivalent to one device: its gradient differs by 50 %"),
    ],
)
def test_a_recipe_that_is_not_equivalent_or_not_comparable_is_measured_and_says_so(
    measured: Measured, workload: str, equivalence: str, reason: str | None
) -> None:
    plan, folder = measured(workload, "single", "dp", throughput={**SHORT, "blocks": 3}, equivalence=True)
    timed = [line for line in folder.lines() if line["purpose"] == ""]
    assert len(timed) == 6 and {line["outcome"] for line in timed} == {"ok"}
    results = harness.load(folder.path)
    assert results.equivalence["reason"].fillna("").tolist() == [reason or ""]
    row = results.scaling.set_index("strategy").loc["dp"]
    assert row["equivalence"] == equivalence and row["speedup"] > 0 and row["low"] < row["speedup"] < row["high"]
    assert pipeline._exit_code(folder, plan) == 0


@pytest.mark.slow
def test_a_cell_whose_finite_loss_diverges_is_tried_once(measured: Measured) -> None:
    plan, folder = measured(throughput=SHORT, optimizer={"name": "SGD", "lr": 1.0})
    findings = harness.load(folder.path).findings
    assert findings["check"].tolist() == ["divergence"]
    assert not any("nan" in seen or "inf" in seen for seen in findings["seen"])
    tried, skipped = (line for line in folder.lines() if line["purpose"] == "")
    assert tried["outcome"] in {"ok", "diverged"} and skipped["outcome"] == "skipped"
    assert skipped["reason"].startswith("preflight: divergence, also when tried once: losses of single")
    before = len(folder.lines())
    Execution(plan, folder, InlineLauncher(plan.experiment), lambda event: None).run()
    assert {line["outcome"] for line in folder.lines()[before:] if line["purpose"] == ""} <= {"skipped"}


@pytest.mark.slow
def test_checks_without_ranks_are_among_the_verdicts_of_a_run(make_experiment: Make, tmp_path: Path) -> None:
    grid = {"strategy": "dp", "devices": [2, 3], "global_batch_size": 64}
    sections = {"workload": "tests.doctor.faulty:Healthy", "optimizer": SGD, "throughput": FEW_STEPS}
    experiment = make_experiment(grid, preflight=True, **sections)
    plan = make_plan(experiment, laptop())
    for name, kept in (("with", plan), ("without", plan.keeping(lambda trial: trial.purpose != "doctor"))):
        _, folder = executed(experiment, tmp_path / name, kept)
        first = folder.environment()["groups"][0]
        (node,) = first["nodes"]
        other = {**node, "host": "b", "packages": {**node["packages"], "torch": "0.1"}}
        folder.add_environment({**first, "nodes": [node, other]})
        findings = harness.load(folder.path).findings
        if name == "without":
            assert findings.empty
            continue
        assert findings["check"].tolist() == ["batch divisibility", "versions"]
        of_nodes, of_cells = finding_rows(findings)  # errors come first
        assert of_cells.where.startswith("dp (emulated) x3") and of_nodes.where == "the nodes"
        assert "22, 22, 20" in findings["seen"].iloc[0] and "0.1 on b" in findings["seen"].iloc[1]
        rows = [" ".join(line.cells) for line in findings_table(findings).rows]
        assert "the nodes torch: " in "\n".join(rows)


def test_a_plan_in_which_every_cell_is_uneven_is_not_called_healthy(make_experiment: Make, tmp_path: Path) -> None:
    grid = {"strategy": "ddp", "devices": [2], "global_batch_size": [3]}
    experiment = make_experiment(grid, preflight=True, throughput=SHORT)
    plan, folder = executed(experiment, tmp_path)
    results = harness.load(folder.path)
    assert results.impossible and not (results.lines or plan.trials)
    assert results.findings["check"].tolist() == ["batch divisibility"]


@pytest.mark.parametrize("more", [{"accumulation": 2, "clip_grad_norm": 100.0}, {"warmup_epochs": 1}])
def test_a_recipe_is_examined_at_the_rate_that_it_begins_with(measured: Measured, more: dict[str, Any]) -> None:
    wild = {"lr_scaling": "linear", "lr_base_batch_size": 1, **more}
    _, folder = measured(throughput=SHORT, optimizer={"name": "SGD", "lr": 0.5}, training=wild)
    findings = harness.load(folder.path).findings.to_dict("records")
    if "warmup_epochs" in more:
        assert findings == []
        return
    (finding,) = findings
    assert (finding["check"], finding["severity"]) == ("divergence", "warning")
    assert "at a learning rate of 16:" in finding["seen"]


def found_in(*groups: list[dict[str, Any]]) -> list[str]:
    """What is seen in worker groups of these nodes, each a mapping of facts with its host."""
    nodes = [{"nodes": [{"node_id": node["host"], **node} for node in group]} for group in groups]
    return list(static_findings({"skipped": [], "impossible": []}, {"groups": nodes}, Labels(()))["seen"])


def test_versions_are_compared_within_worker_groups_and_reported_once() -> None:
    one, other = (
        {"host": host, "packages": {"torch": version}} for host, version in (("a", "2.14.0"), ("b", "2.15.0"))
    )
    assert found_in([one], [other]) == []  # resumed elsewhere
    assert found_in([one, other], [one, other]) == ["torch: 2.14.0 on a, 2.15.0 on b"]


def test_a_machine_s_state_is_a_finding_a_node_however_many_groups_recorded_it() -> None:
    state = {"governors": [], "boost": None, "periods": 100}
    hosts = (("a", 50), ("b", 60), ("a", 70))
    found = found_in(*([{"host": host, "state": {**state, "throttled": throttled}}] for host, throttled in hosts))
    assert [seen.split(":")[0] for seen in found] == ["a", "b"] and "70 of 100" in found[0]


def test_each_kind_of_cell_is_examined_once_on_its_most_devices(make_experiment: Make) -> None:
    grid = {"model": ["resnet8", "resnet14"], "strategy": ["single", "ddp"]}
    grid |= {"devices": [1, 2, 4], "per_device_batch_size": [8, 16]}
    plan = make_plan(make_experiment(grid, preflight=True, throughput={"blocks": 3}), gpu_cluster())
    cells = [trial.cell for trial in plan.trials if trial.purpose == "doctor"]
    of_ddp = [(1, "resnet8", 8), (2, "resnet8", 8), (4, "resnet14", 16), (4, "resnet8", 16)]
    expected = [*(("ddp", *cell) for cell in of_ddp), ("single", 1, "resnet14", 16), ("single", 1, "resnet8", 16)]
    assert sorted((c.strategy, c.devices, c.model, c.per_device_batch_size) for c in cells) == expected
    assert {trial.block for trial in plan.trials if trial.purpose == "doctor"} == {0}


@pytest.mark.parametrize(("launcher", "examines"), [(["ray", "torchrun"], {"ray"}), ("torchrun", {"torchrun"})])
def test_cells_of_torchrun_alone_are_examined_by_it(make_experiment: Make, launcher: Any, examines: set[str]) -> None:
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
    plan = make_plan(make_experiment(grid, preflight=True, launcher=launcher), laptop())
    cells = [trial.cell for trial in plan.trials if trial.purpose == "doctor"]
    assert {cell.launcher for cell in cells} == examines
    assert sorted((cell.strategy, cell.devices) for cell in cells) == [("ddp", 1), ("ddp", 2), ("single", 1)]


def test_doctor_trials_are_separated_from_the_others(make_experiment: Make) -> None:
    plan = make_plan(make_experiment({"per_device_batch_size": 8}, preflight=True), laptop())
    examinations = plan.keeping(lambda trial: trial.purpose == "doctor")
    others = plan.keeping(lambda trial: trial.purpose != "doctor")
    assert {trial.purpose for trial in examinations.trials} == {"doctor"}
    assert len(examinations.trials) + len(others.trials) == len(plan.trials)
    assert doctor_trials([], seed=0) == []


def experiment_file(folder: Path, workload: str, strategy: str = "ddp") -> Path:
    """An experiment on a workload of these tests, on 2 and 3 devices."""
    file = folder / "experiment.yaml"
    file.write_text(
        f"name: test\nworkload: tests.doctor.faulty:{workload}\noptimizer: {{name: SGD, lr: 0.05}}\n"
        f"grid: {{strategy: [{strategy}], devices: [2, 3], global_batch_size: [64]}}\ndevice: cpu\n"
    )
    return file


@pytest.mark.slow
def test_the_doctor_exits_with_1_on_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = experiment_file(tmp_path, "MeanForSum")
    file.write_text(f"{file.read_text()}launcher: torchrun\n")
    text = " ".join(command_here(monkeypatch, "doctor", file, code=1).split())
    assert "gradient scaling: ddp (faulty) x2" in text and "instead of a mean" in text
    assert "batch divisibility: ddp x3" in text and "21, 21, 22" in text
    assert "1 error, " in text and "all-reduce of a number" in text and "loader alone" in text
    assert not list(tmp_path.glob("results"))


@pytest.mark.slow
def test_the_doctor_exits_with_0_and_prints_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = experiment_file(tmp_path, "Healthy", strategy="dp")
    monkeypatch.setattr("harness.run.doctor.start_ray", lambda *_: nullcontext(None))
    monkeypatch.setattr("harness.run.doctor.launcher_for", lambda plan, *_: InlineLauncher(plan.experiment))
    arguments = ["doctor", str(file), "--only", "devices=2"]
    done = CliRunner(env={"RAY_ADDRESS": "", "COLUMNS": "200"}).invoke(app, arguments)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "nothing found" in text and "loader alone" in text


def test_a_bad_file_and_a_node_without_the_module_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a worker group: in tests/test_two_nodes.py a real node answers so."""
    file = experiment_file(tmp_path, "Nobody")
    done = CliRunner(env={"RAY_ADDRESS": ""}).invoke(app, ["doctor", str(file)])
    assert done.exit_code == 2 and "Traceback" not in done.stderr and "Nobody" in done.stderr
    failing = {"b (127.0.0.3)": {"tests.doctor.faulty": "ModuleNotFoundError: no module named 'absent'"}}
    monkeypatch.setattr("harness.run.doctor.failing_imports", lambda *_: failing)
    file = experiment_file(tmp_path, "Healthy")
    done = CliRunner(env={"RAY_ADDRESS": "", "COLUMNS": "200"}).invoke(app, ["doctor", str(file)])
    assert done.exit_code == 1, done.output
    assert "tests.doctor.faulty on b (127.0.0.3): ModuleNotFoundError" in " ".join(done.output.split())
