"""Shapes survive: what the replicas of DataParallel return can be gathered into what one device returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.doctor.check import Case, Check
from harness.doctor.subject import SMALL, Subject
from harness.plan.checks.finding import Finding
from harness.train.strategies.cpu_replicas import ReplicatedModule, scatter

NAME = "shapes survive"
Shapes = list[tuple[int, ...]]


def observe(subject: Subject) -> dict[str, Any]:
    """Shapes of the model's outputs on a small batch, and on each replica's part of it."""
    if not subject.cell.traits.replicates or subject.replicas < 2:
        return {}
    model = subject.bare_model()
    batch = subject.first_samples(SMALL * subject.replicas)
    calls: list[Any] = []
    hook = model.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
    )
    with torch.no_grad():
        subject.workload.loss(model, batch)
        hook.remove()
        if not calls:
            return {}
        args, kwargs, whole = calls[0]
        try:
            parts = [_shapes(model(*part[0], **part[1])) for part in scatter((args, kwargs), subject.replicas)]
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {"whole": _shapes(whole), "parts": parts, "loss": _loss_shape(subject, model, batch, parts)}


def judge(seen: Sequence[dict[str, Any]], case: Case) -> list[Finding]:
    shapes = seen[0]
    if "failed" in shapes:
        return [
            Finding(
                NAME,
                "error",
                f"forward fails on a replica's part of the batch: {shapes['failed']}",
                "dp splits every tensor that goes into forward along its first dimension, and passes the rest on whole",
                "give forward tensors whose first dimension is the batch; make states, as of an RNN, inside forward",
            )
        ]
    if shapes.get("loss"):
        return [
            Finding(
                NAME,
                "error",
                f"under dp the loss has the shape {tuple(shapes['loss'])}: forward returns a single number",
                "gather makes a vector of the replicas' numbers, and backward needs one",
                "compute the loss outside the model, or add up what forward returns: model(...).sum()",
            )
        ]
    return _gathered(shapes)


def _gathered(shapes: dict[str, Any]) -> list[Finding]:
    """Whether the replicas' outputs can be joined along their first dimension."""
    if not shapes or len(shapes["parts"]) < 2:
        return []
    parts: list[Shapes] = shapes["parts"]
    whole: Shapes = shapes["whole"]
    for position, shape in enumerate(whole):
        column = [part[position] if position < len(part) else () for part in parts]
        told = " and ".join(str(tuple(item)) for item in dict.fromkeys(map(tuple, column)))
        if len({tuple(item[1:]) for item in column}) > 1:
            return [
                Finding(
                    NAME,
                    "error",
                    f"output {position} has the shapes {told} on dp's replicas",
                    "gather joins them along the first dimension and fails: the others differ from replica to replica",
                    "pad to a length that the whole batch shares: pad_packed_sequence(..., total_length=x.size(1))",
                )
            ]
        a_number_each = {tuple(shape), *map(tuple, column)} == {(1,)}  # what is made of them, the gradients show
        if shape and not a_number_each and sum(item[0] for item in column) != shape[0]:
            return [
                Finding(
                    NAME,
                    "error",
                    f"output {position} is {tuple(shape)} on one device, {told} on dp's replicas",
                    "its first dimension is not the batch: gather joins what does not belong side by side",
                    "return the batch as the first dimension (batch_first=True), or leave that output out",
                )
            ]
    return []


def _loss_shape(subject: Subject, model: nn.Module, batch: Any, parts: Sequence[Shapes]) -> tuple[int, ...]:
    """The shape of the loss where the replicas give single numbers; empty where it is one number, as it must be."""
    if not any(shape == () for part in parts for shape in part):
        return ()
    total, _ = subject.workload.loss(ReplicatedModule(model, subject.replicas), batch)
    return tuple(total.shape)


def _shapes(outputs: Any) -> Shapes:
    return [tuple(leaf.shape) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


CHECK = Check(NAME, observe, judge, stops=True)
