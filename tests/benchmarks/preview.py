"""What a preview is worth: ``python -m tests.benchmarks.preview [FILE] [--runs 2] [--output FOLDER]``.

Runs an experiment several times, each estimated from the run before it, and prints the estimated and the actual wall
time of every later run. The target: within 20 % with a fixed number of blocks, on the same machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import harness
from harness.record.frames import records

DEFAULT = Path(__file__).parents[2] / "experiments" / "smoke.yaml"
MOST_ERROR = 0.20


def measure(file: Path, output: Path, runs: int) -> list[Path]:
    """Run the experiment so many times; return the run folders in their order."""
    folders: list[Path] = []
    for _ in range(runs):
        command = [sys.executable, "-m", "harness.run", str(file), "--output", str(output), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        folders += [path.parent for path in output.glob("*/*/plan.json") if path.parent not in folders]
    return folders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--output", type=Path, help="keep the run folders there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return report(measure(asked.file, asked.output or Path(folder), asked.runs))


def report(folders: list[Path]) -> int:
    """Print every part of each graded run; return 1 if a total misses the target."""
    missed = False
    for folder in folders[1:]:
        rows = records(harness.load(folder).preview)
        table = Table(title=f"{folder.name}: estimated from the run before it")
        for title in ("part", "estimated (s)", "actual (s)", "error"):
            table.add_column(title, justify="left" if title == "part" else "right")
        for row in rows:
            numbers = (row["estimated_s"], row["actual_s"])
            error = "-" if row["error"] is None else f"{100 * row['error']:+.0f} %"
            table.add_row(str(row["label"]), *("-" if n is None else f"{n:.1f}" for n in numbers), error)
        error = rows[-1]["error"]
        missed |= error is None or abs(error) > MOST_ERROR
        table.caption = f"Target: the total within {100 * MOST_ERROR:.0f} %: {'MISSED' if missed else 'met'}"
        Console(width=110).print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
