"""A Ray-orchestrated scaling benchmark for PyTorch training.

results = harness.load("results/scaling/20261121-120000-ab12")
results.scaling    # a DataFrame; also .trials, .cells, .steps, .epochs, .convergence, .environment ...
history = harness.load_history("results")    # one DataFrame over all runs
"""

TYPE_CHECKING = False  # as in typing, which is not imported: every command imports this module first
if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from harness.analysis.results import Results

__all__ = ["load", "load_history"]


def load(run_folder: "str | Path") -> "Results":
    """Return the results in a run folder, as DataFrames. Needs neither torch nor ray."""
    from harness.analysis import results

    return results.load(run_folder)


def load_history(folder: "str | Path") -> "pd.DataFrame":
    """Return every cell of every run below a folder, one row each, by start. Needs neither torch nor ray."""
    from harness.analysis import history

    return history.load_history(folder)
