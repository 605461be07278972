"""What benchmarks share: the file of their figures, processes of their own, tables and sections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Column, Table

SHORT = {"blocks": 1, "warmup_rounds": 2, "windows": 1, "window_seconds": 0.0, "twin": False, "explain": False}
"""The section ``throughput`` of one measurement of a cell, without numbers of steps."""
UNCHECKED = {"equivalence": False, "preflight": False}
"""Sections of an experiment without checks."""


def write_figures(path: Path, figures: Any) -> None:
    """Writes figures as JSON, with their date and machine."""
    import torch  # not with the module: it would count among the memory that is measured

    from harness.measure.environment import cpu_model

    machine = {"cpu": cpu_model(), "logical_cpus": os.cpu_count(), "torch": torch.__version__}
    result = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "figures": figures}
    path.write_text(json.dumps(result, indent=1) + "\n")


def measured_apart(name: str, *arguments: str) -> Any:
    """What ``python -m tests.benchmarks.NAME ARGUMENTS``, a process of its own, prints in its last line, as JSON."""
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table_of_numbers(title: str, headings: Iterable[str]) -> Table:
    return Table(*(Column(heading, justify="right") for heading in headings), title=title)
