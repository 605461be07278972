"""The training of a cell on one rank: wrapped model, optimizer, the optimizer step and the points that it passes."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from harness.plan.cell import Cell
from harness.plan.rows import Json, TrialFacts
from harness.plan.trial import SkipReason, SkipTrial
from harness.train.activation_checkpointing import NO_UNITS, checkpointed, norms_computed_again, statistics_kept
from harness.train.loader import Share
from harness.train.model import in_channels_last, init_weights_of, initialised, own_statistics, too_large
from harness.train.optimizers import make_clip, own_or_named, scale_rate
from harness.train.precision import FEW_STEPS_SCALE, LossScale, Precision, ProcessSettings, without_autocast
from harness.train.ranks import Ranks
from harness.train.strategies import make_strategy
from harness.train.strategies.base import Report, Strategy, Units, WrapContext, default_units
from harness.train.workloads import Workload, as_loss


class Phase(IntEnum):
    """The points that a step passes, in this order, each named after what it begins or has finished.

    The next step's START ends a step. With accumulation each further micro-batch begins with NEXT and passes FETCHED,
    COPIED and FORWARD again: a phase's time is the sum over micro-batches.
    """

    START = 0
    NEXT = 1
    """The backward pass of a micro-batch that is not the step's last is done."""
    FETCHED = 2
    COPIED = 3
    CLEARED = 4
    """Gradients are None: the forward pass begins."""
    FORWARD = 5
    BACKWARD = 6
    """The backward passes of all micro-batches are done."""
    OPTIMIZER = 7


# read once: in Python 3.11 a lookup on an enum costs 30 ns more than one of a global name
START, NEXT, FETCHED, COPIED, CLEARED, FORWARD, BACKWARD, OPTIMIZER = Phase
STEP = (START, FETCHED, COPIED, CLEARED, FORWARD, BACKWARD, OPTIMIZER)
"""The points of a step of one micro-batch."""

COMPILING = ("_compile.compile_inner", "backward._backward_impl")
"""torch's timers (2.11 to 2.14) of the compilation of a forward graph, and of a backward graph at its first run."""
Mark = Callable[[Phase], None]
"""Records that a step has passed a point; called inside timed windows, so it neither waits nor allocates much."""


def no_mark(point: Phase) -> None:
    """Record nothing: the step is in no window."""


class StepValues(NamedTuple):
    """What a step reports of one rank: detached tensors of one number, or numbers, which are read after the window.

    The table ``steps`` has a column of each name but ``weight``: the mean over ranks, by their weights.
    """

    loss: Tensor
    """The sum over the rank's share of the batch; in ``steps`` over the weight."""
    weight: Tensor
    """The number of samples or tokens in that share."""


