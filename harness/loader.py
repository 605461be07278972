"""Which samples each rank sees in which step, the same for every strategy, and how they reach the device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from harness.lifeline import die_with_parent

Key = tuple[int, int]
"""(epoch, index of the sample)."""


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch.

    A rank whose part is empty still takes a step, on one sample of weight 0, since its peers wait for it.
    """

    keys: tuple[Key, ...]
    samples: int
    global_samples: int


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch: a permutation that depends on the seed and the epoch alone."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(_mix(seed, epoch, 0)))


def share_of(codes: Tensor, samples: int, rank: int, world_size: int) -> Share:
    """A rank's contiguous part of a global batch; the parts differ by one sample at most.

    ``codes``: epoch times ``samples`` plus index, for each sample of the batch.
    """
    size = len(codes)
    mine = codes[rank * size // world_size : (rank + 1) * size // world_size].tolist()
    keys = tuple(divmod(code, samples) for code in mine or codes[:1].tolist())
    return Share(keys, len(mine), size)


def epoch_shares(samples: int, batch: int, seed: int, epoch: int, rank: int, world_size: int) -> Iterator[Share]:
    """A rank's shares of one epoch; the last global batch holds what is left."""
    codes = epoch * samples + epoch_order(samples, seed, epoch)
    return (share_of(codes[i : i + batch], samples, rank, world_size) for i in range(0, samples, batch))


def evaluation_shares(samples: int, batch: int, rank: int, world_size: int) -> Iterator[Share]:
    """A rank's shares of a data set in its own order, each sample exactly once."""
    codes = torch.arange(samples)
    return (share_of(codes[i : i + batch], samples, rank, world_size) for i in range(0, samples, batch))


def endless_shares(samples: int, batch: int, seed: int, rank: int, world_size: int) -> Iterator[Share]:
    """Full global batches for ever; each sample once an epoch, epochs joined without a seam."""
    codes, start = torch.empty(0, dtype=torch.int64), 0
    for epoch in count():
        codes = torch.cat([codes[start:], epoch * samples + epoch_order(samples, seed, epoch)])
        start = 0
        while len(codes) - start >= batch:
            yield share_of(codes[start : start + batch], samples, rank, world_size)
            start += batch


class SeededDataset(Dataset[Any]):
    """Draws the randomness of each sample from (seed, epoch, index), so every strategy sees the same data.

    Seeds torch's CPU generator and Python's ``random`` around each sample and puts both back after the batch.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        generator = torch.default_generator
        torch_state, python_state = generator.get_state(), random.getstate()
        samples = []
        for epoch, index in keys:
            seed = _mix(self.seed, epoch, index)
            generator.manual_seed(seed)
            random.seed(seed)
            samples.append(self.dataset[index])
        generator.set_state(torch_state)
        random.setstate(python_state)
        return samples


def _mix(seed: int, epoch: int, index: int) -> int:
    """A 63-bit seed of three numbers (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + index + 1) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) >> 1


def batches(
    dataset: Dataset[Any],
    shares: Iterable[Share],
    *,
    seed: int,
    device: torch.device,
    options: Mapping[str, Any],
    collate: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Any]:
    """The batches of these shares, still on the host. ``options``: workers, pin_memory, prefetch_factor."""
    workers = int(options.get("workers", 0))
    loader: DataLoader[Any] = DataLoader(
        SeededDataset(dataset, seed),
        batch_sampler=_Keys(shares),
        num_workers=workers,
        pin_memory=_pins(device, options),
        prefetch_factor=int(options.get("prefetch_factor", 2)) if workers else None,
        collate_fn=collate,
        worker_init_fn=_end_with_trainer if workers else None,
    )
    yield from loader


def _end_with_trainer(worker: int) -> None:
    """Where the trainer is killed, torch's workers notice it between two samples: one that hangs would stay."""
    die_with_parent()


def copier(device: torch.device, options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """What brings a batch of ``batches`` to the device; on a CPU it is there, and looking at it would cost."""
    if device.type == "cpu":
        return _as_it_is
    pinned = _pins(device, options)
    return lambda batch: to_device(batch, device, non_blocking=pinned)


def _as_it_is(batch: Any) -> Any:
    return batch


def _pins(device: torch.device, options: Mapping[str, Any]) -> bool:
    return bool(options.get("pin_memory", True)) and device.type == "cuda"


def resident_batch(batch: Any) -> Iterator[Any]:
    """One batch for ever: a step without a loader."""
    return repeat(batch)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """The batch with every tensor inside it on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device, non_blocking=non_blocking) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device, non_blocking=non_blocking) for value in batch)
    return batch


class _Keys(torch.utils.data.Sampler[list[Key]]):
    def __init__(self, shares: Iterable[Share]) -> None:
        self.shares = shares

    def __iter__(self) -> Iterator[list[Key]]:
        return (list(share.keys) for share in self.shares)
