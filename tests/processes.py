"""The command in a process of its own, and every process that comes from it, wherever that hangs in the tree."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from harness.analysis.evidence import foreign_cores
from harness.analysis.results import Results
from harness.record.frames import records
from harness.system.scratch import PREFIX, shared_memory

ROOT = Path(__file__).parents[1]
MARK = "HARNESS_TEST_MARK"
RUN = (sys.executable, "-m", "tests.without_figures", "harness.run")
"""The command for tests that look at no figure."""


def ended(
    *words: object, cwd: Path = ROOT, code: int = 0, variables: Mapping[str, str] = os.environ, timeout: float = 500
) -> subprocess.CompletedProcess[str]:
    """Run a command, for which this package can be imported, to its end; it has to leave with this exit code."""
    environment = {**variables, "PYTHONPATH": str(ROOT)}
    command = [*map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {packages!r}:
            raise {error}('blocked: ' + name)
sys.meta_path.insert(0, Block())
"""


def run_without(packages: tuple[str, ...], script: str, error: str = "ImportError") -> subprocess.CompletedProcess[str]:
    """Run a script in a process in which these packages cannot be imported."""
    command = [sys.executable, "-c", BLOCK.format(packages=packages, error=error) + script]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=100)


class Command:
    """``python -m harness.run ARGUMENTS`` without figures, in a session of its own, as a terminal or batch job has.

    ``temporary``: its folder for temporary files, with a short name: Ray has sockets in it.
    """

    def __init__(self, *arguments: object, log: Path, temporary: Path) -> None:
        self.mark, self.log, self.temporary = uuid.uuid4().hex, log, temporary
        self._seen: set[psutil.Process] = set()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.without_figures", "harness.run", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **os.environ,
                    MARK: self.mark,
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONFAULTHANDLER": "1",
                    "TMPDIR": str(temporary),
                },
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

    def named(self, name: str) -> list[psutil.Process]:
        """The processes of this name that came from the command."""
        found = []
        for process in self.others():
            with contextlib.suppress(psutil.Error):
                found += [process] if name in " ".join(process.cmdline()) else []
        return found

    def is_running(self, name: str) -> bool:
        return bool(self.named(name))

    def files(self) -> set[Path]:
        """Its scratch folders, and what its processes have open or mapped in shared memory: other runs have theirs."""
        memory = shared_memory()
        paths = [Path(name) for process in (self.process, *self.others()) for name in held_paths(process.pid)]
        held = {memory / path.relative_to(memory).parts[0] for path in paths if memory in path.parents}
        return {path for path in (*held, *self.temporary.glob(f"{PREFIX}*")) if path.exists()}

    def wait_for(self, what: Callable[[], object], within_s: float = 120.0) -> None:
        until = time.monotonic() + within_s
        while not what():
            self.others()
            assert self.process.poll() is None, self.output
            assert time.monotonic() < until, f"waited in vain; {self.output}"
            time.sleep(0.1)

    def seconds_until_alone(self, within_s: float) -> float:
        """How long until none of its processes lives."""
        began = time.monotonic()
        while left := self.others():
            waited = time.monotonic() - began
            assert waited < within_s, f"after {waited:.0f} s there are still {[p.cmdline()[:3] for p in left]}"
            time.sleep(0.1)
        return time.monotonic() - began


def held_paths(pid: int) -> set[str]:
    """Return what a process has open or mapped, as paths."""
    found: set[str] = set()
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        found |= {line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()}
        for number in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(number))
    return found


def marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """Return the living processes with this mark in their environment: not Ray's workers, whose title overwrites it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == mark and lives(process):
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
