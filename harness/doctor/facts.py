"""Facts about a model, a batch and the steps: hidden tensors, layers, padding, tensors left behind."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_leaves

from harness.config.values import MIB
from harness.measure.generators import OWN, parts_of
from harness.train.loader import value_digest
from harness.train.training import PIECE, local_part

AGAINST = 0.5
"""A parameter was moved as a step of training does if the cosine to its negative gradient exceeds this.

What keeps weights in bounds, such as a norm or a clamp, moves them in other directions.
"""
WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types of tokens."""
DATA = (Tensor, np.ndarray, int, float, complex, str)
"""Types of values that are compared as state."""
MOST_BYTES = 64 * MIB
"""Bytes of a tensor in an object from which on it is not compared."""
GRAPH = MIB
"""Bytes that a tensor with a graph counts for beside its own: the graph keeps at least its nodes, and often more."""
LEAST = 1024
"""Bytes a step that count: a list of plain losses grows by less."""


def hidden_tensors(model: nn.Module) -> list[tuple[Tensor, str]]:
    """Return tensors in plain attributes, lists, tuples and dictionaries, and of modules in these, with names."""
    found: list[tuple[Tensor, str]] = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in OWN:
                continue
            place = f"{path + '.' if path else ''}{name}"
            if isinstance(value, Tensor):
                found.append((value, f"{place} (a plain attribute of {type(module).__name__})"))
            items = enumerate(value) if isinstance(value, list | tuple) else ()
            for key, item in value.items() if isinstance(value, dict) else items:
                kept = f"(in a plain {type(value).__name__})"
                found += [(tensor, f"{place}[{key!r}]{inner} {kept}") for tensor, inner in _tensors(item)]
    return found


def name_of(tensor: Tensor, hidden: Iterable[tuple[Tensor, str]]) -> str | None:
    """Return the name of a hidden tensor, or of the tensor that it is a view of; None if there is none."""
    for other, name in hidden:
        if other is tensor or (_address(other) and _address(other) == _address(tensor)):
            return name
    return None


def _address(tensor: Tensor) -> int:
    """Return the address of the storage; 0 if there is none, as on the "meta" device, or several (sparse tensors)."""
    has_one = tensor.device.type != "meta" and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if has_one else 0


def _tensors(item: object) -> Iterator[tuple[Tensor, str]]:
    if isinstance(item, Tensor):
        yield item, ""
    elif isinstance(item, nn.Module):
        for inner, tensor in chain(item.named_parameters(), item.named_buffers()):
            yield tensor, f".{inner}"


