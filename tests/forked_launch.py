"""Scripts and torchrun's ranks as forks, in place of new processes, each of which imports torch for seconds.

What a launcher sees of them is the same: processes with their variables, folder, output, signals and exit codes. The
commands themselves are run in tests/launch/test_torchrun.py, tests/test_scripts.py and tests/on_ray/test_scripts.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from harness.cli.commands import app
from harness.launch import torchrun
from harness.measure.script import child, parent
from tests.forks import Forked


class ForkedScript(Forked):
    """A rank of a script. ``started``: all of this process."""

    started: ClassVar[list[ForkedScript]] = []

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, pass_fds: Sequence[int], **_: Any
    ) -> None:
        (number,) = pass_fds
        read, write = os.pipe()
        self.stdout = os.fdopen(read, "rb")
        with Connection(os.dup(number)) as connection, Connection(write, readable=False) as output:
            super().__init__(_script, connection, output, dict(env), cwd)
        self.started.append(self)


class ForkedTorchrun(Forked):
    """torchrun's agent, which starts the ranks of a worker group and ends with the first that fails."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], stdout: Any, **_: Any) -> None:
        (size,) = (int(word.partition("=")[2]) for word in command if word.startswith("--nproc-per-node="))
        with Connection(os.dup(stdout.fileno()), readable=False) as output:
            super().__init__(_agent, output, dict(env), size, Path(command[-1]))


def use_forks(patch: pytest.MonkeyPatch) -> None:
    """Fork scripts and torchrun in this process."""
    patch.setattr(parent, "subprocess", _starting(ForkedScript))
    patch.setattr(torchrun, "subprocess", _starting(ForkedTorchrun))


def command_here(patch: pytest.MonkeyPatch, *words: object, code: int = 0) -> str:
    """Run our command in this process, on forks; return its output. It has to leave with this exit code."""
    use_forks(patch)
    patch.setattr(sys, "path", [*sys.path])  # which the command adds the file's folder to
    done = CliRunner(env={"RAY_ADDRESS": "", "COLUMNS": "200"}).invoke(app, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def _starting(forked: type[Forked]) -> SimpleNamespace:
    """Return the module subprocess with a class that forks."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": forked})


def _script(connection: Connection, output: Connection, environment: dict[str, str], folder: Path) -> None:
    _become(output, environment, folder)
    sys.path.insert(0, "")  # what ``python -m`` puts there, and run_script replaces
    child.end_process(child.run_script(connection, connection.recv()))


FAILED = """Root Cause (first observed failure):
[0]:
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
"""
"""What torchrun prints of the rank that failed first, as far as it is read: launch/test_torchrun.py has the rest."""


def _agent(output: Connection, environment: dict[str, str], size: int, job: Path) -> None:
    """Fork the ranks of a group; leave with 1 if one fails, once the others are killed."""
    _become(output, environment, Path.cwd())
    ranks = {_fork_rank(rank, size, job): rank for rank in range(size)}
    failed = False
    while ranks and not failed:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if failed := code != 0:
            print(FAILED.format(rank=rank, code=code, pid=pid))
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(int(failed))


def _fork_rank(rank: int, size: int, job: Path) -> int:
    if pid := os.fork():
        return pid
    os.setsid()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    parent.subprocess = _starting(ForkedScript)  # type: ignore[assignment]
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running = lambda: None  # it runs: this process was forked from it
    try:
        code = torchrun.main(job)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(output: Connection, environment: dict[str, str], folder: Path) -> None:
    """Take on what a new process has from its start."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # the server has set its own
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
