"""Every rank its disjoint share, the same global order for every strategy."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import islice
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from harness.train.loader import (
    SeededDataset,
    Share,
    batches,
    endless_shares,
    epoch_order,
    epoch_shares,
    evaluation_shares,
    rank_share,
    to_device,
)

CPU = torch.device("cpu")


class Numbers(Dataset[Any]):
    """Sample i is (i, a random number drawn from torch's and Python's global generators)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, float(torch.rand(())), random.random()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(("samples", "batch"), [(10, 4), (12, 4), (7, 7), (9, 16), (1, 4)])
def test_the_shares_of_all_ranks_are_the_global_batches(samples: int, batch: int, world_size: int) -> None:
    whole = list(epoch_shares(samples, batch, seed=3, epoch=1, rank=0, world_size=1))
    parts = [list(epoch_shares(samples, batch, 3, 1, rank, world_size)) for rank in range(world_size)]
    for step, share in enumerate(whole):
        joined = [key for part in parts for key in part[step].keys[: part[step].samples]]
        assert tuple(joined) == share.keys
        assert {part[step].global_samples for part in parts} == {share.samples}
        sizes = [part[step].samples for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_an_epoch_has_each_sample_once_and_a_shorter_last_batch() -> None:
    shares = list(epoch_shares(10, 4, seed=0, epoch=0, rank=0, world_size=1))
    assert [share.samples for share in shares] == [4, 4, 2]
    assert sorted(index for share in shares for _, index in share.keys) == list(range(10))


def test_a_rank_without_a_sample_still_takes_a_step() -> None:
    codes = torch.tensor([1 * 7 + 5])  # epoch 1 of 7 samples, sample 5
    empty = rank_share(codes, 7, rank=0, world_size=2)
    assert (empty.samples, empty.global_samples, empty.keys) == (0, 1, ((1, 5),))
    assert rank_share(codes, 7, rank=1, world_size=2).samples == 1


def test_epochs_are_shuffled_anew_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(20, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert torch.equal(epoch_order(20, 0, 1), epoch_order(20, 0, 1))


def test_the_endless_stream_has_full_batches_and_no_seam() -> None:
    shares = list(islice(endless_shares(10, 4, seed=0, rank=0, world_size=1), 5))
    assert [share.samples for share in shares] == [4] * 5
    keys = [key for share in shares for key in share.keys]
    assert sorted(index for _, index in keys[:10]) == list(range(10))
    assert sorted(index for _, index in keys[10:]) == list(range(10))
    assert [epoch for epoch, _ in keys] == [0] * 10 + [1] * 10


def test_evaluation_sees_each_sample_exactly_once_over_all_ranks() -> None:
    seen = [
        key for rank in range(3) for share in evaluation_shares(11, 4, rank, 3) for key in share.keys[: share.samples]
    ]
    assert sorted(seen) == [(0, index) for index in range(11)]
    assert {len(list(evaluation_shares(11, 4, rank, 3))) for rank in range(3)} == {3}


def test_randomness_depends_on_seed_epoch_and_sample_alone() -> None:
    data = SeededDataset(Numbers(10), seed=1)
    one = data.__getitems__([(0, 3), (0, 7)])
    torch.manual_seed(99)
    random.seed(99)
    two = data.__getitems__([(0, 7), (0, 3)])
    assert one == two[::-1]
    assert data.__getitems__([(1, 3)])[0] != one[0]
    assert SeededDataset(Numbers(10), seed=2).__getitems__([(0, 3)])[0] != one[0]


def test_the_models_own_randomness_is_left_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = (float(torch.rand(())), random.random())
    torch.manual_seed(5)
    random.seed(5)
    SeededDataset(Numbers(10), seed=1).__getitems__([(0, 3)])
    assert (float(torch.rand(())), random.random()) == expected


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_worker_processes_give_the_same_batches(workers: int) -> None:
    shares = list(epoch_shares(10, 4, seed=0, epoch=0, rank=0, world_size=1))
    options = {"workers": workers, "pin_memory": False, "prefetch_factor": 2}
    loaded = list(batches(Numbers(10), shares, seed=1, device=CPU, options=options))
    plain = list(batches(Numbers(10), shares, seed=1, device=CPU, options={}))
    for left, right in zip(loaded, plain, strict=True):
        for one, two in zip(left, right, strict=True):
            torch.testing.assert_close(one, two)


def test_a_workloads_own_collate_is_used() -> None:
    shares = epoch_shares(4, 2, seed=0, epoch=0, rank=0, world_size=1)
    loaded = list(batches(Numbers(4), shares, seed=0, device=CPU, options={}, collate=len))
    assert loaded == [2, 2]


def test_to_device_walks_through_mappings_and_sequences() -> None:
    batch = {"x": torch.ones(2), "rest": (torch.zeros(1), ["text", torch.ones(1)])}
    moved = to_device(batch, torch.device("meta"), non_blocking=False)
    assert moved["x"].device.type == moved["rest"][0].device.type == moved["rest"][1][1].device.type == "meta"
    assert moved["rest"][1][0] == "text"


@pytest.mark.parametrize(("samples", "parts", "sizes"), [(6, 3, [2, 2, 2]), (5, 2, [2, 3]), (1, 3, [0, 0, 1])])
def test_a_share_is_split_into_micro_batches(samples: int, parts: int, sizes: list[int]) -> None:
    keys = tuple((0, index) for index in range(samples))
    split = Share(keys, samples, 10).split(parts)
    assert [part.samples for part in split] == sizes
    assert tuple(key for part in split for key in part.keys[: part.samples]) == keys
    assert all(len(part.keys) == max(1, part.samples) and part.global_samples == 10 for part in split)


def test_an_empty_share_is_split_into_empty_ones() -> None:
    assert {part.samples for part in Share(((0, 3),), 0, 10).split(2)} == {0}


def test_a_share_comes_as_its_micro_batches() -> None:
    shares = list(epoch_shares(10, 4, seed=0, epoch=0, rank=0, world_size=1))
    whole = list(batches(Numbers(10), shares, seed=0, device=CPU, options={}))
    parts = list(batches(Numbers(10), shares, seed=0, device=CPU, options={}, micro_batches=2))
    assert [[len(part[0]) for part in step] for step in parts] == [[2, 2], [2, 2], [1, 1]]
    for one, several in zip(whole, parts, strict=True):
        for column, pieces in zip(one, zip(*several, strict=True), strict=True):
            assert torch.equal(column, torch.cat(pieces))


def test_fetching_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    list(batches(Numbers(4), epoch_shares(4, 2, 0, 0, 0, 1), seed=0, device=CPU, options={}))
    assert torch.equal(torch.get_rng_state(), before)


class OddNumbers(Numbers):
    """Draws for odd indices alone."""

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return super().__getitem__(index) if index % 2 else (index, 0.0, 0.0)


def test_a_data_set_that_draws_now_and_then_is_seeded_all_the_same() -> None:
    data = SeededDataset(OddNumbers(10), seed=1)
    assert data.__getitems__([(0, 2), (0, 4)]) == [(2, 0.0, 0.0), (4, 0.0, 0.0)]
    expected = SeededDataset(Numbers(10), seed=1).__getitems__([(0, 3)])[0]
    assert data.__getitems__([(0, 2), (0, 3)])[1] == expected
    assert data.__getitems__([(0, 3)])[0] == expected


HANGS = """
import sys, time
import torch
from harness.train.loader import Share, batches

class Hangs(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        print("hanging", flush=True)
        time.sleep(600)

options = {"workers": 1}
list(batches(Hangs(), [Share(((0, 0),), 1, 1)], seed=0, device=torch.device("cpu"), options=options))
"""


@pytest.mark.slow
def test_a_loader_that_hangs_does_not_outlive_its_trainer() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout and trainer.stdout.readline() == b"hanging\n"
        (worker,) = psutil.Process(trainer.pid).children()
        trainer.kill()
    until = time.monotonic() + 2
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the loader's process is still there"
        time.sleep(0.02)
