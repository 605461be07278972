"""The samples of each rank in each step, their loading, shared data sets, and digests that show what has changed."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.errors import WorkloadError
from harness.plan.cell import Cell, Options, int_option
from harness.plan.trial import SkipReason, SkipTrial
from harness.system.process import die_with_parent
from harness.train import workloads
from harness.train.ranks import Ranks
from harness.train.transfer import pins
from harness.train.workloads import Collate, Datasets, SizedDataset, Workload, as_datasets

Key = tuple[int, int]
"""(epoch, index of the sample)."""


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch; ``batch``: a number of the global batch, the same on every rank.

    A rank with an empty part still takes a step, on one sample of weight 0, since the other ranks wait for it.
    """

    keys: tuple[Key, ...]
    samples: int
    global_samples: int
    batch: int = 0

    def split(self, parts: int) -> tuple[Share, ...]:
        """Return contiguous parts for micro-batches; an empty part still has one key, as an empty share has."""
        places = [part_of(self.samples, part, parts) for part in range(parts)]
        return tuple(
            replace(
                self, keys=self.keys[p.start : p.stop] or self.keys[:1], samples=len(p), batch=_mix(self.batch, n, 0)
            )
            for n, p in enumerate(places)
        )


def need_full_batch(samples: int, batch: int, what: str = "global batch") -> None:
    """Raise SkipTrial if a training set is smaller than one batch."""
    if batch > samples:
        reason = f"{what} {batch} exceeds the {samples} training samples"
        raise SkipTrial(SkipReason("too_few_samples", reason))


def part_of(size: int, part: int, parts: int) -> range:
    """Return the places of one of several contiguous parts; their sizes differ by one at most."""
    return range(part * size // parts, (part + 1) * size // parts)


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch: a permutation that depends on the seed and the epoch only."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(_mix(seed, epoch, 0)))


def rank_share(codes: Tensor, samples: int, rank: int, world_size: int) -> Share:
    """Return a rank's part of a global batch.

    ``codes``: epoch times ``samples`` plus index, for each sample of the batch.
    """
    size = len(codes)
    places = part_of(size, rank, world_size)
    own = codes[places.start : places.stop].tolist()
    keys = tuple(divmod(code, samples) for code in own or codes[:1].tolist())
    return Share(keys, len(own), size, int(codes[0]))


def epoch_shares(samples: int, batch: int, seed: int, epoch: int, rank: int, world_size: int) -> Iterator[Share]:
    """Return a rank's shares of one epoch; the last global batch holds the remainder."""
    codes = epoch * samples + epoch_order(samples, seed, epoch)
    return (rank_share(codes[i : i + batch], samples, rank, world_size) for i in range(0, samples, batch))


def evaluation_shares(samples: int, batch: int, rank: int, world_size: int) -> Iterator[Share]:
    """Return a rank's shares of a data set in its own order, each sample exactly once."""
    codes = torch.arange(samples)
    return (rank_share(codes[i : i + batch], samples, rank, world_size) for i in range(0, samples, batch))


def endless_shares(samples: int, batch: int, seed: int, rank: int, world_size: int) -> Iterator[Share]:
    """Yield shares of full global batches endlessly; each sample once an epoch; a batch may span two epochs.

    Raises WorkloadError if there are no samples, of which no batch would ever be full.
    """
    if not samples:
        raise WorkloadError("the training set has no samples; return one with samples from datasets()")
    codes, start = torch.empty(0, dtype=torch.int64), 0
    for epoch in count():
        codes = torch.cat([codes[start:], epoch * samples + epoch_order(samples, seed, epoch)])
        start = 0
        while len(codes) - start >= batch:
            yield rank_share(codes[start : start + batch], samples, rank, world_size)
            start += batch


class SeededDataset(Dataset[object]):
    """A data set whose samples draw their randomness from (seed, epoch, index): the same data for every strategy.

    Seeds torch's CPU generator and Python's ``random`` for each sample and restores both after the batch. Until a batch
    has drawn from one of them, neither is seeded, as that takes 10 microseconds a sample.
    """

    def __init__(self, dataset: SizedDataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._draws = False

    def __getitems__(self, keys: Sequence[Key]) -> list[object]:
        before = Generators()
        if not self._draws:
            indices = [index for _, index in keys]
            # in one call if the data set has a method for batches, as torch's loader does
            together: Callable[[list[int]], list[object]] | None = getattr(self.dataset, "__getitems__", None)
            unseeded = together(indices) if together else [self.dataset[index] for index in indices]
            if before.untouched():
                return unseeded
            self._draws = True
        samples = []
        for epoch, index in keys:
            Generators.seed(_mix(self.seed, epoch, index))
            samples.append(self.dataset[index])
        before.put_back()
        return samples


class _CollatedDataset(Dataset[object]):
    """The batches of a data set, collated where their samples are read.

    What a collate of the user's own draws, such as the weight of mixup, follows from the seed and the global batch:
    ranks draw alike, and so do runs. The generators of torch, NumPy and Python are seeded for it, and restored. A
    collate that drew nothing in its first COLLATE_TRIES batches is not seeded any more.
    """

    def __init__(self, dataset: SizedDataset, seed: int, collate: Collate | None) -> None:
        self.samples, self.seed, self.collate = SeededDataset(dataset, seed), seed, collate or default_collate
        self._tries, self._draws = COLLATE_TRIES if collate else 0, False

    def __getitems__(self, batch: tuple[int, list[Key]]) -> object:
        number, keys = batch
        samples = self.samples.__getitems__(keys)
        if not self._tries:
            return self.collate(samples)
        before, numpy_before = Generators(), np.random.get_state()
        value = _mix(self.seed, number, 1)
        Generators.seed(value)
        np.random.seed(value % 2**32)
        seeded = None if self._draws else (Generators(), value_digest(np.random.get_state()))
        try:
            collated = self.collate(samples)
            if seeded:
                of_torch, of_numpy = seeded
                self._draws = not of_torch.untouched() or value_digest(np.random.get_state()) != of_numpy
                self._tries -= not self._draws
        finally:
            before.put_back()
            np.random.set_state(numpy_before)
        return collated


COLLATE_TRIES = 64
"""Batches without a draw after which a collate counts as one that never draws."""


class Generators:
    """The state of the generators that a data set may draw from, at construction."""

    def __init__(self) -> None:
        self.torch, self.python = torch.default_generator.get_state(), random.getstate()

    def untouched(self) -> bool:
        """Return whether nothing was drawn since."""
        return torch.equal(self.torch, torch.default_generator.get_state()) and self.python == random.getstate()

    def put_back(self) -> None:
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)

    @staticmethod
    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)
        random.seed(value)


