"""A workload's model on the host: built, and initialised if the workload builds on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from harness.config.values import GIB
from harness.errors import WorkloadError
from harness.train.precision import without_autocast
from harness.train.workloads import Workload

HOST = torch.device("cpu")
InitWeights = Callable[[nn.Module], object]


def build_model(workload: Workload) -> nn.Module:
    """Return the workload's model on the host, initialised; raise WorkloadError."""
    return initialised(workload.build_model(), init_weights_of(workload))


def init_weights_of(workload: Workload) -> InitWeights | None:
    """Return the workload's ``init_weights``, which sets the parameters and buffers of a model of the meta device."""
    found: InitWeights | None = getattr(workload, "init_weights", None)
    return found


def initialised(model: nn.Module, init_weights: InitWeights | None, device: torch.device = HOST) -> nn.Module:
    """Return the model; one of the meta device is given memory on ``device`` and initialised.

    ``init_weights`` gets it without ``Autocast``, as the workload built it.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model
    if init_weights is None:
        raise WorkloadError("the workload's model is on the meta device, and it has no init_weights(model)")
    model.to_empty(device=device)
    with torch.no_grad():
        init_weights(without_autocast(model))
    return model


def too_large(model: nn.Module, device: torch.device) -> str | None:
    """Return why one device cannot train the model: weights and gradients alone exceed the memory; else None."""
    copies = ((parameter, 2 if parameter.requires_grad else 1) for parameter in model.parameters())
    needed = sum(count * parameter.numel() * parameter.element_size() for parameter, count in copies)
    has = device_bytes(device)
    if has is None or needed <= has:
        return None
    return f"weights and gradients of the model take {needed / GIB:.1f} GiB; one device has {has / GIB:.1f} GiB"


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU; None for a CPU, whose memory holds the model already when it is built."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def faked(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Replace parameters and buffers by fake ones of the same shapes on a device; tied parameters stay tied.

    Module.to() cannot replace a tensor without memory.
    """
    new: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in new:
            with mode:
                made = torch.empty_like(tensor, device=device)
            trains = tensor.requires_grad
            new[id(tensor)] = nn.Parameter(made, trains) if isinstance(tensor, nn.Parameter) else made
        return new[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            tensors: dict[str, Any] = held
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})
    return model


def in_channels_last(model: nn.Module, *, weights: bool) -> nn.Module:
    """Return the model with its images, and with ``weights`` its convolutions too, stored channels last (NHWC).

    A convolution computes in the layout of either. fully_shard takes contiguous parameters only.
    """

    def channels_last(leaf: Tensor) -> Tensor:
        return leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf

    def convert(_: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        return tree_map_only(Tensor, channels_last, (args, kwargs))

    model.register_forward_pre_hook(convert, with_kwargs=True)
    return model.to(memory_format=torch.channels_last) if weights else model


@contextmanager
def own_statistics(model: nn.Module) -> Iterator[None]:
    """Make each SyncBatchNorm a plain BatchNorm for a block: it exchanges its statistics in every forward pass."""
    synchronised = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    for module in synchronised:
        module.forward = partial(_BatchNorm.forward, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in synchronised:
            del module.forward
