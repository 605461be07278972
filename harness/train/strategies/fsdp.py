"""One process a device; parameters, gradients and optimizer state are sharded over the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import Options
from harness.train.model import initialised
from harness.train.precision import dtype_name
from harness.train.strategies.base import ExchangePoint, Report, Strategy, WrapContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

NORMS = (nn.modules.batchnorm._NormBase,)
"""Layers with statistics, which are float32: their kernels take no weights of another dtype than the statistics."""


class WholeDraws(TorchDispatchMode):
    """Fills a sharded tensor that is drawn at random with its part of a draw of the whole tensor.

    Each in-place draw happens on the host, over the whole shape, by torch's CPU generator: ranks with the same seed
    agree with each other and with one device. Host memory holds one whole parameter at a time.
    """

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        from torch.distributed.tensor import DTensor, distribute_tensor

        target = args[0] if args else None
        draws = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        if not (draws and isinstance(target, DTensor)):
            return func(*args, **(kwargs or {}))
        whole = torch.empty(target.shape, dtype=target.dtype)
        func(whole, *args[1:], **(kwargs or {}))
        # src_data_rank None: each rank takes its part of its own draw, nothing is sent
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))
        return target


@dataclass(frozen=True)
class Group:
    """Modules whose parameters are gathered together: a unit, layers with statistics, or what is left of the model.

    ``gather_bytes``, ``reduce_bytes``: of the whole parameters, and of their gradients. ``reshards``: whether a
    backward pass gathers them once more.
    """

    modules: tuple[nn.Module, ...]
    gather_bytes: int
    reduce_bytes: int
    reshards: bool


def groups_of(parts: Sequence[tuple[Sequence[nn.Module], torch.dtype | None, bool]]) -> list[Group]:
    """Return the group of each part, before any is sharded; a parameter is in the first one that has it.

    ``parts``: modules to shard together, the dtype in which their parameters are gathered, None for their own, and
    whether they reshard. Gradients of parameters that are gathered in another dtype are reduced in float32.
    """
    taken: set[nn.Parameter] = set()
    groups = []
    for modules, dtype, reshards in parts:
        own = dict.fromkeys(p for module in modules for p in module.parameters() if p not in taken)
        taken.update(own)
        gathered = sum(p.numel() * (dtype or p.dtype).itemsize for p in own)
        reduced = sum(p.numel() * (torch.float32 if dtype else p.dtype).itemsize for p in own if p.requires_grad)
        groups.append(Group(tuple(modules), gathered, reduced, reshards))
    return groups


def observe_groups(groups: Sequence[Group], report: Report) -> None:
    """Add hooks to the groups' modules, whose parameters are gathered, so that each pass reports where it is."""
    taken: set[nn.Parameter] = set()
    for number, group in enumerate(groups):
        if not group.gather_bytes:  # every parameter of the model is in another group
            continue
        forward = ExchangePoint("forward", number, gather_bytes=group.gather_bytes)
        backward = ExchangePoint("backward", number, gather_bytes=group.gather_bytes if group.reshards else 0)
        gradients = ExchangePoint("gradients", number, reduce_bytes=group.reduce_bytes)
        for module in group.modules:
            module.register_forward_pre_hook(lambda module, inputs, point=forward: report(point))
            module.register_forward_hook(partial(_report_backward, report, backward))
        own = [p for module in group.modules for p in module.parameters() if p.requires_grad and p not in taken]
        taken.update(own)
        for parameter in dict.fromkeys(own):
            parameter.register_post_accumulate_grad_hook(lambda parameter, point=gradients: report(point))


def _report_backward(report: Report, point: ExchangePoint, module: nn.Module, inputs: object, outputs: object) -> None:
    """Report when the first gradient of the outputs arrives."""
    for output in tree_leaves(outputs):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: report(point))


