"""The batches of Ray Data in a loop: counted, or consumed without training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.measure.script.batches import NO_BATCHES, TRAINS
from harness.measure.script.counting import EndOfTrial, Finished, Schedule, StepRecorder


class DataIterator:
    """As ray.data.iterator has it: two epochs of it are two iterations."""

    def __init__(self, rows: int) -> None:
        self.rows, self.epochs = rows, 0

    def iter_batches(self, *, batch_size: int) -> Any:
        outer = self

        class Epochs:
            def __iter__(self) -> Iterator[object]:
                outer.epochs += 1
                for first in range(0, outer.rows, batch_size):
                    yield {"id": np.arange(first, min(first + batch_size, outer.rows))}

        return Epochs()

    iter_torch_batches = iter_batches


def recorder(monkeypatch: pytest.MonkeyPatch, *, ingests: bool) -> tuple[StepRecorder, type[DataIterator], Any]:
    ours, theirs = Pipe()
    script = StepRecorder(theirs, lambda: None, optimizer=0, pauses=False, profiles=False, ingests=ingests)
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
