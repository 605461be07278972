"""The command as a user runs it: a process of its own, a run folder, an exit code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import harness
from tests.processes import ROOT, ended

pytestmark = pytest.mark.slow

SMOKE = ROOT / "experiments" / "smoke.yaml"


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
