"""Devices: a batch of any type is moved to a device, and every tensor of the forward pass is on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.doctor.facts import hidden_tensors, name_of
from harness.doctor.subject import SMALL, Check, Subject, describe_error, first_found
from harness.plan.checks import Finding, join_names
from harness.train.transfer import to_device

NAME = "device placement"
MIXING = ("copy_", "_to_copy", "_pack_padded_sequence", "index", "index_put", "index_put_", "set_")
"""Operators that accept tensors on several devices."""
BY_NAME = ("no nvidia driver", "not compiled with cuda", "cuda is not available", "invalid device ordinal")
TRANSFER = "batch transfer"
DEPTH = 4
"""Levels of containers and attributes that are searched for tensors."""


class DeviceMismatchMode(TorchDispatchMode):
    """Record the first operator whose tensors are on different devices, and its module."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where
        self.found: tuple[str, str, list[str], Tensor] | None = None
        """Module, operator, devices, and the tensor on the other device."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func.__name__.split(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors if tensor.dim()))
        if self.found is None and len(devices) > 1 and name not in MIXING:
            # the device of the model and its input is not the CPU if there is another one
            main = next((device for device in devices if device != "cpu"), "cpu")
            misplaced = next(t for t in tensors if t.dim() and str(t.device) != main)
            self.found = (self._where(), name, devices, misplaced)
        return func(*args, **(kwargs or {}))


def observe(subject: Subject) -> list[Finding]:
    """Run forward and loss once, and report a mismatch; without a GPU on the "meta" device, which computes nothing."""
    try:
        model = subject.built_model()
        real = subject.device.type == "cuda" and subject.whole_model_fits
        stand_in = subject.device if real else torch.device("meta")
        batch = subject.first_samples(SMALL, stand_in)
    except Exception as error:
        return _by_name(error)
    hidden = hidden_tensors(model)  # .to() does not move them
    model = subject.on_device(model) if real else model.to(stand_in)
    found: list[Finding] = []
    with _module_stack(model) as where, DeviceMismatchMode(where) as watch:
        try:
            subject.loss(model, batch)
        except Exception as error:  # many operators cannot run on "meta": the mismatch before the error counts
            found = _by_name(error)
    if watch.found is None:
        return found
    module, operator, devices, misplaced = watch.found
    own = "the model's device" if stand_in.type == "meta" else str(stand_in)
    elsewhere = next((device for device in devices if device != str(stand_in)), devices[0])
    tensor = name_of(misplaced, hidden) or "a tensor made in forward"
    text = f"{tensor} on {elsewhere}, input on {own}: operands of {operator} in {module}"
    means = "error of the forward pass on a GPU, or a copy between devices in every step"
    advice = "register the tensor (register_buffer, nn.Parameter, or a submodule in __init__), or create it with "
    found_there = _on_a_gpu(NAME, text, means, f"{advice}device=x.device", subject.device)
    return [replace(found_there, parts=(module.partition(" (")[0],))]


def _by_name(error: BaseException) -> list[Finding]:
    """Return the finding on a workload that asks for a device by name, if this is its error."""
    text = describe_error(error, 160)
    if not any(sign in text.lower() for sign in BY_NAME):
        return []
    means = "the workload ignores the device of its rank: it fails without that device, and ranks share it"
    advice = "remove .cuda() and device='cuda:0': the harness moves model and batch; in forward, use device=x.device"
    return [Finding(NAME, "error", f"device named in the workload's code: {text}", means, advice, stops=True)]


def _on_a_gpu(check: str, text: str, means: str, advice: str, device: torch.device, *, fails: bool = True) -> Finding:
    """Return the finding on what fails on a GPU: an error if there is one."""
    if device.type == "cuda":
        return Finding(check, "error" if fails else "warning", text, means, advice, stops=True)
    means += " (no effect on this machine, which has no GPU)"
    return Finding(check, "warning", text, means, advice, stops=True)


@contextmanager
def _module_stack(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the module whose forward is running."""
    names = {module: f"{path or 'the model'} ({type(module).__name__})" for path, module in model.named_modules()}
    stack: list[str] = []
    with ExitStack() as hooks:
        for module, name in names.items():
            hooks.enter_context(module.register_forward_pre_hook(lambda m, a, name=name: stack.append(name)))
            hooks.enter_context(module.register_forward_hook(lambda m, a, o: stack.pop() and None))
        yield lambda: stack[-1] if stack else "loss()"


CHECK = Check(observe, first_found, about=("forward", "loss"), clue=r"\.cuda\(|cuda:|device=(?!\w+\.device)")


def observe_transfer(subject: Subject) -> list[Finding]:
    """Move a batch to the rank's device, without a GPU to the "meta" device, and compare its tensors."""
    batch = subject.first_samples(SMALL, torch.device("cpu"))
    target = torch.device("meta") if subject.device.type == "cpu" else subject.device
    advice = (
        "return tensors, lists, tuples, mappings or dataclasses of them from the data set or collate, or give the "
        "batch a method to(device) that returns it with all its tensors on the device"
    )
    try:
        moved = to_device(batch, target)
    except Exception as error:
        return [_on_a_gpu(TRANSFER, describe_error(error), "error of every step on a GPU", advice, subject.device)]
    left = [name for name, tensor in _tensors(moved, "batch", DEPTH) if tensor.device.type != target.type]
    before, after = (sum(1 for _ in _tensors(one, "batch", DEPTH)) for one in (batch, moved))
    if not left and after >= before:
        return []
    names = join_names(left) or f"{before - after} of {before} tensors are missing"
    text = f"{type(batch).__name__}: after the move, not on the device: {names}"
    means = "error of a step on a GPU, unless they belong on the host"
    return [_on_a_gpu(TRANSFER, text, means, advice, subject.device, fails=False)]


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


TRANSFER_CHECK = Check(observe_transfer, first_found, about=("datasets",))
