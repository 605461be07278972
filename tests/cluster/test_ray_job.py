"""``ray job submit`` of a run: its environment is used, its results outlive it, a stop leaves a report."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from tests.cluster.machines import ROOT, Machine, machines, new_token, start_ray, wait_for

LACKS_DASHBOARD = importlib.util.find_spec("aiohttp_cors") is None
pytestmark = [pytest.mark.slow, pytest.mark.cluster]
pytestmark += [pytest.mark.skipif(LACKS_DASHBOARD, reason="needs ray[default], for its dashboard")]

EXPERIMENT = """
name: job
workload: ray_workload:ConfiguredFault
grid: {{strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}}
throughput: {{blocks: {blocks}, warmup_steps: 2, windows: 1, window_steps: 4, window_seconds: 0.2, twin: false,
  explain: false}}
equivalence: false
"""
ADDRESS = "http://10.77.0.1:8265"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A head with a dashboard and two CPUs."""
    with machines(tmp_path_factory.mktemp("job"), 1, **new_token()) as (machine,):
        start_ray(machine, "--dashboard-host=0.0.0.0", cpus=2)
        yield machine


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A working directory with this package, and experiment files with code of their own in a folder below it."""
    work = tmp_path / "work"
    shutil.copytree(ROOT / "harness", work / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    (work / "experiments").mkdir()
    shutil.copy(ROOT / "tests/ray_workload.py", work / "experiments")
    for name, blocks in (("short", 1), ("long", 200)):
        (work / f"experiments/{name}.yaml").write_text(EXPERIMENT.format(blocks=blocks))
    return work


def words(*arguments: str, wait_s: int | None = None, name: str | None = None) -> list[str]:
    """The command that submits a run from the current folder. ``wait_s``: between ``ray job stop`` and SIGKILL."""
    variables = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}})
    options = ["--runtime-env-json", variables] if wait_s is not None else []
    options += ["--submission-id", name] if name else []
    submit = ["ray", "job", "submit", "--address", ADDRESS, "--working-dir", ".", *options, "--"]
    return [*submit, "python", "-m", "harness.run", *arguments]


def test_a_job_needs_an_output_that_outlives_it(head: Machine, home: Path) -> None:
    output = " ".join(head.run(*words("experiments/short.yaml"), cwd=home, check=False, PYTHONPATH="").split())
    assert "error: --output: 1 problem - got 'results'; in a Ray job" in output, output
    assert "ray job submit --working-dir . -- python -m harness.run experiments/short.yaml" in output
    assert "--output /shared/results" in output
    assert "exit code 2" in output and "Traceback" not in output


def test_a_job_runs_and_its_results_outlive_it(head: Machine, home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    command = words("experiments/short.yaml", "--output", str(shared))
    output = head.run(*command, cwd=home, check=False, timeout=300, PYTHONPATH="")
    assert "succeeded" in output, output
    (folder,) = (shared / "job").iterdir()
    results = harness.load(folder)
    assert set(results.trials["outcome"]) == {"ok"} and set(results.trials["devices"]) == {1, 2}
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize(("wait_s", "reported"), [(120, True), (0, False)])
def test_a_stopped_job_has_time_for_its_report_if_its_environment_says_so(
    wait_s: int, reported: bool, head: Machine, home: Path, tmp_path: Path
) -> None:
    shared, log, name = tmp_path / "shared", tmp_path / "log", f"stopped-{wait_s}"
    command = words("experiments/long.yaml", "--output", str(shared), wait_s=wait_s, name=name)
    submitted = head.start(*command, log=log, cwd=home, PYTHONPATH="")
    wait_for(lambda: any(file.stat().st_size for file in shared.glob("job/*/trials.jsonl")), 180, log.read_text)
    head.run("ray", "job", "stop", "--address", ADDRESS, name, cwd=home, timeout=150, check=False)
    submitted.wait(timeout=60)
    (folder,) = (shared / "job").iterdir()
    assert (folder / "report.html").is_file() == reported, log.read_text()
    results = harness.load(folder)
    assert set(results.trials["outcome"]) == {"ok"}
    if reported:
        assert results.environment["invocations"][-1]["ended"] == "interrupted"
        assert "Interrupted." in log.read_text() and f"--resume {folder}" in "".join(log.read_text().split("\n"))
