"""Parameters move: after a few steps every trainable one has changed, and equally on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.doctor import wrapper
from harness.doctor.check import Case, Check
from harness.doctor.steps import STEPS, Steps
from harness.plan.cell import Cell
from harness.plan.checks.finding import Finding, join_names
from harness.plan.rows import Severity

NAME = "parameters move"
WHY = {
    "none": (
        "got no gradient",
        "they are not used in forward, or the graph is cut before them (detach, no_grad, .data, a copy of the model)",
        "use them, freeze them with requires_grad_(False), or leave them out; keep the graph whole from model(x) to "
        "the loss (ddp also needs find_unused_parameters for what is used now and then)",
    ),
    "zero": (
        "got a gradient of exactly zero",
        "what they compute does not reach the loss in these steps",
        "look at what is multiplied by zero or masked before the loss; a dead ReLU may do it too",
    ),
    "some": (
        "got a gradient, and did not change",
        "the optimizer steps in other tensors: the module replaced its parameters after it was wrapped (a copy, a new "
        "nn.Parameter), or the rate is zero",
        "make every parameter in build_model() and never assign it anew; look at the learning rate",
    ),
}


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    return [*still(seen, case.cell), *_apart(seen)]


def still(seen: Sequence[Steps], cell: Cell) -> list[Finding]:
    """Return findings on parameters that moved on no rank.

    A parameter without a gradient is an error under ddp, whose second step fails, unless an option allows it.
    """
    allowed = any(cell.strategy_options.get(option) for option in ("find_unused_parameters", "static_graph"))
    stops = cell.traits.needs_every_gradient and not allowed
    found = []
    for kind, (what, means, advice) in WHY.items():
        # a shard of fsdp may be empty on a rank: a parameter is unmoved only if it moved on no rank
        names = [name for name, why in seen[0].unmoved.items() if why == kind and all(name in r.unmoved for r in seen)]
        if names:
            every = len(names) == seen[0].trainable
            severity: Severity = "error" if every or kind == "some" or (kind == "none" and stops) else "warning"
            count = f"all {len(names)}" if every else f"{len(names)} of {seen[0].trainable}"
            seen_text = f"{count} trainable parameters {what} in {STEPS} steps: {join_names(names)}"
            found.append(Finding(NAME, severity, seen_text, means, advice))
    return found


def _apart(seen: Sequence[Steps]) -> Iterator[Finding]:
    names = [name for name in seen[0].digests if len({rank.digests.get(name) for rank in seen}) > 1]
    if names:
        yield Finding(
            NAME,
            "error",
            f"{len(names)} of {seen[0].trainable} parameters differ between ranks after {STEPS} steps: "
            f"{join_names(names)}",
            "the ranks train different models",
            "let gradients flow through the wrapper, model(x), and leave updates to the optimizer; an update by hand "
            "must be the same on every rank",
        )


CHECK = Check(NAME, None, judge, redundant=lambda findings: any(finding.check == wrapper.NAME for finding in findings))
