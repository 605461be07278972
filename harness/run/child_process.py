"""Child processes of the driver that import the user's code: they cannot outlive a block, nor change the driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from harness.system.process import die_with_parent


@contextmanager
def child_process(
    module: str, job: Path, import_path: Sequence[str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``python -m MODULE JOB`` with this import path; kill it, and what it started, at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(job)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(import_path), "PYTHONSAFEPATH": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is the driver's
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
