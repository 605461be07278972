"""What delivers the batches of a script: torch's DataLoader, whose batches are counted, or Ray Data.

Those of Ray Data are counted too, or consumed without training (mode: ingest).
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import dataloader

T = TypeVar("T")
METHODS = ("iter_batches", "iter_torch_batches")
"""The methods of a dataset's iterator that deliver batches."""
NO_BATCHES = "mode: ingest: the loop's dataset delivered no batch to this rank"
TRAINS = (
    "mode: ingest: the loop took an optimizer step, so that its batches are not those of "
    f"ray.train.get_dataset_shard(...).{' or '.join(METHODS)}, iterated with gradients enabled"
)


@dataclass(eq=False)
class Iteration:
    """One iteration of a loader: its batches with gradients enabled and their samples, in all and since the last step.

    ``source``: its loader, as a weak reference. ``drawn``: the sizes of batches whose indices are
    drawn, and which are not delivered yet. ``began``, ``last``: a mark of the counter at the first and the last of the
    batches, which it has still if none was trained on since.
    """

    source: weakref.ref[object] | None = None
    drawn: deque[int] = field(default_factory=deque)
    batches: int = 0
    samples: float = 0.0
    of_step: int = 0
    samples_of_step: float = 0.0
    began: int | None = None
    last: int | None = None

    @property
    def loader(self) -> object:
        """Its loader; None if that is gone."""
        return self.source and self.source()

    def add(self, samples: float, mark: int) -> None:
        """Add a batch."""
        self.began = mark if self.began is None else self.began
        self.last = mark
        self.batches += 1
        self.samples += samples
        self.of_step += 1
        self.samples_of_step += samples


class Counter(Protocol):
    """What counts batches: the wait for one, its samples, the end of an iteration, and a step."""

    def fetching(self) -> float: ...
    def fetched(self, start: float, samples: int, iteration: Iteration) -> None: ...
    def iterated(self, iteration: Iteration) -> None: ...
    def waited(self, start: float) -> None: ...
    def step(self) -> None: ...


_thread = threading.local()
"""``fetches``: whether a loader of this thread fetches a batch."""


def _fetched(counter: Counter, iteration: Iteration, fetch: Callable[[], T], samples_of: Callable[[T], int]) -> T:
    """Fetch a batch and count it, unless another loader fetches it for a batch of its own.

    A DataLoader's dataset may be Ray Data's batches, as of Hugging Face's Trainer in Ray Train, or another DataLoader.
    """
    outermost = not getattr(_thread, "fetches", False)
    start = counter.fetching() if outermost else 0.0
    _thread.fetches = True
    try:
        batch = fetch()
    except StopIteration:
        counter.iterated(iteration)
        raise
    finally:
        _thread.fetches = not outermost
    samples = samples_of(batch)
    if outermost:
        counter.fetched(start, samples, iteration)
    return batch


def time_loaders(counter: Counter) -> None:
    """Time the iterators of torch's DataLoader and count the indices that each batch was made of."""
    base: Any = dataloader._BaseDataLoaderIter
    fetch, next_index, reset, begin = base.__next__, base._next_index, base._reset, dataloader.DataLoader.__iter__
    iterations: weakref.WeakKeyDictionary[object, Iteration] = weakref.WeakKeyDictionary()
    loaders: weakref.WeakKeyDictionary[object, weakref.ref[object]] = weakref.WeakKeyDictionary()

    def current(iterator: object) -> Iteration:
        return iterations.get(iterator) or iterations.setdefault(iterator, Iteration(loaders.get(iterator)))

    def timed_index(iterator: object) -> object:
        index = next_index(iterator)
        if isinstance(index, list | tuple):  # of a batch; loaders with workers draw it before they deliver it
            current(iterator).drawn.append(len(index))
        return index

    def reset_iteration(iterator: object, *given: object, **named: object) -> object:
        iterations.pop(iterator, None)
        return reset(iterator, *given, **named)

    def timed_fetch(iterator: dataloader._BaseDataLoaderIter) -> object:
        iteration = current(iterator)

        def samples_of(batch: object) -> int:
            stream = iterator._dataset_kind == dataloader._DatasetKind.Iterable  # whose indices are no samples
            size = iteration.drawn.popleft() if iteration.drawn else 0
            return size if size and not stream else size_of(batch) or size

        return _fetched(counter, iteration, lambda: fetch(iterator), samples_of)

    def timed_begin(loader: dataloader.DataLoader[object]) -> dataloader._BaseDataLoaderIter:
        if getattr(_thread, "fetches", False):
            return begin(loader)
        start = counter.fetching()
        iterator = begin(loader)
        loaders[iterator] = weakref.ref(loader)
        counter.waited(start)
        return iterator

    base.__next__, base._next_index, base._reset = timed_fetch, timed_index, reset_iteration
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
            _thread.fetches = False  # a DataLoader with this dataset gets no batch
            batches = self._counted()
            if next(batches, batches) is batches:
                raise ValueError(NO_BATCHES)
            self._counter.step()
            for _ in batches:
                self._counter.step()
        yield from self._counted()

    def _counted(self) -> Iterator[object]:
        batches, iteration = iter(self._batches), Iteration(weakref.ref(self))
        with suppress(StopIteration):
            while True:
                yield _fetched(self._counter, iteration, lambda: next(batches), size_of)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # Ray's prepare_trainer asks for the class
        return type(self._batches)

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
