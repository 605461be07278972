"""Layers that wait instead of computing: many ranks on few cores, with real parameters, gradients and collectives.

Each pass has a schedule of absolute deadlines, one a layer, so that what a layer is late does not add up. While a layer
waits it occupies no core, and the buckets of ddp and the gathers of fsdp go on beside it. What is real is everything
else: a step's exchanges, the loader, the optimizer. Times of it are a rehearsal, and no claim about speed.

    forward pass   (step_ms + sample_ms x batch) / 3 x rank's factor x pass's factor
    backward pass  twice that
    rank's factor  exp(rank_spread x z), one z a rank
    pass's factor  exp(step_spread x z), one z a rank and forward pass, correlated with the one before

z are standard normal numbers from ``seed``: factors are lognormal with median 1. Trials draw the same numbers, so that
what differs between blocks is the machine's.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_rank, is_initialized

from harness.config.values import MIB
from harness.errors import WorkloadError
from harness.train.workloads import Datasets
from harness.train.workloads.datasets import synthetic_datasets, whole_number

SIZES = {"small": 1.0, "medium": 4.0, "large": 20.0}
"""MiB of float32 parameters."""
FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a step's waits; backward computes two matrix products where forward computes one."""


class EmulatedCompute:
    """A chain of layers, each of which waits and adds the scaled sum of its parameters to every sample.

    ``model``: small, medium or large; or ``mebibytes`` of parameters, spread over ``layers``, whose sizes grow to the
    last by ``skew``. ``step_ms``, ``sample_ms``: milliseconds that a batch and each of its samples take, forward and
    backward together. ``rank_spread``, ``step_spread``, ``seed``: see above. ``step_correlation``: of a pass's z with
    that of the pass before. ``samples``: the size of the data set.
    """

    unit = "samples"
    metric_names = ()

    def __init__(
        self,
        data: str = "synthetic",
        model: str = "small",
        mebibytes: float | None = None,
        layers: int = 16,
        skew: float = 1.0,
        step_ms: float = 30.0,
        sample_ms: float = 0.0,
        rank_spread: float = 0.0,
        step_spread: float = 0.0,
        step_correlation: float = 0.0,
        samples: int = 50_000,
        seed: int = 0,
    ) -> None:
        size = SIZES[model] if mebibytes is None else number("mebibytes", mebibytes, 2**20)
        self.elements = int(size * MIB / 4)
        self.layers = whole_number("layers", layers, 10_000)
        self.skew = number("skew", skew, 1e6)
        self.step_s = number("step_ms", step_ms, 1e7, zero=True) / 1e3
        self.sample_s = number("sample_ms", sample_ms, 1e6, zero=True) / 1e3
        self.rank_spread = number("rank_spread", rank_spread, 3, zero=True)
        self.step_spread = number("step_spread", step_spread, 3, zero=True)
        self.step_correlation = number("step_correlation", step_correlation, 0.99, zero=True)
        self.samples = whole_number("samples", samples, 2**40)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise WorkloadError(f"workload_options.seed: got {seed!r}; allowed: a whole number")
        self.seed = seed

    def build_model(self) -> nn.Module:
        return WaitingLayers(self.sizes(), self)

    def sizes(self) -> list[int]:
        """Return the number of parameters of each layer, at least one; the last has ``skew`` times the first's."""
        weights = [self.skew ** (place / max(1, self.layers - 1)) for place in range(self.layers)]
        return [max(1, int(self.elements * weight / sum(weights))) for weight in weights]

    def datasets(self) -> Datasets:
        return synthetic_datasets(draw, self.samples)

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return [layer for layer in model.modules() if isinstance(layer, WaitingLayer)]

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        total = model(batch).square().sum()
        return total, len(batch)


def draw(index: int, generator: torch.Generator) -> Tensor:
    """Return one random number."""
    return torch.randn(1, generator=generator)


def number(name: str, value: object, most: float, *, zero: bool = False) -> float:
    """Return the workload option of this name; raise WorkloadError if it is no number above 0, or 0 with ``zero``."""
    if isinstance(value, int | float) and not isinstance(value, bool) and (0 < value <= most or (zero and value == 0)):
        return float(value)
    least = "from 0" if zero else "above 0"
    raise WorkloadError(f"workload_options.{name}: got {value!r}; allowed: a number {least} up to {most:g}")


