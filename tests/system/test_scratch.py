"""Folders that live as long as their process, and what becomes of them when it is killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.system import scratch
from harness.system.scratch import JUST_MADE_S, PREFIX, Scratch, sweep
from tests.cluster.machines import wait_for

HOLDER = """
import os, sys, time
from pathlib import Path
from harness.system.scratch import Scratch
held = Scratch(Path(sys.argv[1]))
(held.path / "sub").mkdir()
(held.path / "sub" / "file").write_text("x")
if sys.argv[2] == "forks" and os.fork() == 0:  # as a loader worker, which outlives its parent for a moment
    ends = time.monotonic() + 60
    while held.path.parent.exists() and not (held.path.parent / "end").exists() and time.monotonic() < ends:
        time.sleep(0.01)
    os._exit(0)
print(held.path, flush=True)
time.sleep(60)
"""


def holder(parent: Path, how: str = "alone") -> tuple[subprocess.Popen[str], Path]:
    line = [sys.executable, "-c", HOLDER, str(parent), how]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout as output:
        return process, Path(output.readline().strip())


def make_old(folder: Path) -> None:
    then = time.time() - 2 * JUST_MADE_S
    os.utime(folder, (then, then))


def test_a_folder_is_private_and_goes_with_its_context(tmp_path: Path) -> None:
    with Scratch(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.parent == tmp_path
        (folder / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []
    scratch_again = Scratch(tmp_path)
    scratch_again.close()
    scratch_again.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_processes_are_removed_and_folders_in_use_kept(tmp_path: Path) -> None:
    (killed, left), (living, held) = holder(tmp_path), holder(tmp_path)
    try:
        for folder in (left, held):
            make_old(folder)
        assert sweep([tmp_path]) == []
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert sweep([tmp_path]) == [left]
        assert not left.exists() and (held / "sub" / "file").exists()
    finally:
        for process in (killed, living):
            process.kill()
            process.wait()


def test_a_folder_is_held_until_the_last_of_its_processes_is_gone(tmp_path: Path) -> None:
    process, folder = holder(tmp_path, "forks")
    make_old(folder)
    process.kill()
    process.wait()
    assert sweep([tmp_path]) == []
    (tmp_path / "end").touch()
    wait_for(lambda: sweep([tmp_path]) == [folder], 30)


def test_other_folders_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    places = tmp_path / "places"
    for folder in (elsewhere, places / "harness-results", places / f"{PREFIX}young"):
        folder.mkdir(parents=True)
    (places / f"{PREFIX}file").write_text("x")
    (places / f"{PREFIX}link").symlink_to(elsewhere)
    (elsewhere / "kept").write_text("x")
    make_old(places / "harness-results")
    make_old(places / f"{PREFIX}file")
    make_old(elsewhere)
    before = sorted(places.iterdir())
    assert sweep([places]) == []
    make_old(places / f"{PREFIX}young")
    monkeypatch.setattr(scratch.os, "geteuid", lambda: os.getuid() + 1)  # another user's
    assert sweep([places, tmp_path / "absent"]) == []
    assert sorted(places.iterdir()) == before and (elsewhere / "kept").exists()
    monkeypatch.undo()
    assert sweep([places]) == [places / f"{PREFIX}young"]
