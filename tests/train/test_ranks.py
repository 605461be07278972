"""The collectives of real ranks over gloo: who gets what, and how many sockets they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from harness.train.ranks import Ranks, StoreExchange, connecting_on_use
from tests.worlds import fork_ranks

pytestmark = pytest.mark.slow

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
    found["store"] = meet_at_store(rank, world_size)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, found)
    if rank == 0:
        out.write_text(json.dumps(everyone))


def meet_at_store(rank: int, world_size: int) -> dict[str, Any]:
    """Return the same of a store between nodes, and the keys that are left there."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None  # type: ignore[attr-defined]
    port: list[Any] = [server and server.port]
    dist.broadcast_object_list(port)
    before = _sockets()
    exchange = StoreExchange(dist.TCPStore("127.0.0.1", port[0], is_master=False), rank, world_size)  # type: ignore[attr-defined]
    ranks = Ranks(rank, world_size, rank, 0, "n", "127.0.0.1", (torch.device("cpu"),), exchange=exchange)
    for number in range(20):
        assert ranks.broadcast({"from 0": number} if rank == 0 else None) == {"from 0": number}
        assert ranks.sum([1.0, float(rank)]) == [world_size, sum(range(world_size))]
    assert ranks.gather(rank) == list(range(world_size))
    gathered = ranks.gather_to_first(f"of rank {rank}")
    dist.barrier()
    used, left = _sockets() - before, server.num_keys() if server else 0
    dist.barrier()  # none disconnects while another counts
    return {"gathered": gathered, "used": used, "left": left}


def _sockets() -> int:
    return sum(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process().net_connections("tcp"))


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(fork_ranks(meet, SIZE, tmp_path_factory.mktemp("ranks"), 60.0).read_text())
    return found


@pytest.mark.parametrize("backend", [*BACKENDS, "store"])
def test_the_first_rank_has_all_values_and_the_others_their_own(met: list[dict[str, Any]], backend: str) -> None:
    own = [[f"of rank {rank}"] for rank in range(SIZE)]
    assert [rank[backend]["gathered"] for rank in met] == [[text for texts in own for text in texts], *own[1:]]


def test_beside_nccl_gloo_connects_only_ranks_that_exchange_something(met: list[dict[str, Any]]) -> None:
    with_gloo_alone, with_nccl = ([rank[backend] for rank in met] for backend in BACKENDS)
    assert {rank["made"] for rank in with_gloo_alone} == {SIZE - 1}  # in no training step
    assert {rank["made"] for rank in with_nccl} == {0}
    assert max(rank["used"] for rank in with_nccl[1:]) < SIZE - 1  # neighbours in a ring, and rank 0


def test_through_a_store_a_rank_has_one_connection_and_what_was_read_is_removed(met: list[dict[str, Any]]) -> None:
    assert {rank["store"]["used"] for rank in met[1:]} == {1}
    assert met[0]["store"]["left"] <= 2  # those that torch itself keeps