class Training:
    """One training on one rank. The same seed gives every rank, and every strategy, the same initial parameters.

    ``using``: the strategy, if not a new one. Raises SkipTrial if it is one process's, and its device lacks the memory.
    """

    def __init__(self, cell: Cell, workload: Workload, seed: int, ranks: Ranks, using: Strategy | None = None) -> None:
        self._cell = cell
        self.precision = Precision(cell.precision, ranks.devices[0].type)
        self.precision.apply()
        torch.backends.cudnn.benchmark = bool(cell.training.get("cudnn_benchmark"))
        torch.manual_seed(seed)
        self.strategy = using or make_strategy(cell.strategy)
        model = workload.build_model()
        alone = ranks.world_size == 1 and not cell.traits.shards_parameters
        if alone and (reason := too_large(model, ranks.devices[0])):  # an out-of-memory error ends the worker group
            raise SkipTrial(SkipReason("model_too_large", reason))
        if not self.strategy.takes_meta:
            model = initialised(model, init_weights_of(workload))
        if cell.training.get("channels_last"):
            model = in_channels_last(model, weights=not cell.traits.shards_parameters)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        units: Units = getattr(workload, "shard_units", default_units)
        if cell.activation_checkpointing == "full":
            wrapped = checkpointed(model, units(model))
            if not wrapped:
                raise SkipTrial(SkipReason("no_shard_units", NO_UNITS))
            units = lambda _: wrapped  # noqa: E731
        self._context = context = WrapContext(
            ranks.devices,
            cell.strategy_options,
            lambda model: units(without_autocast(model)),
            self.precision,
            cell.nodes,
            init_weights_of(workload),
        )
        if self.strategy.autocasts(cell.strategy_options):
            model = self.precision.around(model)
        self.model = self.strategy.wrap(model, context)
        norms = norms_computed_again(self.model)
        self._around_backward = partial(statistics_kept, norms) if norms else nullcontext[None]
        self._compile()
        self.optimizer = self._make_optimizer(workload)
        self.effective_lr = scale_rate(self.optimizer, cell.lr_factor)
        self._clip = make_clip(cell.training)
        self.settings = ProcessSettings(self.model, self.precision, self.strategy.dtypes(context), cell.compile)
        self.unit = workload.unit
        self._workload, self._ranks = workload, ranks
        self._marks_graphs = cell.compile_mode != "default" and ranks.devices[0].type == "cuda"
        self._micro_batches = cell.micro_batches
        self.units_per_sample = units_per_sample(workload)
        self.scaler = self.precision.scaler()
        self._scales_loss = self.scaler.is_enabled()  # asked once: a disabled one would cost a microsecond a step
        # whether the weight of the global batch is known before backward
        known = ranks.world_size == self._micro_batches == 1 and not self._scales_loss
        self._scales_later = not (known or self.units_per_sample)
        self._after_step: Callable[[nn.Module, int], object] | None = getattr(workload, "after_step", None)
        self.steps_taken = 0
        """Steps before the next one; a training that resumes counts those before its checkpoint."""
        self._tokens_per_sample: Tensor | None = None
        self._divisors: dict[int, tuple[Tensor | float, Tensor | float]] = {}
        """By the samples of a global batch, once the tokens of a sample are taken to be known."""
        self._split: tuple[Share | None, Sequence[Share]] = (None, ())
        self._alone = False
        torch.manual_seed(seed * 1_000_003 + ranks.rank)  # each rank has its own random stream, for dropout

    def _make_optimizer(self, workload: Workload) -> torch.optim.Optimizer:
        """Return the workload's own optimizer, of the model without its wrapper, else the one that the file names.

        A strategy that shards the optimizer's state makes it itself.
        """
        options = self._cell.optimizer
        named = partial(self.strategy.make_optimizer, self.model, options)
        if type(self.strategy).make_optimizer is not Strategy.make_optimizer:
            return named()
        return own_or_named(workload, "optimizer", self.unwrapped, options, named)

    def _compile(self) -> None:
        if self._cell.compile:
            from torch._dynamo.utils import counters  # takes most of a second

            torch.compiler.reset()  # else compilations of earlier trials in this process affect this one's
            self._graphs_before = counters["stats"]["unique_graphs"]
            mode = self._cell.compile_mode
            self.strategy.compiled_part(self.model).compile(mode=None if mode == "default" else mode)

    def observe_exchange(self, report: Report) -> bool:
        """Have further steps report the points of their exchange; return whether the strategy knows them.

        The training is of no further use for measurement: the model may be in a wrapper that reports.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.model = self.strategy.unwrap(self.model)
        gc.collect()  # the wrapper's buckets, before a new one allocates its own
        observed = self.strategy.observed(self.model, self._context, report)
        if observed is None:
            return False
        self.model = observed
        self._compile()
        return True

    def _begin_step(self) -> None:
        if self._marks_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # the last step's outputs in the graphs' memory are not needed

    @property
    def evaluating_whole(self) -> AbstractContextManager[object]:
        """The context of a workload's own evaluate(), whose steps are not known: no CUDA graphs."""
        return torch.compiler.set_stance("force_eager") if self._marks_graphs else nullcontext()

    def set_first_rate(self) -> None:
        """Set the unscaled rate if the training has a warm-up: at the scaled rate its first steps may diverge."""
        if self._cell.training.get("warmup_epochs") and self._cell.lr_factor > 1:
            scale_rate(self.optimizer, 1 / self._cell.lr_factor)

    def step(self, batch: object, share: Share, mark: Mark = no_mark) -> StepValues:
        """Take an optimizer step; return what it reports of this rank.

        ``batch``: this rank's share, with accumulation an iterable of its micro-batches, each of which is taken after
        the backward pass of the one before. ``mark`` is called at each phase of the step from CLEARED on; FORWARD
        occurs once a micro-batch.

        The gradient is that of (sum of all ranks' losses) / (sum of all ranks' weights). The strategies
        average over ranks, so each rank's loss is scaled by world size / global weight.
        """
        self._begin_step()
        # alone, fsdp's model holds gathered parameters, and their gradients, which its optimizer does not know
        (self.model if self._alone else self.optimizer).zero_grad(set_to_none=True)
        mark(CLEARED)
        if self._micro_batches == 1:
            loss, weight = self._backward(batch, share, mark)
        else:
            loss, weight = self._accumulate(batch, share, mark)
        mark(BACKWARD)
        if self._alone and self._cell.traits.shards_parameters:
            pass  # no shard has a gradient
        elif self._scales_loss:
            self._scaled_update()
        else:
            if self._clip:
                self._clip(self.model.parameters())
            self.optimizer.step()
        if self._after_step:
            self._after_step(self.unwrapped, self.steps_taken)
        self.steps_taken += 1
        mark(OPTIMIZER)
        return StepValues(loss, weight)

    def _scaled_update(self) -> None:
        """Update the parameters unless a gradient is not finite: the host reads that once a step, as every user's does.

        Over fsdp's shards torch takes the maximum of the ranks' findings.
        """
        if self._clip:
            self.scaler.unscale_(self.optimizer)
            self._clip(self.model.parameters())
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _backward(
        self, batch: object, share: Share, mark: Mark, earlier: Tensor | None = None, *, last: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Add the gradient of one batch to that of the step; return the sum of its losses, and the weight so far.

        ``earlier``: the weight of the step's micro-batches before. ``last``: whether no other follows.
        """
        loss, weight = as_loss(self._workload.loss(self.model, batch))
        if share.samples == 0:
            loss, weight = loss * 0.0, weight * 0
        divisor, factor = self._divisor(weight, share)
        loss_per_unit = loss * factor
        mark(FORWARD)
        weight = weight if earlier is None else earlier + weight
        tokens = self._exchange(weight) if self._scales_later and last else None
        with self._around_backward():
            (self.scaler.scale(loss_per_unit) if self._scales_loss else loss_per_unit).backward()
        if tokens and not are_equal(divisor, total := tokens()):
            scale_gradients(self.model, divisor / tokens_or(total, divisor))
        kept = loss.detach()
        # read at the end of the window, when the next step's graph has written where a model's own output was
        return (kept.clone(), weight.clone()) if self._marks_graphs else (kept, weight)

    def _accumulate(self, batches: object, share: Share, mark: Mark) -> tuple[Tensor, Tensor]:
        """Add the gradients of micro-batches, one after the other; return the sum of their losses and their weight."""
        if self._split[0] is not share:  # all steps of a window have the same one
            self._split = share, share.split(self._cell.micro_batches)
        shares = self._split[1]
        losses: list[Tensor] = []
        weight: Tensor | None = None
        for number, (batch, part) in enumerate(zip(cast("Sequence[object]", batches), shares, strict=True)):
            last = number == len(shares) - 1
            with self.strategy.gradient_sync(self.model, enabled=last and not self._alone):
                loss, weight = self._backward(batch, part, mark, weight, last=last)
            losses.append(loss)
        assert weight is not None
        return torch.stack(losses).sum(), weight

    def evaluate(self, batch: object, share: Share) -> dict[str, tuple[float, float]]:
        """Return this rank's sum and weight of the loss and of each metric on one batch, without gradients."""
        self._begin_step()
        with torch.no_grad():
            loss, counts = as_loss(self._workload.loss(self.model, batch)), share.samples > 0
            totals: dict[str, tuple[Tensor | float, Tensor | float]] = {"loss": loss}
            metrics: Callable[..., Mapping[str, tuple[Tensor | float, Tensor | float]]] | None
            if metrics := getattr(self._workload, "metrics", None):
                totals.update(metrics(self.model, batch))
        return {name: (float(total) * counts, float(weight) * counts) for name, (total, weight) in totals.items()}

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the values that the workload derives from the means of loss and metrics, such as a perplexity."""
        found: Callable[..., Mapping[str, Tensor | float]] | None = getattr(self._workload, "derived", None)
        return {name: float(value) for name, value in found(means).items()} if found else {}

    @property
    def facts(self) -> TrialFacts:
        """The columns of the trial's row that the training knows so far."""
        facts: TrialFacts = {"effective_lr": self.effective_lr, "dtypes": self.settings.dtypes}
        if self.strategy.shard_units is not None:
            facts["shard_units"] = self.strategy.shard_units
        return facts

    @property
    def compile_s(self) -> float | None:
        """The seconds in which torch.compile has worked on this training's graphs; None if unknown, or not compiled.

        They are those of forward and backward graphs, by the timers of torch, which a reset clears.
        """
        if not self._cell.compile:
            return None
        from torch._dynamo.utils import compilation_time_metrics

        return sum(sum(compilation_time_metrics.get(name, ())) for name in COMPILING) or None

    @property
    def compiled_nothing(self) -> bool:
        """Whether steps have made no graph of this training's code, as of torch's own layers in fsdp's hooks."""
        if not self.compile_s:  # no step was taken
            return False
        from torch._dynamo.utils import counters

        return bool(counters["stats"]["unique_graphs"] == self._graphs_before)

    @property
    def unwrapped(self) -> nn.Module:
        """The workload's own model, without the strategy's wrapper."""
        return without_autocast(self.strategy.unwrap(self.model))

    def own_loss(self, model: nn.Module, batch: object) -> Tensor:
        """Return the sum of the losses of a batch on a copy of the model, without the strategy. For any thread."""
        return as_loss(self._workload.loss(model, batch))[0]

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Disable every exchange between the ranks for a block; their parameters diverge in it."""
        self._alone = True
        try:
            with self.strategy.alone(self.model), own_statistics(self.model):
                yield
        finally:
            self._alone = False

    def snapshot(self) -> Json:
        """Return a copy of parameters, buffers, optimizer state and loss scale on the host."""
        state = {
            "model": self.model.state_dict(),
            "buffers": dict(self.model.named_buffers()),  # non-persistent buffers too
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        copied: Json = tree_map_only(Tensor, lambda leaf: leaf.detach().cpu().clone(), state)
        return copied

    def restore(self, snapshot: Json) -> None:
        self.model.load_state_dict(snapshot["model"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(snapshot["buffers"][name])
        self.optimizer.state.clear()  # else entries that the snapshot lacks would remain
        # a copy: the optimizer keeps these tensors and updates them in place
        self.optimizer.load_state_dict(copy.deepcopy(snapshot["optimizer"]))
        self.scaler.load_state_dict(snapshot["scaler"])

    def finite(self, losses: Sequence[float]) -> bool:
        """Return whether these losses and all parameters on this rank are finite."""
        sums = [local_part(p).detach().sum().float() for p in self.model.parameters()]
        return all(map(math.isfinite, losses)) and bool(torch.isfinite(torch.stack(sums)).all())

    def _divisor(self, weight: Tensor, share: Share) -> tuple[Tensor | float, Tensor | float]:
        """Return the number that divides a loss before backward, the weight of the global batch if it is known then,
        and the factor of the loss that follows from it.

        The tokens of other ranks and of later micro-batches are not. Samples times the first step's tokens per sample
        stand in for them, and the gradient is scaled after backward, so that no rank waits for another before. Under
        fp16 one device does the same, so that the loss scale is of one effect in every strategy.
        """
        if known := self._divisors.get(share.global_samples):
            return known
        if not self._scales_later:
            if self.units_per_sample:
                total = share.global_samples * self.units_per_sample
                return total, self._ranks.world_size / total
            divisor = tokens_or(on_device(weight, self._ranks.devices[0]), 1.0)
            return divisor, self._ranks.world_size / divisor
        rate = self._tokens_per_sample
        if rate is None:
            rate = tokens_per_sample(self._exchange(weight)(), share.global_samples / self._micro_batches)
        found = share.global_samples * rate
        both = found, self._ranks.world_size / found
        if not self._alone:  # alone, each rank has another
            self._tokens_per_sample, self._divisors[share.global_samples] = rate, both
        return both

    def _exchange(self, weight: Tensor) -> Callable[[], Tensor]:
        """Begin to sum the ranks' weights of a step; alone, as if all ranks had this one.

        Return a function that returns the sum; on CUDA the stream waits for it, not the host.
        """
        own, world_size = on_device(weight, self._ranks.devices[0]), self._ranks.world_size
        if self._alone or world_size == 1:
            return lambda: own * world_size if world_size > 1 else own
        total = own.clone()
        work = dist.all_reduce(total, async_op=True)

        def summed() -> Tensor:
            work.wait()
            return total

        return summed

    def expect_few_steps(self) -> None:
        """Begin with a small loss scale under fp16, so that none of the first updates is skipped."""
        if self._scales_loss:
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": FEW_STEPS_SCALE})

    def loss_scale(self) -> LossScale | None:
        """Return the state of the loss scale, read from the device: between windows only; None unless fp16."""
        return LossScale.of(self.scaler) if self._scales_loss else None


def units_per_sample(workload: Workload) -> float | None:
    """Return the weight of each sample; None if they may differ."""
    return 1 if workload.unit == "samples" else getattr(workload, "tokens_per_sample", None)


def tokens_per_sample(tokens: Tensor, samples: float) -> Tensor:
    """Return the tokens of a sample, at least 1: their number if all samples may have the same, as texts that are cut
    to one length, else the nearest power of two, since a division by that does not round.
    """
    rate = (tokens / samples).clamp(min=1.0)
    return torch.where(rate == rate.round(), rate, torch.exp2(rate.log2().round()))


def on_device(weight: Tensor | float, device: torch.device) -> Tensor:
    """Return a weight as a float32 scalar on the device.

    The host does not wait for the device: a weight in its own memory is filled in, not copied.
    """
    if isinstance(weight, Tensor) and weight.device == device:
        return weight.detach().float()
    return torch.full((), float(weight), device=device)


def tokens_or(total: Tensor, divisor: Tensor | float) -> Tensor:
    """Return the tokens of a global batch; without any ``divisor``, by which its gradients of zero stay zero."""
    return torch.where(total > 0, total, divisor)


def are_equal(one: Tensor | float, other: Tensor) -> bool:
    """Return whether two numbers are equal; False on a GPU, for which the host would wait, and for a fake tensor."""
    return other.device.type == "cpu" and type(other) is Tensor and float(one) == float(other)


def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply every gradient, or this rank's shard of it, by a scalar on its device."""
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    if gradients:  # without exchange, fsdp's shards have none; torch 2.11 takes no empty list
        torch._foreach_mul_(gradients, factor)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor whole and dense. Collective if it is sharded."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole if whole.layout is torch.strided else whole.to_dense()


PIECE = 2**24
"""The values of a parameter that are compared at a time, in float64."""


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which fsdp creates; any other tensor is returned itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor
