"""What a script's steps show about it, as findings of the doctor: found on the way, whether it runs or is examined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.measure.script.counting import Finished
from harness.plan.cell import Cell
from harness.plan.checks import Finding

CHECK = "script"
SAME_SIZE = 0.02
"""Largest relative difference of counted and stated samples of a step: the last batch of an epoch may be smaller."""


def judge(ends: Sequence[Finished], cell: Cell, stated: float | None) -> Iterator[Finding]:
    """Yield findings on the ends of all ranks; ``stated``: samples of a step and rank by the file, None if counted."""
    facts, first = [end.facts for end in ends], ends[0]
    connected = min(each.connected for each in facts)
    if cell.devices > 1 and connected < cell.devices:
        group = "no process group" if not connected else f"a process group of {connected} ranks"
        yield Finding(
            CHECK,
            "error",
            f"{len(ends)} ranks with {group}",
            "the ranks train independent copies of the model: their speeds add up, and are no speedup",
            "call torch.distributed.init_process_group() and wrap the model, as for torchrun; or set devices: [1]",
        )
    timed = first.steps.samples[first.steps.edges[0][0] if first.steps.edges else 1 :]
    counted = sum(timed) / len(timed) if timed else 0.0
    expected = cell.global_batch_size / cell.devices
    if stated is None and not counted:
        yield Finding(
            CHECK,
            "warning",
            f"{len(first.steps.ended)} steps, and no batch from a torch DataLoader",
            "throughput is in batches of the file, not in samples",
            "state the samples of a rank and step, as step: {samples: '{per_device_batch_size} * 4'}",
        )
    elif stated is None and abs(counted - expected) > SAME_SIZE * expected:
        yield Finding(
            CHECK,
            "warning",
            f"samples of a step on a rank: {counted:.4g} by the DataLoader, {expected:.4g} by the file",
            "labels name another batch size than the script trains with, if it does not accumulate gradients",
            "pass {per_device_batch_size} in arguments, divide by the number of ranks if the script's is the global "
            "batch, or set the grid's batch size to that of the script",
        )
    if facts[0].evaluation_batches:
        yield Finding(
            CHECK,
            "note",
            f"{facts[0].evaluation_batches} batches without gradients in the timed windows",
            "evaluation counts as time of training",
            "leave it out by step: {pause: validation}, or by probe.pause() in the script",
        )
    if len(facts[0].optimizers) > 1:
        yield Finding(
            CHECK,
            "note",
            f"optimizers in the order of their first steps: {', '.join(facts[0].optimizers)}",
            "the steps of one of them are counted",
            "nothing to do if that is a step; else step: {optimizer: 1}, or probe.steps() in the script",
        )
    if first.by_itself:
        yield Finding(
            CHECK,
            "warning",
            f"the script ended by itself after {len(first.steps.ended)} steps",
            "its steps count, but there are fewer than the file asks for, and they may not be steady",
            "let it train longer, for example by its number of epochs: it is ended after the last window",
        )