def _mix(seed: int, epoch: int, index: int) -> int:
    """Return a 63-bit seed of three numbers (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + index + 1) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) >> 1


def workers_of(options: Options, device_type: str, dataset: object) -> int:
    """Return the loader's worker processes of each device: the file's number, or that which its data need.

    That is not in a cell's id, which is the same on machines of other cores: as many as torch's threads less one, for a
    device has a thread on each of its cores.
    """
    needed = max(1, torch.get_num_threads() - 1) if device_type == "cuda" and decodes(dataset) else 0
    return int_option(options, "workers", needed)


def decodes(dataset: object) -> bool:
    """Return whether a data set reads and decodes a file for each sample.

    So do torchvision's that hold no samples in memory, as ``data``, and those of Hugging Face with images or sound.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    vision, features = sys.modules.get("torchvision.datasets"), getattr(dataset, "features", None)
    if vision and isinstance(dataset, vision.VisionDataset):
        return not hasattr(dataset, "data")
    return isinstance(features, Mapping) and any(getattr(each, "decode", False) for each in features.values())


class Batches:
    """The batches of shares, on the host; the worker processes live on from one pass over shares to the next.

    ``options``: workers of each device (``workers_of``), pin_memory, prefetch_factor. A pass loads no batch of the pass
    after it. With several micro-batches, each share yields them one by one.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        *,
        seed: int,
        ranks: Ranks,
        options: Options,
        collate: Collate | None = None,
        micro_batches: int = 1,
    ) -> None:
        workers = workers_of(options, ranks.devices[0].type, dataset) * len(ranks.devices)
        self._micro_batches, self._keys = micro_batches, _Keys()
        self._loader: DataLoader[object] = DataLoader(
            _CollatedDataset(dataset, seed, collate),
            batch_sampler=self._keys,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pins(ranks.devices[0], options),
            prefetch_factor=int_option(options, "prefetch_factor", 2) if workers else None,
            collate_fn=_unchanged,
            # else each pass draws from the global generator, and a resumed training once more; by rank, as NumPy's
            # generators in the workers are seeded with it
            generator=torch.Generator().manual_seed(_mix(seed, 0, ranks.rank)),
            worker_init_fn=end_with_trainer if workers else None,
        )

    def of(self, shares: Iterable[Share]) -> Iterator[object]:
        """Yield the batches of these shares; the pass before must be over."""
        if self._micro_batches > 1:
            shares = (part for share in shares for part in share.split(self._micro_batches))
        self._keys.shares = shares
        yield from self._loader


def _unchanged(batch: object) -> object:
    return batch


def end_with_trainer(worker: int) -> None:
    """End this loader process with its trainer: torch's own check runs between samples, so a hanging one would stay."""
    die_with_parent()


class _Keys(torch.utils.data.Sampler[list[object]]):
    """The number and the keys of each batch, of the shares of the current pass."""

    def __init__(self) -> None:
        self.shares: Iterable[Share] = ()

    def __iter__(self) -> Iterator[Any]:
        return ((share.batch, list(share.keys)) for share in self.shares)


