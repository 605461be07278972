"""Wrapped at all: on several devices, every step calls the wrapper that uses them."""

from __future__ import annotations

from collections.abc import Sequence

from harness.doctor.check import Case, Check
from harness.doctor.steps import Steps
from harness.plan.checks.finding import Finding

NAME = "wrapped at all"


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    first, cell = seen[0], case.cell
    if first.wrapped_by_itself:
        return [
            Finding(
                NAME,
                "error",
                f"the workload's own model holds a wrapper ({first.wrapped_by_itself})",
                "on a CPU or one device it runs the bare model; inside another wrapper it is wrapped twice",
                "return the bare model from build_model(): the cell's strategy wraps it",
            )
        ]
    if not cell.traits.calls_wrapper or first.calls:
        return []
    ran = f"the model inside it {first.inner_calls} times" if first.inner_calls else "another model"
    return [
        Finding(
            NAME,
            "error",
            f"{cell.devices} devices are asked for, but {len(first.losses)} steps called {cell.strategy}'s wrapper "
            f"0 times, and {ran}",
            "each process trains for itself, or one device does all the work: gradients are never exchanged"
            if not cell.traits.one_process
            else "one device does all the work",
            "call the model that is given to loss(model, batch), as model(x): not self.model, not model.module",
        )
    ]


CHECK = Check(NAME, None, judge)
