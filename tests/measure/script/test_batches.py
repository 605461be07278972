"""The batches of Ray Data in a loop: counted, or consumed without training."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, dataloader

from harness.measure.script import counting
from harness.measure.script.batches import NO_BATCHES, TRAINS, time_loaders
from harness.measure.script.child import Counting
from harness.measure.script.counting import StepRecorder
from harness.measure.script.messages import EndOfTrial, Finished, Schedule


class Epochs:
    """As ray.data.iterator's _IterableFromIterator."""

    def __init__(self, generate: Callable[[], Iterator[object]]) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[object]:
        return self.generate()


class DataIterator:
    """As ray.data.iterator has it: two epochs of it are two iterations."""

    def __init__(self, rows: int) -> None:
        self.rows, self.epochs = rows, 0

    def iter_batches(self, *, batch_size: int) -> Any:
        def generate() -> Iterator[object]:
            self.epochs += 1
            for first in range(0, self.rows, batch_size):
                yield {"id": np.arange(first, min(first + batch_size, self.rows))}

        return Epochs(generate)

    iter_torch_batches = iter_batches


class Dataset(IterableDataset[Any]):
    """As Ray Train gives the batches of a shard to Hugging Face's Trainer: if they are of Ray Data's class."""

    def __init__(self, batches: object) -> None:
        assert isinstance(batches, Epochs)
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader_over(batches: object) -> DataLoader[Any]:
    return DataLoader(Dataset(batches), batch_size=1, collate_fn=lambda found: found[0])


@pytest.fixture
def timed_loaders(monkeypatch: pytest.MonkeyPatch) -> Callable[[StepRecorder], None]:
    """time_loaders, which replaces methods of torch's: they are as before after the test."""
    base: Any = dataloader._BaseDataLoaderIter
    for name in ("__next__", "_next_index", "_reset"):
        monkeypatch.setattr(base, name, getattr(base, name))
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    return time_loaders


def recorder(monkeypatch: pytest.MonkeyPatch, *, ingests: bool) -> tuple[StepRecorder, type[DataIterator], Any]:
    ours, theirs = Pipe()
    script = StepRecorder(theirs, lambda: None, Counting(ingests=ingests))
    kind = type("DataIterator", (DataIterator,), {})
    monkeypatch.setitem(sys.modules, "ray.data.iterator", SimpleNamespace(DataIterator=kind))  # type: ignore[arg-type]
    script.count_datasets()
    return script, kind, ours