@dataclass(frozen=True)
class SharedData:
    """The data sets of a workload, and the attributes that ``datasets()`` set or filled in it, such as a vocabulary.

    ``digest``: that of the data sets' pickle as they were built; None if they cannot be pickled, or an attribute from
    before them cannot. "" if nothing can change them: those of a built-in workload, and those of torch's own types.
    """

    datasets: Datasets
    attributes: Mapping[str, object]
    digest: str | None

    @classmethod
    def of(cls, cell: Cell, workload: Workload) -> SharedData:
        """Build the data sets of a new workload."""
        before = {name: (value, pickle_digest(value)) for name, value in _attributes(workload).items()}
        datasets = as_datasets(workload.datasets())
        after = _attributes(workload)
        same = {name for name, value in after.items() if name in before and before[name][0] is value}
        filled = {name for name in same if before[name][1] != pickle_digest(after[name])}
        found = {name: value for name, value in after.items() if name not in same - filled}
        if cell.workload in BUILTIN_WORKLOADS:
            return cls(datasets, found, "")
        if any(before[name][1] is None for name in same):  # it may have been filled
            return cls(datasets, found, None)
        return cls(datasets, found, "" if all(map(_is_constant, datasets)) else pickle_digest(datasets))

    @property
    def is_unchanged(self) -> bool:
        """Whether the data sets are as they were built."""
        return self.digest == "" or (self.digest is not None and pickle_digest(self.datasets) == self.digest)

    def new_workload(self, cell: Cell) -> Workload:
        """Build a workload as it is after ``datasets()``, whose data sets are these."""
        workload = workloads.build(cell)
        for name, value in self.attributes.items():
            setattr(workload, name, value)
        return workload


def _attributes(workload: Workload) -> dict[str, object]:
    return dict(getattr(workload, "__dict__", {}))


def _is_constant(dataset: object) -> bool:
    """Return whether a data set is of torch's own types alone, in which nothing changes as samples are read."""
    if type(dataset) is Subset:
        return _is_constant(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_constant, dataset.datasets))
    return type(dataset) is TensorDataset


class NoDigest(TypeError):
    """Raised for a value of which nothing can be compared."""


def value_digest(value: object, *, objects: bool = True) -> str:
    """Return 12 hexadecimal digits for a tensor, or for the tensors, arrays, numbers and texts in nested containers.

    Of other objects their pickle counts, without ``objects`` the name of their type. Raises NoDigest without a pickle.
    """
    digest = hashlib.sha1(usedforsecurity=False)
    for leaf in tree_leaves(value):
        digest.update(_bytes_of(leaf, objects=objects))
    return digest.hexdigest()[:12]


def _bytes_of(leaf: object, *, objects: bool) -> bytes:
    if isinstance(leaf, Tensor) and (inner := getattr(leaf, "__tensor_flatten__", None)):  # it has no values of its own
        return b"".join(_bytes_of(getattr(leaf, name), objects=objects) for name in inner()[0])
    if isinstance(leaf, Tensor) and has_values(leaf):
        return _values_of(leaf).numpy().tobytes()
    if isinstance(leaf, str | bytes | int | float | complex | None):
        return repr(leaf).encode()
    if isinstance(leaf, set | frozenset):  # whose order differs between processes
        return repr(sorted(value_digest(item, objects=objects) for item in leaf)).encode()
    if hasattr(leaf, "__array_interface__") and (array := np.asarray(leaf)).dtype != object:  # of NumPy, or of Pillow
        return array.tobytes()
    if not objects:
        return type(leaf).__name__.encode()  # its repr may contain its address, which changes with every object
    if (found := pickle_digest(leaf)) is None:
        raise NoDigest(f"values of the type {type(leaf).__name__} cannot be compared: pickle refuses them")
    return found.encode()


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage of its values: not one that is sparse or nested, or that wraps others."""
    wraps = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not tensor.is_nested and not wraps


def pickle_digest(thing: object) -> str | None:
    """Return a digest of an object's pickle; None if it cannot be pickled."""
    pickler = _DigestPickler()
    try:
        pickler.dump(thing)
    except Exception:  # whatever an object of the user raises here
        return None
    return pickler.hash.hexdigest()


class _DigestPickler(pickle.Pickler):
    """Pickles into a digest; the values of arrays and tensors go there without a copy.

    A lambda or an inner function, which pickle refuses, counts as what it holds.
    """

    def __init__(self) -> None:
        self.hash = hashlib.sha1(usedforsecurity=False)
        super().__init__(self, protocol=5, buffer_callback=lambda buffer: self.hash.update(buffer.raw()))

    def write(self, data: bytes | memoryview) -> int:
        self.hash.update(data)
        return len(data)

    def persistent_id(self, obj: object) -> object:
        """Return the content of a set, whose order differs between processes; None for other objects."""
        return ("set", sorted(pickle_digest(item) or "" for item in obj)) if isinstance(obj, set | frozenset) else None

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, FunctionType) and "<" in obj.__qualname__:
            held = [cell.cell_contents for cell in obj.__closure__ or ()]
            return tuple, ((obj.__qualname__, held, obj.__defaults__, obj.__kwdefaults__),)
        if not isinstance(obj, Tensor) or obj.is_meta or not has_values(obj):
            return NotImplemented
        self.hash.update(_values_of(obj).numpy().data)  # the pickle of a class of one's own may hold an address
        return str, (f"{type(obj).__name__} {obj.dtype} {tuple(obj.shape)}",)


def _values_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's values, also of one that is a view with another sign or conjugated."""
    values = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return values.cpu().contiguous().view(-1).view(torch.uint8)
