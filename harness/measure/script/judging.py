"""What a script's steps show about it, as findings of the doctor: found on the way, whether it runs or is examined."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.measure.script.messages import Facts, Finished
from harness.measure.script.profiling import ProfiledSteps
from harness.plan.cell import Cell
from harness.plan.checks import PLACEMENT, SCRIPT, THREADS, Finding, join_names, judge_threads

SAME_SIZE = 0.02
"""Largest relative difference of counted and stated samples of a step."""


@dataclass(frozen=True)
class Seen:
    """What a rank saw of its script.

    ``samples``: the median of timed steps, as an epoch's last batch is smaller. ``waits``: the part of the time of
    these steps in which it waits for data. ``processors``: the number that it may use, of the node of this number.
    """

    facts: Facts
    steps: int
    samples: float
    by_itself: bool
    waits: float = 0.0
    node: int = 0
    processors: int | None = None

    @classmethod
    def of(cls, end: Finished, node: int = 0, processors: int | None = None) -> Seen:
        steps = end.steps
        first = steps.edges[0][0] if steps.edges else 1
        timed = steps.samples[first:]
        seconds = steps.ended[-1] - steps.ended[first - 1] - sum(steps.pause_s[first:]) if timed else 0.0
        waits = sum(steps.wait_s[first:]) / seconds if seconds > 0 else 0.0
        samples = float(statistics.median(timed or [0.0]))
        return cls(end.facts, len(steps.ended), samples, end.by_itself, waits, node, processors)


def together(facts: Sequence[Facts]) -> int:
    """Return how many ranks train one model: the least size of a process group; 1 if all parameters differ."""
    first, *others = (each.parameters for each in facts)
    alike = all([shape for shape, _ in first] == [shape for shape, _ in other] for other in others)
    equal = any(own == value for other in others for own, value in zip(first, other, strict=False))
    apart = bool(first) and bool(others) and alike and not equal
    return min(1 if apart else each.connected for each in facts)


LEAST_PART = 0.2
"""The least part of a step without a kernel, or of waiting for data, that is a finding."""


def judge(
    ranks: Sequence[Seen],
    cell: Cell,
    stated: float | None,
    profiles: Sequence[ProfiledSteps] = (),
    *,
    examined: bool = False,
    pauses: bool = False,
) -> Iterator[Finding]:
    """Yield findings on a script.

    ``stated``: samples of a step and rank by the file, None if counted. ``examined``: by the doctor, whose trial has no
    row of a table for the wait for data. ``pauses``: whether the file leaves out evaluation.
    """
    facts, first = [each.facts for each in ranks], ranks[0]
    connected, trained = min(each.connected for each in facts), together(facts)
    if cell.devices > 1 and trained < cell.devices:
        group = "no process group" if not connected else f"a process group of {connected} ranks"
        seen = f"{len(ranks)} ranks with {group}"
        means = "the ranks train independent copies of the model: their speeds add up, and are no speedup"
        wrap = "wrap the model in DistributedDataParallel or fully_shard"
        advice = f"call torch.distributed.init_process_group(), as for torchrun, and {wrap}; or set devices: [1]"
        if connected == cell.devices:
            seen = f"{len(ranks)} ranks whose parameters all differ after {first.steps} steps"
            advice = f"{wrap}, on this kind of device too; or set devices: [1]"
        yield Finding(SCRIPT, "error", seen, means, advice)
    yield from _of_samples(ranks, cell, stated)
    yield from _of_steps(first, profiles, pauses=pauses)
    machine = [*_of_machine(ranks, cell)]
    yield from machine
    crowded = any(finding.check == THREADS for finding in machine)
    waits = max(each.waits for each in ranks)
    if examined and waits >= LEAST_PART:
        seen = f"part of a step in which it waits for data: {100 * waits:.0f} %"
        means = "bound by its data, unless a GPU computes meanwhile: throughput and scaling are those of the loader"
        advice = (
            "cheaper samples: its processors are oversubscribed already"
            if crowded
            else "more workers of the DataLoader (num_workers, persistent_workers), or cheaper samples"
        )
        yield Finding(SCRIPT, "note" if first.facts.gpus else "warning", seen, means, advice)


def _of_samples(ranks: Sequence[Seen], cell: Cell, stated: float | None) -> Iterator[Finding]:
    """Yield a finding if the samples of a step are not known, or not those of the file in each backward pass."""
    counts, passes, batches = [each.samples for each in ranks], ranks[0].facts.passes, ranks[0].facts.batches
    if all(counts) and all(each.facts.counted for each in ranks):
        return
    expected = cell.global_batch_size / cell.devices
    wrong = next((count for count in counts if abs(count - expected) > SAME_SIZE * expected), None)
    accumulates = 1 < passes == batches and all(abs(count - passes * expected) <= SAME_SIZE * count for count in counts)
    if stated is None and not all(counts):
        seen = f"{ranks[0].steps} steps, and no batch from a torch DataLoader"
        means = "throughput is in batches of the file, not in samples"
        advice = "state the samples of a rank and step, as step: {samples: '{per_device_batch_size} * 4'}"
        yield Finding(SCRIPT, "warning", seen, means, advice)
    elif stated is None and accumulates:
        seen = f"{passes} backward passes a step, with {expected:.4g} samples each"
        means = "gradients are accumulated: the file's batch size is that of a pass, not of a step"
        advice = "nothing to do: all samples of a step count"
        yield Finding(SCRIPT, "note", seen, means, advice)
    elif stated is None and wrong is not None:
        seen = f"samples of a step on a rank: {wrong:.4g} by the DataLoader, {expected:.4g} by the file"
        means = "labels name another batch size than the script trains with"
        advice = (
            "pass {per_device_batch_size} in arguments, divide by the number of ranks if the script's is the global "
            "batch, or set the grid's batch size to that of the script"
        )
        yield Finding(SCRIPT, "warning", seen, means, advice)


def _of_machine(ranks: Sequence[Seen], cell: Cell) -> Iterator[Finding]:
    """Yield findings on the GPUs of the ranks, and on threads and loader workers by the processors of a node."""
    by_node = [[rank for rank in ranks if rank.node == node] for node in dict.fromkeys(rank.node for rank in ranks)]
    without = [str(number) for number, rank in enumerate(ranks) if not rank.facts.gpus]
    if cell.device == "cuda" and cell.traits.trains and without:
        seen = f"ranks whose parameters are on no GPU: {join_names(without)}"
        means = "the script trains on the CPU, and the cell names GPUs"
        advice = "move the model to the GPU of its LOCAL_RANK; or set device: cpu"
        yield Finding(PLACEMENT, "error", seen, means, advice)
    used = [Counter(gpu for rank in own for gpu in set(rank.facts.gpus)) for own in by_node]
    if not cell.oversubscribed and (shared := sorted({gpu for own in used for gpu, count in own.items() if count > 1})):
        seen = f"GPUs with the parameters of several ranks: {join_names(shared)}"
        means = "the ranks share these GPUs, and others of the cell are idle"
        advice = "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), and move the model there"
        yield Finding(PLACEMENT, "error", seen, means, advice)
    if not cell.oversubscribed:
        less = ("leave out torch.set_num_threads: OMP_NUM_THREADS is each rank's part", "reduce num_workers")
        found = (
            judge_threads(
                [rank.facts.threads for rank in own] if cell.device == "cpu" else [],
                sum(rank.facts.workers for rank in own),
                own[0].processors,
                less,
            )
            for own in by_node
            if own[0].processors
        )
        yield from next((each for each in found if each), [])


def _of_steps(first: Seen, profiles: Sequence[ProfiledSteps], *, pauses: bool) -> Iterator[Finding]:
    """Yield findings on what the counted steps of the first rank hold, and on the GPUs' idle time in the profile."""
    if first.facts.evaluations:
        seen = f"evaluations in the timed windows: {first.facts.evaluations}"
        means = "evaluation counts as time of training, as often as the windows happen to hold one"
        advice = (
            "step: {pause: validation} does not know its batches, which are fetched with gradients enabled, as by a "
            "Trainer: leave it out by probe.pause() in the script"
            if pauses
            else "leave it out by probe.pause() in the script, or, if its batches are fetched without gradients, by "
            "step: {pause: validation}"
        )
        yield Finding(SCRIPT, "note", seen, means, advice)
    if len(first.facts.optimizers) > 1:
        seen = f"optimizers in the order of their first steps: {', '.join(first.facts.optimizers)}"
        means = "the steps of one of them are counted"
        advice = "nothing to do if that is a step; else step: {optimizer: 1}, or probe.steps() in the script"
        yield Finding(SCRIPT, "note", seen, means, advice)
    idle = [(each.idle_s - each.wait_s) / each.step_s for each in profiles if each.idle_s is not None and each.step_s]
    if idle and min(idle) >= LEAST_PART:
        seen = f"part of a step in which the GPU runs no kernel and no data is awaited: {100 * min(idle):.0f} %"
        means = "bound by the host: it cannot launch kernels as fast as the GPU runs them"
        advice = "compile the model, use CUDA graphs or a larger batch, and avoid .item() and prints in the step"
        yield Finding(SCRIPT, "note", seen, means, advice)
    if first.by_itself:
        seen = f"the script ended by itself after {first.steps} steps"
        means = "its steps count, but there are fewer than the file asks for, and they may not be steady"
        advice = "let it train longer, for example by its number of epochs: it is ended after the last window"
        yield Finding(SCRIPT, "warning", seen, means, advice)