def moved_by_hand(model: nn.Module, before: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters that moved against their gradient before it steps.

    ``before``: this rank's values at the start of the step. Parameters of another optimizer move by that one alone.
    """
    found, stepped = [], {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if name not in before or parameter.grad is None or id(parameter) not in stepped:
            continue
        gradient = local_part(parameter.grad)
        gradient = gradient if gradient.layout is torch.strided else gradient.to_dense()
        if _cosine(local_part(parameter).detach(), before[name], gradient) < -AGAINST:
            found.append(name)
    return found


def _cosine(after: Tensor, before: Tensor, gradient: Tensor) -> float:
    """Return the cosine of a move and a gradient, 0 without one; in pieces, as a table may fill half of the memory."""
    both = moved = whole = 0.0
    for now, then, part in zip(*(each.flatten().split(PIECE) for each in (after, before, gradient)), strict=True):
        move, slope = (now - then).double(), part.double()
        both += float((move * slope).sum())
        moved += float(move.square().sum())
        whole += float(slope.square().sum())
    return both / math.sqrt(moved * whole) if moved * whole > 0 else 0.0


def digests_of_state(model: nn.Module) -> Mapping[str, str]:
    """Return digests of buffers and plain attributes by name, without batch statistics, which differ by design."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        buffers = {} if isinstance(module, _NormBase) else dict(module.named_buffers(recurse=False))
        attributes = {name: value for name, value in vars(module).items() if name not in OWN}
        for name, value in {**buffers, **attributes}.items():
            with suppress(Exception):  # a tensor without a digest, such as one of the meta device, is not compared
                found[prefix + name] = value_digest(value, objects=name in buffers)
    return found


def digests_in_objects(model: nn.Module, workload: object) -> Mapping[str, str]:
    """Return digests of the numbers and tensors in the workload, and in plain objects that modules hold, by name."""
    found: dict[str, str] = {}
    own = {"": model, type(workload).__name__: workload}
    for name, value in parts_of(own):
        # of a module's other attributes see digests_of_state; a data set in memory is large, and no state
        if isinstance(value, DATA) and not (isinstance(value, Tensor) and value.nbytes > MOST_BYTES):
            with suppress(Exception):  # a tensor without values
                found[name] = value_digest(value)
    return found


def sums_of_frozen(model: nn.Module) -> Mapping[str, float]:
    """Return the sum of each parameter that does not train: one that forward writes changes it."""
    found: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            with suppress(Exception):  # a type without a sum, or without values
                found[name] = float(parameter.detach().sum(dtype=torch.float64))
    return found


def uses_own_statistics(module: nn.Module) -> bool:
    """Return whether a layer uses the statistics of one device's part of the batch."""
    return isinstance(module, _BatchNorm) and module.training and not isinstance(module, nn.SyncBatchNorm)


def share_of_biases(model: nn.Module) -> float | None:
    """Return the share of the model's values that train, if all of these are biases or scales; None if not.

    What trains has one dimension at most, as biases have, and something that is frozen has more.
    """
    parameters = list(model.parameters())
    trains = [parameter for parameter in parameters if parameter.requires_grad]
    if not trains or any(p.ndim > 1 for p in trains) or all(p.ndim <= 1 for p in parameters):
        return None
    return sum(p.numel() for p in trains) / sum(p.numel() for p in parameters)


@dataclass(frozen=True)
class Padded:
    """The first padded tensor of a rank's batch; ``places`` 0 if there is none."""

    places: int = 0
    real: int = 0

    @property
    def share(self) -> float:
        return self.real / self.places if self.places else 1.0


def padded_of(batches: Sequence[object]) -> Padded:
    """Look for tensors of whole numbers, of shape (batch, length), whose rows end in the same number in every batch."""
    for leaves in zip(*map(tree_leaves, batches), strict=False):
        found = [padding for leaf in leaves if (padding := _padding(leaf))]
        if found and len(found) == len(leaves) and len({number for number, _ in found}) == 1:
            return Padded(leaves[0].numel(), found[0][1])
    return Padded()


def _padding(leaf: object) -> tuple[int, int] | None:
    """Return the number that pads a tensor, and how many others it has; None if it is not padded."""
    if not isinstance(leaf, Tensor) or leaf.dtype not in WHOLE or leaf.ndim != 2 or min(leaf.shape) < 2:
        return None
    lengths = real_lengths(leaf)
    return None if lengths is None else (int(leaf[:, -1].mode().values), int(lengths.sum()))


def real_lengths(rows: Tensor) -> Tensor | None:
    """Return the length of each row without padding; None if the rows are not padded.

    Padding is the number in which most rows end. The longest row of a padded batch has none, and several have some.
    """
    padding = rows[:, -1].mode().values
    is_padding = rows == padding
    trailing = is_padding.flip(1).long().cumprod(1).sum(1)
    # a row of other values may end in the same one by chance: padding is also found nowhere before the end
    inside = is_padding.sum(1) - trailing
    several = int((trailing > 1).sum()) > 1 and len(torch.unique(trailing)) > 1
    return rows.size(1) - trailing if several and not bool(inside.any()) else None


class StepMemory:
    """Bytes of the tensors made since the start of its block that Python objects hold, after each step.

    Which tensors are new does not depend on the collector's generations, which differ between versions of Python.
    """

    def __init__(self) -> None:
        self._after: list[int] = []
        self._before: dict[int, ref[Tensor]] = {}
        self._froze = False

    def __enter__(self) -> StepMemory:
        # of a process without frozen objects, as the main one, each look would otherwise walk all that is imported
        self._froze = not gc.get_freeze_count()
        if self._froze:
            gc.freeze()
        self._before = {id(tensor): ref(tensor) for tensor in held_tensors()}
        return self

    def __exit__(self, *_: object) -> None:
        if self._froze:
            gc.unfreeze()

    def note_step(self) -> None:
        """Count the tensors at the end of a step."""
        self._after.append(_size(self._new_tensors()))

    def kept_bytes(self) -> list[int]:
        """Return the bytes after each step; nothing if garbage that was not collected yet explains their growth."""
        if least_growth(self._after) < LEAST:
            return self._after
        references = [ref(tensor) for tensor in self._new_tensors()]
        gc.collect()
        held = _size(tensor for reference in references if (tensor := reference()) is not None)
        return self._after if held > self._after[-1] / 2 else []

    def _new_tensors(self) -> list[Tensor]:
        # another tensor may have the address of one from before that is gone
        before = self._before
        return [t for t in held_tensors() if id(t) not in before or before[id(t)]() is not t]


def least_growth(kept_bytes: Sequence[int]) -> int:
    """Return the smallest growth from one step to the next; 0 without two steps."""
    return min((after - before for before, after in pairwise(kept_bytes)), default=0)


def held_tensors() -> list[Tensor]:
    """Return the tensors that Python objects hold; those that gc.freeze() exempts are left out."""
    # type(), since isinstance() asks objects that stand for others, some of which warn; each type once, as it is slow
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, Tensor)}
    return [thing for thing in things if type(thing) in kinds]


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() + GRAPH * (tensor.grad_fn is not None) for tensor in tensors)


