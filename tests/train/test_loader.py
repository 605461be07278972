"""Every rank its disjoint share, the same global order for every strategy."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torchvision.datasets
from torch.utils.data import Dataset, Subset

from harness.train import loader
from harness.train.loader import (
    Batches,
    SeededDataset,
    Share,
    decodes,
    endless_shares,
    epoch_order,
    epoch_shares,
    workers_of,
)
from harness.train.ranks import Ranks

CPU = torch.device("cpu")
ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))


def batches(dataset: Any, shares: Iterable[Share], **options: Any) -> list[Any]:
    """The batches of these shares, by default on one rank, with seed 0 and no worker processes."""
    return list(Batches(dataset, **{"seed": 0, "ranks": ONE, "options": {}, **options}).of(shares))


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


class Memory(torchvision.datasets.VisionDataset):
    """Holds its samples, as CIFAR-10."""

    data: Any = ()


def photos(root: Path) -> torchvision.datasets.ImageFolder:
    (root / "a").mkdir()
    (root / "a" / "0.png").touch()
    return torchvision.datasets.ImageFolder(str(root))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (photos, True),
        (lambda root: Subset(Subset(photos(root), [0]), [0]), True),
        (lambda root: Memory(str(root)), False),
        (lambda root: Numbers(3), False),
        (lambda root: SimpleNamespace(features={"image": SimpleNamespace(decode=True), "label": 3}), True),
        (lambda root: SimpleNamespace(features={"text": object()}), False),
        (lambda root: SimpleNamespace(features=torch.zeros(3)), False),
    ],
)
def test_beside_a_gpu_data_that_decode_files_have_workers_by_its_cores(
    make: Callable[[Path], Any], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make(tmp_path)
    assert decodes(dataset) is expected
    monkeypatch.setattr(loader.torch, "get_num_threads", lambda: 8)
    assert workers_of({"workers": None}, "cuda", dataset) == workers_of({}, "cuda", dataset) == 7 * expected
    assert workers_of({}, "cpu", dataset) == 0
    assert [workers_of({"workers": number}, "cuda", dataset) for number in (0, 3)] == [0, 3]
    monkeypatch.setattr(loader.torch, "get_num_threads", lambda: 1)
    assert workers_of({}, "cuda", dataset) == int(expected)


def test_an_epoch_has_each_sample_once_a_shorter_last_batch_and_an_order_of_its_own() -> None:
    shares = list(epoch_shares(10, 4, seed=0, epoch=0, rank=0, world_size=1))
    assert [share.samples for share in shares] == [4, 4, 2]
    assert sorted(index for share in shares for _, index in share.keys) == list(range(10))

    orders = {tuple(epoch_order(20, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert torch.equal(epoch_order(20, 0, 1), epoch_order(20, 0, 1))


def test_a_rank_without_a_sample_still_takes_a_step() -> None:
    codes = torch.tensor([1 * 7 + 5])  # epoch 1 of 7 samples, sample 5
    empty = loader.rank_share(codes, 7, rank=0, world_size=2)
    assert (empty.samples, empty.global_samples, empty.keys) == (0, 1, ((1, 5),))
    assert loader.rank_share(codes, 7, rank=1, world_size=2).samples == 1


def test_the_endless_stream_has_full_batches_and_no_seam() -> None:
    shares = list(islice(endless_shares(10, 4, seed=0, rank=0, world_size=1), 5))
    assert [share.samples for share in shares] == [4] * 5
    keys = [key for share in shares for key in share.keys]
    assert sorted(index for _, index in keys[:10]) == list(range(10))
    assert sorted(index for _, index in keys[10:]) == list(range(10))
    assert [epoch for epoch, _ in keys] == [0] * 10 + [1] * 10


def test_evaluation_sees_each_sample_exactly_once_over_all_ranks() -> None:
    shares = [[*loader.evaluation_shares(11, 4, rank, 3)] for rank in range(3)]
    seen = [key for share in chain(*shares) for key in share.keys[: share.samples]]
    assert sorted(seen) == [(0, index) for index in range(11)] and {*map(len, shares)} == {3}


def test_randomness_depends_on_seed_epoch_and_sample_alone() -> None:
    data = SeededDataset(Numbers(10), seed=1)
    one = data.__getitems__([(0, 3), (0, 7)])
    torch.manual_seed(99)
    random.seed(99)
    before = torch.get_rng_state(), random.getstate()
    two = data.__getitems__([(0, 7), (0, 3)])
    batches(Numbers(4), epoch_shares(4, 2, 0, 0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1], "the model's is left alone"
    assert one == two[::-1]
    assert data.__getitems__([(1, 3)])[0] != one[0]
    assert SeededDataset(Numbers(10), seed=2).__getitems__([(0, 3)])[0] != one[0]


class ReadBy(Numbers):
    """With each sample comes the process that read it."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), os.getpid())


