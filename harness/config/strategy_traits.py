"""The table of strategy traits, one row a strategy.

The names and option sections of the file, placement, feasibility, profiled events, the order in tables, markers and
colours are all read from this table. The code of a strategy is in harness/train/strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from harness.config.values import Axis

BASE_STRATEGY = "single"
"""The strategy of every base cell: the bare model on one device."""


class Strict(BaseModel):
    """A frozen model that rejects unknown keys and converts no types."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


def whole_if_equal(value: float) -> float:
    """Return an integer for a number without a fraction: 25.0 and 25 make one cell."""
    return int(value) if value == int(value) else value


class NoOptions(Strict):
    """The section of a strategy without options."""


class ProcessOptions(Strict):
    """Options of a strategy with a process a device. A list is an axis.

    ``backend``: of the processes' collectives; auto is nccl on GPUs, gloo on CPU slots and on shared GPUs.
    """

    backend: Axis[Literal["auto", "nccl", "gloo"]] = ("auto",)
    sync_batch_norm: Axis[bool] = (False,)


class DdpOptions(ProcessOptions):
    """Arguments of DistributedDataParallel, with its defaults. A list is an axis.

    ``bucket_cap_mb``: in MiB; 25 is as without it, where the first bucket has 1 MiB. ``comm_hook``: gradients are
    exchanged in float32 (none), or rounded to bfloat16 or float16 before.
    """

    bucket_cap_mb: Axis[Annotated[float, Field(ge=0.001, le=100_000), AfterValidator(whole_if_equal)]] = (25,)
    gradient_as_bucket_view: Axis[bool] = (False,)
    static_graph: Axis[bool] = (False,)
    find_unused_parameters: Axis[bool] = (False,)
    broadcast_buffers: Axis[bool] = (True,)
    comm_hook: Axis[Literal["none", "bf16_compress", "fp16_compress"]] = ("none",)


class FsdpOptions(ProcessOptions):
    """Arguments of fully_shard, with its defaults. A list is an axis.

    ``reshard_after_forward``: null is torch's default, all units but the root. ``mixed_precision``: under bf16 and fp16
    parameters are gathered in that dtype (policy), or in float32 and cast by autocast (autocast). ``mesh``: parameters
    are sharded over all ranks (flat), or over those of a node and replicated between nodes (hybrid: HSDP).
    """

    reshard_after_forward: Axis[bool | None] = (None,)
    mixed_precision: Axis[Literal["policy", "autocast"]] = ("policy",)
    mesh: Axis[Literal["flat", "hybrid"]] = ("flat",)


@dataclass(frozen=True)
class ProfiledPart:
    """A part of a step that the profiler measures.

    ``name``: its label in the waterfall, and its key in a trial's exchange_s. ``events``: its names in a profile: of
    NCCL kernels, where the first that occurs counts; and of calls on the host, which the name of a module may follow in
    brackets. ``waits``: whether a rank waits for the others in it.
    """

    name: str
    events: tuple[str, ...]
    waits: bool = True


ALL_REDUCE = "all-reduce"
"""The key of ddp's exchange in exchange_s, which DDP times itself."""
BROADCAST, OWN_COLLECTIVES = "buffer broadcast", "own collectives"
"""The keys of what ddp sends before a forward pass, and of collectives of the user's code: workload or own strategy."""
SPARSE = "sparse gradients"
"""The key of ddp's exchange of the rows that each rank has a gradient for."""
EXCHANGE_CPU = "CPU time of the exchange"
"""The key of what ddp's exchange takes from the processors that compute: copies into buckets, hooks, gloo's sums."""

COLLECTIVES = ProfiledPart(
    "exposed communication",
    (
        "ncclDevKernel",
        *("gloo:all_reduce", "gloo:all_gather", "gloo:reduce_scatter", "gloo:broadcast", "gloo:reduce", "gloo:gather"),
        *("gloo:scatter", "gloo:all_to_all", "gloo:send", "gloo:recv", "gloo:barrier"),
    ),
)
"""All collectives of a program whose own they are."""


