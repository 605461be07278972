"""A Ray-orchestrated scaling benchmark for PyTorch training.

results = harness.load("results/scaling/20261121-120000-ab12")
results.scaling    # a DataFrame; also .trials, .cells, .steps, .epochs, .convergence, .environment ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.analysis.results import Results

__all__ = ["load"]

if "--no-user-code" in sys.argv:
    # `python -m` has put the current folder before everything that is still to be imported
    _here, _home = os.getcwd(), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:] = [path for path in sys.path if path and (path == _home or os.path.realpath(path) != _here)]


def load(run_folder: str | Path) -> Results:
    """The results in a run folder, as DataFrames. Needs neither torch nor ray."""
    from harness.analysis import results

    return results.load(run_folder)
