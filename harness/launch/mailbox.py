"""The mailbox of worker groups for the driver. Ray starts an actor of it fast, since it imports no torch."""

from __future__ import annotations

import threading
import time

from harness.launch.protocol import TrialStarted
from harness.launch.startup import Received

CLOSED = -2
"""A number that no launch has: the mailbox accepts no message."""


class Mailbox:
    """Queues the messages of the workers until the driver takes them; threads call it.

    Every launch of a worker group has a number; late messages of a killed group are dropped.
    """

    def __init__(self) -> None:
        self.refused = False
        """Whether a trial was not allowed to start, as its time was over."""
        self._launch = -1
        self._deadline: float | None = None
        self._holds = False
        self._messages: list[Received] = []
        self._handled = True
        self._changed = threading.Condition()

    def open(self, launch: int, deadline: float | None, holds: bool = False) -> None:
        """Accept only messages of this launch from now on; trials may start until ``deadline`` (unix time).

        ``holds``: a trial starts once the driver has handled every message before its announcement, as which counts
        that it asks for more. It works for the driver between two trials, when nothing is measured.
        """
        with self._changed:
            self._launch, self._deadline, self._holds = launch, deadline, holds
            self._messages, self._handled = [], True
            self._changed.notify_all()  # those that wait look at the number of their launch

    def put(self, launch: int, message: Received) -> bool:
        """Queue a message; return False if its sender must not start the trial that the message announces."""
        with self._changed:
            if isinstance(message, TrialStarted) and self._holds:
                self._changed.wait_for(lambda: self._handled or launch != self._launch)
            if launch != self._launch:
                return False
            if isinstance(message, TrialStarted) and self._deadline is not None and time.time() >= self._deadline:
                self.refused = True
                return False
            self._messages.append(message)
            self._handled = False
            self._changed.notify_all()
        return True

    def take(self, wait_s: float) -> list[Received]:
        """Return the messages that have arrived; wait for the first one for at most ``wait_s``."""
        with self._changed:
            if not self._messages:
                self._handled = True
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._messages, wait_s)
            messages, self._messages = self._messages, []
            return messages