@dataclass
class Steps:
    """The real steps of one rank. Names are of parameters of the model inside the wrapper."""

    calls: int = 0
    """Forward passes of the wrapper."""
    inner_calls: int = 0
    """Forward passes of the model inside the wrapper, without those of replicas."""
    losses: list[float] = field(default_factory=list)
    """Sum of the losses of this rank's part of the batch, by step."""
    weights: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    """Samples of this rank's part of the batch, by step."""
    unit: str = "samples"
    """The unit of the weights."""
    units_per_sample: float | None = None
    """The weight of each sample, if all have the same."""
    single_device_losses: list[float] = field(default_factory=list)
    """Mean loss of the same global batches on one device, on rank 0."""
    unchanged: dict[str, str] = field(default_factory=dict)
    """Trainable parameters that did not change, and their gradient: "none", "zero" or "some"."""
    trainable: int = 0
    parameter_bytes: int = 0
    """Size of the whole model, before sharding."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digest of every parameter after the steps; empty if the strategy shards parameters."""
    wrapped_by_itself: str = ""
    """A wrapper inside the workload's own model."""
    random_states: dict[str, str] = field(default_factory=dict)
    """Digests of the states after the steps of the generators that they drew from; see generators.drawing."""
    step_s: float = 0.0
    """Time of the fastest step."""
    own_step_s: float = 0.0
    """Time of the fastest step on this rank's part of the batch, without the other ranks; 0 if it is not known."""
    padded: Padded = field(default_factory=Padded)
    """The padding of the first batch."""
    lr: float = 0.0
    """Learning rate of the steps."""
    moved_by_hand: list[str] = field(default_factory=list)
    """Parameters that moved against their gradient before the optimizer's first step."""
    state: dict[str, str] = field(default_factory=dict)
    """Digests of the buffers, attributes and frozen parameters that the steps changed, without batch statistics."""
    buffers: list[str] = field(default_factory=list)
    """The names in ``state`` that are registered buffers."""
    evaluation_error: str = ""
    """What the rehearsed evaluation of an epoch raised on some rank; empty if nothing."""
    same_batch_loss: float | None = None
    """The loss of a small batch after the steps, the same on every rank; None if it was not computed."""
    evaluated: list[str] | str = field(default_factory=list)
    """The names that evaluate() returned among all ranks, or its error."""
    evaluates: bool = False
    """Some forward pass was in eval mode."""
    mode_layers: list[str] = field(default_factory=list)
    """Layers that act differently in train mode."""
    batch_norms: list[str] = field(default_factory=list)
    """Layers that use the statistics of one device's part of the batch."""
    share_of_biases: float | None = None
    """The share of the model's values that train, if these are biases or scales alone."""
    kept_bytes: list[int] = field(default_factory=list)
    """Bytes of the tensors that Python objects hold after each step from the second on."""
