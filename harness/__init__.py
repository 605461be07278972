"""A Ray-orchestrated scaling benchmark for PyTorch training.

results = harness.load("results/scaling/20261121-120000-ab12")    # or harness.run_experiment("scaling.yaml")
results.summary               # 12 numbers a cell; results.best: the settings to use
results.scaling               # a DataFrame; also .trials, .cells, .steps, .epochs, .convergence, .environment ...
results.plot.throughput()     # a figure of the report
history = harness.load_history("results")    # one DataFrame over all runs
"""

TYPE_CHECKING = False  # as in typing, which is not imported: every command imports this module first
if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

    import pandas as pd

    from harness.config.values import PlainValue
    from harness.report.notebook import RunResults

__all__ = ["load", "load_history", "run_experiment"]


def load(run_folder: "str | Path", local: "str | Path" = "results") -> "RunResults":
    """Return the results in a run folder, as DataFrames. Needs neither torch nor ray; raises RunFolderError.

    The URI of a run in a store is first copied to <local>/<experiment>/<time>-<id>; raises StoreError.
    """
    from harness.report import notebook

    return notebook.load(run_folder, local)


def load_history(folder: "str | Path") -> "pd.DataFrame":
    """Return every cell of every run below a folder, one row each, by start. Needs neither torch nor ray."""
    from harness.analysis import history

    return history.load_history(folder)


def run_experiment(
    experiment: "str | os.PathLike[str] | Mapping[str, object]",
    *,
    output: "str | os.PathLike[str] | None" = None,
    local: "str | os.PathLike[str] | None" = None,
    only: "Mapping[str, PlainValue] | None" = None,
    resume: "str | os.PathLike[str] | None" = None,
    address: "str | None" = None,
    preflight: bool = True,
    quiet: bool = False,
) -> "RunResults":
    """Run an experiment as ``harness run`` does, write its run folder and report, and return the results.

    ``experiment``: the path of an experiment file, or its content as a dict; the user's own modules, and relative
    paths, are then looked for in the current folder. ``only``: a part of the grid, such as ``{"strategy": "ddp"}``.
    ``output``: the folder of run folders (default: results); or the URI of a store to which each trial is sent, with
    the run folders in ``local``. ``resume``: a run folder of the same experiment, the URI of a run, or "auto"; the rest
    of its trials is measured.

    A failed trial is a row with its outcome, no exception. Raises HarnessError if nothing was started (bad input, or
    nothing that this machine can measure), and KeyboardInterrupt after an interruption: what was measured until then is
    in the run folder.
    """
    from harness.run import api

    return api.run_experiment(
        experiment,
        output=output,
        local=local,
        only=only,
        resume=resume,
        address=address,
        preflight=preflight,
        quiet=quiet,
    )
