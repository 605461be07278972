"""Processes of claims that are forks of one that has imported torch, which takes longer than most claims: for CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forks import start

ROOT = Path(__file__).parents[2]


class Forked:
    """A process that calls the target and writes its output to a file, with what is used of subprocess.Popen here.

    ``leads``: whether it leads a session of its own, so that what it starts can be killed with it.
    """

    def __init__(self, output: Path, target: Callable[..., None], *arguments: Any, leads: bool = False) -> None:
        self._process = start(_run, output, leads, target, *arguments)
        self.pid = self._process.pid or 0

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, minus the number of a signal; raise TimeoutExpired if the process lives on."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        """Send SIGKILL; nothing if the process has ended."""
        self._process.kill()


def _run(output: Path, leads: bool, target: Callable[..., None], *arguments: Any) -> None:
    if leads:
        os.setsid()
    os.chdir(ROOT)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    import torch

    torch.set_num_threads(1)  # more only wait for each other where claims share the machine, or others use it
    target(*arguments)
