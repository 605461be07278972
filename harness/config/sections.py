"""The sections of an experiment file, each strict and frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from harness.config.axes import BATCHES, PLAIN_AXES, Filter, PrecisionName, is_option_axis
from harness.config.known_hardware import link_named
from harness.config.problems import Conflict, raise_conflicts
from harness.config.strategy_traits import BASE_STRATEGY, BUILTIN_TRAITS, Strict
from harness.config.values import (
    SECTION,
    USER_CLASS,
    Axis,
    Batch,
    Count,
    DataName,
    DeviceIdAxis,
    FilePath,
    Options,
    Seconds,
    Seed,
    Text,
    absolute_folders,
    as_axis,
    one_of,
)

StrategyName = Annotated[Text, BeforeValidator(one_of(BUILTIN_TRAITS, or_own=True))]
Amount = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
"""An amount of money, or a number of device-hours."""


class Cost(Strict):
    """The price of one device for an hour, whether it works or waits, and its currency; no part of any cell's id."""

    per_device_hour: Amount
    currency: Annotated[str, Field(min_length=1, max_length=20)]


_plain_axes = {name: (Axis[kind], (default,)) for name, (kind, default) in PLAIN_AXES.items()}  # type: ignore[valid-type]
_PlainGrid: Any = create_model("_PlainGrid", __base__=Strict, **_plain_axes)  # type: ignore[call-overload]
"""The axes of a grid that need no rule of their own, from the table of axes."""


ACCUMULATION = "training.accumulation"
MAX, AUTO = "max", "auto"
"""In place of a batch of a device: the largest that trains. In place of micro-batches a step: as many as needed."""
ONE_BATCH = (
    "give exactly one of per_device_batch_size (weak) and global_batch_size (strong); both with "
    "training.accumulation: auto in the grid, where per_device_batch_size is the most of a micro-batch"
)


class Grid(_PlainGrid):
    """Axes whose product is a set of cells. Keys such as ``optimizer.lr`` make any option an axis too.

    ``device_ids`` names GPUs of one node; their number is the number of devices, so ``devices`` is left out.
    ``seeks_max``: ``max`` stands among the batches of a device; the largest that trains is found before a run.
    """

    data: Axis[DataName] | None = None
    model: Axis[Text] | None = None
    strategy: Axis[StrategyName] = (BASE_STRATEGY,)
    devices: Axis[Count] = (1,)
    precision: Axis[PrecisionName] = ("fp32",)
    device_ids: DeviceIdAxis | None = None
    nodes: Axis[Count] | None = None
    per_device_batch_size: Axis[Batch] | None = None
    global_batch_size: Axis[Batch] | None = None
    seeks_max: bool = False
    options: Options = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, value: object) -> object:
        """Move keys with a dot, which are options of a section, to ``options``."""
        if not isinstance(value, dict):
            return value
        # workload_options, the section's name beside the grid, is accepted inside it too
        value = {str(key).replace("workload_options.", "workload.", 1): option for key, option in value.items()}
        variables = value.get(SECTION)
        if isinstance(variables, dict):  # the section's name is accepted inside the grid too
            value = {key: option for key, option in value.items() if key != SECTION}
            value |= {f"{SECTION}.{name}": option for name, option in variables.items()}
        dotted = {key: option for key, option in value.items() if is_option_axis(key)}
        plain = {key: option for key, option in value.items() if key not in dotted}
        options = plain.get("options", {})
        if not isinstance(options, dict):
            raise ValueError(f"options: got {repr(options)[:80]}; write optimizer.lr and the like in the grid itself")
        plain = {**plain, "options": {**options, **dotted}} if dotted else plain
        batches = as_axis(plain.get("per_device_batch_size"))
        if MAX not in batches:
            return plain
        numbers = [batch for batch in batches if batch != MAX]
        return {**plain, "per_device_batch_size": numbers or None, "seeks_max": True}

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_conflicts(self._conflicts())
        return self.model_copy(update={"devices": self._named_counts()}) if self.device_ids else self

    @field_validator("options")
    @classmethod
    def _folders(cls, options: Options, info: ValidationInfo) -> Options:
        return absolute_folders(options, "workload.data_folder", info)

    @property
    def batches_of_devices(self) -> bool:
        """Whether the grid gives batches of a device."""
        return self.per_device_batch_size is not None or self.seeks_max

    @property
    def knows_a_batch(self) -> bool:
        """Whether the grid gives a batch as a number."""
        return self.per_device_batch_size is not None or self.global_batch_size is not None

    def _named_counts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(len(ids) for ids in self.device_ids or ()))

    def _conflicts(self) -> Iterator[Conflict]:
        if not self.batches_of_devices and self.global_batch_size is None:
            yield Conflict(ONE_BATCH, BATCHES)
        for key in self.options:
            if not is_option_axis(key):
                yield Conflict(f"options: unknown axis {key[:80]!r}; allowed: an option such as optimizer.lr", ())
        if self.device_ids is None:
            return
        counts, ids = self._named_counts(), [list(one) for one in self.device_ids]
        if "devices" in self.model_fields_set and set(self.devices) != set(counts):
            text = f"got devices {list(self.devices)} and device_ids {ids}, which are {list(counts)} devices"
            yield Conflict(f"{text}; leave devices out", ("devices", "device_ids"))
        if self.nodes not in (None, (1,)):
            text = f"got nodes {list(self.nodes or ())} and device_ids, which belong to one node; leave nodes out"
            yield Conflict(text, ("nodes", "device_ids"))


