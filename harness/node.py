"""What one machine is and has, asked on that machine itself; and what its worker processes are doing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from harness import scratch
from harness.inventory import Node
from harness.measure.progress import read_counter

STACK_WAIT_S = 1.0
"""How long the processes have to write down where they stand before they are killed."""


def describe_node(node_id: str, address: str) -> Node:
    """This machine. Imports torch only to ask for GPUs."""
    gpus, gpu_model = _gpus()
    return Node(
        node_id=node_id,
        address=address,
        host=socket.gethostname(),
        cores=usable_cores(),
        gpus=gpus,
        gpu_model=gpu_model,
        memory_bytes=psutil.virtual_memory().total,
        compiler=any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")),
    )


def usable_cores() -> int:
    """Physical cores that this process may use: not hyper-threads, not beyond a container's share."""
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed, _container_cores() or physical))


def _container_cores() -> int | None:
    """The CPU quota of a cgroup (v2), in whole cores; None where there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _gpus() -> tuple[int, str | None]:
    """How many GPUs torch sees, and the first one's name; asked without starting CUDA in this process."""
    import torch

    count = torch.cuda.device_count()
    return count, _gpu_name() if count else None


def _gpu_name() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "GPU"
    return (done.stdout.strip().splitlines() or ["GPU"])[0]


def interface_of(address: str) -> str | None:
    """The network interface that holds an address, such as ``lo`` or ``eth0``; None where none does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return "lo" if address.startswith("127.") else None


class NodeAgent:
    """Lives on one node beside the workers (as a Ray actor) and answers the driver's questions."""

    def describe(self, node_id: str, address: str) -> Node:
        return describe_node(node_id, address)

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Those of these paths that this node does not have."""
        return [path for path in paths if not os.path.exists(path)]

    def progress(self, counters: Sequence[str]) -> list[int | None]:
        """How many steps the processes behind these counters have taken."""
        return [read_counter(Path(counter)) for counter in counters]

    def stacks(self, processes: Sequence[tuple[int, str]]) -> list[str]:
        """Where each (pid, stack file) stands, as its own fault handler writes it down."""
        for pid, _ in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_WAIT_S)
        return [_read(Path(path)) for _, path in processes]

    def kill(self, processes: Sequence[tuple[int, Sequence[str]]]) -> None:
        """Ends each (pid, its files) at once and removes the files."""
        for pid, files in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            for file in files:
                Path(file).unlink(missing_ok=True)

    def clear(self, folders: Sequence[str]) -> None:
        """Removes the scratch folders of processes that have ended."""
        for folder in filter(None, folders):
            scratch.remove(Path(folder))

    def sweep(self) -> None:
        """Removes what earlier runs, if they were killed, left on this node."""
        scratch.sweep()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
