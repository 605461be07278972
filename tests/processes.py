"""The command in a process of its own, and every process that comes from it, wherever that hangs in the tree."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from harness.analysis.evidence import foreign_cores
from harness.analysis.results import Results
from harness.record.frames import records

ROOT = Path(__file__).parents[1]
MARK = "HARNESS_TEST_MARK"


class Command:
    """``python -m harness.run ARGUMENTS`` in a session of its own, as a terminal or a batch system gives it."""

    def __init__(self, *arguments: object, log: Path) -> None:
        self.mark, self.log = uuid.uuid4().hex, log
        self._seen: set[psutil.Process] = set()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.run", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def others(self) -> list[psutil.Process]:
        """All living processes that came from this command, but itself: workers, Ray, torchrun.

        By the mark in their environment, or since they were seen below it: Ray's workers write their title over both.
        """
        known = {self.process.pid, *(process.pid for process in self._seen)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.ppid() in known or process.environ().get(MARK) == self.mark:
                    known.add(process.pid)
                    self._seen.add(process)
        return [process for process in self._seen if process.pid != self.process.pid and lives(process)]

    def wait_for(self, what: Callable[[], object], within_s: float = 120.0) -> None:
        until = time.monotonic() + within_s
        while not what():
            self.others()
            assert self.process.poll() is None, self.output
            assert time.monotonic() < until, f"waited in vain; {self.output}"
            time.sleep(0.05)

    def seconds_until_alone(self, within_s: float) -> float:
        """How long until none of its processes lives."""
        began = time.monotonic()
        while left := self.others():
            waited = time.monotonic() - began
            assert waited < within_s, f"after {waited:.0f} s there are still {[p.cmdline()[:3] for p in left]}"
            time.sleep(0.05)
        return time.monotonic() - began


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes with this mark in their environment: not Ray's workers, whose title overwrites it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and lives(process):
                found.append(process)
    return found


def lives(process: psutil.Process) -> bool:
    """Not what only waits to be reaped: in a container nobody may do that."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def most_foreign_cores(results: Results) -> float:
    """The most processors that other processes kept busy during a trial, from the recorded columns of its ranks."""
    trials = results.ranks.groupby(["trial_id", "attempt"])
    return max((cores for _, ranks in trials if (cores := foreign_cores(records(ranks))) is not None), default=0.0)
