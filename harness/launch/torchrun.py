"""Run a worker group under torchrun, without Ray: the control that shows the cost of Ray."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import IO

import psutil
import torch
import torch.distributed as dist

from harness.config.experiment import Experiment
from harness.launch.agent import NodeAgent, busy_cores, interface_of, runs
from harness.launch.failures import blamed, blamed_on, died, from_exit, from_hang, judged, primary
from harness.launch.mailbox import DriverLine, SocketMailbox
from harness.launch.protocol import Job, Message, process_variables
from harness.launch.startup import Received, Registration, StartupTimer, start_limit_s
from harness.launch.supervision import Answers, Ending, GroupEnd, Watchdog, supervise
from harness.launch.worker import TrialFailed, devices_of, failure, run_rank
from harness.plan.trial import TrialResult, WorkerGroup
from harness.system import sanitize
from harness.system.import_path import path_without
from harness.system.process import die_with_parent
from harness.system.scratch import Scratch, shared_memory
from harness.system.user_code import CodeVersion
from harness.train.ranks import Ranks, connecting_on_use

OUTPUT_BYTES = 20_000
END_S, POLL_S = 5.0, 0.01
LEFT_S = 45.0
"""The time that torchrun has to end the ranks after one of them has ended; it waits 30 s for them itself."""
SOCKET, STORE = "driver", "ranks"
"""The files beside the job through which the ranks find the driver, and each other."""
KEY_VARIABLE = "HARNESS_DRIVER_KEY"
NODE_ID, ADDRESS = "torchrun", "127.0.0.1"


@dataclass
class Processes:
    """torchrun and its ranks, which send to ``mailbox``, as ``supervise`` sees them."""

    agent: subprocess.Popen[bytes]
    mailbox: SocketMailbox
    watchdog: Watchdog
    _output: IO[bytes]
    pids: dict[int, int] = field(default_factory=dict)
    """The rank of each process that has registered, and leads a process group of its own, with its loaders."""
    left: int | None = None
    """The rank whose process ended first, while others go on."""
    _left_at: float = 0.0

    @property
    def ended(self) -> bool:
        return self.agent.poll() is not None or self._rank_left()

    def _rank_left(self) -> bool:
        """Return whether a rank ended long ago and torchrun has not ended the others, as after exit code 0."""
        if self.left is None:
            self.left = next((rank for pid, rank in self.pids.items() if not runs(pid)), None)
            self._left_at = time.monotonic()
        return self.left is not None and time.monotonic() > self._left_at + LEFT_S

    def take(self, timeout_s: float) -> list[Received]:
        messages = self.mailbox.take(timeout_s)
        self.pids.update((each.pid, each.rank) for each in messages if isinstance(each, Registration))
        return messages

    def kill(self) -> None:
        self.watchdog.kill()

    def release(self) -> None:
        """Nothing: ``start_processes`` ends all of them."""

    def output(self) -> str:
        """Return the end of their output, with this machine's secrets redacted."""
        return sanitize.redacted_tail(self._output, OUTPUT_BYTES)