@pytest.mark.slow
def test_worker_processes_give_the_same_batches_and_stay_for_the_next_epoch() -> None:
    epochs = [list(epoch_shares(10, 4, 0, epoch, rank=0, world_size=1)) for epoch in (0, 1)]
    options = {"workers": 2, "pin_memory": False, "prefetch_factor": 2}
    passes = Batches(ReadBy(10), seed=1, ranks=ONE, options=options)
    loaded = [batch for shares in epochs for batch in passes.of(shares)]
    plain = batches(Numbers(10), chain(*epochs), seed=1)
    workers = {int(process) for *_, processes in loaded for process in processes}
    assert len(workers) == 2 and os.getpid() not in workers
    loaded = [batch[:-1] for batch in loaded]
    for left, right in zip(loaded, plain, strict=True):
        for one, two in zip(left, right, strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("samples", "parts", "sizes"), [(6, 3, [2, 2, 2]), (5, 2, [2, 3]), (1, 3, [0, 0, 1])])
def test_a_share_is_split_into_micro_batches(samples: int, parts: int, sizes: list[int]) -> None:
    keys = tuple((0, index) for index in range(samples))
    split = Share(keys, samples, 10).split(parts)
    assert [part.samples for part in split] == sizes
    assert tuple(key for part in split for key in part.keys[: part.samples]) == keys
    assert all(len(part.keys) == max(1, part.samples) and part.global_samples == 10 for part in split)
    assert {part.samples for part in Share(((0, 3),), 0, 10).split(2)} == {0}, "an empty share, into empty ones"


def test_a_share_yields_its_micro_batches_one_by_one_collated_as_the_workload_does() -> None:
    shares = list(epoch_shares(10, 4, seed=0, epoch=0, rank=0, world_size=1))
    assert batches(Numbers(10), shares, collate=len) == [4, 4, 2]
    whole, parts = batches(Numbers(10), shares), batches(Numbers(10), shares, micro_batches=2)
    assert [len(part[0]) for part in parts] == [2, 2, 2, 2, 1, 1]
    for one, several in zip(whole, zip(parts[::2], parts[1::2], strict=True), strict=True):
        for column, pieces in zip(one, zip(*several, strict=True), strict=True):
            assert torch.equal(column, torch.cat(pieces))


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


class Fetched(Numbers):
    calls = 0

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float]]:
        self.calls += 1
        return [(index, 0.0, 0.0) for index in indices]


class FetchedWithNoise(Numbers):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float]]:
        return [self[index] for index in indices]


