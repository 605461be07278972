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

from harness.launch.mailbox import CLOSED, Mailbox
from harness.launch.startup import Received

JOIN_S = 5.0
RETRY_S = 0.01
DRIVER_GONE = 75
"""Exit code of a process that lost its driver (EX_TEMPFAIL)."""


class SocketMailbox:
    """The driver's end: a mailbox for the processes that connect to a socket, which holds trials back.

    A client must know ``key``, since messages are unpickled. Trials may start until ``deadline`` (unix time).
    """

    def __init__(self, path: Path, deadline: float | None) -> None:
        self.key = secrets.token_bytes(32)
        self._path, self._closed, self._mailbox = str(path), False, Mailbox()
        self._mailbox.open(0, deadline, holds=True)
        self._listener = Listener(self._path, family="AF_UNIX", authkey=self.key)
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    @property
    def refused(self) -> bool:
        """Whether a trial was not allowed to start."""
        return self._mailbox.refused

    def take(self, wait_s: float) -> list[Received]:
        """Return the messages that have arrived; wait for the first one for at most ``wait_s``."""
        return self._mailbox.take(wait_s)

    def close(self) -> None:
        """Stop accepting connections; connected ranks get False for every further message."""
        self._closed = True
        self._mailbox.open(CLOSED, None)
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
                connection.send(self._mailbox.put(0, connection.recv()))


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
