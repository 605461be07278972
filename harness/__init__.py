"""A Ray-orchestrated scaling benchmark for PyTorch training.

results = harness.load("results/scaling/20261121-120000-ab12")
results.scaling    # a DataFrame; also .trials, .cells, .steps, .epochs, .convergence, .environment ...
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.results import Results

__all__ = ["load"]


def load(run_folder: str | Path) -> Results:
    """The results in a run folder, as DataFrames. Needs neither torch nor ray."""
    from harness import results

    return results.load(run_folder)
