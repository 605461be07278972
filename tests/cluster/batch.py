"""Jobs of our batch script under a real SLURM: to a report through interruptions, cancelled, and not started.

``python -m tests.cluster.batch [--times 5] [--only NAME]``, as root: runs jobs that USR1 interrupts, one that it
interrupts five times, one whose block is longer than its time limit, one that loses a node, one whose venv is packed,
one that is cancelled and two without Ray on a node, and prints what happens and when. Exit code 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness
from harness.analysis.results import Results
from tests.cluster.machines import ROOT, machines, wait_for
from tests.cluster.slurm import Slurm, slurm

SCRIPT = ROOT / "experiments/clusters/slurm.sbatch"
EXPERIMENT = """
name: batch
workload: emulated_compute
workload_options: {mebibytes: 0.1, step_ms: 5}
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: %s}
exclude: [{strategy: ddp, devices: 1}, {strategy: single, devices: 2}]
throughput: {blocks: %s, warmup_steps: 3, windows: 1, window_steps: 10, window_seconds: %s, twin: false, explain: false}
equivalence: false
preflight: false
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
HELD_S = 35
"""For how long the nodes may stay allocated after the command has ended, or a start has failed."""


@dataclass(frozen=True)
class Job:
    """A job of our batch script, submitted in the folder ``home``. ``began_s``: of the monotonic clock."""

    cluster: Slurm
    home: Path
    id: str
    began_s: float

    def log(self, event: str) -> None:
        """Print an event with the seconds since the job was submitted, and the queue."""
        queue = self.cluster.run("squeue", "--noheader", "-o", "%i %T %R").strip() or "nothing"
        print(f"  {time.monotonic() - self.began_s:6.1f} s  {event} [squeue: {queue}]", flush=True)

    def wait(self, what: Callable[[], object], within_s: float = 300) -> None:
        """Wait until something holds; AssertionError with all logs after the time."""
        wait_for(what, within_s, self.logs)

    def wait_until_ended(self, state: str) -> None:
        """Wait until the job has ended; AssertionError unless in this state."""
        self.wait(lambda: self.cluster.state(self.id) in ENDED)
        assert self.cluster.state(self.id) == state, self.logs()
        self.log(f"{state}, queued again {self.cluster.restarts(self.id)} times")

    def wait_until_nodes_are_free(self, *files: Path) -> None:
        """Wait until both nodes are idle; AssertionError if that is more than HELD_S after the last change of a file.

        ``files``: by default those of the run, the last of which the command writes just before it ends.
        """
        self.wait(lambda: set(self.cluster.run("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"})
        held = time.time() - max(file.stat().st_mtime for file in files or self.run_folder().rglob("*"))
        last = "its last output" if files else "the command's last file"
        self.log(f"sinfo: both nodes idle, {held:.1f} s after {last}")
        assert held <= HELD_S, self.logs()

    def wait_until_nothing_is_left(self) -> None:
        """Wait until neither Ray nor the harness runs on a node."""
        self.wait(lambda: not self.processes(), 60)
        self.log(f"on the nodes: no process of Ray or the harness, {len(self.folders())} folders")

    def logs(self) -> str:
        files = (*self.home.glob("*.out"), *self.home.glob("*.log"))
        texts = "".join(f"\n{file}:\n{file.read_text()[-3000:]}" for file in files)
        return f"state {self.cluster.state(self.id)}; left: {self.processes()}{texts}{self.cluster.logs()}"

    def output(self) -> str:
        return self.output_file().read_text()

    def output_file(self) -> Path:
        return self.home / f"harness-{self.id}.out"

    def run_folder(self) -> Path:
        (folder,) = (self.home / "results/batch").iterdir()
        return folder

    def results(self) -> Results:
        """Load what was recorded; log the trials by outcome and how each start of the command ended."""
        results = harness.load(self.run_folder())
        outcomes = results.trials["outcome"].value_counts().to_dict()
        ended = [each.get("ended", "killed") for each in results.environment["invocations"]]
        self.log(f"trials: {outcomes}; the command's ends: {', '.join(map(str, ended))}")
        return results

    def trials(self) -> int:
        """Return the number of trials recorded until now."""
        return sum(file.read_text().count("\n") for file in self.home.glob("results/batch/*/trials.jsonl"))

    def processes(self) -> list[str]:
        """Return what runs on the nodes of Ray or of the harness."""
        commands = [command for node in self.cluster.nodes for command in node.commands()]
        return [command[:80] for command in commands if re.search("raylet|gcs_server|ray start|harness", command)]

    def folders(self) -> list[Path]:
        """Return the job's folders and files on the disks of the nodes."""
        names = (f"ray-{self.id}", f"harness-{self.id}", f"harness-{self.id}.*")
        return [path for node in self.cluster.nodes for name in names for path in (node.folder / "ray").glob(name)]


def submit(
    cluster: Slurm, home: Path, *, blocks: int, window_s: float, minutes: int = 20, batches: str = "8", **more: str
) -> Job:
    """Submit our script, with the resources of these machines, for a new experiment; ``more``: variables."""
    (home / "batch.yaml").write_text(EXPERIMENT % (batches, blocks, window_s))
    shutil.copy(SCRIPT, home)
    words = ["sbatch", "--parsable", "--gpus-per-node=0", "--cpus-per-task=1", f"--time={minutes}"]
    words += [SCRIPT.name, "batch.yaml"]
    began = time.monotonic()
    job = Job(cluster, home, cluster.run(*words, cwd=home, RAY_TMPDIR="/tmp/ray", **more).strip(), began)
    job.log(f"{' '.join(words)}: job {job.id}")
    return job


def interrupt_by_signal(cluster: Slurm, home: Path) -> Results:
    """Run a job that gets USR1 after two trials: report, requeue, resume, all trials ok, nothing left."""
    job = submit(cluster, home, blocks=2, window_s=1.0)
    job.wait(lambda: job.trials() >= 2)
    job.log(f"scancel --signal=USR1 --batch {job.id}, after {job.trials()} trials")
    cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait(lambda: any(home.glob("results/batch/*/report.html")))
    job.log("report.html")
    job.wait(lambda: cluster.restarts(job.id) == 1)
    job.log("queued again")
    job.wait_until_nodes_are_free()
    return completed(job)


def interrupt_five_times(cluster: Slurm, home: Path) -> Results:
    """Run a job whose blocks of 6 trials are longer than an invocation: USR1 after 2 trials of each, five times."""
    job = submit(cluster, home, blocks=2, window_s=1.0, batches="[8, 16, 32]")
    for number in range(1, 6):
        job.wait(lambda number=number: job.trials() >= 2 * number)
        job.log(f"scancel --signal=USR1 --batch {job.id}, after {job.trials()} trials")
        cluster.run("scancel", "--signal=USR1", "--batch", job.id)
        job.wait(lambda number=number: cluster.restarts(job.id) == number)
        job.log(f"queued again, the {number}. time, with {job.trials()} trials")
        job.wait_until_nodes_are_free()
    results = completed(job)
    assert not results.trials["trial_id"].duplicated().any() and len(results.trials) == 12
    scaling = results.scaling[results.scaling["strategy"] == "ddp"]
    assert set(scaling["blocks"]) == {2} and len(scaling) == 3
    for label, blocks, doubts in zip(scaling["label"], scaling["blocks"], scaling["doubts"], strict=True):
        job.log(f"{label}: {blocks} blocks; {'; '.join(map(str, doubts))}")
    assert any("block cut in two" in str(doubt) for doubts in scaling["doubts"] for doubt in doubts)
    return results


def from_packed_venv(cluster: Slurm, home: Path) -> Results:
    """Run a job whose venv each node unpacks to its own disk; it is no longer where it was made."""
    made, tar = home / "made", home / "venv.tar"
    venv.create(made)
    (packages,) = made.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (made / "bin/ray").write_text(f"#!{made}/bin/python3\nfrom ray.scripts.scripts import main\nmain()\n")
    (made / "bin/ray").chmod(0o755)
    subprocess.run(["tar", "-cf", tar, "-C", made, "."], check=True)
    shutil.rmtree(made)
    job = submit(cluster, home, blocks=2, window_s=1.0, VENV_TAR=str(tar))
    job.wait(lambda: job.trials() >= 1)
    of_copy = f"/tmp/ray/harness-{job.id}/bin/"
    for node in cluster.nodes:
        found = sum(each.split(maxsplit=1)[0].startswith(of_copy) for each in node.commands() if each)
        job.log(f"{node.name}: {found} processes of {of_copy}")
        assert found and not any(Path(sys.executable).parent.as_posix() in each for each in node.commands()), job.logs()
    return completed(job)


def without_ray(cluster: Slurm, home: Path) -> None:
    """Run a job whose environment has no ray: it ends at once, and the nodes are free."""
    did_not_start(submit(cluster, home, blocks=2, window_s=1.0, PATH="/usr/sbin:/usr/bin:/bin"), "no ray in ", 15)


def without_ray_on_a_node(cluster: Slurm, home: Path) -> None:
    """Run a job whose ray fails on the second node: it is named, and both nodes are free within a minute."""
    (home / "bin").mkdir()
    (home / "bin/ray").write_text(
        f'#!/bin/bash\n[ "$(hostname)" = n0 ] || exit 1\nexec {Path(sys.executable).with_name("ray")} "$@"\n'
    )
    (home / "bin/ray").chmod(0o755)
    job = submit(cluster, home, blocks=2, window_s=1.0, VENV=str(home))
    did_not_start(job, "a node did not start: ", 60)
    assert re.search("a node did not start: (n1: Ray ended|srun: error: n1: )", job.output())


def did_not_start(job: Job, why: str, within_s: float) -> None:
    """Wait until the job's nodes are free; AssertionError after the time, and unless its output says why."""
    job.wait(lambda: job.cluster.state(job.id) == "RUNNING" or job.cluster.state(job.id) in ENDED)
    job.log("started")
    job.wait(lambda: job.cluster.run("squeue", "--noheader").strip() == "", within_s)
    job.wait_until_nodes_are_free(job.output_file())
    job.wait_until_ended("FAILED")
    assert why in job.output(), job.logs()
    job.log(next(line for line in job.output().splitlines() if why in line))
    job.wait_until_nothing_is_left()


def interrupt_by_time_limit(cluster: Slurm, home: Path) -> Results:
    """Run a job whose one block takes longer than its time limit, 120 s before which SLURM itself sends USR1."""
    job = submit(cluster, home, blocks=1, window_s=50.0, minutes=6, batches="[8, 16, 32]")
    job.wait(lambda: cluster.restarts(job.id) >= 1, 600)
    job.log(f"queued again, after {job.trials()} trials")
    job.wait_until_nodes_are_free()
    results = completed(job)
    assert not results.trials["trial_id"].duplicated().any() and len(results.trials) == 6
    return results


def completed(job: Job) -> Results:
    """Return the results at the job's end; AssertionError unless it was resumed if it was queued again, all trials are
    ok, and nothing is left.
    """
    job.wait(lambda: job.cluster.state(job.id) in ENDED, 1800)
    job.wait_until_ended("COMPLETED")
    job.wait_until_nodes_are_free()
    results = job.results()
    assert set(results.trials["outcome"]) == {"ok"} and results.missing.empty
    assert set(results.trials["nodes"]) == {1, 2} and results.trials["emulated_compute"].all()
    ended = [each["ended"] for each in results.environment["invocations"]]
    assert ended == ["interrupted"] * job.cluster.restarts(job.id) + ["finished"]
    resumed = "the newest unfinished run: it was interrupted" in " ".join(job.output().split())
    assert resumed == (len(ended) > 1)
    assert (job.run_folder() / "report.html").is_file()
    job.wait_until_nothing_is_left()
    assert job.folders() == []
    return results


def lose_a_node(cluster: Slurm, home: Path) -> Results:
    """Run a job whose second node's Ray is killed: what needs one node goes on, with a report, and nothing is left."""
    job = submit(cluster, home, blocks=3, window_s=1.0)
    job.wait(lambda: job.trials() >= 2)
    job.log(f"kill -KILL of the second node's raylet, after {job.trials()} trials")
    for process in cluster.nodes[1].processes():
        if process.name() == "raylet":
            process.kill()
    job.wait(lambda: job.cluster.state(job.id) in ENDED, 900)
    job.wait_until_nodes_are_free()
    results = job.results()
    job.log(cluster.state(job.id))
    for reason in results.trials[results.trials["outcome"] != "ok"]["reason"].dropna().unique():
        job.log(f"not ok: {reason}"[:200])
    on_one = results.trials[results.trials["nodes"] == 1]
    assert set(on_one["outcome"]) == {"ok"} and set(on_one["block"]) == {0, 1, 2}
    assert (job.run_folder() / "report.html").is_file()
    job.wait_until_nothing_is_left()
    return results


def cancel(cluster: Slurm, home: Path, *by: str, state: str = "CANCELLED") -> Job:
    """Run a job that scancel ends after its first trial; nothing is queued or left."""
    job = submit(cluster, home, blocks=200, window_s=1.0)
    job.wait(lambda: job.trials() >= 1)
    job.log(f"scancel {' '.join((*by, job.id))}, after {job.trials()} trials")
    cluster.run("scancel", *by, job.id)
    job.wait_until_ended(state)
    time.sleep(6)  # a requeue would be scheduled by now
    assert cluster.run("squeue", "--noheader").strip() == ""
    job.log("not queued again")
    assert set(job.results().trials["outcome"]) <= {"ok", "lost"}
    job.wait_until_nothing_is_left()
    return job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="jobs that are interrupted by USR1")
    parser.add_argument("--only", default="", help="the function of one case")
    given = parser.parse_args()
    cases: list[Callable[[Slurm, Path], object]] = [*[interrupt_by_signal] * given.times, interrupt_five_times]
    cases += [interrupt_by_time_limit, lose_a_node, from_packed_venv, cancel, without_ray, without_ray_on_a_node]
    cases = [case for case in cases if given.only in ("", case.__name__)]
    failed = 0
    with (
        tempfile.TemporaryDirectory() as name,
        machines(Path(name)) as nodes,
        slurm(nodes, Path(name, "slurm")) as cluster,
    ):
        print(f"{cluster.run('sinfo', '--version').strip()}, two nodes")
        for number, case in enumerate(cases, 1):
            home = Path(name, f"home-{number}")
            home.mkdir()
            print(f"{number}. {case.__doc__}", flush=True)
            try:
                case(cluster, home)
            except AssertionError:
                traceback.print_exc()
                failed += 1
    print(f"{len(cases) - failed} of {len(cases)} jobs as described")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
