"""The sections of an experiment file, each strict and frozen."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from harness.config_values import Axis, Batch, Count, Filter, Options, Seconds, Seed, Text, is_option_axis

StrategyName = Literal["single", "dp", "ddp", "fsdp"]
PrecisionName = Literal["fp32", "tf32", "bf16"]
LauncherName = Literal["ray", "torchrun"]


class Strict(BaseModel):
    """Frozen; no key that is not known, no type that is not meant."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Grid(Strict):
    """Axes whose product is a set of cells. Keys such as ``optimizer.lr`` make any option an axis too."""

    data: Axis[Text] | None = None
    model: Axis[Text] | None = None
    strategy: Axis[StrategyName] = ("single",)
    devices: Axis[Count] = (1,)
    nodes: Axis[Count] | None = None
    per_device_batch_size: Axis[Batch] | None = None
    global_batch_size: Axis[Batch] | None = None
    precision: Axis[PrecisionName] = ("fp32",)
    compile: Axis[bool] = (False,)
    options: Options = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, value: Any) -> Any:
        """Keys with a dot are options of a section; they move to ``options``."""
        if not isinstance(value, dict):
            return value
        # the section may be written as it is called beside the grid
        value = {str(key).replace("workload_options.", "workload.", 1): option for key, option in value.items()}
        dotted = {key: option for key, option in value.items() if is_option_axis(key)}
        plain = {key: option for key, option in value.items() if key not in dotted}
        return {**plain, "options": {**plain.get("options", {}), **dotted}} if dotted else plain

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.per_device_batch_size is None) == (self.global_batch_size is None):
            raise ValueError("give exactly one of per_device_batch_size (weak) and global_batch_size (strong)")
        return self


class NoOptions(Strict):
    """For strategies that have nothing to set."""


class DdpOptions(Strict):
    """DistributedDataParallel's own settings, with its defaults. A list is an axis."""

    bucket_cap_mb: Axis[Annotated[int, Field(ge=1, le=100_000)]] = (25,)
    gradient_as_bucket_view: Axis[bool] = (False,)
    static_graph: Axis[bool] = (False,)
    find_unused_parameters: Axis[bool] = (False,)
    sync_batch_norm: Axis[bool] = (False,)


class FsdpOptions(Strict):
    """fully_shard's own settings, with its defaults. A list is an axis."""

    reshard_after_forward: Axis[bool] = (True,)
    sync_batch_norm: Axis[bool] = (False,)


class StrategyOptions(Strict):
    """Options of one strategy each."""

    single: NoOptions = NoOptions()
    dp: NoOptions = NoOptions()
    ddp: DdpOptions = DdpOptions()
    fsdp: FsdpOptions = FsdpOptions()


class Loader(Strict):
    """How batches are fetched; the same for every strategy. A list is an axis."""

    workers: Axis[Annotated[int, Field(ge=0, le=256)]] = (0,)
    pin_memory: Axis[bool] = (True,)
    prefetch_factor: Axis[Annotated[int, Field(ge=1, le=1024)]] = (2,)


class BlockRule(Strict):
    """As many blocks as a ratio needs for an interval of this half-width (relative), by Stein's two stages."""

    at_least: Annotated[int, Field(ge=2, le=1000)] = 3
    at_most: Annotated[int, Field(ge=2, le=1000)]
    halfwidth: Annotated[float, Field(gt=0, lt=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.at_most < self.at_least:
            raise ValueError(f"got at_least {self.at_least} and at_most {self.at_most}; at_most must not be less")
        return self


def _is_rule(value: Any) -> str:
    return "rule" if isinstance(value, dict | BlockRule) else "number"


Blocks = Annotated[
    Annotated[int, Field(ge=1, le=1000), Tag("number")] | Annotated[BlockRule, Tag("rule")],
    Discriminator(_is_rule),
]


class Throughput(Strict):
    """How fast: warm-up, then windows of at least so many steps and seconds, in so many blocks.

    The warm-up goes in rounds of ``warmup_steps`` until they are steady, at most ``warmup_rounds``.
    ``twin``: the base once more in every block, for the noise floor. ``explain``: where the time goes.
    """

    blocks: Blocks = 6
    warmup_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    warmup_rounds: Annotated[int, Field(ge=2, le=1000)] = 5
    windows: Annotated[int, Field(ge=1, le=1000)] = 3
    window_steps: Annotated[int, Field(ge=2, le=1_000_000)] = 50
    window_seconds: Annotated[float, Field(ge=0, le=86_400)] = 5.0
    twin: bool = True
    explain: bool = True

    @property
    def most_blocks(self) -> int:
        return self.blocks if isinstance(self.blocks, int) else self.blocks.at_most

    @property
    def rule(self) -> BlockRule | None:
        """The rule that decides on the blocks; None where their number is given."""
        return None if isinstance(self.blocks, int) else self.blocks


class Target(Strict):
    """When a training counts as done: a validation metric reaches a value."""

    metric: Text
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of at_least and at_most")
        return self


class Convergence(Strict):
    """How well: which cells, for how many epochs, from which seeds, towards what."""

    epochs: Annotated[int, Field(ge=1, le=100_000)]
    seeds: Axis[Seed] = (0, 1, 2)
    target: Target | None = None
    only: Filter = Field(default_factory=dict)
    global_batch_size: Batch | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: got {list(self.seeds)}; a seed stands twice")
        return self


class Limits(Strict):
    """Of the run (wall), of the time a trial may pass without a step (trial), of attempts at a lost one.

    ``prune_oom``: what ran out of memory is not tried again, neither later nor at a larger batch.
    """

    wall: Seconds | None = None
    trial: Seconds = 600.0
    attempts: Annotated[int, Field(ge=1, le=100)] = 2
    prune_oom: bool = True

    @property
    def collective_s(self) -> int:
        """How long a collective waits for its peers: beyond the hang limit, which knows more about where they stand."""
        return int(2 * self.trial + 60)
