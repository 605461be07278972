"""What delivers the batches of a script: torch's DataLoader, whose batches are counted, or Ray Data.

Those of Ray Data are counted too, or consumed without training (mode: ingest).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import dataloader

METHODS = ("iter_batches", "iter_torch_batches")
"""The methods of a dataset's iterator that deliver batches."""
NO_BATCHES = "mode: ingest: the loop's dataset delivered no batch to this rank"
TRAINS = (
    "mode: ingest: the loop took an optimizer step, so that its batches are not those of "
    f"ray.train.get_dataset_shard(...).{' or '.join(METHODS)}, iterated with gradients enabled"
)


class Counter(Protocol):
    """What counts batches: its wait for one, its samples, and a step."""

    def fetching(self) -> float: ...
    def fetched(self, start: float, samples: int) -> None: ...
    def waited(self, start: float) -> None: ...
    def step(self) -> None: ...


def time_loaders(counter: Counter) -> None:
    """Time the iterators of torch's DataLoader and count the indices that each batch was made of."""
    base: Any = dataloader._BaseDataLoaderIter
    fetch, next_index, reset, begin = base.__next__, base._next_index, base._reset, dataloader.DataLoader.__iter__
    sizes: weakref.WeakKeyDictionary[object, deque[int]] = weakref.WeakKeyDictionary()

    def timed_index(iterator: object) -> object:
        index = next_index(iterator)
        if isinstance(index, list | tuple):  # of a batch; loaders with workers draw it before they deliver it
            sizes.setdefault(iterator, deque()).append(len(index))
        return index

    def reset_sizes(iterator: object, *given: object, **named: object) -> object:
        sizes.pop(iterator, None)
        return reset(iterator, *given, **named)

    def timed_fetch(iterator: dataloader._BaseDataLoaderIter) -> object:
        start = counter.fetching()
        batch = fetch(iterator)
        drawn = sizes.get(iterator)
        stream = iterator._dataset_kind == dataloader._DatasetKind.Iterable  # whose indices are no samples
        size = drawn.popleft() if drawn else 0
        counter.fetched(start, size if size and not stream else size_of(batch) or size)
        return batch

    def timed_begin(loader: dataloader.DataLoader[object]) -> dataloader._BaseDataLoaderIter:
        start = counter.fetching()
        iterator = begin(loader)
        counter.waited(start)
        return iterator

    base.__next__, base._next_index, base._reset = timed_fetch, timed_index, reset_sizes
    dataloader.DataLoader.__iter__ = timed_begin  # type: ignore[method-assign]


class Batches:
    """Batches of a dataset, each iteration of which counts waits and samples.

    ``consumes``: with gradients enabled each batch is a step, and no batch is delivered, epoch after epoch, until the
    counter ends the trial.
    """

    def __init__(self, batches: Iterable[object], counter: Counter, *, consumes: bool) -> None:
        self._batches, self._counter, self._consumes = batches, counter, consumes

    def __iter__(self) -> Iterator[object]:
        while self._consumes and torch.is_grad_enabled():
            batches = self._counted()
            if next(batches, batches) is batches:
                raise ValueError(NO_BATCHES)
            self._counter.step()
            for _ in batches:
                self._counter.step()
        yield from self._counted()

    def _counted(self) -> Iterator[object]:
        batches = iter(self._batches)
        while True:
            start = self._counter.fetching()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._counter.fetched(start, size_of(batch))
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def count_datasets(counter: Counter, *, consumes: bool) -> None:
    """From now on, count the batches of Ray Data, if it is imported by now."""
    iterator = getattr(sys.modules.get("ray.data.iterator"), "DataIterator", None)
    for name in METHODS if iterator else ():
        setattr(iterator, name, _counting(getattr(iterator, name), counter, consumes))


def _counting(method: Callable[..., Iterable[object]], counter: Counter, consumes: bool) -> Callable[..., Batches]:
    @functools.wraps(method)
    def counting(*given: object, **named: object) -> Batches:
        return Batches(method(*given, **named), counter, consumes=consumes)

    return counting


def size_of(batch: object) -> int:
    """Return the length of the first tensor, array or table of a batch, or 0 if it has none."""
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple):
        return int(shape[0]) if shape else 1
    inner = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    having = (each for each in inner if getattr(each, "shape", None) != ())  # a number beside them is no sample
    return next((size for each in having if (size := size_of(each))), 0)
