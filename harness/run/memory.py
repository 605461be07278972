"""``--memory``: traces of the cells of a plan in child processes, and the forecast of each cell."""

from __future__ import annotations

import json
import pickle
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.plan.cell import Cell
from harness.plan.memory_forecast import Forecast, forecast, traced_cell
from harness.plan.planner import Plan
from harness.plan.rows import Examination
from harness.run.child_process import child_process
from harness.run.memory_process import ANSWERS, Job
from harness.system import sanitize
from harness.system.import_path import path_without
from harness.system.scratch import Scratch
from harness.system.user_code import CodeVersion

LIMIT_S = 300.0
"""The longest time of one trace, the start of its process included."""
POLL_S = 0.05
OUTPUT_BYTES = 2000


def forecasts(plan: Plan, home: Path, limit_s: float = LIMIT_S) -> dict[Cell, Forecast]:
    """Return the forecast of each cell that the plan measures, after a trace of each kind of them.

    Runs the workload's code, in child processes. ``home``: the experiment file's folder. ``limit_s``: of one trace.
    """
    cells = list(dict.fromkeys(trial.cell for trial in plan.trials if trial.kind != "diagnostic"))
    wanted = dict.fromkeys(map(traced_cell, cells))
    own = [str(home)] if plan.experiment.own_code else []
    found: dict[Cell, Examination] = {}
    for variant in dict.fromkeys(cell.variant for cell in wanted):
        version = plan.variants[variant].version if variant else None
        path = path_without(*version.hidden) if version else [*own, *path_without(*own)]
        found |= _examinations([cell for cell in wanted if cell.variant == variant], version, path, limit_s)
    # a process that has traced other cells is larger than a rank's
    process = min((each["process_bytes"] for each in found.values() if each["process_bytes"]), default=0)
    return {
        cell: forecast(cell, {**found[traced_cell(cell)], "process_bytes": process}, plan.inventory) for cell in cells
    }


def _examinations(
    cells: Sequence[Cell], version: CodeVersion | None, path: Sequence[str], limit_s: float
) -> dict[Cell, Examination]:
    """Return the examination of each cell; after one that ends its process, or takes too long, in a new process."""
    found: list[Examination] = []
    while len(found) < len(cells):
        with Scratch() as folder, tempfile.TemporaryFile() as output:
            job = folder / "job"
            job.write_bytes(pickle.dumps(Job(cells[len(found) :], version)))
            with child_process("harness.run.memory_process", job, path, output) as process:
                child = _Child(process, output, folder / ANSWERS, limit_s)
                found += child.answers()
        if len(found) < len(cells):
            found.append(_unknown(child.failure))
    return dict(zip(cells, found, strict=True))


@dataclass
class _Child:
    """A process that traces cells. ``failure``: why its answers ended."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    file: Path
    limit_s: float
    failure: str = ""

    def answers(self) -> Iterator[Examination]:
        """Yield the examinations until the process has ended, or has given none for the time limit."""
        given, last = 0, time.monotonic()
        while True:
            ended = self.process.poll() is not None  # before the file is read: all that it wrote is there
            lines = self.file.read_text(encoding="utf-8").split("\n")[:-1] if self.file.exists() else []
            for line in lines[given:]:
                yield json.loads(line)
                given, last = given + 1, time.monotonic()
            if ended:
                self.failure = self._end()
                return
            if time.monotonic() - last > self.limit_s:
                self.failure = f"the trace took longer than {self.limit_s:.0f} s and was ended"
                return
            time.sleep(POLL_S)

    def _end(self) -> str:
        lines = sanitize.redacted_tail(self.output, OUTPUT_BYTES).strip().splitlines() or ["it printed nothing"]
        return f"the process that traces it ended with exit code {self.process.returncode}: {lines[-1]}"


def _unknown(reason: str) -> Examination:
    return {"sizes": None, "process_bytes": 0, "peak": None, "alone": False, "reason": reason}