class Schedule:
    """The deadlines of one forward pass and of its backward pass, in seconds of the monotonic clock.

    The forward pass begins with the construction, the backward pass with its first wait.
    """

    def __init__(self, layers: int, step_s: float) -> None:
        self._layers = layers
        self._forward_s, self._backward_s = step_s * FORWARD_SHARE, step_s * (1 - FORWARD_SHARE)
        self._began = time.monotonic()
        self._turned: float | None = None

    def wait_forward(self, place: int) -> None:
        """Wait until the layer's part of the forward pass is over."""
        _wait_until(self._began + self._forward_s * (place + 1) / self._layers)

    def wait_backward(self, place: int) -> None:
        """Wait until the layer's part of the backward pass is over, which goes from the last layer to the first."""
        if self._turned is None:
            self._turned = time.monotonic()
        _wait_until(self._turned + self._backward_s * (self._layers - place) / self._layers)


def _wait_until(deadline: float) -> None:
    left = deadline - time.monotonic()
    if left > 0:
        time.sleep(left)


class Waiting(torch.autograd.Function):
    """Returns values + scale x the sum of the weight, after a wait; backward likewise.

    The weight's elements are equal, in all steps, since their gradients are: the first stands for the sum, and the
    gradient is one number expanded to its shape, so that neither costs time.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, scale: float, schedule: Schedule, place: int) -> Tensor:
        ctx.shape, ctx.dtype, ctx.scale, ctx.schedule, ctx.place = weight.shape, weight.dtype, scale, schedule, place
        schedule.wait_forward(place)
        return values + scale * weight.numel() * weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        ctx.schedule.wait_backward(ctx.place)
        of_weight = (ctx.scale * gradient.sum()).to(ctx.dtype).expand(ctx.shape)
        return gradient, of_weight, None, None, None


class WaitingLayer(nn.Module):
    """One layer of equal parameters; ``scale``: see Waiting."""

    def __init__(self, size: int, scale: float, place: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.scale, self.place = scale, place

    def forward(self, values: Tensor, schedule: Schedule) -> Tensor:
        result: Tensor = Waiting.apply(values, self.weight, self.scale, schedule, self.place)
        return result


class PassNumbers:
    """Standard normal numbers, each correlated with the one before (AR(1)).

    Each is drawn from its number, and no generator is held: by one, a comparison of trainings takes values for random.
    """

    def __init__(self, seed: str, correlation: float) -> None:
        self._seed, self._correlation, self._drawn = seed, correlation, 0
        self._last = self._fresh()

    def _fresh(self) -> float:
        self._drawn += 1
        return random.Random(f"{self._seed} {self._drawn}").normalvariate(0, 1)

    def draw(self) -> float:
        self._last = self._correlation * self._last + math.sqrt(1 - self._correlation**2) * self._fresh()
        return self._last


class WaitingLayers(nn.Module):
    """The chain of layers; each forward pass draws its factor."""

    def __init__(self, sizes: list[int], workload: EmulatedCompute) -> None:
        super().__init__()
        scale = 1 / math.sqrt(sum(sizes))  # an update then changes the output as that of one weight would
        self.layers = nn.ModuleList(WaitingLayer(size, scale, place) for place, size in enumerate(sizes))
        self.step_s, self.sample_s, self.step_spread = workload.step_s, workload.sample_s, workload.step_spread
        own = f"{workload.seed} {get_rank() if is_initialized() else 0}"
        self.rank_factor = math.exp(workload.rank_spread * random.Random(f"rank {own}").normalvariate(0, 1))
        self.passes = PassNumbers(f"passes {own}", workload.step_correlation)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled, it would not wait
    def forward(self, values: Tensor) -> Tensor:
        factor = self.rank_factor * math.exp(self.step_spread * self.passes.draw())
        schedule = Schedule(len(self.layers), (self.step_s + self.sample_s * len(values)) * factor)
        for layer in self.layers:
            values = layer(values, schedule)
        return values
