"""Child processes of the driver that import the user's code: they cannot outlive a block, nor change the driver.

``python -m harness.run.child_process FOLDER`` is one; it imports what the job in the folder needs, torch too.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO, Generic, TypeVar

from harness.errors import HarnessError
from harness.system import sanitize
from harness.system.process import die_with_parent
from harness.system.scratch import Scratch
from harness.system.user_code import CodeVersion

Given = TypeVar("Given")
Answer = TypeVar("Answer")
POLL_S = 0.05
OUTPUT_BYTES = 2000


@dataclass
class Child(Generic[Answer]):
    """A process that computes answers. ``end``: how it ended before it gave all of them; '' while it runs."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    folder: Path
    end: str = ""

    def answers(self, limit_s: float = inf) -> Iterator[Answer]:
        """Yield the answers until the process has ended, or has given none for the time limit."""
        given, last = 0, time.monotonic()
        while not self.end and time.monotonic() - last <= limit_s:
            code = self.process.poll()  # before the files are read: all that it wrote is there
            while (file := self.folder / str(given)).exists():
                yield pickle.loads(file.read_bytes())  # ours: the folder is closed to others
                given, last = given + 1, time.monotonic()
            if code is None:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(POLL_S)
            else:
                lines = sanitize.redacted_tail(self.output, OUTPUT_BYTES).strip().splitlines()
                self.end = f"ended with exit code {code}: {lines[-1] if lines else 'it printed nothing'}"


@contextmanager
def child_process(
    function: Callable[[Given], Answer], arguments: Sequence[Given], version: CodeVersion | None, path: Sequence[str]
) -> Iterator[Child[Answer]]:
    """Call a function with each argument in a new process with this import path, which then imports this version.

    At the end of the block the process is killed, with what it started.
    """
    with Scratch() as folder, tempfile.TemporaryFile() as output:
        (folder / "job").write_bytes(pickle.dumps((version, function, arguments)))
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the driver's
            preexec_fn=die_with_parent,
        )
        try:
            yield Child(process, output, folder)
        finally:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def checked(
    version: CodeVersion, function: Callable[[Given], Answer], argument: Given
) -> tuple[Answer | None, list[str]]:
    """Return the function's value and the messages of a HarnessError, among them the message on changed code."""
    try:
        value = function(argument)
        version.check()
        return value, []
    except HarnessError as error:  # as text: its class may be the user's own, which the driver does not import
        return None, [str(part) for part in error.parts or (error,)]


def main(folder: Path) -> None:
    """Carry out the job in the folder: write the answer to each argument, in files named by its position."""
    version, function, arguments = pickle.loads((folder / "job").read_bytes())
    if version:
        version.use()
    for position, argument in enumerate(arguments):
        partial = folder / "partial"
        partial.write_bytes(pickle.dumps(function(argument)))
        os.replace(partial, folder / str(position))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the user's code must not keep the driver waiting
