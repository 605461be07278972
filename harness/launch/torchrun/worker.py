"""What torchrun starts on every rank: one trial, told to the driver. ``-m harness.launch.torchrun.worker JOB_FILE``."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from harness.launch.heartbeat import StepCounter
from harness.launch.postmortem import output_of_this_process
from harness.launch.protocol import Job
from harness.launch.torchrun.mailbox import DriverLine
from harness.launch.watchdog import Registration
from harness.launch.worker import TrialFailed, failure, run_group
from harness.plan.trial import WorkerGroup
from harness.system.process import die_with_parent
from harness.train.ranks import Ranks

SOCKET, STORE = "driver", "ranks"
"""The files beside the job through which the ranks find the driver, and each other."""
KEY_VARIABLE = "HARNESS_DRIVER_KEY"
NODE_ID, ADDRESS = "torchrun", "127.0.0.1"


def main(job_file: Path) -> int:
    """Runs the job's one trial on this rank; returns the exit code."""
    die_with_parent()
    folder, rank = job_file.parent, int(os.environ["RANK"])
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))  # what the workload starts need not know it
    line = DriverLine(folder / SOCKET, key)
    job: Job = pickle.loads(job_file.read_bytes())  # ours: the folder is closed to others
    counter_file, stack_file = folder / f"steps-{rank}", folder / f"stack-{rank}"
    with stack_file.open("w") as stack, StepCounter(counter_file) as counter:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        made = psutil.Process().create_time()
        files = (str(counter_file), str(stack_file))
        process = Registration(
            rank, NODE_ID, os.getpid(), *files, made, connected=False, traces=output_of_this_process()
        )
        if not line.send(process):
            return 1  # given up while this process came up
        try:
            ranks = _join(job, folder)
            line.send(replace(process, connected=True))
            run_group(job, ranks, line.send, counter.advance)
        except TrialFailed:
            return 1
        except BaseException as error:  # before the trial: then too it is the trial that failed
            line.send(failure(job.group.trials[0].id, rank, error))
            return 1
    return 0


def devices_of(group: WorkerGroup, local_rank: int, gpus: int) -> tuple[torch.device, ...]:
    """The devices of one worker: those that are named, or the first that this machine shows.

    A GPU that is shared stands several times.
    """
    count = group.placement.devices_per_worker
    if group.device == "cpu":
        return tuple(torch.device("cpu") for _ in range(count))
    if not gpus:
        raise RuntimeError("no GPU is visible to torch in this process")
    if ids := group.placement.ids_of(local_rank):
        return tuple(torch.device("cuda", number) for number in ids)
    return tuple(torch.device("cuda", (local_rank * count + i) % gpus) for i in range(count))


def _join(job: Job, folder: Path) -> Ranks:
    """Connects the ranks as Ray Train does, but over a file: the store of torchrun listens to every network."""
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    devices = devices_of(job.group, local_rank, torch.cuda.device_count())
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
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
    os._exit(exit_code)  # the interpreter's teardown, where torch now and then aborts, would look like a death
