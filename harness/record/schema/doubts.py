"""Every doubt by name: the threshold that it crosses, and what it means."""

from __future__ import annotations

from harness.plan.thresholds import STEADY_CHANGE, STEADY_NOISE

WIDE_SPREAD = 0.10
SLOW_RANK = 1.20
FOREIGN_CORES = 0.25

DOUBTS: dict[str, str] = {
    "no steady state": "the warm-up came to its limit before the medians of two rounds of steps, and the ends of the "
    f"last one's trend, were within {100 * STEADY_CHANGE:.0f} % (within their noise up to {100 * STEADY_NOISE:.0f} %)",
    "wide spread": f"the interquartile range of the timed steps is over {100 * WIDE_SPREAD:.0f} % of their median",
    "slow rank": f"that rank's own step, without gradient exchange, takes over {SLOW_RANK:g} times the median rank's "
    "(looked at where throughput.explain times ddp's steps alone)",
    "foreign load": f"other processes kept over {FOREIGN_CORES:g} cores of a node busy while steps were timed",
    "foreign load on the GPU": "other processes computed on a GPU while steps were timed",
    "memory swapped": "the node swapped memory while steps were timed",
    "clocks throttled": "heat or power held a GPU's clocks down for over a hundredth of the time, or at its end",
    "threads differ from the base's": "not as many threads a device as its base had",
    "other devices than the base's": "other models of devices",
    "other hosts than the base's": "not on the machine that its base ran on",
    "environment differs from the base's": "other versions, settings or hardware than in its base's worker group",
}
"""'slow rank' is followed by the rank's number."""
