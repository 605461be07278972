"""What a script's steps show about it, as findings of the doctor: found on the way, whether it runs or is examined."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.measure.script.counting import Facts, Finished
from harness.measure.script.profiling import ProfiledSteps
from harness.plan.cell import Cell
from harness.plan.checks import SCRIPT, Finding

SAME_SIZE = 0.02
"""Largest relative difference of counted and stated samples of a step."""


@dataclass(frozen=True)
class Seen:
    """What a rank saw of its script. ``samples``: the median of timed steps, as an epoch's last batch is smaller."""

    facts: Facts
    steps: int
    samples: float
    by_itself: bool

    @classmethod
    def of(cls, end: Finished) -> Seen:
        timed = end.steps.samples[end.steps.edges[0][0] if end.steps.edges else 1 :]
        return cls(end.facts, len(end.steps.ended), float(statistics.median(timed or [0.0])), end.by_itself)


def together(facts: Sequence[Facts]) -> int:
    """Return how many ranks train one model: the least size of a process group; 1 if all parameters differ."""
    first, *others = (each.parameters for each in facts)
    alike = all([shape for shape, _ in first] == [shape for shape, _ in other] for other in others)
    equal = any(own == value for other in others for own, value in zip(first, other, strict=False))
    apart = bool(first) and bool(others) and alike and not equal
    return min(1 if apart else each.connected for each in facts)


IDLE = 0.2
"""The least part of a step without a kernel that is a finding."""


def judge(
    ranks: Sequence[Seen],
    cell: Cell,
    stated: float | None,
    profiles: Sequence[ProfiledSteps] = (),
    *,
    paused: bool = False,
) -> Iterator[Finding]:
    """Yield findings on a script.

    ``stated``: samples of a step and rank by the file, None if counted. ``paused``: whether evaluation is a pause.
    """
    facts, first = [each.facts for each in ranks], ranks[0]
    connected, trained = min(each.connected for each in facts), together(facts)
    if cell.devices > 1 and trained < cell.devices:
        group = "no process group" if not connected else f"a process group of {connected} ranks"
        seen = f"{len(ranks)} ranks with {group}"
        if connected == cell.devices:
            seen = f"{len(ranks)} ranks whose parameters all differ after {first.steps} steps"
        yield Finding(
            SCRIPT,
            "error",
            seen,
            "the ranks train independent copies of the model: their speeds add up, and are no speedup",
            "call torch.distributed.init_process_group() and wrap the model, as for torchrun; or set devices: [1]",
        )
    counts = [each.samples for each in ranks]
    expected = cell.global_batch_size / cell.devices
    wrong = next((count for count in counts if abs(count - expected) > SAME_SIZE * expected), None)
    if stated is None and not all(counts):
        yield Finding(
            SCRIPT,
            "warning",
            f"{first.steps} steps, and no batch from a torch DataLoader",
            "throughput is in batches of the file, not in samples",
            "state the samples of a rank and step, as step: {samples: '{per_device_batch_size} * 4'}",
        )
    elif stated is None and wrong is not None:
        yield Finding(
            SCRIPT,
            "warning",
            f"samples of a step on a rank: {wrong:.4g} by the DataLoader, {expected:.4g} by the file",
            "labels name another batch size than the script trains with, if it does not accumulate gradients",
            "pass {per_device_batch_size} in arguments, divide by the number of ranks if the script's is the global "
            "batch, or set the grid's batch size to that of the script",
        )
    yield from _of_steps(first, profiles, paused)


def _of_steps(first: Seen, profiles: Sequence[ProfiledSteps], paused: bool) -> Iterator[Finding]:
    """Yield findings on what the counted steps of the first rank hold, and on the GPUs' idle time in the profile."""
    if first.facts.evaluation_batches and not paused:
        yield Finding(
            SCRIPT,
            "note",
            f"{first.facts.evaluation_batches} batches without gradients in the timed windows",
            "evaluation counts as time of training",
            "leave it out by step: {pause: validation}, or by probe.pause() in the script",
        )
    if len(first.facts.optimizers) > 1:
        yield Finding(
            SCRIPT,
            "note",
            f"optimizers in the order of their first steps: {', '.join(first.facts.optimizers)}",
            "the steps of one of them are counted",
            "nothing to do if that is a step; else step: {optimizer: 1}, or probe.steps() in the script",
        )
    idle = [(each.idle_s - each.wait_s) / each.step_s for each in profiles if each.idle_s is not None and each.step_s]
    if idle and min(idle) >= IDLE:
        yield Finding(
            SCRIPT,
            "note",
            f"part of a step in which the GPU runs no kernel and no data is awaited: {100 * min(idle):.0f} %",
            "bound by the host: it cannot launch kernels as fast as the GPU runs them",
            "compile the model, use CUDA graphs or a larger batch, and avoid .item() and prints in the step",
        )
    if first.by_itself:
        yield Finding(
            SCRIPT,
            "warning",
            f"the script ended by itself after {first.steps} steps",
            "its steps count, but there are fewer than the file asks for, and they may not be steady",
            "let it train longer, for example by its number of epochs: it is ended after the last window",
        )
