"""Real ranks over gloo, forked or each a new ``python -m MODULE RANK WORLD_SIZE STORE OUT``: how tests run them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from tests.forks import start

ROOT = Path(__file__).parents[1]
Work = Callable[[int, int, Path], None]
"""What a rank does: its rank, the world size, the file that rank 0 writes."""


@contextmanager
def fake_group(size: int, rank: int = 0) -> Iterator[None]:
    """Open a process group of ``size`` ranks of which only this one exists; its collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fork_ranks(work: Work, world_size: int, folder: Path, within_s: float = 180.0) -> Path:
    """Runs a world of forks to its end; the file that its rank 0 wrote. All leave with exit code 0."""
    store, out = folder / f"store{world_size}", folder / f"out{world_size}"
    printed = [folder / f"printed{world_size}-{rank}" for rank in range(world_size)]
    ranks = [start(_forked, work, rank, world_size, store, out, printed[rank]) for rank in range(world_size)]
    until = time.monotonic() + within_s
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size, [codes, *(file.read_text(errors="replace")[-4000:] for file in printed)]
    return out


def _forked(work: Work, rank: int, world_size: int, store: Path, out: Path, printed: Path) -> None:
    with printed.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    _rank(work, rank, world_size, store, out)


def run_ranks(
    module: str,
    world_size: int,
    folder: Path,
    within_s: float = 180.0,
    *,
    prefixes: Sequence[Sequence[str]] = (),
    variables: Mapping[str, str] | None = None,
) -> Path:
    """The same of new processes, each with its own beginning of the command, and with these variables."""
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
    _rank(work, int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))


def _rank(work: Work, rank: int, world_size: int, store: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)
    work(rank, world_size, out)
    dist.barrier()
    dist.destroy_process_group()
    # a thread of torch's may still be there when the interpreter is torn down, and aborts one exit in forty
    sys.stdout.flush()
    os._exit(0)
