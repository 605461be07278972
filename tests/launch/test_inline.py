"""``harness run FILE --inline``: one rank in the command's own process, for a debugger."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import harness
from harness.analysis.results import Results
from harness.cli.commands import app
from harness.plan.planner import make_plan, single_rank_only
from harness.run.console import ConsoleSink, Lasting
from tests.conftest import Make, laptop

pytestmark = pytest.mark.usefixtures("no_figures")

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
    added = inline.skips[len(plan.skips) :]
    assert {skip.trial.id for skip in added} == {
        trial.id for group in plan.groups if group.placement.workers > 1 for trial in group.trials
    }
    assert {skip.skip_code for skip in added} == {"inline"}
    assert {skip.reason for skip in added} == {"--inline runs one rank in this process; this cell needs 2"}
    assert any(trial.cell.strategy == "dp" and trial.cell.devices == 2 for trial in inline.trials)


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
