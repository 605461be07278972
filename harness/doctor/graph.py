"""Parameters move: every nn.Parameter that the loss depends on is one of the model's, else nothing ever updates it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from harness.cell import Cell
from harness.doctor.finding import Finding, some
from harness.doctor.movement import NAME
from harness.doctor.subject import SMALL, Subject


def observe(subject: Subject) -> list[str]:
    """The names, or the shapes, of parameters in the loss's graph that model.parameters() does not give."""
    model = subject.bare_model()
    hidden = _in_plain_containers(model)
    loss, _ = subject.workload.loss(model, subject.first_samples(SMALL))
    own = {id(parameter) for parameter in model.parameters()}
    strangers = [leaf for leaf in _leaves(loss) if isinstance(leaf, nn.Parameter) and id(leaf) not in own]
    return [hidden.get(id(leaf), f"one of shape {tuple(leaf.shape)} made in forward") for leaf in strangers]


def judge(seen: Sequence[list[str]], cell: Cell) -> list[Finding]:
    names = seen[0]
    if not names:
        return []
    return [
        Finding(
            NAME,
            "error",
            f"the loss depends on {len(names)} parameters that are not the model's: {some(names)}",
            "the optimizer, the strategy and .to(device) do not know them: they are never trained, moved or exchanged",
            "make modules in __init__ and keep them as attributes, in nn.ModuleList or nn.ModuleDict",
        )
    ]


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The leaf tensors whose gradients a backward pass would accumulate."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def _in_plain_containers(model: nn.Module) -> dict[int, str]:
    """Parameters of modules that are kept in plain lists, tuples and dictionaries: id -> name."""
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") and name in vars(nn.Module()):
                continue
            for key, item in _items(value):
                if isinstance(item, nn.Module):
                    kept = f"{path + '.' if path else ''}{name}[{key!r}]"
                    kind = type(value).__name__
                    names |= {id(p): f"{kept}.{inner} (in a plain {kind})" for inner, p in item.named_parameters()}
    return names


def _items(value: object) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()
