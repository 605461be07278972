"""Peak memory of one rank: allocated and reserved by torch on GPUs, resident memory of the process on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.plan.rows import ModelBytes, RankFacts
from harness.system.process import resident_peak
from harness.train.strategies.base import default_units
from harness.train.training import Training, local_part
from harness.train.workloads import Workload

_CLEAR = Path("/proc/self/clear_refs")


def reset_peak(devices: Sequence[torch.device]) -> bool:
    """Reset peak memory; return False if the system cannot, so that an older peak is not taken for the trial's."""
    if devices[0].type == "cuda":
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text("5")  # resets VmHWM, see proc(5)
    except OSError:
        return False
    return True


def peak(devices: Sequence[torch.device]) -> RankFacts:
    """Return peak bytes since ``reset_peak``: the largest of the rank's devices and each device's, or the process's.

    'allocated_by_device' and 'reserved_by_device' are text, '1024, 512', in the order of the devices.
    """
    if devices[0].type == "cuda":
        allocated = [torch.cuda.max_memory_allocated(device) for device in devices]
        reserved = [torch.cuda.max_memory_reserved(device) for device in devices]
        return {
            "peak_memory_bytes": max(allocated),
            "peak_reserved_bytes": max(reserved),
            "allocated_by_device": ", ".join(map(str, allocated)),
            "reserved_by_device": ", ".join(map(str, reserved)),
            "resident_bytes": resident_peak(),
        }
    resident = resident_peak()
    return {"peak_memory_bytes": resident, "peak_reserved_bytes": None, "resident_bytes": resident}


def of_state(training: Training) -> RankFacts:
    """Return the bytes of parameters, gradients and optimizer state on this rank; of a shard, its local part."""
    for module in training.model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # fsdp: after an evaluation its root's are whole
            module.reshard()  # type: ignore[operator]
    parameters = list(training.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [leaf for entry in training.optimizer.state.values() for leaf in tree_leaves(entry)]
    return {
        "parameter_bytes": _bytes(parameters),
        "gradient_bytes": _bytes(gradients),
        "optimizer_bytes": _bytes([leaf for leaf in state if isinstance(leaf, Tensor)]),
    }


def of_model(model: nn.Module, workload: Workload) -> ModelBytes:
    """Return the sizes of a whole model, on any device, and of the units of it that fsdp shards one by one."""
    parameters = list(model.parameters())
    in_units: set[int] = set()
    units = []
    for unit in getattr(workload, "shard_units", default_units)(model):
        own = {id(p): p for p in unit.parameters() if id(p) not in in_units}
        in_units |= own.keys()
        units.append(_bytes(own.values()))
    return {
        "parameter_bytes": _bytes(parameters),
        "trainable_bytes": _bytes(p for p in parameters if p.requires_grad),
        "buffer_bytes": _bytes(model.buffers()),
        "unit_bytes": max(units, default=0),
        "root_bytes": _bytes(p for p in parameters if id(p) not in in_units),
        "on_meta": any(p.is_meta for p in parameters),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local_part, tensors))
