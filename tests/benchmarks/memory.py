"""Traced peaks of memory beside real ones: ``python -m tests.benchmarks.memory``.

Each row is a cell. Measured is the median of five steps' peaks, by the allocation events of torch's profiler on a CPU,
with their range: those of fsdp differ from step to step, as gloo's threads give up their tensors when they come to it.
Estimated is the trace of ``--memory`` on fake tensors, without the allowance. The error is to be at most 2 % for
single, ddp and fsdp in fp32, of a ResNet and a GPT. Takes about two minutes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from harness.config.values import MIB
from tests.allocations import cells, estimated, measured
from tests.worlds import run_ranks


def main() -> None:
    torch.set_num_threads(1)
    real = {name: measured(cell) for name, cell in cells(1).items()}
    with tempfile.TemporaryDirectory() as folder:
        real |= json.loads(run_ranks("tests.allocations", 2, Path(folder), within_s=600.0).read_text())
    table = Table("cell", "measured, MiB", "range", "estimated, MiB", "error", title="Peak memory of a step")
    for name, cell in {**cells(1), **cells(2)}.items():
        peaks, found = real[name], estimated(cell)
        median = statistics.median(peaks)
        numbers = (f"{size / MIB:.2f}" for size in (median, min(peaks), max(peaks), found))
        at, low, high, traced = numbers
        table.add_row(name, at, f"{low} to {high}", traced, f"{100 * (found / median - 1):+.2f} %")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
