"""Wrapper use: on several devices, every step calls the strategy's wrapper."""

from __future__ import annotations

from collections.abc import Sequence

from harness.doctor.check import Case, Check
from harness.doctor.steps import Steps
from harness.plan.checks.finding import Finding

NAME = "wrapper use"


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    first, cell = seen[0], case.cell
    if first.wrapped_by_itself:
        return [
            Finding(
                NAME,
                "error",
                f"wrapper inside the workload's own model: {first.wrapped_by_itself}",
                "two wrappers under dp, ddp or fsdp; on a CPU or one device this wrapper only calls the bare model",
                "return the bare model from build_model(); the cell's strategy wraps it",
            )
        ]
    if not cell.traits.calls_wrapper or first.calls:
        return []
    ran = f"the model inside it {first.inner_calls}" if first.inner_calls else "another model was called"
    return [
        Finding(
            NAME,
            "error",
            f"forward calls of {cell.strategy}'s wrapper in {len(first.losses)} steps on "
            f"{cell.devices} device{'s' * (cell.devices > 1)}: 0; {ran}",
            "computation on one device only"
            if cell.traits.one_process
            else "no gradient synchronisation: each process trains a model of its own",
            "call the model that loss(model, batch) receives, model(x); not self.model, not model.module",
        )
    ]


CHECK = Check(NAME, None, judge, about=("loss",), clue=r"DataParallel\(|self\.\w+\(")
