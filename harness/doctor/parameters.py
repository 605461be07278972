"""Parameters: each that the loss depends on belongs to the model, is updated on every rank, and through the wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from harness.doctor.facts import Steps, hidden_tensors, name_of
from harness.doctor.real_steps import STEPS
from harness.doctor.subject import SMALL, Case, Check, FewBuilds, Subject, first_found
from harness.plan.cell import Cell
from harness.plan.checks import Finding, join_names
from harness.plan.rows import Severity
from harness.train.workloads import Workload, innermost

WRAPPER = "wrapper use"
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
    "not stepped": (
        "with a gradient and in no group of the optimizer",
        "the optimizer does not train them, which costs their part of the backward pass",
        "freeze them with requires_grad_(False), or give them to the optimizer",
    ),
    "rounded": (
        "of 16 bits unchanged in spite of a gradient",
        "each step is below the precision of these parameters, and lost",
        "keep parameters in float32 and compute in 16 bits (precision: bf16), or raise the learning rate",
    ),
    "some": (
        "unchanged in spite of a gradient",
        "the optimizer updates other tensors, as the module replaced its parameters after it was wrapped (a copy, a "
        "new nn.Parameter), or the learning rate is zero",
        "create every parameter in build_model() and never replace it; check the learning rate",
    ),
}


def judge_wrapper(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    first, cell = seen[0], case.cell
    if first.wrapped_by_itself:
        text = f"wrapper inside the workload's own model: {first.wrapped_by_itself}"
        means = "two wrappers under dp, ddp or fsdp; on a CPU or one device this wrapper only calls the bare model"
        advice = "return the bare model from build_model(); the cell's strategy wraps it"
        yield Finding(WRAPPER, "error", text, means, advice)
    elif cell.traits.calls_wrapper and not first.calls:
        ran = f"the model inside it {first.inner_calls}" if first.inner_calls else "another model was called"
        text = f"forward calls of {cell.strategy}'s wrapper in {len(first.losses)} steps on "
        text += f"{cell.devices} device{'s' * (cell.devices > 1)}: 0; {ran}"
        means = "no gradient synchronisation: each process trains a model of its own"
        means = "computation on one device only" if cell.traits.one_process else means
        advice = "call the model that loss(model, batch) receives, model(x); not self.model, not model.module"
        yield Finding(WRAPPER, "error", text, means, advice)


WRAPPER_CHECK = Check(None, judge_wrapper, about=("loss",), clue=r"DataParallel\(|self\.\w+\(")


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
            if kind == "none" and allowed and not every:  # experts that these samples did not choose
                severity = "note"
            count = f"all {len(names)}" if every else f"{len(names)} of {seen[0].trainable}"
            seen_text = f"trainable parameters {what} in {STEPS} steps: {count} ({join_names(names)})"
            crashes = every or (kind == "none" and stops)
            found.append(Finding(NAME, severity, seen_text, means, advice, stops=crashes, parts=tuple(names)))
    return found


def judge(seen: Sequence[Steps], case: Case) -> Iterator[Finding]:
    yield from unchanged(seen, case.cell)
    trainable = seen[0].trainable
    apart = [name for name in seen[0].digests if len({rank.digests.get(name) for rank in seen}) > 1]
    if apart:
        count = f"{len(apart)} of {trainable} ({join_names(apart)})"
        text = f"parameters that differ between ranks after {STEPS} steps: {count}"
        advice = "call the wrapped model, model(x), and leave updates to the optimizer; an update in the workload's "
        advice += "own code must be the same on every rank"
        yield Finding(NAME, "error", text, "a different model on each rank", advice)
    if by_hand := next((rank.moved_by_hand for rank in seen if rank.moved_by_hand), []):
        count = f"{len(by_hand)} of {trainable} ({join_names(by_hand)})"
        text = f"trainable parameters that move against their gradient before the optimizer steps: {count}"
        means = "each of these parameters moves twice a step, once by the workload's own code and once by the "
        means += "optimizer: the learning rate is not the file's"
        advice = "remove the update from forward, loss() and hooks; the harness steps the optimizer that the file names"
        yield Finding(NAME, "warning", text, means, advice)
    if (share := seen[0].share_of_biases) is not None:
        count = f"{100 * share:.2g} % ({trainable} parameters, each of one dimension)"
        text = f"values of the model that train: {count}; all matrices and kernels are frozen"
        means = "only biases, or scales, are trained"
        advice = "nothing to do if this is meant; else remove requires_grad_(False)"
        yield Finding(NAME, "note", text, means, advice)


CHECK = Check(
    None,
    judge,
    redundant=lambda findings: any(finding.check == WRAPPER for finding in findings),
    about=("forward", "loss"),
    clue=r"\.data\.|\.(add|sub|mul|div|copy|lerp)_\(|deepcopy\(|requires_grad",
)


def observe_loss_parameters(subject: Subject) -> list[Finding]:
    """Look for the leaves of the loss's graph, and the plain tensors of the model, that no optimizer reaches."""
    model = subject.bare_model()
    hidden = hidden_tensors(model)
    loss, _ = subject.loss(model, subject.first_samples(SMALL))
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [leaf for leaf in _leaves(loss) if id(leaf) not in own]
    names = {id(leaf): name_of(leaf, hidden) for leaf in foreign}
    if not all(names.values()):
        # leaves of one loss alone are inputs whose gradient is wanted, or parameters that are created in forward
        again, _ = subject.loss(model, subject.first_samples(SMALL))
        in_both = {id(leaf) for leaf in _leaves(again)}
        for leaf in foreign:
            if id(leaf) in in_both and not names[id(leaf)]:
                names[id(leaf)] = f"shape {tuple(leaf.shape)}, outside the model"
    parameters, plain, meant = [], [], _beside_the_model(subject.workload)
    beside = [names[id(leaf)] or "" for leaf in foreign if id(leaf) in meant]
    for leaf in foreign:
        if id(leaf) in meant:
            continue
        if isinstance(leaf, nn.Parameter):
            parameters.append(names[id(leaf)] or f"shape {tuple(leaf.shape)}, created in forward")
        elif name := names[id(leaf)]:
            plain.append(name)
    return unregistered(parameters, plain, _random(subject, hidden), beside)


