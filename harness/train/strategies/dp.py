"""One process drives every device; the model is copied at each forward pass. On CPU it is emulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.train.activation_checkpointing import Checkpointed
from harness.train.strategies.base import WrapContext, Wrapping


class ReplicatedModule(nn.Module):
    """Runs ``module`` on chunks of the batch, each in a thread with a copy of the parameters."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = module
        self.replicas = replicas

    def forward(self, *args: object, **kwargs: object) -> object:
        with record_function("Scatter"):
            chunks = scatter((args, kwargs), self.replicas)
        if len(chunks) == 1:
            return self.module(*args, **kwargs)
        with record_function("Replicate"):
            replicas = replicate(self.module, len(chunks))
        outputs = _apply(replicas, chunks)
        with record_function("Gather"):
            return gather(outputs)


class Broadcast(torch.autograd.Function):
    """Copies parameters for every replica; backward, sums their gradients. Profiles name it as on CUDA."""

    @staticmethod
    def forward(ctx: Any, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.size = len(parameters)  # of one replica
        ctx.set_materialize_grads(False)
        return tuple(parameter.clone() for _ in range(count) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        columns = (gradients[index :: ctx.size] for index in range(ctx.size))
        known = ([gradient for gradient in column if gradient is not None] for column in columns)
        # None if no replica used the parameter
        return (None, *(torch.stack(gradients).sum(dim=0) if gradients else None for gradients in known))


def replicate(module: nn.Module, count: int) -> list[nn.Module]:
    """Return shallow copies of a module tree whose parameters are differentiable copies of the originals.

    The first replica keeps the module's own buffers, as on CUDA: only its batch statistics survive.
    """
    members, parameters = list(module.modules()), list(module.parameters())
    copied = Broadcast.apply(count, *parameters)
    replicas = []
    for index in range(count):
        copies = {member: member._replicate_for_data_parallel() for member in members}
        own = copied[index * len(parameters) : (index + 1) * len(parameters)]
        tensors = {id(parameter): copy for parameter, copy in zip(parameters, own, strict=True)}
        buffers = {id(b): b if index == 0 else b.clone() for b in module.buffers()}
        for member, copy in copies.items():
            for name, child in member._modules.items():
                copy._modules[name] = copies[child] if child is not None else None
            for name, parameter in member._parameters.items():
                if parameter is None:
                    copy._parameters[name] = None
                else:  # a plain attribute: only a leaf tensor, without history, can be an nn.Parameter
                    setattr(copy, name, tensors[id(parameter)])
            for name, buffer in member._buffers.items():
                copy._buffers[name] = None if buffer is None else buffers[id(buffer)]
        replicas.append(copies[module])
    return replicas


def scatter(inputs: object, count: int) -> list[Any]:
    """Split every tensor along its first dimension into at most ``count`` chunks; other values are shared."""
    if isinstance(inputs, Tensor):
        return list(inputs.chunk(count)) if inputs.dim() else [inputs] * count
    if isinstance(inputs, tuple | list) and inputs:
        columns = [scatter(item, count) for item in inputs]
        return [type(inputs)(row) for row in zip(*columns, strict=False)]
    if isinstance(inputs, Mapping) and inputs:
        columns = [scatter(item, count) for item in inputs.values()]
        return [dict(zip(inputs, row, strict=True)) for row in zip(*columns, strict=False)]
    return [inputs for _ in range(count)]


def gather(outputs: Sequence[Any]) -> object:
    """Concatenate the replicas' outputs along the first dimension; scalars become a vector."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, Mapping):
        return type(first)({key: gather([output[key] for output in outputs]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        return type(first)(gather(column) for column in zip(*outputs, strict=True))
    return first


def _apply(models: Sequence[nn.Module], chunks: Sequence[object]) -> list[object]:
    """Run each replica's forward in its own thread, with the caller's grad mode.

    Checkpointed ones run in turn: all draw from one generator, whose state backward restores.
    """
    grad = torch.is_grad_enabled()
    threads = torch.get_num_threads()

    def forward(model: nn.Module, chunk: Any) -> object:
        torch.set_num_threads(threads)
        args, kwargs = chunk
        with torch.set_grad_enabled(grad):
            return model(*args, **kwargs)

    checkpointed = any(isinstance(module, Checkpointed) for module in models[0].modules())
    with ThreadPoolExecutor(max_workers=1 if checkpointed else len(models)) as pool:
        return list(pool.map(forward, models, chunks))


class DataParallel(Wrapping):
    """nn.DataParallel on CUDA; an emulation on CPU, where nn.DataParallel would run the bare module."""

    traits = BUILTIN_TRAITS["dp"]

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        devices = context.devices
        model = model.to(devices[0])
        if devices[0].type == "cuda":
            return nn.DataParallel(model, device_ids=[device.index or 0 for device in devices])
        return ReplicatedModule(model, len(devices))
