"""What one machine is and has, asked on that machine itself; and what its worker processes are doing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from harness.launch.heartbeat import read_counter
from harness.launch.host import describe_node
from harness.launch.postmortem import ProcessOutput, killed_for_memory, what_it_printed
from harness.plan.inventory import Node
from harness.system import sanitize, scratch

IMPORT_S = 50.0
"""How long a module may take to be imported; two of them fit into what an agent may take to answer."""
STACK_WAIT_S = 1.0
"""How long the processes have to write down where they stand before they are killed; their loaders half of it."""


class NodeAgent:
    """Lives on one node beside the workers (as a Ray actor) and answers the driver's questions."""

    def describe(self, node_id: str, address: str) -> Node:
        return describe_node(node_id, address)

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Those of these paths that this node does not have."""
        return [path for path in paths if not os.path.exists(path)]

    def failing_imports(self, modules: Sequence[str]) -> dict[str, str]:
        """Those of these modules that cannot be imported here, with the last line of why; in a process of its own."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        failing = {}
        for module in modules:
            command = [sys.executable, "-c", "import importlib, sys; importlib.import_module(sys.argv[1])", module]
            try:
                done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=IMPORT_S)
            except subprocess.TimeoutExpired:
                failing[module] = f"it takes more than {IMPORT_S:.0f} s"
                continue
            if done.returncode:
                lines = sanitize.redact_text(done.stderr.decode(errors="replace")).strip().splitlines()
                failing[module] = lines[-1][:300] if lines else f"exit code {done.returncode}"
        return failing

    def progress(self, counters: Sequence[str]) -> list[int | None]:
        """How many steps the processes behind these counters have taken."""
        return [read_counter(Path(counter)) for counter in counters]

    def alive(self, pids: Sequence[int]) -> list[bool]:
        """Whether each of these processes still runs."""
        return [_runs(pid) for pid in pids]

    def stacks(self, processes: Sequence[tuple[int, str]]) -> list[str]:
        """Where each (pid, stack file) stands, as its own fault handler writes it down; its loader workers below it."""
        pids = [pid for pid, _ in processes]
        _signal(pids)
        time.sleep(STACK_WAIT_S)
        _signal([child for pid in pids for child in _children(pid)])
        time.sleep(STACK_WAIT_S / 2)
        return [_read(Path(path)) for _, path in processes]

    def printed(self, processes: Sequence[ProcessOutput]) -> list[str]:
        """The end of what each of these processes printed, without what is secret here."""
        return [what_it_printed(traces) for traces in processes]

    def killed_for_memory(self, processes: Sequence[ProcessOutput]) -> list[bool]:
        """Whether the kernel killed for memory beside each of these processes while it ran."""
        return [killed_for_memory(traces) for traces in processes]

    def kill(self, processes: Sequence[tuple[int, Sequence[str]]]) -> None:
        """Ends each (pid, its files) and what it started at once, also where it has died; removes the files."""
        for pid, files in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # ranks lead process groups of their own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # but for one that has not come that far
            for file in files:
                Path(file).unlink(missing_ok=True)

    def clear(self, folders: Sequence[str]) -> None:
        """Removes the scratch folders of processes that have ended."""
        for folder in filter(None, folders):
            scratch.remove(Path(folder))

    def sweep(self) -> None:
        """Removes what earlier runs, if they were killed, left on this node."""
        scratch.sweep()


def lead_a_process_group() -> None:
    """From now on this process and what it starts can be ended together, even once it has died itself."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def _signal(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