def test_a_data_set_with_a_method_for_batches_is_read_by_it_and_seeded_sample_by_sample() -> None:
    data = Fetched(10)
    assert SeededDataset(data, seed=1).__getitems__([(0, 3), (0, 7)]) == [(3, 0.0, 0.0), (7, 0.0, 0.0)]
    assert data.calls == 1
    keys = [(0, 3), (1, 7)]
    assert SeededDataset(FetchedWithNoise(10), 1).__getitems__(keys) == SeededDataset(Numbers(10), 1).__getitems__(keys)


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of each loader that is made; none starts its workers."""
    made: list[dict[str, Any]] = []

    def make(dataset: Any, **settings: Any) -> Iterator[Any]:
        made.append(settings)
        return map(dataset.__getitems__, settings["batch_sampler"])

    monkeypatch.setattr(loader, "DataLoader", make)
    return made


def test_each_device_of_a_rank_has_its_loader_workers(loaders: list[dict[str, Any]]) -> None:
    dp = replace(ONE, devices=(CPU,) * 8)
    for ranks, options in ((ONE, {"workers": 4}), (dp, {"workers": 4}), (dp, {})):
        Batches(Numbers(8), seed=0, ranks=ranks, options=options)
    assert [made["num_workers"] for made in loaders] == [4, 32, 0]
    assert [made["persistent_workers"] for made in loaders] == [True, True, False]


def test_workers_of_other_ranks_have_other_numpy_seeds_and_the_same_samples(loaders: list[dict[str, Any]]) -> None:
    shares = list(epoch_shares(8, 4, seed=0, epoch=0, rank=0, world_size=1))
    ranks = [replace(ONE, rank=rank, world_size=4) for rank in range(4)]
    loaded = [batches(Numbers(8), shares, seed=3, ranks=each, options={"workers": 1}) for each in ranks]
    assert all(each == loaded[0] for each in loaded)
    # torch seeds the workers from one draw of this generator
    draws = {torch.empty((), dtype=torch.int64).random_(generator=made["generator"]).item() for made in loaders}
    assert len(draws) == 4


HANGS = """
import sys, time
import torch
from harness.train.loader import Batches, Share
from harness.train.ranks import Ranks

class Hangs(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        print("hanging", flush=True)
        time.sleep(600)

one = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
list(Batches(Hangs(), seed=0, ranks=one, options={"workers": 1}).of([Share(((0, 0),), 1, 1)]))
"""


@pytest.mark.slow
def test_a_loader_that_hangs_does_not_outlive_its_trainer() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout and trainer.stdout.readline() == b"hanging\n"
        (worker,) = psutil.Process(trainer.pid).children()
        trainer.kill()
    until = time.monotonic() + 60  # it would sleep for ten minutes
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the loader's process is still there"
        time.sleep(0.02)


def mixes(draw: Any) -> Any:
    """A collate that weights its samples by what ``draw`` returns."""
    return lambda samples: (draw(), [index for index, *_ in samples])


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_what_a_collate_draws_follows_from_seed_and_global_batch(draw: Any) -> None:
    def drawn(seed: int = 1, rank: int = 0, world_size: int = 1, parts: int = 1) -> list[float]:
        shares = list(epoch_shares(12, 4, 0, 0, rank, world_size))
        made = batches(Numbers(12), shares, seed=seed, collate=mixes(draw), micro_batches=parts)
        return [weight for weight, _ in made]

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    one = drawn()
    assert draw() == before, "the caller's generators go on as if nothing had been drawn"
    assert len(set(one)) == 3 and drawn() == one and drawn(seed=2) != one
    assert drawn(rank=0, world_size=2) == drawn(rank=1, world_size=2) == one
    assert len(set(drawn(parts=2))) == 6, "each micro-batch draws anew"


def test_a_collate_that_never_draws_is_soon_not_seeded_and_one_that_draws_seldom_is() -> None:
    counts = iter(range(1000))

    def seldom(samples: list[Any]) -> float:
        return random.random() if next(counts) % 50 == 49 else 0.0

    shares = list(islice(endless_shares(12, 4, 0, 0, 1), loader.COLLATE_TRIES + 40))
    data = loader._CollatedDataset(Numbers(12), 1, seldom)
    values = [data.__getitems__((share.batch, list(share.keys))) for share in shares]
    assert len({value for value in values if value}) == 2 and data._draws
    plain = loader._CollatedDataset(Numbers(12), 1, len)
    assert {plain.__getitems__((share.batch, list(share.keys))) for share in shares} == {4}
    assert not plain._tries
