"""A Ray-orchestrated scaling benchmark for PyTorch training.

results = harness.load("results/scaling/20261121-120000-ab12")    # or harness.run_experiment("scaling.yaml")
results.summary               # 12 numbers a cell; results.best: the settings to use
results.scaling               # a DataFrame; also .trials, .cells, .steps, .epochs, .convergence, .environment ...
results.plot.throughput()     # a figure of the report
history = harness.load_history("results")    # one DataFrame over all runs
"""

TYPE_CHECKING = False  # as in typing, which is not imported: every command imports this module first
if TYPE_CHECKING:
    from harness.analysis.history import load_history
    from harness.report.notebook import load
    from harness.run.api import run_experiment

__all__ = ["load", "load_history", "run_experiment"]
_MODULES = {
    "load": "harness.report.notebook",
    "load_history": "harness.analysis.history",
    "run_experiment": "harness.run.api",
}


def __getattr__(name: str) -> object:
    """Import a function of __all__ when it is first used, and with it pandas or torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
