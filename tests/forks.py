"""Processes forked from a server that has imported torch and the harness, which takes longer than most tests do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from typing import Any

IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "torchvision.models", "harness.report.html")
IMPORTED += ("tests.scripted", "tests.trained", "tests.doctor.ranks", "tests.gpu.communication", "tests.gpu.speed")
IMPORTED += ("tests.forked_launch",)
"""What the server imports. It starts no thread and computes nothing, so that its forks may do both."""


def start(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a process that calls the target, and has nothing of this one but the arguments. CUDA works in no fork."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    child = context.Process(target=target, args=arguments)
    child.start()
    return child


class Forked:
    """Such a process, with what is used of subprocess.Popen."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = start(target, *arguments)
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        """Return the exit code, minus the number of a signal; None if the process lives."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise TimeoutExpired if the process lives on."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        """Send SIGKILL; nothing if the process has ended."""
        self._process.kill()
