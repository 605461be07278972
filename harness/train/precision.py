"""The arithmetic of a training (dtypes, autocast, TF32, the loss scale of fp16), and settings that change its speed."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_leaves, tree_map_only

REDUCED: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions whose forward and backward passes compute in fewer than 32 bits; weights stay in float32."""
LOW_PRECISIONS: Mapping[torch.dtype, str] = {low: name for name, low in REDUCED.items()}
"""Their names by dtype, also of parameters that have one of these themselves."""
FEW_STEPS_SCALE = 1024.0
"""A scale for checks of a few steps: at GradScaler's first, 65,536, updates are skipped until it has fallen."""
SWITCHES = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")
"""Variables of debugging on a GPU, which 0 leaves off."""


@dataclass(frozen=True)
class Precision:
    """The precision of a cell: ``name`` as in the experiment file; ``device``: the type of its devices."""

    name: str
    device: str

    @property
    def reduced(self) -> torch.dtype | None:
        """The dtype of matrix products and convolutions if it is not float32."""
        return REDUCED.get(self.name)

    def apply(self) -> None:
        """Enable TF32 for matrix products and convolutions in this process, or disable it."""
        torch.set_float32_matmul_precision("high" if self.name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.name == "tf32"

    def around(self, model: nn.Module) -> nn.Module:
        """Return the model with autocast in its forward pass; the model itself if it computes in float32."""
        return Autocast(model, self.device, self.reduced) if self.reduced else model

    def scaler(self) -> GradScaler:
        """Return a new loss scale, enabled for fp16, whose small gradients would be 0; else it changes nothing."""
        return GradScaler(self.device, enabled=self.name == "fp16")

    @property
    def text(self) -> str:
        """The dtypes under autocast, for the trial's row."""
        if self.reduced is None:
            return "float32 with TF32 products" if self.name == "tf32" else "float32"
        return f"weights, gradients, loss float32; forward autocast to {dtype_name(self.reduced)}"


class Autocast(nn.Module):
    """Runs ``module`` under autocast, in whichever thread calls it; floating-point outputs are float32.

    nn.DataParallel calls each replica in a thread of its own, and autocast's dtype is a property of the thread. A
    module around the workload's model enters autocast there. The loss is computed from the outputs in float32.

    Attributes of ``module`` are found here too, such as a model's ``config`` that a workload's loss reads. A method of
    it other than ``forward`` that is called so runs without autocast.
    """

    def __init__(self, module: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self._autocast_device, self._autocast_dtype = module, device, dtype

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):  # not there yet while it is copied; its own protocols
                raise
            return getattr(self.module, name)

    def forward(self, *args: object, **kwargs: object) -> object:
        with torch.autocast(self._autocast_device, dtype=self._autocast_dtype):
            outputs = self.module(*args, **kwargs)
        low = REDUCED.values()
        return tree_map_only(Tensor, lambda leaf: leaf.float() if leaf.dtype in low else leaf, outputs)


def without_autocast(model: nn.Module) -> nn.Module:
    """Return the model inside ``Autocast``; any other model is returned itself."""
    return model.module if isinstance(model, Autocast) else model


def dtype_name(dtype: torch.dtype) -> str:
    """Return 'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LossScale:
    """The state of a GradScaler. ``unskipped``: updates in a row without a skip or a growth of the scale.

    A step whose gradients are not finite is skipped and halves the scale; ``growth_interval`` updates double it.
    """

    scale: float
    unskipped: int
    growth_interval: int

    @classmethod
    def of(cls, scaler: GradScaler) -> LossScale:
        """Read the state from the device: between windows, since the host waits for it."""
        state = scaler.state_dict()
        return cls(float(state["scale"]), int(state["_growth_tracker"]), int(state["growth_interval"]))

    def skipped_since(self, earlier: LossScale, steps: int) -> int:
        """Return how many of ``steps`` steps were skipped since: exact for none, else the least that explains it.

        A scale that has fallen to 0 does not count its halvings: all steps but those since the last skip.
        """
        if not self.scale:
            return max(0, steps - self.unskipped)
        growths, unskipped = divmod(earlier.unskipped + steps, self.growth_interval)
        doublings = round(math.log2(self.scale / earlier.scale))
        if (doublings, self.unskipped) == (growths, unskipped):
            return 0
        return max(1, -doublings)


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


def _dtypes(values: Iterable[object]) -> set[torch.dtype]:
    """Return the dtypes of tensors with real numbers, and of the parts of complex ones."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return {tensor.dtype.to_real() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}


def _text(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_name, dtypes)))
