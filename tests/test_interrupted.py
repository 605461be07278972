"""Kill -9, Ctrl-C and SIGTERM of the command as a user runs it: real Ray, real torchrun, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import harness
from harness.system.process import INTERRUPTED, REPEAT_S, UNSETTLED
from harness.system.scratch import JUST_MADE_S, shared_memory
from tests.cluster.machines import wait_for
from tests.processes import Command

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
GONE_S, ORDERLY_S = 30.0, 60.0
"""How long processes may outlive a driver that is killed, and one that is asked to end."""
TEXT = """
name: interrupted
workload: ray_workload:ConfiguredFault
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}
throughput: {blocks: 2, warmup_steps: 2, windows: 2, window_steps: 4, window_seconds: %s, twin: false, explain: false}
loader: {workers: 1}
equivalence: false
preflight: false
"""
WANTED = 2 * 3


class Run:
    """One experiment, called again and again in one folder, with temporary files in another."""

    def __init__(self, place: Path, temporary: Path) -> None:
        self.file, self.output, self.calls, self.temporary = place / "interrupted.yaml", place / "out", 0, temporary
        (place / "ray_workload.py").write_text((HERE / "ray_workload.py").read_text())
        self.set_window(0.5)

    def set_window(self, seconds: float) -> None:
        self.file.write_text(TEXT % seconds)

    def call(self, *more: object) -> Command:
        self.calls += 1
        again = ["--resume", self.folder] if self.folder else ["--output", self.output]
        log = self.file.with_name(f"log-{self.calls}.txt")
        return Command(self.file, *again, *more, log=log, temporary=self.temporary)

    @property
    def folder(self) -> Path | None:
        return next((path.parent for path in self.output.glob("*/*/plan.json")), None)

    @property
    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "trials.jsonl" if self.folder else None
        whole = path.read_text().split("\n")[:-1] if path and path.exists() else []  # the next may be on its way
        return [json.loads(line) for line in whole]

    @property
    def done(self) -> list[str]:
        return [line["trial_id"] for line in self.lines if line["outcome"] == "ok"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        yield Run(tmp_path, Path(temporary))


def wait_until_removed(files: set[Path]) -> None:
    wait_for(lambda: not any(path.exists() for path in files), GONE_S, files)


def test_kills_and_interruptions_leave_no_process_and_no_file_and_lose_nothing(run: Run) -> None:
    """Kill it while Ray starts and while a trial is measured; end what goes on in order by SIGTERM, then by Ctrl-C."""
    run.set_window(1.0)
    files: set[Path] = set()

    def measured(command: Command) -> bool:
        files.update(held := command.files())
        return bool(run.done) and any(path.parent == shared_memory() for path in held)

    for moment in ("Ray starts", "a trial is measured"):
        command = run.call()
        starts = moment == "Ray starts"
        command.wait_for(partial(command.is_running, "gcs_server") if starts else partial(measured, command))
        files |= command.files()
        command.process.kill()
        command.process.wait()
        command.seconds_until_alone(within_s=GONE_S)
        assert not list(Path("/tmp/ray").glob(f"session_2*_{command.process.pid}"))
    assert run.done
    left = {path for path in files if path.exists()}
    assert {path.parent for path in left} == {run.temporary, shared_memory()}  # of Ray's session, of a rank
    then = time.time() - 2 * JUST_MADE_S
    for path in left:
        os.utime(path, (then, then))
    for number in (signal.SIGTERM, signal.SIGINT):  # to all processes, as SLURM sends it, and as a terminal does
        kept = run.done
        command = run.call()
        files |= check_an_end_in_order(run, command, number)
        assert run.done[: len(kept)] == kept and len(set(run.done)) == len(run.done)
        wait_until_removed(files)


def check_an_end_in_order(run: Run, command: Command, number: int) -> set[Path]:
    """Interrupt all processes of a command once it has measured a trial; return the files that it had."""
    before = len(run.done)
    command.wait_for(lambda: len(run.done) > before)
    files = command.files()
    assert files
    os.killpg(command.process.pid, number)
    command.seconds_until_alone(within_s=ORDERLY_S)
    command.process.wait(60)
    output = command.output
    assert command.process.returncode == INTERRUPTED, output
    assert f"--resume {run.folder}\n" in output
    assert f"python -m harness.report {run.folder}" in output
    assert "Traceback" not in output
    results = harness.load(run.folder or run.output)
    assert results.folder.report.exists() and len(results.missing) == WANTED - len(run.done)
    assert "was interrupted" in results.folder.report.read_text()
    return files


def test_a_second_ctrl_c_exits_at_once(run: Run) -> None:
    run.set_window(30.0)
    command = run.call()
    command.wait_for(lambda: command.is_running("RayTrainWorker"))
    (mailbox,) = command.named("ray::Mailbox")
    mailbox.suspend()  # an end in order waits for its answer
    os.killpg(command.process.pid, signal.SIGINT)
    time.sleep(REPEAT_S + 0.2)
    assert command.process.poll() is None

    def ends() -> bool:
        """Whether it ends at a further signal: two that reach it late, and together, are one."""
        os.killpg(command.process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(2 * REPEAT_S)
        return command.process.poll() is not None

    wait_for(ends, 30)
    assert command.process.returncode == 130
    with contextlib.suppress(psutil.NoSuchProcess):
        mailbox.resume()
    command.seconds_until_alone(within_s=GONE_S)


def _handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of its own for a signal."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_signal_before_anything_is_measured(run: Run) -> None:
    """Ctrl-C while it plans leaves nothing; SIGTERM while Ray starts a folder that can go on."""
    command = run.call()
    command.wait_for(lambda: _handles(command.process.pid, signal.SIGTERM))  # it imports no more
    command.process.send_signal(signal.SIGINT)
    command.process.wait(ORDERLY_S)
    assert command.process.returncode in (UNSETTLED, INTERRUPTED), command.output
    assert "Traceback" not in command.output, command.output
    command = run.call()
    command.wait_for(lambda: command.is_running("gcs_server"))
    command.process.send_signal(signal.SIGTERM)  # for which Ray sets a handler of its own while it starts
    command.process.wait(ORDERLY_S)
    assert command.process.returncode == UNSETTLED and "Traceback" not in command.output, command.output
    assert f"--resume {run.folder}\n" in command.output
    assert f"settled no trial: {WANTED} trials to measure at its start and at its end" in command.output
    command.seconds_until_alone(within_s=GONE_S)


SIGTERM_TO_GROUP = """
import os, signal, sys, time
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from harness.launch.ray import cluster
from harness.launch.ray.launcher import give_up
from harness.system.process import handle_signals, in_thread

