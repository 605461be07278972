"""Conditions of ``harness compare --fail-if``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

METRICS = ("throughput", "speedup")
_GRAMMAR = re.compile(r"\s*([a-z_]+)\s*([<>])\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)\s*")


@dataclass(frozen=True)
class Condition:
    """A condition under which a cell fails: the ratio of ``metric`` is below, or above, the threshold."""

    metric: Literal["throughput", "speedup"]
    below: bool
    threshold: float

    def __str__(self) -> str:
        return f"{self.metric} {'<' if self.below else '>'} {self.threshold:g}"

    def holds(self, ratio: float) -> bool:
        """Return whether a ratio lies on the failing side."""
        return ratio < self.threshold if self.below else ratio > self.threshold


def parse_condition(text: str) -> Condition:
    """Return the condition of 'throughput < 0.95' or 'speedup < 95 %'; raise ValueError."""
    match = _GRAMMAR.fullmatch(text)
    if not match or match[1] not in METRICS or float(match[3]) == 0:
        raise ValueError(
            f"got {text!r}; allowed: METRIC < NUMBER or METRIC > NUMBER, such as 'throughput < 0.95'; METRIC is "
            f"{' or '.join(METRICS)}, as a ratio of the later run to the first; NUMBER is positive"
        )
    metric: Literal["throughput", "speedup"] = "throughput" if match[1] == "throughput" else "speedup"
    return Condition(metric, match[2] == "<", float(match[3]) / (100 if match[4] else 1))