class _StrategySections(Strict):
    """The options of each strategy; those of the user's own strategy stand under package.module:ClassName."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Options]

    @model_validator(mode="after")
    def _check(self) -> Self:
        unknown = [name for name in self.__pydantic_extra__ or {} if not USER_CLASS.fullmatch(name)]
        if unknown:
            errors: list[InitErrorDetails] = [
                {"type": "extra_forbidden", "loc": (name,), "input": ""} for name in unknown
            ]
            raise ValidationError.from_exception_data("strategy_options", errors)
        return self


_sections = {name: (traits.options, traits.options()) for name, traits in BUILTIN_TRAITS.items()}
StrategyOptions: type[_StrategySections] = create_model("StrategyOptions", __base__=_StrategySections, **_sections)  # type: ignore[call-overload]


class BlockRule(Strict):
    """A rule for the number of blocks: enough for an interval of this relative half-width (Stein's two stages)."""

    at_least: Annotated[int, Field(ge=2, le=1000)] = 3
    at_most: Annotated[int, Field(ge=2, le=1000)]
    halfwidth: Annotated[float, Field(gt=0, lt=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.at_most < self.at_least:
            raise ValueError(f"got at_least {self.at_least} and at_most {self.at_most}; at_most must not be less")
        return self


LOOKS = (3, 5, 8)
"""The numbers of blocks after which ``blocks: decide`` looks at the comparisons: those that are open go on."""
Decide = Literal["decide"]
Rule = BlockRule | Decide


def _check_decide(value: object) -> object:
    if value != "decide":
        raise ValueError(f"got {str(value)[:80]!r}; allowed: a number, decide, or {{at_least, at_most, halfwidth}}")
    return value


def _kind_of_blocks(value: object) -> str:
    return "rule" if isinstance(value, dict | BlockRule) else "decide" if isinstance(value, str) else "number"


Blocks = Annotated[
    Annotated[int, Field(ge=1, le=1000), Tag("number")]
    | Annotated[BlockRule, Tag("rule")]
    | Annotated[Decide, BeforeValidator(_check_decide), Tag("decide")],
    Discriminator(_kind_of_blocks),
]


class Throughput(Strict):
    """Options of throughput trials: blocks, warm-up, and windows, each of at least n steps and t seconds.

    The warm-up runs rounds of ``warmup_steps`` until their times are steady, at most ``warmup_rounds`` of them. After
    its first round it lasts at least ``warmup_seconds``: if unset 5 on GPUs, whose clocks take seconds to settle, and
    none on CPUs.
    ``twin``: the base is measured twice in every block (A/A test); ratios are to the mean. On CPU slots it is measured
    with the threads of all of them too, as plain PyTorch would use them. ``explain``: the parts of
    the waterfall are measured too, and, for at most ``links_seconds`` a placement (if unset 5 on GPUs, 1 on CPU slots;
    0: not at all), links and collectives. ``traces``: the best cell of the waterfall and its base are profiled once
    more after the blocks, and their traces kept.
    ``keep_steps``: of each step one row is recorded, of its slowest rank with means over ranks; or all ranks' rows.
    ``wait_for_quiet``: the longest time to wait, before each block, until other programs leave the processors idle.
    """

    blocks: Blocks = 6
    warmup_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    warmup_rounds: Annotated[int, Field(ge=2, le=1000)] = 5
    warmup_seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None
    windows: Annotated[int, Field(ge=1, le=1000)] = 3
    window_steps: Annotated[int, Field(ge=2, le=1_000_000)] = 50
    window_seconds: Annotated[float, Field(ge=0, le=86_400)] = 5.0
    twin: bool = True
    explain: bool = True
    traces: bool = True
    links_seconds: Annotated[float, Field(ge=0, le=600)] | None = None
    keep_steps: Literal["slowest", "all"] = "slowest"
    wait_for_quiet: Seconds | None = None

    @property
    def most_blocks(self) -> int:
        """The maximum number of blocks."""
        if isinstance(self.blocks, BlockRule):
            return self.blocks.at_most
        return LOOKS[-1] if self.blocks == "decide" else self.blocks

    @property
    def least_blocks(self) -> int:
        """The number of blocks that every cell has."""
        if isinstance(self.blocks, BlockRule):
            return self.blocks.at_least
        return LOOKS[0] if self.blocks == "decide" else self.blocks

    @property
    def rule(self) -> Rule | None:
        """The rule for the number of blocks; None if the file gives the number."""
        return None if isinstance(self.blocks, int) else self.blocks


Effort = Literal["quick", "normal", "careful"]
EFFORTS: Mapping[str, Mapping[str, int | float]] = {
    "quick": {"blocks": 5, "warmup_steps": 5, "windows": 2, "window_steps": 6, "window_seconds": 0.4},
    "normal": {},
    "careful": {"blocks": 10, "windows": 5, "window_seconds": 10.0},
}
"""The options of throughput trials that an effort sets, unless the file gives them: normal is their defaults."""


class Target(Strict):
    """The value of a validation metric at which a training has converged."""

    metric: Text
    at_least: Annotated[float, Field(allow_inf_nan=False)] | None = None
    at_most: Annotated[float, Field(allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of at_least and at_most")
        return self


class Convergence(Strict):
    """Options of convergence trials: cells, length, seeds, target.

    ``epochs``: of a workload, whose trainings have no other length. A script or a loop trains to its own end, or until
    after ``steps`` optimizer steps, or until ``seconds`` after its first step have passed.
    ``devices``: the device counts to train on; by default each strategy's largest. ``only``: a filter on cells.
    ``uneven``: a global batch that does not divide by the devices trains with unequal shares, instead of not at all.
    ``train_metrics``: the workload's metrics, such as the accuracy, are also computed on the training set, after each
    epoch and not on the training clock.
    """

    epochs: Annotated[int, Field(ge=1, le=100_000)] | None = None
    steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    seconds: Seconds | None = None
    seeds: Axis[Seed] = (0, 1, 2)
    target: Target | None = None
    only: Filter = Field(default_factory=dict)
    devices: Axis[Count] | None = None
    global_batch_size: Batch | None = None
    train_metrics: bool = False
    uneven: bool = False

    @property
    def names_batch(self) -> bool:
        """Whether the batches to train at are given, beside those of the grid."""
        return self.global_batch_size is not None or not self.only.keys().isdisjoint(BATCHES)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: got {list(self.seeds)}; each seed may appear only once")
        if self.devices and "devices" in self.only:
            raise ValueError("devices: got it here and in only; give one of both")
        return self

    @property
    def length(self) -> str:
        """How long a training is, in words."""
        if self.epochs:
            return f"{self.epochs} epochs"
        if self.steps:
            return f"at most {self.steps} steps"
        return f"at most {self.seconds:g} s" if self.seconds else "to the program's own end"

    @property
    def clock(self) -> str:
        """What the time of a training contains, as a sentence."""
        if self.epochs:
            return "Training time excludes evaluation; the first epoch includes the warm-up of its first steps."
        return "Training time is since the end of the first step; it contains evaluation, but no pauses."


class Checkpoint(Strict):
    """Options of checkpoints, which are written after every ``every`` epochs and after the last.

    ``folder``: a path that all nodes can read; each run has a folder of its own in it. The default is in the run
    folder, which other nodes may not see.
    """

    every: Annotated[int, Field(ge=1, le=100_000)] = 1
    folder: FilePath | None = None


class GrowingCluster(Strict):
    """Options of a cluster at an address. ``wait_for``: nodes that its autoscaler has to bring are requested and
    awaited for at most this time, before the plan is made; the request is held until the run ends.
    """

    wait_for: Seconds


class Limits(Strict):
    """Limits of a run: its wall time, the time without progress after which a trial is ended, attempts at a lost trial.

    ``device_hours``: devices of the machine times hours, of all invocations together; ``cost``: their price.
    ``prune_oom``: a cell that ran out of memory is not tried again, neither later nor at a larger batch.
    """

    wall: Seconds | None = None
    device_hours: Amount | None = None
    cost: Amount | None = None
    trial: Seconds = 600.0
    attempts: Annotated[int, Field(ge=1, le=100)] = 2
    prune_oom: bool = True

    @property
    def collective_s(self) -> int:
        """Timeout of collectives in seconds: above the limit of a trial, whose error names what each rank was doing."""
        return int(2 * self.trial + 60)


Changed = Literal["precision", "compile", "batch"]


class Improve(Strict):
    """The time to try options of the best cell in, once the blocks are measured; as a number: ``improve: 5m``.

    Options that change speed alone are tried. ``allow``: what else is: precision (bf16, and gradients exchanged in it),
    compile, batch (twice the batch a device).
    """

    time: Seconds
    allow: Annotated[tuple[Changed, ...], BeforeValidator(as_axis)] = ()

    @model_validator(mode="before")
    @classmethod
    def _time_alone(cls, value: object) -> object:
        return {"time": value} if isinstance(value, str | int | float) else value


class AssumedLink(Strict):
    """A link for predictions over devices whose links were not measured; also as text: ``8x infiniband-ndr``.

    ``gb_per_s``: 10^9 bytes a second in one direction, of all ports of a node or, inside one, of a device.
    ``latency_us``: of one step of a ring. ``ports``: of a node; a device uses one.
    """

    gb_per_s: Amount
    latency_us: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    ports: Annotated[int, Field(ge=1, le=1000)] = 1
    name: Annotated[str, Field(min_length=1, max_length=40)] = "own figures"

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        link, ports = link_named(value)
        figures = {"gb_per_s": ports * link.gb_per_s, "latency_us": link.latency_us}
        return {**figures, "ports": ports, "name": value.strip().casefold()}


class Hardware(Strict):
    """What the tables of devices and links lack or have wrong; no part of any cell's id.

    ``memory_gb``: of one GPU, for forecasts. ``peak_flops``: dense FLOP/s of one device by precision, for MFU.
    ``inside_a_node``, ``between_nodes``: links for predictions where none were measured.
    """

    memory_gb: Amount | None = None
    peak_flops: dict[PrecisionName, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    inside_a_node: AssumedLink | None = None
    between_nodes: AssumedLink | None = None


LrScaling = Literal["none", "linear", "sqrt"]


class Loader(Strict):
    """Options of the data loader, the same for every strategy. A list is an axis.

    ``workers``: worker processes of each device; dp, whose one process drives n devices, has n times as many. null, the
    default: as many as the doctor measures to keep up with the model, at most the cores of a GPU less one; without the
    doctor that many if the data set decodes a file for each sample, else none, as on CPUs.
    """

    workers: Axis[Annotated[int, Field(ge=0, le=256)] | None] = (None,)
    pin_memory: Axis[bool] = (True,)
    prefetch_factor: Axis[Annotated[int, Field(ge=1, le=1024)]] = (2,)


class TrainingOptions(Strict):
    """Options of an optimizer step, and of its learning rate's dependence on the global batch. A list is an axis.

    Each is part of every cell's id: with a further one, no earlier run is resumed.

    ``accumulation``: micro-batches a step, into which each device's share of the global batch is split. In a grid
    ``auto``: the fewest that keep the global batch with micro-batches of at most its per_device_batch_size.
    ``clip_grad_norm``: the maximum 2-norm of the whole gradient. ``clip_grad_value``: the maximum absolute value of its
    elements.
    ``lr_scaling``: the learning rate is multiplied by k (linear: Goyal et al. 2017, arXiv 1706.02677) or by the
    square root of k (sqrt: Krizhevsky 2014, arXiv 1404.5997), where k = global batch / ``lr_base_batch_size``.
    ``channels_last``: weights and inputs of convolutions are stored channels last; under fsdp inputs only, since
    fully_shard keeps shards contiguous. ``cudnn_benchmark``: cuDNN times its algorithms for each new shape.
    ``warmup_epochs``: epochs over which the rate rises, step by step, from the rate in the file to the scaled rate.
    """

    accumulation: Axis[Annotated[int, Field(ge=1, le=65_536)]] = (1,)
    clip_grad_norm: Axis[Annotated[float, Field(gt=0, allow_inf_nan=False)] | None] = (None,)
    clip_grad_value: Axis[Annotated[float, Field(gt=0, allow_inf_nan=False)] | None] = (None,)
    lr_scaling: Axis[LrScaling] = ("none",)
    lr_base_batch_size: Axis[Batch | None] = (None,)
    warmup_epochs: Axis[Annotated[int, Field(ge=0, le=100_000)]] = (0,)
    channels_last: Axis[bool] = (False,)
    cudnn_benchmark: Axis[bool] = (False,)

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_conflicts(self._conflicts())
        return self

    def _conflicts(self) -> Iterator[Conflict]:
        scales = set(self.lr_scaling) != {"none"}
        if scales and None in self.lr_base_batch_size:
            text = "lr_scaling: needs lr_base_batch_size, the global batch size that the optimizer's lr was chosen for"
            yield Conflict(text, ("lr_scaling", "lr_base_batch_size"))
        if any(self.warmup_epochs) and not scales:
            text = "warmup_epochs: needs lr_scaling linear or sqrt; it rises from the optimizer's lr to the scaled one"
            yield Conflict(text, ("warmup_epochs", "lr_scaling"))
        if set(self.clip_grad_norm) != {None} and set(self.clip_grad_value) != {None}:
            text = "clip_grad_norm: not together with clip_grad_value; to compare them, give each a grid of its own"
            yield Conflict(text, ("clip_grad_norm", "clip_grad_value"))
