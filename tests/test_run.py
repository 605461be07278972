"""The command as a user runs it: a run folder, an exit code; of the smoke experiment in a process of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import harness
from tests.forked_launch import command_here
from tests.processes import ROOT, ended

pytestmark = pytest.mark.slow

SMOKE = ROOT / "experiments" / "smoke.yaml"


def test_the_smoke_experiment(tmp_path: Path) -> None:
    done = ended(sys.executable, "-m", "harness.run", SMOKE, "--output", tmp_path)
    assert done.stderr == ""
    assert "Plan of smoke" in done.stdout
    assert re.search(r"\[10/10\] ok ", done.stdout)  # three cells, checks, examinations; the links
    assert "Trials: " in done.stdout and "10 ok" in done.stdout
    for chatter in ("raylet", "local Ray", "ray::", "pid=", "INFO", "WARNING"):
        assert chatter not in done.stdout, chatter
    *shown, command_shown = done.stdout.strip().splitlines()
    assert "python -m harness" in command_shown  # what to do next
    report = Path(next(line for line in shown if line.startswith("Report: ")).removeprefix("Report: "))
    assert report.exists()
    results = harness.load(report.parent)
    assert set(results.trials["outcome"]) == {"ok"} and len(results.impossible) == 1
    assert results.scaling["blocks"].tolist() == [1, 1, 1]
    assert results.environment["invocations"][0]["wall_s"] > 0
    traces = results.folder.traces()
    best_and_base = (results.scaling["strategy"] == "single") | (results.scaling["devices"] == 2)
    assert {*traces} == {*results.scaling.loc[best_and_base, "cell_id"]}
    sizes = [(report.parent / path).stat().st_size for paths in traces.values() for path in paths.values()]
    assert len(sizes) == 3 and min(sizes) > 10_000 and sum(sizes) < 20_000_000
    assert all(f'<a href="{path}">' in report.read_text() for paths in traces.values() for path in paths.values())
    assert "\x1b" not in done.stdout  # plain lines where the output is no terminal


WASTEFUL = """
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Wasteful:
    unit = "samples"

    def build_model(self):
        return nn.Linear(4, 1)

    def datasets(self):
        data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
        return data, data

    def loss(self, model, batch):
        time.sleep(0.02)  # of each pass, whatever its size
        x, y = batch
        return (model(x) - y).square().sum(), torch.tensor(len(x))
"""
EIGHT_PASSES = """
name: wasteful
workload: wasteful:Wasteful
grid: {per_device_batch_size: [16]}
launcher: torchrun
training: {accumulation: 8}
optimizer: {name: SGD, lr: 0.001}
throughput: {blocks: 1, warmup_steps: 2, warmup_rounds: 2, windows: 1, window_steps: 3, window_seconds: 0}
equivalence: false
preflight: false
"""


def test_what_slows_a_step_is_tried_confirmed_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None
) -> None:
    """In this process, with forks as ranks: in fresh ones each worker group would import torch for seconds."""
    (tmp_path / "wasteful.py").write_text(WASTEFUL)
    (tmp_path / "wasteful.yaml").write_text(EIGHT_PASSES)
    asked = ("run", tmp_path / "wasteful.yaml", "--output", tmp_path / "results", "--improve", "100s")
    assert "TRIED" in (output := command_here(monkeypatch, *asked)), output
    run = next((tmp_path / "results" / "wasteful").glob("*"))
    (screened, confirmed) = harness.load(run).improvements.to_dict("records")
    assert screened["changes"] == confirmed["changes"] == "training.accumulation: 1"
    assert (confirmed["step"], confirmed["kept"]) == ("confirmation", True) and confirmed["blocks"] >= 5
    assert 2 < confirmed["low"] < 8 < 2 * confirmed["high"]  # one pass in place of eight, but for the rest of a step
    assert "accumulation: 1" in (run / "next.yaml").read_text()
    assert len(list(run.glob("improve/*/*/*/report.html"))) == 2
