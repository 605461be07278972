"""Memory growth: what the steps keep, step by step, such as losses with the graphs that they came from."""

from __future__ import annotations

from collections.abc import Sequence

from harness.doctor.check import Case, Check
from harness.doctor.step_memory import LEAST, least_growth
from harness.doctor.steps import Steps
from harness.plan.checks.finding import Finding
from harness.system.units import MIB

NAME = "memory growth"


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    for rank, steps in enumerate(seen):
        growth = least_growth(steps.kept_bytes)
        if growth >= LEAST:
            return [
                Finding(
                    NAME,
                    "warning",
                    f"tensors that steps keep on rank {rank}: {growth / MIB:.3g} MiB more after each one, a "
                    "graph counted as 1 MiB",
                    "memory grows until none is left; each graph keeps the activations of its step",
                    "keep numbers, not tensors with their graphs: loss.detach(), or .item() once in a while",
                )
            ]
    return []


CHECK = Check(NAME, None, judge, about=("loss", "forward"), clue=r"\.append\(|\+= |\.extend\(")
