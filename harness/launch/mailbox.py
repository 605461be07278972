"""The mailbox of worker groups for the driver: an actor of Ray, which starts fast without torch, or behind a socket."""

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

CLOSED = -2
"""A number that no launch has: the mailbox accepts no message."""
JOIN_S = 5.0
RETRY_S = 0.01
DRIVER_GONE = 75
"""Exit code of a process that lost its driver (EX_TEMPFAIL)."""


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


class SocketMailbox(Mailbox):
    """The driver's end: a mailbox for the processes that connect to a socket, which holds trials back.

    A client must know ``key``, since messages are unpickled. Trials may start until ``deadline`` (unix time).
    """

    def __init__(self, path: Path, deadline: float | None) -> None:
        self.key = secrets.token_bytes(32)
        super().__init__()
        self._path, self._closed = str(path), False
        self.open(0, deadline, holds=True)
        self._listener = Listener(self._path, family="AF_UNIX", authkey=self.key)
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop accepting connections; connected ranks get False for every further message."""
        self._closed = True
        self.open(CLOSED, None)
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
                connection.send(self.put(0, connection.recv()))


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
