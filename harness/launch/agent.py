"""The agent of one node: describes its hardware, and observes and ends its worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from harness.launch.postmortem import ProcessOutput, killed_for_memory, what_it_printed
from harness.launch.startup import IMPORT_PART, start_limit_s
from harness.plan.inventory import Node
from harness.system import sanitize, scratch
from harness.system.process import read_counter
from harness.system.user_code import CodeVersion

STACK_WAIT_S = 1.0
"""Time for the processes to write their stacks before they are killed; their loader workers have half of it."""


def describe_node(node_id: str, address: str) -> Node:
    """Return the description of this machine; import torch only to count GPUs."""
    import torch

    from harness.measure.environment import cpu_model

    gpus = torch.cuda.device_count()  # without starting CUDA in this process
    known = _gpus() if gpus else []
    return Node(
        node_id=node_id,
        address=address,
        host=socket.gethostname(),
        cores=usable_cores(),
        gpus=gpus,
        gpu_model=(" + ".join(sorted({name for name, _ in known})) or "GPU") if gpus else None,
        memory_bytes=psutil.virtual_memory().total,
        compiler=any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")),
        gpu_memory_bytes=min((size for _, size in known), default=None),
        cpu=cpu_model(),
    )


def usable_cores(root: Path = Path("/sys")) -> int:
    """Return the physical cores that this process may use: no hyper-threads, within the container's quota.

    A scheduler that gives 32 processors may mean 16 cores of 2 threads: of the processors those count once that share a
    core.
    """
    usable = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        usable = min(usable, len(allowed))
        with contextlib.suppress(OSError):  # no topology
            cores = [root / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list" for number in allowed]
            usable = min(usable, len({path.read_text() for path in cores}))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no cgroup (v2), or no quota: "max"
        quota, period = (root / "fs/cgroup/cpu.max").read_text().split()
        usable = min(usable, int(quota) // int(period))
    return max(1, usable)


def busy_cores() -> float:
    """Return the number of logical cores that all processes of this machine kept busy over a second."""
    return psutil.cpu_percent(interval=1.0) / 100 * (psutil.cpu_count() or 1)


IMPORTS = """
import importlib, json, os, sys
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what modules print is no result
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
        why = None
    except Exception as error:
        why = ": ".join((type(error).__name__, *str(error).strip().splitlines()[-1:]))
    print(json.dumps([module, why]), file=results, flush=True)
"""
GPUS = """
import json, torch
found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps([(gpu.name, gpu.total_memory) for gpu in found]))
"""


def _gpus() -> list[tuple[str, int]]:
    """Return the name and the bytes of each GPU, or slice of one, that torch sees here; none if it fails.

    By torch in a new process: nvidia-smi gives the name of the whole GPU for a slice, and lists hidden GPUs too.
    """
    try:
        command, limit_s = [sys.executable, "-c", GPUS], IMPORT_PART * start_limit_s(1)
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
        return [(str(name), int(size)) for name, size in json.loads(done.stdout.splitlines()[-1])]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []


def interface_of(address: str) -> str | None:
    """Return the network interface of an address, such as ``lo`` or ``eth0``; None without one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return "lo" if address.startswith("127.") else None


class NodeAgent:
    """Answers the driver's questions about one node; a Ray actor beside the workers."""

    def describe(self, node_id: str, address: str) -> Node:
        return describe_node(node_id, address)

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Return those of these paths that do not exist on this node."""
        return [path for path in paths if not os.path.exists(path)]

    def failing_imports(
        self, modules: Sequence[str], limit_s: float, version: CodeVersion | None = None, folder: str | None = None
    ) -> dict[str, str]:
        """Return the modules that cannot be imported here, each with the last line of its error.

        They are imported in one new process, as a rank does, in their order; after one that ends or outlasts it the
        others are unknown. ``limit_s``: of all. ``folder``: first on its import path if the modules are of no version.
        """
        import_path = version.import_path() if version else [path for path in (folder, *sys.path) if path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_path)}
        command, ended = [sys.executable, "-c", IMPORTS, *modules], ""
        try:
            done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=limit_s)
            results, last = done.stdout, done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            ended = last[0] if last else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as late:
            results, ended = late.stdout or b"", f"it takes more than {limit_s:.0f} s"
        found: dict[str, str | None] = dict(map(json.loads, results.splitlines()))
        if unknown := [module for module in modules if module not in found]:
            found[unknown[0]] = ended
        return {module: sanitize.redact_text(why)[:300] for module, why in found.items() if why}

    def busy(self, things: Sequence[object]) -> list[float]:
        """Return how many cores of this node are busy, for each thing, as every question has one answer a thing."""
        return [busy_cores()] * len(things)

    def progress(self, counters: Sequence[str]) -> list[int | None]:
        """Return the number of steps of the processes of these counters."""
        return [read_counter(Path(counter)) for counter in counters]

    def alive(self, pids: Sequence[int]) -> list[bool]:
        """Return whether each of these processes still runs."""
        return list(map(runs, pids))

    def stacks(self, processes: Sequence[tuple[int, str]]) -> list[str]:
        """Return the stack of each (pid, stack file), written by its fault handler; its loader workers' follow."""
        pids = [pid for pid, _ in processes]
        _signal(pids)
        time.sleep(STACK_WAIT_S)
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                _signal([child.pid for child in psutil.Process(pid).children()])
        time.sleep(STACK_WAIT_S / 2)
        files = (Path(path) for _, path in processes)
        return [file.read_text(errors="replace") if file.exists() else "" for file in files]

    def printed(self, processes: Sequence[ProcessOutput]) -> list[str]:
        """Return the end of each process's output, with this machine's secrets redacted."""
        return [what_it_printed(traces) for traces in processes]

    def killed_for_memory(self, processes: Sequence[ProcessOutput]) -> list[bool]:
        """Return for each process whether the kernel killed for memory in its cgroup while it ran."""
        return [killed_for_memory(traces) for traces in processes]

    def kill(self, processes: Sequence[tuple[int, Sequence[str]]]) -> None:
        """Kill each (pid, its files) and its children, even if it has ended itself; remove the files."""
        for pid, files in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # each rank leads a process group of its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # unless it has not created its group yet
            for file in files:
                Path(file).unlink(missing_ok=True)

    def clear(self, folders: Sequence[str]) -> None:
        """Remove the scratch folders of processes that have ended."""
        for folder in filter(None, folders):
            scratch.remove(Path(folder))

    def sweep(self) -> None:
        """Remove the files that killed runs left on this node."""
        scratch.sweep()


def lead_a_process_group() -> None:
    """Make this process a group leader: the group can be killed together, even after the leader has ended."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)


def runs(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has, since in a container nobody may reap it."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _signal(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
