"""The command as a user runs it: a process of its own, a run folder, an exit code, a resume."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import harness
from harness.config.experiment import load_experiment
from harness.launch.ray.cluster import local_inventory
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder
from tests.processes import ROOT, ended

pytestmark = pytest.mark.slow

SMOKE = ROOT / "experiments" / "smoke.yaml"
SMALL = """
name: small
grid: {model: resnet8, per_device_batch_size: 16}
workload_options: {width: 4}
"""


def test_the_smoke_experiment(tmp_path: Path) -> None:
    done = ended(sys.executable, "-m", "harness.run", SMOKE, "--output", tmp_path)
    assert done.stderr == ""
    assert "Plan of smoke" in done.stdout
    assert re.search(r"\[10/10\] ok ", done.stdout)  # three cells, checks, examinations; the links
    assert "(base: single x1: " in done.stdout
    assert "Trials: " in done.stdout and "10 ok" in done.stdout
    for chatter in ("raylet", "local Ray", "ray::", "pid=", "INFO", "WARNING"):
        assert chatter not in done.stdout, chatter
    *shown, command_shown = done.stdout.strip().splitlines()
    assert command_shown.startswith("python -m harness")  # what to do next
    report = Path(next(line for line in shown if line.startswith("Report: ")).removeprefix("Report: "))
    assert report.exists()
    results = harness.load(report.parent)
    assert set(results.trials["outcome"]) == {"ok"} and len(results.impossible) == 1
    assert results.scaling["blocks"].tolist() == [1, 1, 1]
    assert results.environment["invocations"][0]["wall_s"] > 0
    assert "\x1b" not in done.stdout  # plain lines where the output is no terminal


def test_a_resume_of_another_experiment_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    experiment = load_experiment(file)
    folder = RunFolder.create(tmp_path / "out", experiment, make_plan(experiment, local_inventory()), SMALL)
    file.write_text(SMALL.replace("width: 4", "width: 8"))
    done = ended(sys.executable, "-m", "harness.run", file, "--resume", folder.path, code=2)
    assert "was made by another experiment: workload_options differ" in done.stderr
