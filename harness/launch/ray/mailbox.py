"""How worker groups talk to the driver: an actor that the driver owns. Kept free of torch, it starts fast."""

from __future__ import annotations

import asyncio
import time

from harness.launch.protocol import TrialStarted
from harness.launch.startup import Received


class Mailbox:
    """Keeps what the workers send until the driver takes it. An asyncio Ray actor.

    Every launch of a worker group has a number; what a killed group sent late is dropped.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Received] = asyncio.Queue()
        self._launch = -1
        self._deadline: float | None = None

    async def open(self, launch: int, deadline: float | None) -> None:
        """From now on only this launch's messages count; trials may start until ``deadline`` (unix time)."""
        self._launch, self._deadline = launch, deadline
        self._queue = asyncio.Queue()

    async def put(self, launch: int, message: Received) -> bool:
        """Keeps a message; False tells its sender not to start the trial it announces."""
        if launch != self._launch:
            return False
        if isinstance(message, TrialStarted) and self._deadline is not None and time.time() >= self._deadline:
            return False
        await self._queue.put(message)
        return True

    async def take(self, wait_s: float) -> list[Received]:
        """What has arrived; waits so long for a first message."""
        messages: list[Received] = []
        if self._queue.empty() and wait_s > 0:
            try:
                messages.append(await asyncio.wait_for(self._queue.get(), wait_s))
            except TimeoutError:
                return []
        while not self._queue.empty():
            messages.append(self._queue.get_nowait())
        return messages
