"""Kill -9, Ctrl-C and SIGTERM of the command as a user runs it: real Ray, real torchrun, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import harness
from harness.system.process import UNSETTLED
from harness.system.scratch import PREFIX, shared_memory
from tests.processes import Command

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
GONE_S, ORDERLY_S = 30.0, 60.0
"""How long processes may outlive a driver that is killed, and one that is asked to end."""
TEXT = """
name: interrupted
workload: ray_workload:ConfiguredFault
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}
throughput: {blocks: 1, warmup_steps: 2, windows: 2, window_steps: 4, window_seconds: %s, twin: false, explain: false}
loader: {workers: 1}
launcher: %s
equivalence: false
preflight: false
"""
WANTED = 3


class Run:
    """One experiment, called again and again in one folder."""

    def __init__(self, place: Path, window_s: float = 0.5, launcher: str = "ray") -> None:
        self.file, self.output, self.calls = place / "interrupted.yaml", place / "out", 0
        self.file.write_text(TEXT % (window_s, launcher))
        (place / "ray_workload.py").write_text((HERE / "ray_workload.py").read_text())

    def call(self, *more: object) -> Command:
        self.calls += 1
        again = ["--resume", self.folder] if self.folder else ["--output", self.output]
        return Command(self.file, *again, *more, log=self.file.with_name(f"log-{self.calls}.txt"))

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

    def finish(self) -> None:
        """The rest, in one call that nobody disturbs."""
        command = self.call()
        command.process.wait(300)
        assert command.process.returncode == 0, command.output
        results = harness.load(self.folder or self.output)
        assert len(set(self.done)) == WANTED and results.missing.empty
        assert set(results.scaling["blocks"]) == {1}


def temporary() -> set[Path]:
    """Return the scratch folders, and everything in shared memory."""
    places = {Path("/tmp"), Path(os.environ.get("TMPDIR", "/tmp"))}
    return {*shared_memory().iterdir(), *(folder for place in places for folder in place.glob(f"{PREFIX}*"))}


def left_behind(before: set[Path]) -> set[Path]:
    """Return what is new since ``before`` and of no living process: others on this machine have theirs open."""
    new = temporary() - before
    held = held_paths() if new else set()
    return {path for path in new if not any(name == str(path) or name.startswith(f"{path}/") for name in held)}


def held_paths() -> set[str]:
    """Return what some process has open or mapped, as paths."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
            for number in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(number))
    return found


def named(command: Command, name: str) -> Callable[[], bool]:
    """Whether a process of this name came from the command."""

    def is_there() -> bool:
        for process in command.others():
            with contextlib.suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    return True
        return False

    return is_there


def test_a_killed_driver_leaves_no_process_and_loses_nothing(tmp_path: Path) -> None:
    """While Ray starts, while workers come up, while a trial is measured; then the rest."""
    run, waited, kept = Run(tmp_path), [], []
    moments = [
        lambda command: named(command, "gcs_server"),
        lambda command: named(command, "RayTrainWorker"),
        lambda command: lambda: run.done,
    ]
    for moment in moments:
        command = run.call()
        command.wait_for(moment(command))
        command.others()
        command.process.kill()
        command.process.wait()
        waited.append(command.seconds_until_alone(within_s=GONE_S))
        assert run.done[: len(kept)] == kept
        kept = run.done
    assert kept
    run.finish()
    assert run.done[: len(kept)] == kept
    print("seconds until the last process was gone:", [f"{seconds:.1f}" for seconds in waited])


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill), (signal.SIGTERM, os.killpg)],
    ids=["Ctrl-C in a terminal", "SIGTERM", "SIGTERM to everybody, as SLURM sends it"],
)
def test_an_interruption_ends_in_order(tmp_path: Path, number: int, send: Callable[[int, int], None]) -> None:
    run, before = Run(tmp_path, window_s=1.0), temporary()
    command = run.call()
    command.wait_for(lambda: run.done)
    began = time.monotonic()
    send(command.process.pid, number)
    command.seconds_until_alone(within_s=ORDERLY_S)
    gone_s = time.monotonic() - began
    command.process.wait(60)
    output = command.output
    assert command.process.returncode == 130, output
    assert f"--resume {run.folder}\n" in output
    assert f"python -m harness.report {run.folder}" in output
    assert "Traceback" not in output
    results = harness.load(run.folder or tmp_path)
    assert results.folder.report.exists() and len(results.missing) == WANTED - len(run.done)
    assert "was interrupted" in results.folder.report.read_text()
    until = time.monotonic() + GONE_S
    while (left := left_behind(before)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    print(f"workers gone after {gone_s:.1f} s, the report was there after {time.monotonic() - began:.1f} s")


def test_a_second_ctrl_c_exits_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, window_s=30.0)
    command = run.call()
    command.wait_for(named(command, "RayTrainWorker"))
    os.killpg(command.process.pid, signal.SIGINT)
    time.sleep(0.7)
    os.killpg(command.process.pid, signal.SIGINT)
    command.process.wait(10)
    assert command.process.returncode == 130
    command.seconds_until_alone(within_s=GONE_S)


def test_ctrl_c_before_anything_is_measured(tmp_path: Path) -> None:
    """While it plans nothing is left; while Ray starts a folder that can go on."""
    run = Run(tmp_path)
    command = run.call()
    time.sleep(2.0)
    command.process.send_signal(signal.SIGINT)
    command.process.wait(ORDERLY_S)
    assert command.process.returncode == UNSETTLED and "Traceback" not in command.output, command.output
    for number in (signal.SIGINT, signal.SIGTERM):
        command = run.call()
        command.wait_for(named(command, "gcs_server"))
        command.process.send_signal(number)
        command.process.wait(ORDERLY_S)
        assert command.process.returncode == UNSETTLED and "Traceback" not in command.output, command.output
        assert f"--resume {run.folder}\n" in command.output
        assert f"settled no trial: {WANTED} trials to measure at its start and at its end" in command.output
        command.seconds_until_alone(within_s=GONE_S)


SIGTERM_TO_GROUP = """
import os, signal, sys, time
import ray
from harness.launch.ray import cluster
from harness.system.process import handle_signals

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
"""


def test_a_sigterm_to_the_process_group_ends_in_order_also_after_ray_has_ended() -> None:
    """Ray ends a driver whose raylet is gone, and takes its handlers away when it ends."""
    message = subprocess.run(
        [sys.executable, "-c", SIGTERM_TO_GROUP],
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
        check=False,
    )
    assert (message.returncode, message.stdout.split()) == (0, ["interrupted", "interrupted", "1000000"]), (
        message.stderr
    )
