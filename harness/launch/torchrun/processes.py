"""The processes that torchrun makes for one trial, from their start until none of them is left."""

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
from harness.system.process import die_with_parent
from harness.system.scratch import Scratch, shared_memory

OUTPUT_BYTES = 20_000
END_S, POLL_S = 5.0, 0.01


@dataclass
class Processes:
    """torchrun and its ranks. ``mailbox`` is where they talk to."""

    agent: subprocess.Popen[bytes]
    mailbox: SocketMailbox
    _output: IO[bytes]
    pids: set[int] = field(default_factory=set)
    """The ranks that have registered; each leads a process group of its own, with its loaders."""

    @property
    def exit_code(self) -> int | None:
        """torchrun's; None while it runs."""
        return self.agent.poll()

    def output(self) -> str:
        """The end of what all of them printed, without what is secret here."""
        return sanitize.redacted_tail(self._output, OUTPUT_BYTES)


@contextmanager
def start_processes(job: Job, deadline: float | None) -> Iterator[Processes]:
    """torchrun with one process a worker of the job's group; on leaving all of them are ended."""
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
    """What --standalone does, but ranks meet in a file: its two stores would listen to every network."""
    folder = job_file.parent
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder / 'meeting'}", "--rdzv-conf=store_type=file"]
    here = ["--nnodes=1", f"--rdzv-id={folder.name}", f"--local-addr={ADDRESS}", f"--log-dir={folder / 'logs'}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *here, *rendezvous, f"--nproc-per-node={workers}"]
    return [*torchrun, "-m", "harness.launch.torchrun.worker", str(job_file)]


def _variables(job: Job) -> dict[str, str]:
    return {
        **process_variables(job.group, job.threads_per_device),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # they find what the driver finds,
        "PYTHONSAFEPATH": "1",  # and not what lies in the current folder besides
    }


def _interfaces() -> dict[str, str]:
    """gloo and NCCL stay on this machine, unless the user names another interface."""
    loopback = interface_of(ADDRESS) or "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def _end(processes: Processes) -> None:
    """Kills torchrun, its ranks and what they started, wherever they stand, and waits until they are gone."""
    agent = processes.agent
    ended: list[psutil.Process] = []
    if agent.poll() is None:
        with contextlib.suppress(psutil.Error):
            tree = psutil.Process(agent.pid)
            tree.suspend()  # it starts nobody while its children are listed
            ended = tree.children(recursive=True)
        agent.kill()
    for process in ended:
        with contextlib.suppress(psutil.Error):
            process.kill()
    for pid in processes.pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    agent.wait()
    until = time.monotonic() + END_S  # on a GPU they hold memory that the next trial needs
    while time.monotonic() < until and not all(map(_gone, ended)):
        time.sleep(POLL_S)


def _gone(process: psutil.Process) -> bool:
    """Also what only waits to be reaped: in a container nobody may do that."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
