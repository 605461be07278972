"""The doubts of a trial in words that need no key."""

from __future__ import annotations

from collections.abc import Mapping

from harness.analysis.doubts import kind_of

DOUBTS: Mapping[str, str] = {
    "impossible efficiency": "a speedup that more devices cannot explain",
    "waits for data": "most of the step is a wait for data",
    "inline": "it ran in the command's own process",
    "no steady state": "the speed had not settled after the warm-up",
    "skipped updates": "fp16 skipped updates",
    "wide spread": "the times of single steps vary widely",
    "windows drift": "the speed changed during a measurement",
    "stalled": "single steps took seconds",
    "slow rank": "one device was slower than the others",
    "settings of the process": "the process ran with settings that change its speed",
    "foreign load": "other programs used the processor",
    "memory swapped": "memory was swapped to disk",
    "clocks throttled": "a GPU lowered its clock, for heat or a fault",
    "other clock than the base's": "the GPUs' clock differs",
    "foreign load on the GPU": "other programs used a GPU",
    "threads differ from the base's": "the number of threads per device differs",
    "other devices than the base's": "the devices are of another model",
    "other hosts than the base's": "the machines are others",
    "environment differs from the base's": "versions or settings differ",
    "block cut in two": "an interruption lies between the trials of a ratio",
}
"""The doubts of a trial by name, in plain words; the section Doubts has their thresholds."""


def plain_doubt(name: str) -> str:
    """Return a trial's doubt in plain words, with what its name has after a colon: settings."""
    words, (_, _, which) = DOUBTS[kind_of(name)], name.partition(": ")
    return f"{words}: {which}" if which else words