@dataclass(frozen=True)
class StrategyTraits:
    """Properties of a strategy for planning, measurement, analysis and figures.

    ``own_program``: a script of the user is the whole program, and its base is the script on one device.
    ``own_ranks``: it connects its ranks itself, in processes beside those of a worker group.
    ``trains``: false if a loop's batches are consumed without training, so that its speed is that of the ingest.
    ``one_process``: one process drives all devices of a cell; otherwise each device has a process of its own.
    ``most_devices``: None if there is no limit. ``calls_wrapper``: the loss must call the wrapped model, whose forward
    synchronises the devices. ``replicates``: forward copies the model to the devices and splits the batch with
    torch.chunk. ``shards_parameters``: each rank holds a part of every parameter. ``needs_every_gradient``: a parameter
    without a gradient makes the next step fail. ``buckets_gradients``: gradients are copied into buckets of the same
    size, unless its option gradient_as_bucket_view is set. ``explained_by``: the measurement of its communication:
    windows without gradient synchronisation ("removal"), a profile of ``profiled_parts`` ("profile"), or none.
    ``wrapper_cost``: the wrapped model on one device is measured beside the bare one, and on every device its steps
    without exchange. ``options``: the keys of its section in the file. ``marker``: matplotlib's marker of its points.
    ``summary``: a clause for ``harness list``.
    """

    own_program: bool = False
    own_ranks: bool = False
    trains: bool = True
    one_process: bool = False
    most_devices: int | None = None
    calls_wrapper: bool = False
    replicates: bool = False
    shards_parameters: bool = False
    needs_every_gradient: bool = False
    buckets_gradients: bool = False
    compiles: bool = True
    emulated_on_cpu: bool = False
    explained_by: Literal["", "removal", "profile"] = ""
    wrapper_cost: bool = False
    profiled_parts: tuple[ProfiledPart, ...] = ()
    options: type[Strict] = NoOptions
    marker: str = ""
    summary: str = ""


BUILTIN_TRAITS: Mapping[str, StrategyTraits] = {
    BASE_STRATEGY: StrategyTraits(
        one_process=True, most_devices=1, marker="o", summary="the bare model on one device: the base of ratios"
    ),
    "dp": StrategyTraits(
        one_process=True,
        calls_wrapper=True,
        replicates=True,
        compiles=False,
        emulated_on_cpu=True,
        explained_by="profile",
        profiled_parts=(  # autograd functions of nn.DataParallel; those of the emulation on CPU have the same names
            ProfiledPart("replicate", ("Broadcast", "Replicate")),  # copies of the model
            ProfiledPart("scatter", ("Scatter",)),  # the batch
            ProfiledPart("gather", ("Gather",)),  # the outputs
            ProfiledPart("reduce", ("BroadcastBackward",)),  # the gradients
        ),
        marker="s",
        summary="DataParallel: one process drives all devices and copies the model to each in every forward pass",
    ),
    "ddp": StrategyTraits(
        calls_wrapper=True,
        needs_every_gradient=True,
        buckets_gradients=True,
        explained_by="removal",
        wrapper_cost=True,
        options=DdpOptions,
        marker="D",
        summary="DistributedDataParallel: one process per device; gradients are averaged while backward runs",
    ),
    "fsdp": StrategyTraits(
        shards_parameters=True,
        explained_by="profile",
        wrapper_cost=True,
        profiled_parts=(  # a kernel of NCCL and its annotation cover the same time; gloo's run in a thread of its own
            ProfiledPart(
                "all-gather",
                ("ncclDevKernel_AllGather", "nccl:_all_gather_base", "gloo:all_gather", "c10d::_allgather_base_"),
            ),
            ProfiledPart(
                "reduce-scatter",
                # gloo implements reduce-scatter as an all-reduce
                (
                    "ncclDevKernel_ReduceScatter",
                    "nccl:_reduce_scatter_base",
                    "gloo:all_reduce",
                    "c10d::_reduce_scatter_base_",
                ),
            ),
            # copies of shards before and after they are gathered, with the host's part; on one device there are none.
            # Copies of gradients are made there too, and are in the wrapper.
            ProfiledPart("shard copies", ("FSDP::all_gather", "FSDP::all_gather_copy_out"), waits=False),
        ),
        options=FsdpOptions,
        marker="^",
        summary="FSDP2: one process per device; parameters, gradients and optimizer state are sharded",
    ),
}
"""The built-in strategies, in the order of tables and figures."""


def strategy_order(name: str) -> tuple[int, str]:
    """Return a sort key: built-in strategies in the order of the table, then others by name."""
    names = list(BUILTIN_TRAITS)
    return (names.index(name) if name in names else len(names), name)
