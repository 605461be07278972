"""The connection of worker groups without Ray to the driver: a unix socket in a folder only the driver can read."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from harness.launch.protocol import TrialStarted
from harness.launch.startup import Received

JOIN_S = 5.0
RETRY_S = 0.01
DRIVER_GONE = 75
"""Exit code of a process that lost its driver (EX_TEMPFAIL)."""


class SocketMailbox:
    """The driver's end: queues the messages of the processes and answers each at once, but the announcement of a trial.

    The trial starts once the driver has handled every message before, as which counts that it asks for more: it may
    work between two trials, when nothing is measured. A client must know ``key``, since messages are unpickled. Trials
    may start until ``deadline`` (unix time).
    """

    def __init__(self, path: Path, deadline: float | None) -> None:
        self.key = secrets.token_bytes(32)
        self.refused = False
        """Whether a trial was not allowed to start."""
        self._path, self._deadline = str(path), deadline
        self._queue: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._closed = False
        self._changed = threading.Condition()
        self._queued = self._taken = self._handled = 0
        self._listener = Listener(self._path, family="AF_UNIX", authkey=self.key)
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def take(self, wait_s: float) -> list[Received]:
        """Return the messages that have arrived; wait for the first one for at most ``wait_s``."""
        messages: list[Received] = []
        with self._changed:
            self._handled = self._taken
            self._changed.notify_all()
        with contextlib.suppress(queue.Empty):
            messages.append(self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        self._taken += len(messages)
        return messages

    def close(self) -> None:
        """Stop accepting connections; connected ranks get False for every further message."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(self._path)  # accept() does not end by itself
        self._acceptor.join(JOIN_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):  # the client ended, or does not have the key
                time.sleep(RETRY_S)
            else:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            while True:
                connection.send(self._put(connection.recv()))

    def _put(self, message: Received) -> bool:
        with self._changed:
            if isinstance(message, TrialStarted):
                self._changed.wait_for(lambda: self._closed or self._handled == self._queued)
            if self._closed:
                return False
            if isinstance(message, TrialStarted) and self._deadline is not None and time.time() >= self._deadline:
                self.refused = True
                return False
            self._queued += 1
            self._queue.put(message)
        return True


class DriverLine:
    """A rank's end. This process exits as soon as the driver does; then torchrun ends itself."""

    def __init__(self, path: Path, key: bytes) -> None:
        self._connection = Client(str(path), family="AF_UNIX", authkey=key)
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: Received) -> bool:
        """Send to the driver and return its answer; False asks the group to stop before its next trial."""
        self._connection.send(message)
        return self._answers.get()

    def _listen(self) -> None:
        """Block on the socket until an answer or its end: no cost for a timed window."""
        try:
            while True:
                self._answers.put(self._connection.recv())
        except (OSError, EOFError):
            os._exit(DRIVER_GONE)