def _beside_the_model(workload: Workload) -> set[int]:
    """Return the ids of the parameters that a workload keeps beside its model on purpose: of its modules in eval mode,
    such as a network whose features are compared, and those that an optimizer of its own trains, as a discriminator's.
    """
    kept = getattr(innermost(workload), "__dict__", {}).values()
    apart = [p for each in kept if isinstance(each, nn.Module) and not each.training for p in each.parameters()]
    groups = [group for each in kept if isinstance(each, torch.optim.Optimizer) for group in each.param_groups]
    return {id(parameter) for parameter in (*apart, *(p for group in groups for p in group["params"]))}


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
    both = [
        (name, tensor.detach().cpu(), other[name].detach().cpu()) for name, tensor in plain.items() if name in other
    ]
    return [name for name, one, again in both if one.shape == again.shape and not torch.equal(one, again)]


def unregistered(parameters: list[str], trained: list[str], drawn: list[str], beside: list[str]) -> list[Finding]:
    """Return findings on tensors of the loss that are neither parameters nor buffers of the model, by name or shape.

    ``trained``, ``drawn``: plain tensors that want a gradient, and others whose values depend on the seed, as a
    weight's do. ``beside``: parameters that the workload keeps beside its model on purpose.
    """
    means = "no optimizer updates them, no strategy synchronises them, .to(device) does not move them"
    texts: list[tuple[list[str], Severity, str, str, str]] = [
        (
            parameters,
            "error",
            "parameters of the loss that are not in model.parameters()",
            f"unregistered parameters: {means}",
            "create modules and parameters in the model's __init__ and keep them as its attributes, several in "
            "nn.ModuleList, nn.ModuleDict or nn.ParameterList",
        ),
        (
            trained,
            "error",
            "plain tensors with requires_grad in the loss",
            f"never trained: {means}",
            "make each an nn.Parameter that is an attribute of a module",
        ),
        (
            drawn,
            "note",
            "plain tensors with drawn values in the model",
            f"constants: {means}",
            "if it should train, nn.Parameter; if it is constant, register_buffer",
        ),
        (
            beside,
            "note",
            "parameters of the loss in modules of the workload beside its model",
            "a step computes their gradients; the file's optimizer does not train them, no strategy synchronises them",
            "if they are constant, freeze them with requires_grad_(False); if the workload trains them, nothing on one "
            "device, and on several average their gradients yourself",
        ),
    ]
    return [
        Finding(NAME, severity, f"{what}: {len(names)} ({join_names(names)})", consequence, advice)
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


LOSS_PARAMETERS_CHECK = Check(observe_loss_parameters, first_found, stops=True, needs_whole_model=True)
