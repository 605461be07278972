"""Loss parameters: every nn.Parameter that the loss depends on belongs to the model, else it is never updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from harness.doctor import parameters
from harness.doctor.check import Case, Check
from harness.doctor.subject import SMALL, Subject
from harness.doctor.unregistered import hidden_tensors, name_of
from harness.plan.checks.finding import Finding, join_names


def observe(subject: Subject) -> list[str]:
    """Return names or shapes of the parameters in the loss's graph that are not in model.parameters()."""
    model = subject.bare_model()
    hidden = hidden_tensors(model)
    loss, _ = subject.loss(model, subject.first_samples(SMALL))
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [leaf for leaf in _leaves(loss) if isinstance(leaf, nn.Parameter) and id(leaf) not in own]
    return [name_of(leaf, hidden) or f"shape {tuple(leaf.shape)}, created in forward" for leaf in foreign]


def judge(seen: Sequence[list[str]], case: Case) -> list[Finding]:
    names = seen[0]
    if not names:
        return []
    return [
        Finding(
            parameters.NAME,
            "error",
            f"parameters of the loss that are not in model.parameters(): {len(names)} ({join_names(names)})",
            "unregistered parameters: no optimizer updates them, no strategy synchronises them, .to(device) does not "
            "move them",
            "create modules in __init__ and keep them as attributes, in nn.ModuleList or nn.ModuleDict",
        )
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
