"""Several ranks of one claim, each a process of its own: a fork, or with a GPU ``python -m tests.gpu.world``.

A function of a claim's module is called on every rank with the Ranks and the arguments; what it returns is JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.train.ranks import Ranks
from tests.forks import Forked
from tests.gpu.forked import forked

ROOT = Path(__file__).parents[2]


def run_ranks(
    function: Callable[..., Any], device: torch.device, size: int, *arguments: str, share: bool = False, within_s: float
) -> list[Any]:
    """Return what the function returned on each rank; raise RuntimeError with the output of a rank that failed.

    With ``share`` all ranks use the device together, over gloo, as under oversubscribe; else each has a GPU of its own.
    """
    name = f"{function.__module__}:{function.__name__}"
    where = str(device) if share or device.type == "cpu" else "each"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        processes = [_start(name, rank, size, folder, where, arguments) for rank in range(size)]
        until = time.monotonic() + within_s
        try:
            codes = [process.wait(timeout=max(0.0, until - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, code in enumerate(codes):
            if code:
                text = (folder / f"output{rank}").read_bytes().decode(errors="replace").strip()
                sys.stderr.write(f"{text[-8000:]}\n")
                raise RuntimeError(f"rank {rank} left with exit code {code}: {text.splitlines()[-1:]}")
        return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(size)]


def _start(
    name: str, rank: int, size: int, folder: Path, where: str, arguments: Sequence[str]
) -> Forked | subprocess.Popen[bytes]:
    output = folder / f"output{rank}"
    if where == "cpu":
        return forked(output, main, name, rank, size, folder, where, arguments)
    command = [sys.executable, "-m", "tests.gpu.world", name, str(rank), str(size), str(folder), where, *arguments]
    with output.open("wb") as stream:
        return subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)


def main(name: str, rank: int, size: int, folder: Path, where: str, arguments: Sequence[str]) -> None:
    """Join the other ranks, call the function, write its result; does not return."""
    device = torch.device("cuda", rank) if where == "each" else torch.device(where)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if where == "each" else "gloo"
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    module, _, function = name.partition(":")
    ranks = Ranks(rank, size, rank, 0, "here", "127.0.0.1", (device,))
    result = getattr(importlib.import_module(module), function)(ranks, *arguments)
    (folder / f"rank{rank}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5], sys.argv[6:])