class Fsdp(Strategy):
    """torch's fully_shard, which modifies a model in place.

    Under bf16 and fp16 each unit gathers its parameters in that dtype and reduces its gradients in float32, as
    MixedPrecisionPolicy describes; layers with statistics stay in float32, in one group of the whole model.
    """

    traits = BUILTIN_TRAITS["fsdp"]
    takes_meta = True

    def autocasts(self, options: Options) -> bool:
        """Return whether the option asks for autocast over float32 parameters in place of the policy."""
        return options.get("mixed_precision", "policy") == "autocast"

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Apply fully_shard to each unit, then to the whole. All ranks must hold the same parameters before.

        The model is on the host or on the meta device: fully_shard moves one unit at a time and keeps its shards.
        """
        # imported here: the import takes most of a second, which worker groups without fsdp save
        from torch.distributed.fsdp import fully_shard

        options = context.options
        if options.get("sync_batch_norm", False):
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        reshard = options.get("reshard_after_forward")
        after_forward = reshard if isinstance(reshard, int) else None  # all but the root, as in torch
        shard = partial(fully_shard, mesh=self.mesh(context), reshard_after_forward=after_forward)
        reduced = None if self.autocasts(options) else context.precision.reduced
        policy = _policy(reduced)
        norms: list[nn.Module] = [m for m in model.modules() if reduced and isinstance(m, NORMS) and [*m.parameters()]]
        # such a layer may be a unit itself, as in nn.Sequential
        units = [unit for unit in context.units(model) if unit not in norms and [*unit.parameters()]]
        # before sharding, which replaces parameters; torch's default gathers the root's once a step
        of_norms = [(norms, None, reshard is not False)] if norms else []
        of_units = [([unit], reduced, reshard is not False) for unit in units]
        self._groups = groups_of([*of_norms, *of_units, ([model], reduced, reshard is True)])
        self.shard_units = len(self._groups)
        if norms:  # frozen weights too: else the group around them gathers them in 16 bits
            shard(norms, mp_policy=_policy(None))
        for unit in units:
            shard(unit, mp_policy=policy)
        shard(model, mp_policy=replace(policy, output_dtype=torch.float32) if reduced else policy)
        with WholeDraws():  # type: ignore[no-untyped-call]
            return initialised(model, context.init_weights, context.devices[0])

    def mesh(self, context: WrapContext) -> DeviceMesh:
        """Return the mesh of all ranks: one dimension, or for ``mesh: hybrid`` nodes x the ranks of each (HSDP)."""
        from torch.distributed.device_mesh import init_device_mesh

        kind, size = context.devices[0].type, dist.get_world_size()
        if context.options.get("mesh", "flat") == "hybrid" and context.nodes > 1:
            shape = (context.nodes, size // context.nodes)  # ranks are numbered node by node
            return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        return init_device_mesh(kind, (size,))

    def dtypes(self, context: WrapContext) -> str:
        """Return the dtypes of parameters, gradients and loss, for the trial's row."""
        reduced = context.precision.reduced
        if reduced is None or self.autocasts(context.options):
            return super().dtypes(context)
        name = dtype_name(reduced)
        return f"shards, gradient reduction, BatchNorm, loss float32; parameters gathered and computed in {name}"

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[object]:
        """Set whether the backward passes that follow reduce gradients; the setting remains after the context."""
        model.set_requires_gradient_sync(enabled)  # type: ignore[operator]
        return nullcontext()

    def observed(self, model: nn.Module, context: WrapContext, report: Report) -> nn.Module | None:
        """Report the passes of each group from hooks of its modules; None for a hybrid mesh, which exchanges twice.

        On one node a hybrid mesh equals a flat one, but is not reported either: a prediction from it for several nodes,
        where the two differ, would be wrong.
        """
        if context.options.get("mesh", "flat") == "hybrid":
            return None
        observe_groups(self._groups, report)
        return model

    @contextmanager
    def alone(self, model: nn.Module) -> Iterator[None]:
        """Return a context whose steps keep the parameters that the first one gathers, and reduce no gradient.

        The optimizer has nothing to update in it: its shards get no gradient. Afterwards parameters are shards again,
        which the next forward pass gathers as before; reshard_after_forward stays False.
        """
        units = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)  # type: ignore[operator]
            unit.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
            unit.set_reshard_after_backward(False, recurse=False)  # type: ignore[operator]
        try:
            yield
        finally:
            for unit in units:
                unit.set_requires_gradient_sync(True, recurse=False)  # type: ignore[operator]
                unit.set_reshard_after_backward(True, recurse=False)  # type: ignore[operator]
                unit.reshard()  # type: ignore[operator]


def _policy(reduced: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the policy of a unit; in float32 nothing is cast, inputs included."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if reduced is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=reduced, reduce_dtype=torch.float32)
