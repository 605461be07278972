"""The end of a training: at the step that is named, wherever its steps are; followed from a thread beside a loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.sections import Convergence
from harness.measure.script import following
from harness.measure.script.child import Counting
from harness.measure.script.counting import StepRecorder
from harness.measure.script.following import _followed_training
from harness.measure.script.loop import _run
from harness.measure.script.messages import EndOfTrial, Finished, Held, Hold, Progress, Schedule, Steps
from harness.measure.script.parent import InThread, ScriptFailed
from harness.train.ranks import Ranks
from tests.cluster.machines import wait_for

ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
BURST = 1000


def recorder() -> tuple[StepRecorder, Any]:
    ours, theirs = Pipe()
    return StepRecorder(theirs, lambda: None, Counting(trains=True)), ours


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


class Two(Ranks):
    """Rank 0 of two. ``others``: the steps of the other by now, the next after three seconds; its script takes 60."""

    others: Iterator[int]
    other = 0

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, bool):  # whether the script has ended
            return [value, self.other == 60]
        type(self).other = next(self.others)
        return [value, self.other]

    def broadcast(self, value: Any) -> Any:
        return value


STEADY = (10, 20, 30, 40, 50, 60)


@pytest.mark.parametrize(
    ("others", "waits", "fails"),
    [(STEADY, True, False), (STEADY, False, True), ((10, *[20] * 9), True, True)],
    ids=["takes steps", "of windows", "takes none"],
)
def test_a_rank_that_still_takes_steps_after_another_one_s_end_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, others: Sequence[int], waits: bool, fails: bool
) -> None:
    monkeypatch.setattr(following.time, "monotonic", partial(next, count(0.0, 3.0)))
    monkeypatch.setattr(Two, "others", iter(others), raising=False)
    unused: Any = None
    end = Finished(Steps(ended=[0.0] * 60), unused, by_itself=True)
    process: Any = SimpleNamespace(messages=lambda seconds: [end], exit_code=0)
    two = Two(0, 2, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
    if not fails:
        assert following._to_schedule(process, two, unused, 1.0, waits=waits) == (0, end)
        return
    with pytest.raises(ScriptFailed, match=f"until one ended: 60, {others[4]}"):
        following._to_schedule(process, two, unused, 1.0, waits=waits)


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
    wait_for(lambda: len(script._steps.ended) > 1, 30)
    thread.join(0.2)
    assert thread.is_alive() and len(script._steps.ended) == 2
    script._obey(Schedule(4))
    parent.send("end")
    thread.join(10)
    assert len(script._steps.ended) == 4 and script._late is None


def test_an_error_of_a_loop_is_raised_and_what_follows_its_last_window_is_sent() -> None:
    sent: list[Any] = []
    recorder: Any = SimpleNamespace(
        measured=False, fail=lambda *words: sent.append(words), finish=lambda: sent.append("end")
    )

    def fails(config: Any) -> None:
        raise config["error"]

    with pytest.raises(ValueError, match="no such column"):
        _run(fails, {"error": ValueError("no such column")}, recorder)
    recorder.measured = True
    for error in (ValueError("too late"), SystemExit(3)):
        _run(fails, {"error": error}, recorder)
    _run(len, {}, recorder)
    assert sent == [("ValueError", "too late"), ("SystemExit", "the loop ended with exit code 3"), "end"]
