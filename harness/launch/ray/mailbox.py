"""The mailbox of worker groups for the driver: an actor that the driver owns. Starts fast, since without torch."""

from __future__ import annotations

import asyncio
import time

from harness.launch.protocol import TrialStarted
from harness.launch.startup import Received


class Mailbox:
    """Queues the messages of the workers until the driver takes them. An asyncio Ray actor.

    Every launch of a worker group has a number; late messages of a killed group are dropped.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Received] = asyncio.Queue()
        self._launch = -1
        self._deadline: float | None = None
        self._holds = False
        self._handled = asyncio.Event()

    async def open(self, launch: int, deadline: float | None, holds: bool = False) -> None:
        """Accept only messages of this launch from now on; trials may start until ``deadline`` (unix time).

        ``holds``: a trial starts once the driver has handled every message before its announcement, as which counts
        that it asks for more. It works for the driver between two trials, when nothing is measured.
        """
        self._launch, self._deadline, self._holds = launch, deadline, holds
        self._queue = asyncio.Queue()
        self._handled.set()  # those that wait look at the number of their launch
        self._handled = asyncio.Event()

    async def put(self, launch: int, message: Received) -> bool:
        """Queue a message; return False if its sender must not start the trial that the message announces."""
        if launch != self._launch:
            return False
        if isinstance(message, TrialStarted) and self._holds:
            await self._handled.wait()
            if launch != self._launch:
                return False
        if isinstance(message, TrialStarted) and self._deadline is not None and time.time() >= self._deadline:
            return False
        self._handled.clear()
        await self._queue.put(message)
        return True

    async def take(self, wait_s: float) -> list[Received]:
        """Return the messages that have arrived; wait for the first one for at most ``wait_s``."""
        messages: list[Received] = []
        if self._queue.empty():
            self._handled.set()
        if self._queue.empty() and wait_s > 0:
            try:
                messages.append(await asyncio.wait_for(self._queue.get(), wait_s))
            except TimeoutError:
                return []
        while not self._queue.empty():
            messages.append(self._queue.get_nowait())
        return messages
