"""Batch transfer: a batch of the workload's own type can be moved to a device, and all of its tensors are moved.

The move is to the GPU; on a CPU, which moves nothing, to the meta device, so that a batch that a GPU would reject is
found without one. Only an exception of the move to a GPU is an error: a tensor may belong on the host, as lengths for
pack_padded_sequence do, and a method ``to`` may read a value, which the meta device lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from harness.doctor.check import Case, Check, describe_error
from harness.doctor.subject import SMALL, Subject
from harness.plan.checks.finding import Finding, join_names
from harness.plan.rows import Severity
from harness.train.transfer import to_device

NAME = "batch transfer"
DEPTH = 4
"""Levels of containers and attributes that are searched for tensors."""


@dataclass(frozen=True)
class Moved:
    """The error of a move, or the tensors that it leaves behind, in words; empty if there are none."""

    error: str = ""
    left: str = ""


def observe(subject: Subject) -> Moved:
    batch = subject.first_samples(SMALL, torch.device("cpu"))
    target = torch.device("meta") if subject.device.type == "cpu" else subject.device
    try:
        moved = to_device(batch, target)
    except Exception as error:
        return Moved(error=describe_error(error))
    left = [name for name, tensor in _tensors(moved, "batch", DEPTH) if tensor.device.type != target.type]
    before, after = (sum(1 for _ in _tensors(one, "batch", DEPTH)) for one in (batch, moved))
    if left or after < before:
        names = join_names(left) or f"{before - after} of {before} tensors are missing"
        return Moved(left=f"{type(batch).__name__}: after the move, not on the device: {names}")
    return Moved()


def judge(seen: Sequence[Moved], case: Case) -> list[Finding]:
    on_gpu = case.cell.device == "cuda"
    error = next((moved.error for moved in seen if moved.error), "")
    left = next((moved.left for moved in seen if moved.left), "")
    if not error and not left:
        return []
    severity: Severity = "error" if error and on_gpu else "warning"
    means = "error of every step on a GPU" if error else "error of a step on a GPU, unless they belong on the host"
    return [
        Finding(
            NAME,
            severity,
            error or left,
            means + ("" if on_gpu else " (no effect on this machine, which has no GPU)"),
            "return tensors, lists, tuples, mappings or dataclasses of them from the data set or collate, or give the "
            "batch a method to(device) that returns it with all its tensors on the device",
            stops=True,
        )
    ]


def _tensors(thing: object, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their names, in containers and attributes."""
    if isinstance(thing, PackedSequence):  # its batch sizes belong on the host
        thing = thing.data
    if isinstance(thing, Tensor):
        yield name, thing
        return
    if depth == 0 or isinstance(thing, str | bytes | type):
        return
    inside: list[tuple[str, object]] = []
    if isinstance(thing, Mapping):
        inside = [(f"{name}[{key!r}]", value) for key, value in thing.items()]
    elif isinstance(thing, list | tuple):
        inside = [(f"{name}[{index}]", value) for index, value in enumerate(thing)]
    elif hasattr(thing, "__dict__"):
        inside = [(f"{name}.{key}", value) for key, value in vars(thing).items()]
    for inner, value in inside:
        yield from _tensors(value, inner, depth - 1)


CHECK = Check(NAME, observe, judge, about=("datasets",))
