"""The process that traces cells for ``--memory``: ``-m harness.run.memory_process JOB``."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.plan.cell import Cell
from harness.system.user_code import CodeVersion

ANSWERS = "answers"
"""The file beside the job that gets an Examination of each cell, one a line, as JSON."""


@dataclass(frozen=True)
class Job:
    """Cells to trace, and the version of the user's code to import; None without variants."""

    cells: Sequence[Cell]
    version: CodeVersion | None = None


def main(path: Path) -> None:
    """Examine the job's cells, one after the other."""
    job: Job = pickle.loads(path.read_bytes())  # ours: the folder is closed to others
    if job.version:
        job.version.use()
    from harness.measure.memory_trace import examine  # imports torch

    with (path.parent / ANSWERS).open("a", encoding="utf-8") as answers:
        for cell in job.cells:
            answers.write(json.dumps(examine(cell)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the user's code must not keep the driver waiting
