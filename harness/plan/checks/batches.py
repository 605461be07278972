"""Batch divisibility: the samples of each device in every global batch, and in the last one of an epoch."""

from __future__ import annotations

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import Cell
from harness.plan.checks.finding import Finding

NAME = "batch divisibility"


def judge(samples: int, batch: int, cell: Cell, *, epochs: bool) -> list[Finding]:
    """Judge a training set of ``samples`` and a step of ``batch`` samples, over all its micro-batches.

    ``epochs``: the cell is trained for whole epochs, whose last batch may be smaller.
    """
    # a cell that trains with unequal shares on purpose (convergence.uneven) is not skipped
    uneven = [] if cell.uneven else uneven_batch(cell.strategy, cell.devices, cell.global_batch_size)
    left = samples % batch
    if uneven or not epochs or not left or left >= cell.devices:
        return uneven
    return [
        Finding(
            NAME,
            "note",
            f"last batch of an epoch: {left} of {batch} samples for {cell.devices} devices "
            f"({samples:,} training samples)",
            f"devices without samples in that step: {cell.devices - left}; its gradient is the mean over its samples",
            "choose a batch size with a larger remainder, if that step matters",
        )
    ]


def uneven_batch(strategy: str, devices: int, batch: int) -> list[Finding]:
    """Return a finding if a global batch does not divide by the devices, with the samples of each."""
    if batch % devices == 0:
        return []
    sizes = part_sizes(strategy, batch, devices)
    idle = sizes.count(0)
    gets = ", ".join(map(str, sizes))
    nearest = max(devices, round(batch / devices) * devices)
    return [
        Finding(
            NAME,
            "error" if batch < devices else "warning",
            f"samples of each device under {strategy} on {devices} devices at a global batch of {batch}: {gets}"
            + (f" ({idle} without samples)" if idle else ""),
            "unequal work of the devices: cells with such a batch are skipped",
            f"use a global batch of {nearest}, or another multiple of {devices}",
            stops=True,
        )
    ]


def part_sizes(strategy: str, batch: int, devices: int) -> list[int]:
    """Return the samples of each device: dp scatters equal chunks, rounded up; other shares differ by at most one."""
    if strategy in BUILTIN_TRAITS and BUILTIN_TRAITS[strategy].replicates:
        chunk = -(-batch // devices)
        return [max(0, min(chunk, batch - index * chunk)) for index in range(devices)]
    return [(index + 1) * batch // devices - index * batch // devices for index in range(devices)]
