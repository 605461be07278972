"""Loss parameters: every nn.Parameter that the loss depends on belongs to the model, else it is never updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from harness.doctor import parameters
from harness.doctor.builds import FewBuilds
from harness.doctor.check import Case, Check
from harness.doctor.subject import SMALL, Subject
from harness.doctor.unregistered import hidden_tensors, name_of
from harness.plan.checks.finding import Finding, join_names
from harness.plan.rows import Severity


@dataclass(frozen=True)
class Unregistered:
    """Tensors of the loss that are neither parameters nor buffers of the model."""

    parameters: list[str] = field(default_factory=list)
    """Names or shapes of each nn.Parameter that is not in model.parameters()."""
    trained: list[str] = field(default_factory=list)
    """Plain tensors that want a gradient, in attributes of the model or outside it."""
    random: list[str] = field(default_factory=list)
    """Plain tensors in attributes that want none, whose values another seed changes, as those of a weight."""


def observe(subject: Subject) -> Unregistered:
    """Look for the leaves of the loss's graph, and the plain tensors of the model, that no optimizer reaches."""
    model = subject.bare_model()
    hidden = hidden_tensors(model)
    loss, _ = subject.loss(model, subject.first_samples(SMALL))
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [leaf for leaf in _leaves(loss) if id(leaf) not in own]
    lost = [leaf for leaf in foreign if isinstance(leaf, nn.Parameter)]
    plain = [leaf for leaf in foreign if not isinstance(leaf, nn.Parameter)]
    again = _again(subject, model, [leaf for leaf in foreign if not name_of(leaf, hidden)])
    return Unregistered(
        [name_of(leaf, hidden) or again.get(id(leaf)) or f"{_shape(leaf)}, created in forward" for leaf in lost],
        [name for leaf in plain if (name := name_of(leaf, hidden) or again.get(id(leaf)))],
        _random(subject, hidden),
    )


def _again(subject: Subject, model: nn.Module, leaves: Sequence[Tensor]) -> dict[int, str]:
    """Return the shapes by id of the leaves that another loss has too: weights outside the model.

    Those of one loss alone are inputs whose gradient is wanted, or parameters that are created in forward.
    """
    if not leaves:
        return {}
    loss, _ = subject.loss(model, subject.first_samples(SMALL))
    found = {id(leaf) for leaf in _leaves(loss)}
    return {id(leaf): f"{_shape(leaf)}, outside the model" for leaf in leaves if id(leaf) in found}


def _shape(leaf: Tensor) -> str:
    return f"shape {tuple(leaf.shape)}"


def _random(subject: Subject, hidden: Sequence[tuple[Tensor, str]]) -> list[str]:
    """Return the names of plain tensors of fractions that another seed changes: drawn, as the values of a weight are.

    Constants such as a mean, class weights or a table of positions are the same under every seed. Of a model that takes
    long to build, nothing is returned: its copies have the same values, and a build of its own for a note is too much.
    """
    plain = {name: tensor for tensor, name in hidden if tensor.is_floating_point() and not tensor.requires_grad}
    workload = subject.workload
    if not plain or (isinstance(workload, FewBuilds) and workload.kept.is_copied):  # copies: no other values
        return []
    torch.manual_seed(subject.seed + 1)
    other = {name: tensor for tensor, name in hidden_tensors(workload.build_model())}
    return [name for name, tensor in plain.items() if name in other and _differ(tensor, other[name])]


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not torch.equal(one.detach().cpu(), other.detach().cpu())


def judge(seen: Sequence[Unregistered], case: Case) -> list[Finding]:
    means = "no optimizer updates them, no strategy synchronises them, .to(device) does not move them"
    texts: list[tuple[list[str], Severity, str, str, str]] = [
        (
            seen[0].parameters,
            "error",
            "parameters of the loss that are not in model.parameters()",
            f"unregistered parameters: {means}",
            "create modules and parameters in the model's __init__ and keep them as its attributes, several in "
            "nn.ModuleList, nn.ModuleDict or nn.ParameterList",
        ),
        (
            seen[0].trained,
            "error",
            "plain tensors with requires_grad in the loss",
            f"never trained: {means}",
            "make each an nn.Parameter that is an attribute of a module",
        ),
        (
            seen[0].random,
            "note",
            "plain tensors with drawn values in the model",
            f"constants: {means}",
            "if it should train, nn.Parameter; if it is constant, register_buffer",
        ),
    ]
    return [
        Finding(parameters.NAME, severity, f"{what}: {len(names)} ({join_names(names)})", consequence, advice)
        for names, severity, what, consequence, advice in texts
        if names
    ]


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors whose gradients a backward pass would accumulate."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        waiting += [following for following, _ in node.next_functions]


CHECK = Check("loss parameters", observe, judge, stops=True, needs_whole_model=True)
