"""The supervision that both launchers share, over a group that is a script, its counter of steps and its mailbox."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from harness.launch.mailbox import Mailbox
from harness.launch.postmortem import ProcessOutput
from harness.launch.protocol import GroupStarted, Measured, Message, TrialStarted
from harness.launch.startup import Registration, StartupTimer
from harness.launch.supervision import (
    ENDING_S,
    TAKE_S,
    Ending,
    GroupEnd,
    Received,
    Watchdog,
    supervise,
)
from harness.plan.trial import TrialResult
from harness.system.process import read_counter, step_counter

FAILURE = TrialResult("b", "error", "ValueError on rank 0", error_rank=0)


@dataclass
class Script:
    """A group that sends these batches of messages, and ends with the last."""

    batches: list[list[Received]]
    ends: bool = True
    events: list[str] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.ends and not self.batches

    def take(self, timeout_s: float) -> Sequence[Received]:
        self.timeouts.append(timeout_s)
        return self.batches.pop(0) if self.batches else []

    def kill(self) -> None:
        self.events.append("kill")

    def release(self) -> None:
        self.events.append("release")


def watchdog(**limits: Any) -> Watchdog:
    return Watchdog(lambda question, things: [True] * len(things), 800.0, **limits)


def registration(*, connected: bool) -> Registration:
    return Registration(0, "n0", "", "", connected, pid=1, created_at=10.0, traces=ProcessOutput())


def supervised(script: Script, dog: Watchdog) -> tuple[list[Message], GroupEnd]:
    generator = supervise(script, dog, StartupTimer(9.0, "starter"), last="b")
    messages: list[Message] = []
    try:
        while True:
            messages.append(next(generator))
    except StopIteration as stop:
        end: GroupEnd = stop.value
        return messages, end


def test_messages_come_in_order_and_registrations_stay_inside() -> None:
    done = TrialResult("a", "ok")
    ups: list[Received] = [registration(connected=False), registration(connected=True), GroupStarted((), ())]
    script = Script([ups, [TrialStarted("a"), done, TrialStarted("b")]])
    messages, end = supervised(script, watchdog())
    started, *rest = messages
    assert isinstance(started, GroupStarted)
    assert list(started.parts) == ["starter", "worker start", "process group", "first word"]
    assert rest == [TrialStarted("a"), done, TrialStarted("b")]
    assert end == GroupEnd(Ending.BY_ITSELF, (done,), (), "b")
    assert script.events == ["release"]
    script = Script([[TrialStarted("b")], [TrialResult("b", "ok")], []])
    assert supervised(script, watchdog())[1].current is None
    assert script.timeouts == [TAKE_S, TAKE_S, ENDING_S, 0.0], "the poll is short after the last result"


def test_a_measurement_is_kept_until_its_trial_has_its_result() -> None:
    measured = TrialResult("b", "ok", parts={"timed": 1.0})
    first: list[Received] = [TrialStarted("a"), Measured(replace(measured, trial_id="a")), TrialResult("a", "ok")]
    messages, end = supervised(Script([first, [TrialStarted("b")]]), watchdog())
    assert messages == [TrialStarted("a"), TrialResult("a", "ok"), TrialStarted("b")] and end.measured is None
    messages, end = supervised(Script([first, [TrialStarted("b"), Measured(measured), FAILURE]]), watchdog(grace_s=0.0))
    assert end.measured is measured and end.failures == (FAILURE,) and Measured(measured) not in messages


def test_a_group_is_killed_if_its_ranks_outlive_a_failure_or_never_start() -> None:
    script = Script([[TrialStarted("b"), FAILURE]])
    messages, end = supervised(script, watchdog())
    assert messages == [TrialStarted("b")]
    assert (end.failures, end.current, end.finished) == ((FAILURE,), "b", ()) and script.events == ["release"]
    outliving, silent = (Script(batches, ends=False) for batches in ([[TrialStarted("b"), FAILURE]], []))
    ending = supervised(outliving, watchdog(grace_s=-1.0))[1].ending
    assert ending is Ending.AFTER_FAILURE and ending.was_cut_short
    assert supervised(silent, watchdog(start_s=-1.0))[1].ending == Ending.NEVER_STARTED
    assert outliving.events == ["kill", "release"] and silent.events == ["release"]


def test_a_node_that_dies_ends_a_group_until_its_ranks_are_connected() -> None:
    starting = Script([[registration(connected=False)]], ends=False)
    dog = watchdog(find_dead_node=iter([None, "n1 (10.0.0.2)"]).__next__)
    assert supervised(starting, dog)[1].ending is Ending.NODE_LOST
    assert dog.dead_node == "n1 (10.0.0.2)" and dog.failed_at is not None
    assert starting.events == ["release"], "which waits for no rank, as the start may have none"
    connected = Script([[registration(connected=True)], [TrialStarted("b")], [TrialResult("b", "ok")]])
    asked = watchdog(find_dead_node=lambda: pytest.fail("asked while trials run"))
    assert supervised(connected, asked)[1].ending is Ending.BY_ITSELF


def test_a_group_is_released_if_the_generator_is_closed_or_an_error_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Script, timeout_s: float) -> Sequence[Received]:
        raise RuntimeError("the mailbox is gone")

    closed, failing = Script([[TrialStarted("a")]], ends=False), Script([], ends=False)
    generator = supervise(closed, watchdog(), StartupTimer(9.0, "starter"), last="b")
    assert next(generator) == TrialStarted("a")
    generator.close()
    monkeypatch.setattr(Script, "take", lost)
    with pytest.raises(RuntimeError, match="is gone"):
        supervised(failing, watchdog())
    assert closed.events == failing.events == ["release"]


def test_another_process_sees_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    with step_counter(path) as advance:
        assert read_counter(path) == 0
        for _ in range(5):
            advance()
        script = "import sys; from harness.system.process import *; print(read_counter(Path(sys.argv[1])))"
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "5"
    assert read_counter(path) is None
    path.write_bytes(b"abc")  # torn
    assert read_counter(path) is None


RESULT, NEXT = TrialResult("a", "ok"), TrialStarted("b")
SHORT_S = 0.05
"""Too short to tell that a trial is held for good, and long enough to see one that is not."""


def _held(pool: ThreadPoolExecutor, mailbox: Mailbox, *, mirrored: bool = True) -> Future[bool]:
    """A trial that asks to start once a result is there."""
    mailbox.open(0, None, mirrored)
    assert mailbox.put(0, GroupStarted((), ())) and mailbox.put(0, RESULT)
    return pool.submit(mailbox.put, 0, NEXT)


def test_a_held_trial_starts_once_the_driver_has_handled_the_last_result() -> None:
    mailbox = Mailbox()
    with ThreadPoolExecutor() as pool:
        started = _held(pool, mailbox)
        assert not wait([started], SHORT_S).done
        assert mailbox.take(0.0) == [GroupStarted((), ()), RESULT]
        assert not wait([started], SHORT_S).done  # the driver has the result, and may still record it
        assert mailbox.take(10.0) == [NEXT] and started.result()


def test_a_held_trial_of_a_group_that_was_given_up_is_refused_and_without_a_mirror_nothing_is_held() -> None:
    mailbox = Mailbox()
    with ThreadPoolExecutor() as pool:
        started = _held(pool, mailbox)
        assert not wait([started], SHORT_S).done
        mailbox.open(1, None, True)
        assert started.result() is False and mailbox.take(0.0) == []
        assert _held(pool, Mailbox(), mirrored=False).result()
