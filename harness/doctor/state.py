"""State in forward: values that a forward pass writes into its module, which DataParallel's replicas lose."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.doctor import parameters
from harness.doctor.check import Case, Check
from harness.doctor.subject import SMALL, Subject
from harness.doctor.unregistered import OWN
from harness.measure.equivalence import NORMS
from harness.plan.checks.finding import Finding, join_names

NAME = "state in forward"


def observe(subject: Subject) -> dict[str, bool]:
    """Return the names of parameters, buffers and attributes that two forward passes change; True if trainable."""
    if not subject.cell.traits.replicates:
        return {}
    model, batch = subject.bare_model(), subject.first_samples(SMALL)
    before = _state(model)
    with torch.no_grad():
        for _ in range(2):
            subject.loss(model, batch)
    after = _state(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = sorted(name for name in before.keys() | after.keys() if not _same(before.get(name), after.get(name)))
    return {name: name in trained for name in names}


def judge(seen: Sequence[dict[str, bool]], case: Case) -> list[Finding]:
    written = seen[0] if case.cell.traits.replicates else {}
    names = {
        parameters.NAME: [name for name, trained in written.items() if trained],
        NAME: [name for name, trained in written.items() if not trained],
    }
    return [
        Finding(
            check,
            "warning",
            f"{'trainable parameters' if check == parameters.NAME else 'state'} that forward modifies: "
            f"{join_names(names[check])}",
            f"dp copies the model to its {case.cell.devices} devices in every step, and modifications of the copies "
            "are lost (in-place ones persist on the first device, from its part of the batch)",
            "return the value from forward and keep it outside the model, or use ddp, where each process has its own "
            "model",
        )
        for check in names
        if names[check]
    ]


def _state(model: nn.Module) -> Mapping[str, object]:
    """Return every parameter, buffer and attribute by its full name, except batch statistics, which dp keeps."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            state[prefix + name] = parameter.detach().clone()
        if not isinstance(module, NORMS):
            for name, buffer in module.named_buffers(recurse=False):
                state[prefix + name] = buffer.detach().clone()
        for name, value in vars(module).items():
            if name not in OWN:
                state[prefix + name] = _copied(value)
    return state


def _copied(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if type(value) in (list, dict, set) else value


def _same(before: object, after: object) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and torch.equal(before, after)
    if before is after:
        return True
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(before[key], after[key]) for key in before)
    simple = (int, float, str, bool, set, tuple, type(None))
    return isinstance(before, simple) and isinstance(after, simple) and before == after


CHECK = Check(
    NAME,
    observe,
    judge,
    needs_whole_model=True,
    about=("forward",),
    clue=r"self\.[\w.]+ [-+*/]?= |self\.[\w.]+\.(append|update|add_|sub_|mul_|div_|copy_|lerp_|fill_|zero_)\(",
)
