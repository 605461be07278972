"""Which rank a hanging group waits for, read from where each of its ranks stands (faulthandler's words)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_THREAD = re.compile(r"\n(?=(?:Current thread|Thread) 0x)")
WAITING = ("/torch/distributed/", "/torch/autograd/", "/harness/train/ranks.py")
"""Where a healthy rank stands while it waits for its peers: in a collective, or in a backward pass that ends in one."""
LIBRARY, OURS = "/lib/python", "/harness/"
TRAINS = "run_group"
"""The function that every rank's training thread is in."""


class Frame(NamedTuple):
    """One place in a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file.rsplit('/', 1)[-1]}:{self.line})"


def training_thread(stack: str) -> list[Frame]:
    """The frames of the thread that trains, innermost first; none where it is not among the threads."""
    for thread in _THREAD.split("\n" + stack):
        frames = [Frame(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(thread)]
        if any(frame.name == TRAINS for frame in frames):
            return frames
    return []


def held_up_by(stacks: Mapping[int, str]) -> tuple[int, Frame | None] | None:
    """The first rank that does not wait for the others, and where it stands; None where that cannot be told.

    Where it stands: not in which function of a library, but in which of its callers'.
    """
    threads = {rank: training_thread(stack) for rank, stack in sorted(stacks.items())}
    for rank, frames in threads.items():
        if frames and not any(part in frames[0].file for part in WAITING):
            own = (frame for frame in frames if LIBRARY not in frame.file or OURS in frame.file)
            return rank, next(own, frames[0])
    mute = [rank for rank, frames in threads.items() if not frames]
    return (mute[0], None) if mute and len(mute) < len(threads) else None
