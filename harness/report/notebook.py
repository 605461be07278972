"""A run's results as a notebook or a script takes them: the tables, and the figures of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis.results import Results
from harness.errors import nearest
from harness.record.folder import RunFolder
from harness.record.mirror import on_this_machine

if TYPE_CHECKING:
    from harness.report.figures.drawing import Chart, Drawing


@dataclass(frozen=True, repr=False)
class RunResults(Results):
    """The results of a run with its figures; made by ``harness.load`` and ``harness.run_experiment``."""

    @cached_property
    def plot(self) -> Plots:
        """The figures of the report, drawn anew: ``results.plot.throughput()`` is a figure of matplotlib."""
        return Plots(self)


class Plots:
    """The figures of the report, each a function of no arguments; imports what draws."""

    def __init__(self, results: Results) -> None:
        from harness.report.figures import FIGURES

        vars(self).update({name: partial(_draw, draw, results) for name, draw in FIGURES.items()})

    def __getattr__(self, name: str) -> Callable[[], Chart]:
        """Raise AttributeError, which lists the names of the figures."""
        raise AttributeError(f"no figure {name!r}; {nearest(name, vars(self))}")

    def __repr__(self) -> str:
        return f"Figures: {', '.join(f'.{name}()' for name in vars(self))}"


def load(run_folder: str | Path, local: str | Path = "results") -> RunResults:
    """Return the results in a run folder, as DataFrames. Needs neither torch nor ray; raises RunFolderError.

    The URI of a run in a store is first copied to <local>/<experiment>/<time>-<id>; raises StoreError.
    """
    return RunResults(RunFolder.open(on_this_machine(run_folder, local)))


def _draw(draw: Callable[[Results], Drawing], results: Results) -> Chart:
    """Return a figure of matplotlib with its caption; raise ValueError with the reason if it is left out."""
    from harness.report.figures import style

    with style():
        drawing = draw(results)
    text = f"{drawing.title}. {drawing.caption}"
    if drawing.figure is None:
        raise ValueError(text)
    drawing.figure.caption, drawing.figure.more = text, drawing.more
    return drawing.figure
