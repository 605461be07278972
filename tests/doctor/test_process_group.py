"""A group of one rank beside those of all, on two real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from harness.doctor.real_steps import OtherRanksNeeded, group_of_one
from tests.worlds import fork_ranks


def refused(group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> list[str]:
    """The collectives over several ranks that raise in place of waiting."""
    ones = torch.ones(2)
    attempts = {"own": lambda: dist.all_reduce(ones, group=group), "all": lambda: dist.barrier(group=everyone)}
    attempts["functional"] = lambda: functional.all_reduce(ones, "sum", group)
    found = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except OtherRanksNeeded:
            found.append(name)
    return found


def alone_and_together(rank: int, world_size: int, out: Path) -> None:
    everyone = dist.group.WORLD
    group = dist.new_group(list(range(world_size)))
    assert isinstance(group, dist.ProcessGroup) and isinstance(everyone, dist.ProcessGroup)
    seen: dict[str, object] = {}
    with group_of_one(torch.device("cpu")):
        if rank == 0:  # the other rank is not here
            total = torch.ones(3)
            dist.all_reduce(total)
            from torch.distributed.nn.functional import all_gather

            seen = {"size": dist.get_world_size(), "sum": total.tolist(), "gathered": len(all_gather(total))}
            seen["refused"] = refused(group, everyone)
    later = dist.new_group(list(range(world_size)))  # hangs if the ranks count their groups otherwise
    number = torch.tensor(float(rank + 1))
    dist.all_reduce(number, group=later)
    if rank == 0:
        out.write_text(json.dumps({**seen, "after": number.item(), "then": dist.get_world_size()}))


@pytest.mark.slow
def test_a_pass_on_one_rank_finds_one_rank_and_waits_for_nobody(tmp_path: Path) -> None:
    seen = json.loads(fork_ranks(alone_and_together, 2, tmp_path, within_s=60.0).read_text())
    assert seen.pop("refused") == ["own", "all", "functional"]
    assert seen == {"size": 1, "sum": [1.0, 1.0, 1.0], "gathered": 1, "after": 3.0, "then": 2}


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_the_collectives_of_a_gpu_are_nccl_s(monkeypatch: pytest.MonkeyPatch, device: str, backend: str) -> None:
    asked: list[tuple[list[int], dict[str, object]]] = []
    make = dist.new_group

    def new_group(ranks: list[int], **options: object) -> object:
        asked.append((ranks, options))
        return make(ranks, backend="gloo", use_local_synchronization=True)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr("harness.doctor.real_steps.dist.get_world_size", lambda: 8)
    everyone = dist.group.WORLD
    with group_of_one(torch.device(device)):
        assert dist.group.WORLD is not everyone
    assert dist.group.WORLD is everyone
    assert asked == [([0], {"backend": backend, "use_local_synchronization": True})]


@pytest.mark.slow
def test_differentiable_collectives_are_imported_before_the_ranks_connect() -> None:
    """Imported later they would keep the group of all ranks as their default, in a pass on one device too."""
    code = "import sys, harness.train.ranks; print('torch.distributed.nn.functional' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"
