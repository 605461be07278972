"""Claims that end without a verdict, for the test of the acceptance."""

from __future__ import annotations

import os
import time


def abort(device: object) -> None:
    """Crash, as a library does."""
    print("last words", flush=True)
    os.abort()


def leave(device: object) -> None:
    """Leave the process."""
    print("last words", flush=True)
    raise SystemExit(3)


def hang(device: object) -> None:
    """Run into the time limit."""
    print("last words", flush=True)
    time.sleep(60)