@pytest.mark.parametrize("method", ["iter_batches", "iter_torch_batches"])
def test_batches_with_gradients_are_samples_of_the_step_and_each_iteration_is_an_epoch(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    script, kind, parent = recorder(monkeypatch, ingests=False)
    shard = kind(20)
    batches = getattr(shard, method)(batch_size=8)
    for _ in range(2):
        for _ in batches:
            script.step()
        with torch.no_grad():
            assert len([*batches]) == 3
    script.finish()
    steps = parent.recv().steps
    assert list(steps.samples) == [8, 8, 4] * 2 and min(steps.wait_s) > 0 and shard.epochs == 4


def test_an_ingest_consumes_epoch_after_epoch_and_delivers_batches_to_evaluations_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, kind, parent = recorder(monkeypatch, ingests=True)
    script._obey(Schedule(start=1, steps=3, windows=2))
    parent.send("end")
    with torch.no_grad():
        assert len([*kind(20).iter_batches(batch_size=8)]) == 3
    shard, delivered = kind(20), 0
    with pytest.raises(EndOfTrial):
        for _ in shard.iter_batches(batch_size=8):
            delivered += 1
    assert delivered == 0 and shard.epochs == 3
    *_, end = parent.recv(), parent.recv()
    assert isinstance(end, Finished) and not end.by_itself
    assert list(end.steps.samples) == [8, 8, 4, 8, 8, 4, 8] and not any(end.steps.wait_s)


def test_an_ingest_of_nothing_or_of_a_loop_that_trains_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    script, kind, _ = recorder(monkeypatch, ingests=True)
    with pytest.raises(ValueError, match=NO_BATCHES):
        list(kind(0).iter_batches(batch_size=8))
    with pytest.raises(RuntimeError, match="took an optimizer step"):
        script._after_optimizer(torch.optim.SGD([torch.ones(1)], lr=0.1))
    assert "iter_batches or iter_torch_batches" in TRAINS


def test_a_loader_over_ray_data_or_another_loader_counts_its_own_batches_alone(
    monkeypatch: pytest.MonkeyPatch, timed_loaders: Callable[[StepRecorder], None]
) -> None:
    script, kind, parent = recorder(monkeypatch, ingests=False)
    timed_loaders(script)
    rows = DataLoader(TensorDataset(torch.zeros(20, 1)), 5)
    rebatched = DataLoader(_Rows(rows), 8)
    now = [0.0]
    monkeypatch.setattr(counting, "clock", lambda: now.__setitem__(0, now[0] + 1) or now[0])
    for loader in (loader_over(kind(20).iter_torch_batches(batch_size=8)), rebatched):
        for _ in loader:
            script.step()
    script.finish()
    steps = parent.recv().steps
    assert list(steps.samples) == [8, 8, 4] * 2
    assert max(steps.wait_s) <= 2, "the inner fetch is a part of the outer one"


class _Rows(IterableDataset[Any]):
    def __init__(self, batches: DataLoader[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for (batch,) in self.batches:
            yield from batch


def test_an_ingest_behind_a_loader_consumes_what_the_loader_would_get(
    monkeypatch: pytest.MonkeyPatch, timed_loaders: Callable[[StepRecorder], None]
) -> None:
    script, kind, parent = recorder(monkeypatch, ingests=True)
    timed_loaders(script)
    script._obey(Schedule(start=1, steps=3, windows=1))
    parent.send("end")
    with pytest.raises(EndOfTrial):
        next(iter(loader_over(kind(20).iter_batches(batch_size=8))))
    *_, end = parent.recv(), parent.recv()
    assert list(end.steps.samples) == [8, 8, 4, 8]


WEIGHT = torch.ones(1, requires_grad=True)


def ahead(batches: Any) -> Iterator[Any]:
    """Fetch each batch before the one before it is trained on, as accelerate's loaders do."""
    iterator, nothing = iter(batches), object()
    batch = next(iterator)
    while batch is not nothing:
        following = next(iterator, nothing)
        yield batch
        batch = following


@pytest.mark.parametrize(
    ("rows", "accumulates", "fetch", "samples"),
    [
        (16, 1, iter, [8, 8, 8, 8]),
        (16, 3, iter, [24, 24]),  # steps with batches of several epochs
        (16, 1, ahead, [16, 0, 16, 0]),
        (8, 1, ahead, [8, 8, 8, 8]),  # iterations that end before they are trained on
    ],
)
def test_an_iteration_in_which_nothing_is_trained_on_is_an_evaluation_and_a_report_changes_no_samples(
    monkeypatch: pytest.MonkeyPatch,
    timed_loaders: Callable[[StepRecorder], None],
    rows: int,
    accumulates: int,
    fetch: Callable[[Any], Iterator[Any]],
    samples: list[float],
) -> None:
    ours, parent = Pipe()
    script = StepRecorder(ours, lambda: None, Counting(trains=True))
    timed_loaders(script)
    monkeypatch.setattr(torch.autograd, "backward", script._noting(torch.autograd.backward))
    loader, held_out = (DataLoader(TensorDataset(torch.zeros(size, 1)), 8) for size in (rows, 20))
    count = 0
    while len(script._steps.ended) < len(samples):
        for _ in fetch(loader):
            count += 1
            script.report({"val_loss": 1.0})  # before the step of its batch
            WEIGHT.sum().backward()
            if count % accumulates == 0:
                script.step()
        if accumulates == 1 and rows > 8:
            for _ in held_out:  # with gradients enabled, as a Trainer's
                pass
    script.finish()
    end = parent.recv()
    assert list(end.steps.samples) == samples and end.facts.passes == end.facts.batches == accumulates
    # the last one is before no step, and each reads three batches
    assert end.facts.evaluations == (len(samples) // (rows // 8) - 1 if accumulates == 1 and rows > 8 else 0)


def test_a_backward_pass_inside_another_is_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    script, _, parent = recorder(monkeypatch, ingests=False)
    monkeypatch.setattr(torch.autograd, "backward", script._noting(torch.autograd.backward))
    for _ in range(2):
        inputs = torch.ones(1, requires_grad=True)
        for _ in range(3):
            inputs = checkpoint(torch.sin, inputs, use_reentrant=True)
        inputs.sum().backward()
        script.step()
    script.finish()
    assert parent.recv().facts.passes == 1


@pytest.mark.parametrize("pauses", [False, True])
def test_batches_of_a_pause_are_neither_trained_on_nor_an_evaluation_in_the_windows(
    monkeypatch: pytest.MonkeyPatch, timed_loaders: Callable[[StepRecorder], None], pauses: bool
) -> None:
    script, kind, parent = recorder(monkeypatch, ingests=False)
    script._pauses = pauses  # for evaluation without gradients too
    timed_loaders(script)
    loader = DataLoader(TensorDataset(torch.zeros(16, 1)), 8)
    for _ in loader:
        script.step()
        script.pause()
        assert len([*loader]) == 2
        with torch.no_grad():
            assert len([*kind(8).iter_batches(batch_size=8)]) == 1
        script.go_on()
    script.finish()
    end = parent.recv()
    assert list(end.steps.samples) == [8, 8] and end.facts.evaluations == 0


Timed = Callable[[StepRecorder], None]


def counting_script(monkeypatch: pytest.MonkeyPatch, timed_loaders: Timed, **how: Any) -> tuple[StepRecorder, Any]:
    ours, parent = Pipe()
    script = StepRecorder(ours, lambda: None, Counting(**how))
    timed_loaders(script)
    monkeypatch.setattr(torch.autograd, "backward", script._noting(torch.autograd.backward))
    return script, parent


@pytest.mark.parametrize(("fetch", "samples"), [(iter, [8] * 8), (ahead, [16, 8, 8, 0] * 2)])
@pytest.mark.parametrize("most", [3, 99])
def test_an_evaluation_with_gradients_that_is_left_or_beside_a_loader_that_fetches_ahead_has_no_samples(
    monkeypatch: pytest.MonkeyPatch, timed_loaders: Timed, fetch: Any, samples: list[float], most: int
) -> None:
    script, parent = counting_script(monkeypatch, timed_loaders)
    loader, held_out = (DataLoader(TensorDataset(torch.zeros(size, 1)), 8) for size in (32, 100))
    for _ in range(2):
        for number, _ in enumerate(fetch(loader)):
            WEIGHT.sum().backward()
            script.step()
            if number == 1:
                for seen, _ in enumerate(held_out):
                    if seen == most:
                        break
    script.finish()
    end = parent.recv()
    assert list(end.steps.samples) == samples and end.facts.evaluations == 2


@pytest.mark.parametrize(
    ("whole", "accumulates", "samples"), [(False, 2, [16] * 6), (True, 1, [32] * 3), (False, 1, [8] * 12)]
)
def test_a_training_whose_loader_is_new_in_each_epoch_or_read_whole_keeps_its_samples(
    monkeypatch: pytest.MonkeyPatch, timed_loaders: Timed, whole: bool, accumulates: int, samples: list[float]
) -> None:
    script, parent = counting_script(monkeypatch, timed_loaders)
    count = 0
    for _ in range(3):
        loader = DataLoader(TensorDataset(torch.zeros(32, 1)), 8)
        parts = [torch.cat([part for (part,) in loader])] if whole else loader
        for _ in parts:
            count += 1
            WEIGHT.sum().backward()
            if count % accumulates == 0:
                script.step()
    script.finish()
    end = parent.recv()
    assert list(end.steps.samples) == samples and end.facts.evaluations == 0


def test_a_loader_that_was_trained_on_is_not_kept(monkeypatch: pytest.MonkeyPatch, timed_loaders: Timed) -> None:
    script, _ = counting_script(monkeypatch, timed_loaders)
    data = TensorDataset(torch.zeros(24, 1))
    gone = weakref.ref(data)
    for _ in DataLoader(data, 8):
        WEIGHT.sum().backward()
        script.step()
    del data
    script.step()
    gc.collect()
    assert gone() is None


def test_a_pause_without_a_batch_takes_no_time_and_one_of_an_evaluation_that_is_left_is_one(
    monkeypatch: pytest.MonkeyPatch, timed_loaders: Timed
) -> None:
    """Of a training whose batches are its own."""
    script, parent = counting_script(monkeypatch, timed_loaders, pauses=True)
    now = 100.0
    monkeypatch.setattr(counting, "clock", lambda: now)
    held_out = DataLoader(TensorDataset(torch.zeros(24, 1)), 8)
    for number in range(4):
        with torch.no_grad():
            if number == 1:
                iter(held_out)
            elif number > 1:
                for _ in held_out:
                    now += 1.0
                    break
        now += 10.0
        WEIGHT.sum().backward()
        script.step()
    script.finish()
    steps = parent.recv().steps
    assert list(steps.samples) == [0.0] * 4 and list(steps.pause_s) == [0.0] * 4


def test_a_training_that_fetches_without_gradients_is_no_evaluation(
    monkeypatch: pytest.MonkeyPatch, timed_loaders: Timed
) -> None:
    """As one whose batches a frozen encoder prepares."""
    script, parent = counting_script(monkeypatch, timed_loaders, pauses=True)
    batches = iter(DataLoader(TensorDataset(torch.zeros(40, 1)), 8))
    for _ in range(4):
        with torch.no_grad():
            next(batches)
        WEIGHT.sum().backward()
        script.step()
    script.finish()
    steps = parent.recv().steps
    assert list(steps.samples) == [8] * 4 and list(steps.pause_s) == [0.0] * 4


def test_the_pause_of_an_evaluation_ends_with_its_last_batch(
    monkeypatch: pytest.MonkeyPatch, timed_loaders: Timed
) -> None:
    """Of a training whose own batches are in memory, which no fetch shows."""
    script, parent = counting_script(monkeypatch, timed_loaders, pauses=True)
    now = 0.0
    monkeypatch.setattr(counting, "clock", lambda: now)
    held_out = DataLoader(TensorDataset(torch.zeros(24, 1)), 8)
    for _ in range(3):
        with torch.no_grad():
            for _ in held_out:
                now += 1.0
        now += 10.0
        WEIGHT.sum().backward()
        script.step()
    script.finish()
    steps = parent.recv().steps
    assert list(steps.pause_s) == [3.0] * 3 and not any(steps.samples)
    assert steps.ended[2] - steps.ended[1] - steps.pause_s[2] == 10.0


def test_what_a_script_counts_takes_the_place_of_what_loaders_deliver(
    monkeypatch: pytest.MonkeyPatch, timed_loaders: Timed
) -> None:
    script, parent = counting_script(monkeypatch, timed_loaders)
    for _ in DataLoader(TensorDataset(torch.zeros(24, 1)), 8):
        WEIGHT.sum().backward()
        script.count(1024)
        script.step()
    script.finish()
    end = parent.recv()
    assert list(end.steps.samples) == [1024] * 3 and end.facts.counted


def test_a_pause_inside_another_ends_with_the_outer_one(monkeypatch: pytest.MonkeyPatch, timed_loaders: Timed) -> None:
    script, parent = counting_script(monkeypatch, timed_loaders)
    now = 0.0
    monkeypatch.setattr(counting, "clock", lambda: now)
    for _ in range(2):
        script.pause()
        script.pause()
        now += 1.0
        script.go_on()
        now += 2.0
        script.go_on()
        script.step()
    script.finish()
    assert list(parent.recv().steps.pause_s) == [3.0] * 2
