"""Parameter updates: after a few steps every trainable parameter has changed, and equally on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.doctor import wrapper
from harness.doctor.check import Case, Check
from harness.doctor.steps import STEPS, Steps
from harness.plan.cell import Cell
from harness.plan.checks.finding import Finding, join_names
from harness.plan.rows import Severity

NAME = "parameter updates"
WHY = {
    "none": (
        "without a gradient",
        "parameters that forward does not use, or that detach, no_grad, .data or a copy of the model cuts off from the "
        "loss",
        "use the parameters, freeze them with requires_grad_(False), or remove them; compute the loss from model(x) "
        "without detaching (parameters that only some steps use need ddp.find_unused_parameters)",
    ),
    "zero": (
        "with a gradient of exactly zero",
        "no effect of these parameters on the loss in these steps",
        "look for factors of zero, masks and dead ReLUs between these parameters and the loss",
    ),
    "some": (
        "unchanged in spite of a gradient",
        "the optimizer updates other tensors, as the module replaced its parameters after it was wrapped (a copy, a "
        "new nn.Parameter), or the learning rate is zero",
        "create every parameter in build_model() and never replace it; check the learning rate",
    ),
}


def judge(seen: Sequence[Steps], case: Case) -> list[Finding]:
    return [*unchanged(seen, case.cell), *_apart(seen), *_by_hand(seen), *_only_biases(seen)]


def unchanged(seen: Sequence[Steps], cell: Cell) -> list[Finding]:
    """Return findings on parameters that changed on no rank.

    A parameter without a gradient is an error under ddp, whose second step fails, unless an option allows it.
    """
    allowed = any(cell.strategy_options.get(option) for option in ("find_unused_parameters", "static_graph"))
    stops = cell.traits.needs_every_gradient and not allowed
    found = []
    for kind, (what, means, advice) in WHY.items():
        # a shard of fsdp may be empty on a rank: a parameter is unchanged only if it changed on no rank
        names = [
            name for name, why in seen[0].unchanged.items() if why == kind and all(name in r.unchanged for r in seen)
        ]
        if names:
            every = len(names) == seen[0].trainable
            severity: Severity = "error" if every or kind == "some" or (kind == "none" and stops) else "warning"
            count = f"all {len(names)}" if every else f"{len(names)} of {seen[0].trainable}"
            seen_text = f"trainable parameters {what} in {STEPS} steps: {count} ({join_names(names)})"
            crashes = every or (kind == "none" and stops)
            found.append(Finding(NAME, severity, seen_text, means, advice, stops=crashes))
    return found


def _apart(seen: Sequence[Steps]) -> Iterator[Finding]:
    names = [name for name in seen[0].digests if len({rank.digests.get(name) for rank in seen}) > 1]
    if names:
        yield Finding(
            NAME,
            "error",
            f"parameters that differ between ranks after {STEPS} steps: {len(names)} of {seen[0].trainable} "
            f"({join_names(names)})",
            "a different model on each rank",
            "call the wrapped model, model(x), and leave updates to the optimizer; an update in the workload's own "
            "code must be the same on every rank",
        )


def _by_hand(seen: Sequence[Steps]) -> Iterator[Finding]:
    names = next((rank.moved_by_hand for rank in seen if rank.moved_by_hand), [])
    if names:
        yield Finding(
            NAME,
            "warning",
            f"trainable parameters that move against their gradient before the optimizer steps: {len(names)} of "
            f"{seen[0].trainable} ({join_names(names)})",
            "each of these parameters moves twice a step, once by the workload's own code and once by the optimizer: "
            "the learning rate is not the file's",
            "remove the update from forward, loss() and hooks; the harness steps the optimizer that the file names",
        )


def _only_biases(seen: Sequence[Steps]) -> Iterator[Finding]:
    share = seen[0].share_of_biases
    if share is not None:
        yield Finding(
            NAME,
            "note",
            f"values of the model that train: {100 * share:.2g} % ({seen[0].trainable} parameters, each of one "
            "dimension); all matrices and kernels are frozen",
            "only biases, or scales, are trained",
            "nothing to do if this is meant; else remove requires_grad_(False)",
        )


CHECK = Check(
    NAME,
    None,
    judge,
    redundant=lambda findings: any(finding.check == wrapper.NAME for finding in findings),
    about=("forward", "loss"),
    clue=r"\.data\.|\.(add|sub|mul|div|copy|lerp)_\(|deepcopy\(|requires_grad",
)