@contextmanager
def start_processes(job: Job, deadline: float | None, watchdog: Watchdog) -> Iterator[Processes]:
    """Run torchrun with one process a worker of the job's group; kill all of them on leaving."""
    with ExitStack() as stack:
        folder = stack.enter_context(Scratch(shared_memory()))
        job_file = folder / "job"
        job_file.write_bytes(pickle.dumps(job))
        mailbox = stack.enter_context(closing(SocketMailbox(folder / SOCKET, deadline)))
        output = stack.enter_context(tempfile.TemporaryFile())
        agent = subprocess.Popen(
            command(job_file, job.group.workers),
            env={**_variables(job), KEY_VARIABLE: mailbox.key.hex()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the driver's
            preexec_fn=die_with_parent,
        )
        processes = Processes(agent, mailbox, watchdog, output)
        stack.callback(_end, processes)
        yield processes


def command(job_file: Path, workers: int) -> list[str]:
    """Return the command: as --standalone, but with a file as the store; its two TCP stores listen on every network."""
    folder = job_file.parent
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder / 'meeting'}", "--rdzv-conf=store_type=file"]
    here = ["--nnodes=1", f"--rdzv-id={folder.name}", f"--local-addr={ADDRESS}", f"--log-dir={folder / 'logs'}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *here, *rendezvous, f"--nproc-per-node={workers}"]
    return [*torchrun, "-m", "harness.launch.torchrun", str(job_file)]


def _variables(job: Job) -> dict[str, str]:
    loopback = interface_of(ADDRESS) or "lo"
    hidden = {folder for version in job.versions.values() for folder in version.hidden}
    return {
        "GLOO_SOCKET_IFNAME": loopback,  # unless the user has set it
        "NCCL_SOCKET_IFNAME": loopback,
        **os.environ,
        **process_variables(job.group, job.threads_per_device),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": os.pathsep.join(path_without(*hidden)),  # modules that the driver finds,
        "PYTHONSAFEPATH": "1",  # and none of the current folder
    }


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
    while time.monotonic() < until and any(runs(process.pid) for process in ended):
        time.sleep(POLL_S)


@dataclass(frozen=True)
class TorchrunLauncher:
    """Runs each worker group in processes of its own on this machine, with the same worker code as under Ray."""

    experiment: Experiment
    threads_per_device: int
    import_path: str | None = None
    versions: Mapping[str, CodeVersion] = field(default_factory=dict)
    """The versions of the user's code, by variant."""

    def busy_cores(self) -> dict[str, float]:
        return {socket.gethostname(): busy_cores()}

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        if deadline is not None and time.time() >= deadline:
            return
        versions = {name: self.versions[name] for name in group.variants}
        job = Job(self.experiment, group, self.threads_per_device, self.import_path, versions)
        timer = StartupTimer(time.time(), "torchrun")
        watchdog = Watchdog(ask_here, self.experiment.limits.trial, start_s=start_limit_s(1))
        with start_processes(job, deadline, watchdog) as processes:
            end = yield from supervise(processes, watchdog, timer, group.trials[-1].id)
            refused = processes.mailbox.refused and not end.failures
            failed = () if refused else _failed_trials(group, end, processes)
            if failed and end.ending is Ending.BY_ITSELF:  # else the time of the end is not known
                watchdog.record_failure()
            yield from judged(failed, group, end, watchdog)


def _failed_trials(group: WorkerGroup, end: GroupEnd, processes: Processes) -> list[TrialResult]:
    """Return a row for each trial that the end of the group cost."""
    finished, output = [result.trial_id for result in end.finished], processes.output()
    left = blamed([trial.id for trial in group.trials], finished, end.current, connected=processes.watchdog.connected)
    if end.ending is Ending.HUNG:
        rows = list(from_hang(left, end.stacks))
    elif end.failures:
        rows = blamed_on(left, primary(end.failures, processes.watchdog.dead_ranks or ()), finished)
    elif (code := processes.agent.poll()) == 0 and end.current is None:  # if a device failed, before the next trial
        return []
    elif code is None and (rank := processes.left) is not None:
        rows = [TrialResult(trial_id, "lost", died(rank), error_rank=rank) for trial_id in left]
    else:
        return [from_exit(trial_id, code, output, came_up=bool(processes.pids)) for trial_id in left]
    detail = f"\n\nlast output of the processes:\n{output}" if output else ""
    return [replace(row, detail=f"{row.detail}{detail}") for row in rows]


def ask_here(question: str, things: Sequence[tuple[str, object]]) -> Answers:
    """Return the answers of this machine, in place of the agents that Ray has on every node."""
    return list(getattr(NodeAgent(), question)([what for _, what in things]) or [None] * len(things))


def main(job_file: Path) -> int:
    """Run the job's trials on this rank; return the exit code."""
    die_with_parent()
    folder, rank = job_file.parent, int(os.environ["RANK"])
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))  # not for the workload's own processes
    line = DriverLine(folder / SOCKET, key)
    job: Job = pickle.loads(job_file.read_bytes())  # ours: the folder is closed to others
    process = Registration(rank, NODE_ID, f"{folder}/steps-{rank}", f"{folder}/stack-{rank}", connected=False)
    try:
        return 0 if run_rank(job, process, line.send, lambda: _join(job, folder)) else 1
    except TrialFailed:
        return 1
    except BaseException as error:  # outside of a trial: the driver knows which one was next
        line.send(failure(job.group.trials[0].id, rank, error))
        return 1


def _join(job: Job, folder: Path) -> Ranks:
    """Connect the ranks as Ray Train does, but through a file: the store of torchrun listens on every network."""
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    devices = devices_of(job.group, local_rank, gpus, local_rank * job.group.placement.devices_per_worker)
    if devices[0].type == "cuda" and not job.experiment.programs:
        torch.cuda.set_device(devices[0])
    with connecting_on_use(job.group.backend):
        dist.init_process_group(
            job.group.backend,
            store=dist.FileStore(str(folder / STORE), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=job.experiment.limits.collective_s),
        )
    return Ranks(rank, size, local_rank, 0, NODE_ID, ADDRESS, devices)


if __name__ == "__main__":
    exit_code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # torch sometimes aborts in the interpreter's teardown, which would read as a crash
