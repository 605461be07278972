"""Real ranks over gloo, each ``python -m MODULE RANK WORLD_SIZE STORE OUT``: how tests start and run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
Work = Callable[[int, int, Path], None]
"""What a rank does: its rank, the world size, the file that rank 0 writes."""


def run_ranks(
    module: str,
    world_size: int,
    folder: Path,
    within_s: float = 180.0,
    *,
    prefixes: Sequence[Sequence[str]] = (),
    variables: Mapping[str, str] | None = None,
) -> Path:
    """Runs a world of processes to its end; the file that its rank 0 wrote. All leave with exit code 0."""
    store, out = folder / f"store{world_size}", folder / f"out{world_size}"
    command = [sys.executable, "-m", module]
    ranks = [
        subprocess.Popen(
            [*(prefixes[rank] if prefixes else ()), *command, str(rank), str(world_size), str(store), str(out)],
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
        )
        for rank in range(world_size)
    ]
    assert [process.wait(timeout=within_s) for process in ranks] == [0] * world_size
    return out


def rank_main(work: Work) -> None:
    """This process as one of a world, by its arguments; does not return."""
    rank, world_size, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    work(rank, world_size, out)
    dist.barrier()
    dist.destroy_process_group()
    # a thread of torch's may still be there when the interpreter is torn down, and aborts one exit in forty
    sys.stdout.flush()
    os._exit(0)
