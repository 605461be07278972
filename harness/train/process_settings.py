"""Settings of a process that change its speed or its arithmetic, and that the experiment file does not name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.train.precision import Precision, dtype_name
from harness.train.ranks import Ranks

SWITCHES = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")
"""Variables of debugging on a GPU, which 0 leaves off."""


class ProcessSettings:
    """The dtypes of a model that is ready to train, and the settings that are in effect in its process.

    ``declared``: the dtypes that the strategy sets. The first forward pass shows what is in effect inside loss() alone;
    not that of a ``compiled`` model, or one that the workload compiles, which a hook would change.
    """

    def __init__(self, model: nn.Module, precision: Precision, declared: str, compiled: bool) -> None:
        self._precision, self._declared = precision, declared
        self._parameters, self._outputs = _dtypes(model.parameters()), set[torch.dtype]()
        self._inside: list[str] = []

        def note(module: nn.Module, inputs: object, outputs: object) -> None:
            hook.remove()
            self._outputs |= _dtypes(tree_leaves(outputs))
            self._inside += in_effect(precision)

        own = getattr(model, "_compiled_call_impl", None) is not None or isinstance(model, torch.jit.ScriptModule)
        if not (compiled or own):
            hook = model.register_forward_hook(note)

    @property
    def dtypes(self) -> str:
        """The declared dtypes, or those of parameters and outputs if one of them is not float32."""
        if self._parameters | self._outputs <= {torch.float32}:
            return self._declared
        seen = {"parameters": self._parameters, "outputs": self._outputs}
        return ", ".join(f"{what} {_text(kinds)}" for what, kinds in seen.items() if kinds)

    def names(self) -> list[str]:
        """Return the settings in effect in the first forward pass or now, and dtypes other than the precision's."""
        narrow = {dtype for dtype in self._outputs if dtype.itemsize < torch.float32.itemsize}
        other = (self._parameters | narrow) - {torch.float32, self._precision.reduced}
        dtypes = [f"dtype {_text(other)}"] if other else []
        return [*dict.fromkeys([*self._inside, *in_effect(self._precision), *dtypes])]


def in_effect(precision: Precision) -> list[str]:
    """Return the settings of this process and thread that are in effect now."""
    on_gpu, tf32 = precision.device == "cuda", precision.name == "tf32"
    products = torch.backends.cuda.matmul.fp32_precision
    several = dist.is_initialized() and dist.get_world_size() > 1
    debug = dist.get_debug_level().name if several else "OFF"  # type: ignore[attr-defined]
    variables = {name: value for name, value in os.environ.items() if on_gpu and value}
    override = variables.get("NVIDIA_TF32_OVERRIDE")
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    profiled = sys.getprofile() or sys.gettrace() or (monitoring and monitoring.get_tool(monitoring.PROFILER_ID))
    found = {
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": on_gpu and torch.backends.cudnn.deterministic,
        "torch's profiler": torch.autograd._profiler_enabled(),  # type: ignore[attr-defined]
        "Python's profiler or debugger": bool(profiled),
        "autocast of the workload": not precision.reduced and torch.is_autocast_enabled(precision.device),
        f"TORCH_DISTRIBUTED_DEBUG={debug}": debug != "OFF",
        f"NVIDIA_TF32_OVERRIDE={override}": override is not None and (override != "0") != tf32,
        f"fp32_precision={products}": on_gpu and (products == "tf32") != tf32,
    }
    switched = [name for name in SWITCHES if variables.get(name, "0") != "0"]
    return [*(name for name, is_on in found.items() if is_on), *switched]


def pinned() -> frozenset[int]:
    """Return the processors that the calling thread is pinned to; empty if it may use all, or if that is not known."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return frozenset(allowed) if len(allowed) < (os.cpu_count() or 1) else frozenset()


def crowded(ranks: Sequence[tuple[frozenset[int], int]]) -> frozenset[int]:
    """Return processors that several ranks of a node are pinned to, with more threads than processors; empty if none.

    ``ranks``: the processors that each is pinned to, and the number of its computing threads.
    """
    for shared in sorted({one | other for one, _ in ranks for other, _ in ranks if one & other}, key=len):
        inside = [threads for own, threads in ranks if own and own <= shared]
        if len(inside) > 1 and sum(inside) > len(shared):
            return shared
    return frozenset()


def crowding(ranks: Ranks) -> list[str]:
    """Return the crowded processors of this rank as a setting. Every rank calls it, in the thread that trains."""
    threads = 1 if ranks.devices[0].type == "cuda" else torch.get_num_threads()  # with a GPU one thread launches
    gathered = ranks.gather((ranks.node_rank, pinned(), threads))
    here = [(own, n) for node, own, n in gathered if node == ranks.node_rank]
    shared = pinned() & crowded(here)
    return [f"processors {'/'.join(map(str, sorted(shared)))} shared by ranks"] if shared else []


def _dtypes(values: Iterable[object]) -> set[torch.dtype]:
    """Return the dtypes of tensors with real numbers; that of their parts for complex ones."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return {tensor.dtype.to_real() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}


def _text(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_name, dtypes)))
