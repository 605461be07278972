"""The command as a user runs it: a process of its own, a run folder, an exit code, an interruption, a resume."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import harness

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SMOKE = ROOT / "experiments" / "smoke.yaml"
LONG = """
name: long
workload: image_classification
grid: {model: resnet8, strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 16}
workload_options: {width: 4}
throughput: {blocks: 2, warmup_steps: 2, windows: 2, window_steps: 5, window_seconds: 1.0, twin: false}
equivalence: false
preflight: false
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "harness.run", *map(str, arguments)]


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def lines_of(folder: Path) -> list[dict[str, object]]:
    path = folder / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_a_trial(output: Path, name: str) -> Path:
    """The run folder, once its first trial is on disk."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for folder in output.glob(f"{name}/*"):
            if any(line["outcome"] == "ok" for line in lines_of(folder)):
                return folder
        time.sleep(0.1)
    raise AssertionError("no trial was finished in time")


def test_the_smoke_experiment(tmp_path: Path) -> None:
    done = subprocess.run(command(SMOKE, "--output", tmp_path), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "Plan of smoke" in done.stdout
    assert re.search(r"\[9/9\] ok ", done.stdout)  # three cells, their three checks, their three examinations
    assert "(base: single x1: " in done.stdout
    assert "Trials: " in done.stdout and "9 ok" in done.stdout
    for chatter in ("raylet", "Ray", "pid=", "INFO", "WARNING"):
        assert chatter not in done.stdout, chatter
    report = Path(done.stdout.strip().splitlines()[-1].removeprefix("Report: "))
    assert report.exists()
    results = harness.load(report.parent)
    assert set(results.trials["outcome"]) == {"ok", "skipped"}
    assert results.scaling["blocks"].tolist() == [1, 1, 1]
    assert results.environment["sittings"][0]["wall_s"] > 0
    assert "\x1b" not in done.stdout  # plain lines where the output is no terminal


def test_a_resume_of_another_experiment_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "long.yaml"
    file.write_text(LONG)
    process = start(file, "--output", tmp_path / "out")
    folder = wait_for_a_trial(tmp_path / "out", "long")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    file.write_text(LONG.replace("width: 4", "width: 8"))
    done = subprocess.run(command(file, "--resume", folder), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "was made by another experiment: workload_options differ" in done.stderr
