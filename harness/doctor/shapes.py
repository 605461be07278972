"""Output shapes: the outputs of DataParallel's replicas can be gathered into the output of one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.doctor.subject import SMALL, Check, Subject, describe_error, first_found
from harness.plan.checks import Finding
from harness.train.strategies.dp import ReplicatedModule, scatter

NAME = "output shapes"
Shapes = list[tuple[int, ...]]


def observe(subject: Subject) -> list[Finding]:
    """Run forward on a small batch, and on each replica's part of it, and compare the shapes of the outputs."""
    if not subject.cell.traits.replicates or subject.replicas < 2:
        return []
    model = subject.bare_model()
    batch = subject.first_samples(SMALL * subject.replicas)
    calls: list[tuple[tuple[object, ...], dict[str, object], object]] = []
    with torch.no_grad():
        with model.register_forward_hook(
            lambda module, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
        ):
            subject.loss(model, batch)
        if not calls:
            return []
        args, kwargs, whole = calls[0]
        try:
            parts = [_shapes(model(*part[0], **part[1])) for part in scatter((args, kwargs), subject.replicas)]
        except Exception as error:
            text = f"error of forward on a replica's part of the batch: {describe_error(error, 200)}"
            means = (
                "dp splits every tensor argument of forward along its first dimension; other arguments are not split"
            )
            advice = (
                "pass tensors whose first dimension is the batch; create states, such as those of an RNN, in forward"
            )
            return [Finding(NAME, "error", text, means, advice, stops=True)]
    if any(shape == () for part in parts for shape in part):
        total, _ = subject.workload.loss(ReplicatedModule(model, subject.replicas), batch)
        if total.shape:
            text = f"shape of the loss under dp: {tuple(total.shape)}; each replica's forward returns a scalar"
            means = "gather stacks the scalars of the replicas to a vector, and backward needs a scalar"
            advice = "compute the loss outside the model, or sum the output of forward: model(...).sum()"
            return [Finding(NAME, "error", text, means, advice, stops=True)]
    return judge_shapes(_shapes(whole), parts)


def judge_shapes(whole: Shapes, parts: Sequence[Shapes]) -> list[Finding]:
    """Compare the shapes of the outputs on one device and on each replica."""
    for position, shape in enumerate(whole if len(parts) > 1 else []):
        column = [part[position] if position < len(part) else () for part in parts]
        shown = " and ".join(str(tuple(item)) for item in dict.fromkeys(map(tuple, column)))
        if len({tuple(item[1:]) for item in column}) > 1:
            text = f"shapes of output {position} on dp's replicas: {shown}"
            means = "gather fails: it concatenates along the first dimension, and the other dimensions differ"
            advice = "pad to one length for the whole batch: pad_packed_sequence(..., total_length=x.size(1))"
            return [Finding(NAME, "error", text, means, advice, stops=True)]
        # single numbers: the check of gradients shows whether the loss combines them correctly
        a_number_each = {tuple(shape), *map(tuple, column)} == {(1,)}
        if shape and not a_number_each and sum(item[0] for item in column) != shape[0]:
            text = f"shape of output {position}: {tuple(shape)} on one device, {shown} on dp's replicas"
            means = "gather concatenates along the first dimension, which is not the batch"
            advice = "return the batch as the first dimension (batch_first=True), or omit that output"
            return [Finding(NAME, "error", text, means, advice, stops=True)]
    return []


def _shapes(outputs: object) -> Shapes:
    return [tuple(leaf.shape) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


CHECK = Check(observe, first_found, stops=True, needs_whole_model=True, about=("forward",))
