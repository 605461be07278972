"""The end of a training: at the step that is named, wherever its steps are; followed from a thread beside a loop."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from harness.config.sections import Convergence
from harness.measure.script import following, loop
from harness.measure.script.counting import StepRecorder
from harness.measure.script.following import Followed, _followed_training
from harness.measure.script.loop import in_thread
from harness.measure.script.messages import EndOfTrial, Finished, Held, Hold, Progress, Schedule
from harness.measure.script.parent import InThread
from harness.train.ranks import Ranks

ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
BURST = 1000


def recorder() -> tuple[StepRecorder, Any]:
    ours, theirs = Pipe()
    return StepRecorder(theirs, lambda: None, optimizer=0, pauses=False, profiles=False, trains=True), ours


def test_the_steps_of_a_training_are_sent_after_its_end_is_named_too() -> None:
    script, parent = recorder()
    parent.send(Schedule(1_000))
    thread = threading.Thread(target=script._follow, daemon=True)
    thread.start()
    for expected in (1, 2):
        script.step()
        assert parent.poll(10)
        message = parent.recv()
        assert isinstance(message, Progress) and message.count == expected
    script.finish()
    thread.join()


class Watched(InThread):
    """The process of a training; ``asked``: its steps at each message from the parent."""

    def __init__(self, connection: Any, script: StepRecorder) -> None:
        super().__init__(connection)
        self.asked: list[int] = []
        self._script = script

    def send(self, message: object) -> None:
        self.asked.append(len(self._script._steps.ended))
        super().send(message)


def test_a_training_whose_steps_come_in_bursts_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "WAIT_S", 0.01)
    script, parent = recorder()
    process = Watched(parent, script)
    threading.Thread(target=script._follow, daemon=True).start()

    def train() -> None:
        for _ in range(100):
            for _ in range(BURST):
                script.step()
            threading.Event().wait(0.2)  # as an evaluation
        script.finish()

    def training() -> None:
        with pytest.raises(EndOfTrial):
            train()

    thread = threading.Thread(target=training, daemon=True)
    thread.start()
    end = _followed_training(process, ONE, Convergence(seeds=0, seconds=0.3))  # type: ignore[arg-type]
    process.send("end")
    assert isinstance(end, Finished) and not end.by_itself and end.late is None
    assert len(end.steps.ended) <= process.asked[0] + 2
    thread.join()


def test_a_training_that_is_held_ends_at_most_one_more_step_until_its_last_one_is_named() -> None:
    script, parent = recorder()
    script.step()
    script._obey(Hold())
    assert parent.recv() == Held(1)

    def train() -> None:
        with pytest.raises(EndOfTrial):
            for _ in range(100):
                script.step()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and len(script._steps.ended) == 2
    script._obey(Schedule(4))
    parent.send("end")
    thread.join(10)
    assert len(script._steps.ended) == 4 and script._late is None


def test_a_loop_that_has_ended_waits_for_the_others_without_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float | None] = []

    class Asked(Future[Followed]):
        def result(self, timeout: float | None = None) -> Followed:
            waited.append(timeout)
            return super().result(timeout)

    def fails(*_: object) -> Followed:
        raise ValueError("of the other thread")

    monkeypatch.setattr(loop, "Future", Asked)
    with pytest.raises(ValueError, match="of the other thread"):
        in_thread(fails).result()
    assert waited == [None]
