"""The hardware of this machine: cores, GPUs, memory, network interfaces."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

from harness.plan.inventory import Node


def describe_node(node_id: str, address: str) -> Node:
    """Return the description of this machine; import torch only to count GPUs."""
    from harness.measure.environment import cpu_model

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
        cpu=cpu_model(),
    )


def usable_cores() -> int:
    """Return the physical cores that this process may use: no hyper-threads, within the container's quota."""
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed, _container_cores() or physical))


def _container_cores() -> int | None:
    """Return the CPU quota of a cgroup (v2), in whole cores; None without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _gpus() -> tuple[int, str | None]:
    """Return the number of GPUs that torch sees and the first one's name, without starting CUDA in this process."""
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
    """Return the network interface of an address, such as ``lo`` or ``eth0``; None without one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return "lo" if address.startswith("127.") else None
