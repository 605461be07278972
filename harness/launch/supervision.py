"""What both launchers do with a worker group that runs: receive its messages, watch it, end it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from harness.launch.protocol import GroupStarted, Measured, Message, Sent, TrialStarted
from harness.launch.startup import Received, Registration, ResourcesRequested, StartupTimer
from harness.launch.watchdog import Ending, Verdict, Watchdog
from harness.plan.trial import TrialResult

TAKE_S = 1.0
"""The timeout of one look at the messages; a message ends it."""
ENDING_S = 0.05
"""The same after the last result, when only the end of the processes is awaited."""


class RunningGroup(Protocol):
    """The processes of a worker group as one launcher started them."""

    @property
    def ended(self) -> bool:
        """Whether all of them have ended."""
        ...

    def take(self, timeout_s: float) -> Sequence[Received]:
        """Return the messages that have arrived; wait for the first one for at most ``timeout_s``."""
        ...

    def kill(self) -> None:
        """Kill them and what they started; return when they have ended, or when that takes too long."""
        ...

    def release(self) -> None:
        """Free what the group holds, however it ended: kill it if it still runs."""
        ...


@dataclass(frozen=True)
class GroupEnd:
    """How a worker group ended: which of its trials finished, which one it was at, and the failures in order."""

    verdict: Verdict
    finished: tuple[TrialResult, ...]
    failures: tuple[TrialResult, ...]
    """Not yielded: the cause may be a failure of a peer, which is only known when all processes have ended."""
    current: str | None
    measured: TrialResult | None = None
    """The measurement of the current trial, if it was complete."""


def supervise(
    group: RunningGroup, watchdog: Watchdog, timer: StartupTimer, last: str
) -> Generator[Message, None, GroupEnd]:
    """Yield the messages of a group whose last trial is ``last``, until it has ended or had to be ended; return how.

    Failures and measurements without their explanation are not among them. Closing the generator ends the group.
    """
    finished, failures = list[TrialResult](), list[TrialResult]()
    current: str | None = None
    measured: TrialResult | None = None
    timeout_s = TAKE_S
    try:
        while True:
            ended = group.ended  # before the last look, so that no message sent until then is missed
            for message in _messages(group.take(0.0 if ended else timeout_s), watchdog, timer):
                match message:
                    case GroupStarted():
                        message = replace(message, parts=timer.parts(time.time()))
                    case TrialStarted():
                        current = message.trial_id
                    case Measured():
                        measured = message.result
                        continue
                    case TrialResult():
                        timeout_s = ENDING_S if message.trial_id == last or message.ends_group else timeout_s
                        watchdog.record_result(message)
                        (failures if message.ends_group else finished).append(message)
                        if message.ends_group:
                            continue
                        current = measured = None
                yield message
                watchdog.record_progress()  # what the driver did meanwhile is no time without a step
            verdict = Verdict(Ending.BY_ITSELF) if ended else watchdog.poll()
            if verdict is not None:
                break
        if not ended:
            group.kill()
    finally:
        group.release()
    return GroupEnd(verdict, tuple(finished), tuple(failures), current, measured)


def _messages(received: Sequence[Received], watchdog: Watchdog, timer: StartupTimer) -> Iterator[Sent]:
    """Yield the messages of the trials; record those of the start."""
    for message in received:
        watchdog.record_progress()
        if isinstance(message, Registration):
            watchdog.add(message)
        if isinstance(message, Registration | ResourcesRequested):
            timer.record(message, time.time())
        else:
            yield message
