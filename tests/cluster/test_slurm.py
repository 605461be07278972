"""Our batch script under a real SLURM: to a report; interrupted by USR1, queued again, completed; cancelled."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from tests.cluster.machines import ROOT, machines, wait_for
from tests.cluster.slurm import Slurm, slurm, why_not

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SCRIPT = ROOT / "experiments/clusters/slurm.sbatch"
EXPERIMENT = """
name: batch
workload: emulated_compute
workload_options: {mebibytes: 0.1, step_ms: 5}
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}
exclude: [{strategy: ddp, devices: 1}, {strategy: single, devices: 2}]
throughput: {blocks: %s, warmup_steps: 3, windows: 1, window_steps: 10, window_seconds: %s, twin: false, explain: false}
equivalence: false
preflight: false
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with machines(folder) as nodes, slurm(nodes, folder / "slurm") as running:
        yield running


def submit(cluster: Slurm, home: Path, *, blocks: int, window_s: float) -> str:
    """Submit our script, with the resources of these machines, for a new experiment; return the job's number."""
    (home / "batch.yaml").write_text(EXPERIMENT % (blocks, window_s))
    shutil.copy(SCRIPT, home)
    options = ["--parsable", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10"]
    return cluster.run("sbatch", *options, SCRIPT.name, "batch.yaml", cwd=home, RAY_TMPDIR="/tmp/ray").strip()


def wait_until(cluster: Slurm, job: str, home: Path, *states: str, within_s: float = 300) -> None:
    def report() -> str:
        output = "".join(
            f"\n{file}:\n{file.read_text()[-3000:]}" for file in (*home.glob("*.out"), *home.glob("*.log"))
        )
        return f"state {cluster.state(job)}{output}{cluster.logs()}"

    wait_for(lambda: cluster.state(job) in states, within_s, report)


def lines(home: Path) -> int:
    return sum(file.read_text().count("\n") for file in home.glob("results/batch/*/trials.jsonl"))


def processes(cluster: Slurm) -> list[str]:
    """What runs on the nodes of Ray or of the harness."""
    commands = [command for node in cluster.nodes for command in node.commands()]
    return [command[:80] for command in commands if re.search("raylet|gcs_server|ray start|harness", command)]


def folders(cluster: Slurm, job: str) -> list[Path]:
    """Ray's folders of a job on the nodes."""
    return [path for node in cluster.nodes for path in (node.folder / "ray").glob(f"ray-{job}")]


def test_a_job_that_is_interrupted_is_queued_again_and_completed(cluster: Slurm, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, blocks=3, window_s=1.0)
    wait_until(cluster, job, tmp_path, "RUNNING", within_s=60)
    wait_for(lambda: lines(tmp_path) >= 2, 150, lambda: (tmp_path / f"harness-{job}.out").read_text() + cluster.logs())
    began = time.monotonic()
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    wait_for(lambda: any(tmp_path.glob("results/batch/*/report.html")), 60)
    print(f"seconds from the signal to the report: {time.monotonic() - began:.1f}")
    wait_for(lambda: cluster.restarts(job) == 1, 60, cluster.logs)
    wait_until(cluster, job, tmp_path, *ENDED)
    output = (tmp_path / f"harness-{job}.out").read_text()
    assert cluster.state(job) == "COMPLETED", output
    (folder,) = (tmp_path / "results/batch").iterdir()
    results = harness.load(folder)
    assert set(results.trials["outcome"]) == {"ok"} and results.missing.empty
    assert set(results.trials["nodes"]) == {1, 2} and results.trials["emulated_compute"].all()
    assert [each["ended"] for each in results.environment["invocations"]] == ["interrupted", "finished"]
    assert "the newest unfinished run: it was interrupted" in " ".join(output.split())
    wait_for(lambda: not processes(cluster), 20, lambda: processes(cluster))
    assert folders(cluster, job) == []


@pytest.mark.parametrize(("by", "state"), [((), "CANCELLED"), (("--signal=TERM", "--batch"), "FAILED")])
def test_a_job_that_its_user_ends_is_not_queued_again(
    by: tuple[str, ...], state: str, cluster: Slurm, tmp_path: Path
) -> None:
    """With the signal to the batch script alone there is a report too; scancel itself ends Ray at the same time."""
    job = submit(cluster, tmp_path, blocks=200, window_s=1.0)
    wait_for(lambda: lines(tmp_path) >= 1, 150, lambda: cluster.logs())
    cluster.run("scancel", *by, job)
    wait_until(cluster, job, tmp_path, *ENDED, within_s=60)
    assert cluster.state(job) == state
    time.sleep(6)  # a requeue would be scheduled by now
    assert cluster.run("squeue", "--noheader").strip() == ""
    (folder,) = (tmp_path / "results/batch").iterdir()
    assert set(harness.load(folder).trials["outcome"]) <= {"ok", "lost"}
    assert (folder / "report.html").is_file() or not by
    wait_for(lambda: not processes(cluster), 20, lambda: processes(cluster))
    assert folders(cluster, job) == [] or not by  # scancel may kill the step before it removes them