def interrupted_by(send, *to):
    try:
        send(*to, signal.SIGTERM)
        time.sleep(10)
    except KeyboardInterrupt:
        return "interrupted"

with handle_signals():
    with cluster.start_embedded(cluster.local_inventory()):
        pass
    print(interrupted_by(os.kill, os.getpid()))
with handle_signals(), cluster.start_embedded(cluster.local_inventory()):
    kept = ray.put(bytes(1_000_000))
    print(interrupted_by(os.killpg, 0))
    time.sleep(3)
    print(len(ray.get(kept)))
    for wait_s in (0, 3):  # before its controller exists, and while workers start
        fit = in_thread(TorchTrainer(lambda: time.sleep(60), scaling_config=ScalingConfig(num_workers=1)).fit)
        time.sleep(wait_s)
        give_up(fit)
        print(fit.done())  # a thread that outlives Ray uses what Ray has freed
"""


def test_a_sigterm_to_the_process_group_ends_in_order_also_after_ray_has_ended() -> None:
    """Ray ends a driver whose raylet is gone, and takes its handlers away when it ends."""
    command = [sys.executable, "-c", SIGTERM_TO_GROUP]
    message = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True, check=False)
    expected = ["interrupted", "interrupted", "1000000", "True", "True"]
    assert (message.returncode, message.stdout.split()) == (0, expected), message.stderr
