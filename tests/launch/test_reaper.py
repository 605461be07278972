"""Who holds files below a folder dies with the driver, and only then."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

DRIVER = """
import os, signal, sys
from pathlib import Path
from harness.launch.ray.reaper import reaper_for
with reaper_for(Path(sys.argv[1])):
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""
HOLDER = "import sys, time; file = open(sys.argv[1] + '/log', 'w'); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[psutil.Process]:
    """A process that hides its command, but has a file open below the folder."""
    script = tmp_path.parent / "holder.py"
    script.write_text(HOLDER.replace("sys.argv[1]", repr(str(tmp_path))))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        yield psutil.Process(process.pid)
        process.kill()


def drive(folder: Path, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER, str(folder), how], check=False, timeout=30)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0)


def test_processes_left_by_a_killed_driver_are_killed(tmp_path: Path, holder: psutil.Process) -> None:
    drive(tmp_path, "killed")
    until = time.monotonic() + 40  # it would sleep for a minute
    while holder.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_processes_of_a_driver_that_ends_in_order_are_left_alone(tmp_path: Path, holder: psutil.Process) -> None:
    drive(tmp_path, "in order")
    time.sleep(1.0)
    assert holder.status() != psutil.STATUS_ZOMBIE
