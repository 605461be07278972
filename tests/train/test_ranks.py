"""The collectives of real ranks over gloo: who gets what, and how many sockets they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from harness.train.ranks import Ranks, connecting_on_use
from tests.worlds import fork_ranks

SIZE = 6
BACKENDS = ("gloo", "cpu:gloo,cuda:nccl")


def meet(rank: int, world_size: int, out: Path) -> None:
    """Write what each rank gathers, and its sockets, by backend: of a new group, and after its collectives."""
    found: dict[str, Any] = {}
    for backend in BACKENDS:
        before = _sockets()
        with connecting_on_use(backend):
            group: Any = dist.new_group(backend="gloo")
        made = _sockets() - before
        dist.barrier()  # over the group that there was: none connects to another that still counts
        ranks = Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", (torch.device("cpu"),), group)
        gathered = ranks.gather_to_first(f"of rank {rank}")
        ranks.barrier()
        found[backend] = {"gathered": gathered, "made": made, "used": _sockets() - before}
        ranks.barrier()  # none disconnects while another counts
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, found)
    if rank == 0:
        out.write_text(json.dumps(everyone))


def _sockets() -> int:
    return sum(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process().net_connections("tcp"))


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(fork_ranks(meet, SIZE, tmp_path_factory.mktemp("ranks"), 60.0).read_text())
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_rank_has_all_values_and_the_others_their_own(met: list[dict[str, Any]], backend: str) -> None:
    own = [[f"of rank {rank}"] for rank in range(SIZE)]
    assert [rank[backend]["gathered"] for rank in met] == [[text for texts in own for text in texts], *own[1:]]


def test_beside_nccl_gloo_connects_only_ranks_that_exchange_something(met: list[dict[str, Any]]) -> None:
    with_gloo_alone, with_nccl = ([rank[backend] for rank in met] for backend in BACKENDS)
    assert {rank["made"] for rank in with_gloo_alone} == {SIZE - 1}  # in no training step
    assert {rank["made"] for rank in with_nccl} == {0}
    assert max(rank["used"] for rank in with_nccl[1:]) < SIZE - 1  # neighbours in a ring, and rank 0
