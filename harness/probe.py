"""Optional marks in a training script that the harness runs; in any other process they do nothing.

for batch in probe.steps(loader):            # for loops without an optimizer of torch, or with several
    ...
    probe.count(len(batch["y"]))             # samples or tokens of this rank
with probe.pause():                          # no part of the time of training
    evaluate(model)
probe.report(val_accuracy=accuracy, epoch=epoch)    # a point of the learning curve
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
__all__ = ["count", "pause", "report", "steps"]


class Recorder:
    """What records the steps of this process; this one records nothing."""

    def begin(self) -> None: ...
    def step(self) -> None: ...
    def count(self, samples: float) -> None: ...
    def pause(self) -> None: ...
    def go_on(self) -> None: ...
    def report(self, values: Mapping[str, object]) -> None: ...


_recorder = Recorder()


def record_by(recorder: Recorder | None) -> None:
    """Pass the marks of this process to a recorder; None: to nobody."""
    global _recorder
    _recorder = recorder or Recorder()


def steps(batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches of a training loop, each of whose iterations is a step."""
    for batch in batches:
        _recorder.begin()
        yield batch
        _recorder.step()


def count(samples: float) -> None:
    """Count samples or tokens that this rank has trained on in the current step."""
    _recorder.count(samples)


@contextmanager
def pause() -> Iterator[None]:
    """Leave the time of a block out of the time of training."""
    _recorder.pause()
    try:
        yield
    finally:
        _recorder.go_on()


def report(**values: object) -> None:
    """Report metrics of the training as it is now: numbers, or tensors with one element.

    ``train_loss``, ``val_accuracy`` (a fraction) and so on, and if it is known ``epoch``, how many have been trained.
    Rank 0's are recorded; calls on other ranks are allowed.
    """
    _recorder.report(values)
