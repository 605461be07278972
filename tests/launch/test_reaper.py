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


@pytest.mark.parametrize(
    ("how", "code", "wait_s"),
    [("killed", -signal.SIGKILL, 40), pytest.param("in order", 0, 1, marks=pytest.mark.slow)],  # it sleeps for a minute
)
def test_processes_left_by_a_killed_driver_are_killed_and_others_are_left_alone(
    tmp_path: Path, holder: psutil.Process, how: str, code: int, wait_s: float
) -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path), how], check=False, timeout=30)
    until = time.monotonic() + wait_s
    while holder.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        time.sleep(0.05)
    assert done.returncode == code and (holder.status() == psutil.STATUS_ZOMBIE) == (how == "killed")
