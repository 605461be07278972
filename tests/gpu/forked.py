"""Processes of claims that are forks of one that has imported torch, which takes longer than most claims: for CPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forks import Forked

ROOT = Path(__file__).parents[2]


def forked(output: Path, target: Callable[..., None], *arguments: Any, leads: bool = False) -> Forked:
    """Start a process that calls the target and writes its output to a file.

    ``leads``: whether it leads a session of its own, so that what it starts can be killed with it.
    """
    return Forked(_run, output, leads, target, *arguments)


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
