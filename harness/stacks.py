"""Which rank a hanging group waits for, read from where each of its ranks stands (faulthandler's words)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_THREAD = re.compile(r"\n(?=(?:Current thread|Thread) 0x)")
WAITING = ("/torch/distributed/", "/torch/autograd/", "/harness/ranks.py")
"""Where a healthy rank stands while it waits for its peers: in a collective, or in a backward pass that ends in one."""
TRAINS = "run_group"
"""The function that every rank's training thread is in."""


class Frame(NamedTuple):
    """One place in a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file.rsplit('/', 1)[-1]}:{self.line})"


def innermost(stack: str) -> Frame | None:
    """Where the thread that trains stands; None where it is not among the threads."""
    for thread in _THREAD.split("\n" + stack):
        frames = [Frame(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(thread)]
        if any(frame.name == TRAINS for frame in frames):
            return frames[0]
    return None


def held_up_by(stacks: Mapping[int, str]) -> tuple[int, Frame | None] | None:
    """The first rank that does not wait for the others, and where it stands; None where that cannot be told."""
    places = {rank: innermost(stack) for rank, stack in sorted(stacks.items())}
    busy = {rank: place for rank, place in places.items() if place and not _waits(place)}
    mute = {rank: place for rank, place in places.items() if place is None}
    if busy:
        return next(iter(busy.items()))
    return next(iter(mute.items())) if mute and len(mute) < len(places) else None


def _waits(place: Frame) -> bool:
    return any(part in place.file for part in WAITING)
