"""Processes forked from a server that has imported torch and the harness, which takes longer than most tests do."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from typing import Any

IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "torchvision.models", "harness.report.html")
IMPORTED += ("tests.scripted", "tests.trained", "tests.doctor.ranks", "tests.gpu.communication", "tests.gpu.speed")
"""What the server imports. It starts no thread and computes nothing, so that its forks may do both."""


def start(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a process that calls the target, and has nothing of this one but the arguments. CUDA works in no fork."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    child = context.Process(target=target, args=arguments)
    child.start()
    return child
