"""The entry point of a rank under torchrun: ``-m harness.launch.torchrun.entry JOB_FILE``."""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.launch.protocol import Job
from harness.launch.rank import devices_of, run_rank
from harness.launch.startup import register_process
from harness.launch.torchrun.driver_socket import DriverLine
from harness.launch.worker import TrialFailed, failure
from harness.system.process import die_with_parent
from harness.train.ranks import Ranks, connecting_on_use

SOCKET, STORE = "driver", "ranks"
"""The files beside the job through which the ranks find the driver, and each other."""
KEY_VARIABLE = "HARNESS_DRIVER_KEY"
NODE_ID, ADDRESS = "torchrun", "127.0.0.1"


def main(job_file: Path) -> int:
    """Run the job's trials on this rank; return the exit code."""
    die_with_parent()
    folder, rank = job_file.parent, int(os.environ["RANK"])
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))  # not for the workload's own processes
    line = DriverLine(folder / SOCKET, key)
    job: Job = pickle.loads(job_file.read_bytes())  # ours: the folder is closed to others
    process = register_process(rank, NODE_ID, folder / f"steps-{rank}", folder / f"stack-{rank}", connected=False)
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
