"""The processes that torchrun starts for one trial, from start to end."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from harness.launch.host import interface_of
from harness.launch.protocol import Job, process_variables
from harness.launch.torchrun.mailbox import SocketMailbox
from harness.launch.torchrun.worker import ADDRESS, KEY_VARIABLE, SOCKET
from harness.system import sanitize
from harness.system.import_path import path_without
from harness.system.process import die_with_parent
from harness.system.scratch import Scratch, shared_memory

OUTPUT_BYTES = 20_000
END_S, POLL_S = 5.0, 0.01


@dataclass
class Processes:
    """torchrun and its ranks, which send to ``mailbox``."""

    agent: subprocess.Popen[bytes]
    mailbox: SocketMailbox
    _output: IO[bytes]
    pids: set[int] = field(default_factory=set)
    """The ranks that have registered; each leads a process group of its own, with its loaders."""

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of torchrun; None while it runs."""
        return self.agent.poll()

    def output(self) -> str:
        """Return the end of their output, with this machine's secrets redacted."""
        return sanitize.redacted_tail(self._output, OUTPUT_BYTES)


@contextmanager
def start_processes(job: Job, deadline: float | None) -> Iterator[Processes]:
    """Run torchrun with one process a worker of the job's group; kill all of them on leaving."""
    with ExitStack() as stack:
        folder = stack.enter_context(Scratch(shared_memory()))
        job_file = folder / "job"
        job_file.write_bytes(pickle.dumps(job))
        mailbox = stack.enter_context(closing(SocketMailbox(folder / SOCKET, deadline)))
        output = stack.enter_context(tempfile.TemporaryFile())
        agent = subprocess.Popen(
            command(job_file, job.group.placement.workers),
            env={**_interfaces(), **os.environ, **_variables(job), KEY_VARIABLE: mailbox.key.hex()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the driver's
            preexec_fn=die_with_parent,
        )
        processes = Processes(agent, mailbox, output)
        stack.callback(_end, processes)
        yield processes


def command(job_file: Path, workers: int) -> list[str]:
    """Return the command: as --standalone, but with a file as the store; its two TCP stores listen on every network."""
    folder = job_file.parent
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder / 'meeting'}", "--rdzv-conf=store_type=file"]
    here = ["--nnodes=1", f"--rdzv-id={folder.name}", f"--local-addr={ADDRESS}", f"--log-dir={folder / 'logs'}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *here, *rendezvous, f"--nproc-per-node={workers}"]
    return [*torchrun, "-m", "harness.launch.torchrun.worker", str(job_file)]


def _variables(job: Job) -> dict[str, str]:
    hidden = job.version.hidden if job.version else ()
    return {
        **process_variables(job.group, job.threads_per_device),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": os.pathsep.join(path_without(*hidden)),  # modules that the driver finds,
        "PYTHONSAFEPATH": "1",  # and none of the current folder
    }


def _interfaces() -> dict[str, str]:
    """Return the loopback interface for gloo and NCCL; a variable of the user has priority."""
    loopback = interface_of(ADDRESS) or "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def _end(processes: Processes) -> None:
    """Kill torchrun, its ranks and their children, and wait until they are gone."""
    agent = processes.agent
    ended: list[psutil.Process] = []
    if agent.poll() is None:
        with contextlib.suppress(psutil.Error):
            tree = psutil.Process(agent.pid)
            tree.suspend()  # it starts no process while its children are listed
            ended = tree.children(recursive=True)
        agent.kill()
    for process in ended:
        with contextlib.suppress(psutil.Error):
            process.kill()
    for pid in processes.pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    agent.wait()
    until = time.monotonic() + END_S  # they hold GPU memory that the next trial needs
    while time.monotonic() < until and not all(map(_gone, ended)):
        time.sleep(POLL_S)


def _gone(process: psutil.Process) -> bool:
    """Return whether a process has ended; zombies count, since in a container there may be no reaper."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
