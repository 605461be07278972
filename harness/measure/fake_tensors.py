"""Fake tensors, a fake process group and torch's tracker of their memory, of modules that torch does not document.

The only module that names those: they may move between versions (here those of torch 2.11 to 2.14). They are imported
when they are used, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

TOTAL = "Total"
"""The key of a snapshot's sum; the other keys are kinds of tensors."""
GRADIENTS = ("Gradient", "Sharded Grad", "Unsharded Grad")


class FakeMode(Protocol):
    """A mode in which operators compute shapes, not values; tensors that it makes hold no memory."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> object: ...

    def from_tensor(self, tensor: Tensor) -> Tensor: ...


class Tracker(Protocol):
    """torch's MemTracker as far as it is used here."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> object: ...

    def get_tracker_snapshot(self) -> Mapping[torch.device, Mapping[str, int]]: ...

    def track_external(self, *external: Any) -> None: ...


def fake_mode() -> FakeMode:
    """Return a new fake mode; real tensors that operators meet are taken as fake ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: FakeMode = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


@contextmanager
def fake_group(size: int) -> Iterator[None]:
    """Make this process the first rank of a group of this size, whose collectives exchange nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def tracker_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> Tracker:
    """Return a tracker that knows the model and the optimizer; ``sharded``: by fully_shard."""
    if sharded:
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

        return FSDPMemTracker(model, optimizer)
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    return tracker


def track_batch(tracker: Tracker, batch: object) -> None:
    """Add the tensors of a batch to those that the tracker knows, until they are deleted."""
    if (track_inputs := getattr(tracker, "track_inputs", None)) is not None:
        track_inputs((batch,))
    else:
        tracker.track_external(*(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)))


class AfterEachOperator(TorchDispatchMode):
    """Calls a function after each operator inside; of a DTensor's after those on its local tensor, as the tracker."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(
        self, func: Callable[..., object], types: Sequence[type], args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._look()
        return result


def faked(model: nn.Module, mode: FakeMode) -> nn.Module:
    """Replace parameters and buffers by fake ones of the same shapes on the CPU, shared ones by shared ones."""
    new: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in new:
            with mode:
                made = torch.empty_like(tensor, device="cpu")
            trains = tensor.requires_grad
            new[id(tensor)] = nn.Parameter(made, trains) if isinstance(tensor, nn.Parameter) else made
        return new[id(tensor)]

    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            tensors: dict[str, Any] = kept
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})
    return model


def faked_batch(batch: object, mode: FakeMode) -> object:
    """Return the batch with fake tensors."""
    return tree_map_only(Tensor, mode.from_tensor, batch)
