"""Batches divide: each device gets its part of every batch, and the last batch of an epoch is known."""

from __future__ import annotations

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.plan.cell import Cell
from harness.plan.checks.finding import Finding

NAME = "batches divide"


def judge(samples: int, batch: int, cell: Cell, *, epochs: bool) -> list[Finding]:
    """Judge a training set of ``samples`` and a step of ``batch`` samples, over all its micro-batches.

    ``epochs``: the cell is trained for whole epochs, whose last batch may be smaller.
    """
    uneven = uneven_batch(cell.strategy, cell.devices, cell.global_batch_size)
    left = samples % batch
    if uneven or not epochs or not left or left >= cell.devices:
        return uneven
    return [
        Finding(
            NAME,
            "note",
            f"the last batch of an epoch has {left} of {batch} samples for {cell.devices} devices "
            f"({samples:,} training samples)",
            f"{cell.devices - left} devices sit idle in that step; its weight is that of its samples",
            "a batch size that leaves more, if that step matters",
        )
    ]


def uneven_batch(strategy: str, devices: int, batch: int) -> list[Finding]:
    """Return a finding if a global batch does not divide by the devices, with the share of each."""
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
            f"{strategy} on {devices} devices would split a global batch of {batch} into {gets}"
            + (f": {idle} sit idle" if idle else ""),
            "such a cell is skipped: its devices would not do equal work; in an epoch what is left over makes a last, "
            "smaller batch",
            f"a global batch of {nearest}, or another multiple of {devices}",
        )
    ]


def part_sizes(strategy: str, batch: int, devices: int) -> list[int]:
    """Return the samples of each device: dp scatters equal chunks, rounded up; other shares differ by at most one."""
    if strategy in BUILTIN_TRAITS and BUILTIN_TRAITS[strategy].replicates:
        chunk = -(-batch // devices)
        return [max(0, min(chunk, batch - index * chunk)) for index in range(devices)]
    return [(index + 1) * batch // devices - index * batch // devices for index in range(devices)]
