"""The plan of a request and its preview, shown; no rank is started, and no library of figures is imported."""

from __future__ import annotations

from contextlib import ExitStack

from harness.config.experiment import Experiment
from harness.run.auto_resume import prepare_run
from harness.run.estimate import estimated
from harness.run.events import Emit, MemoryForecast, Note, Planned
from harness.run.memory import LIMIT_S, forecasts
from harness.run.request import Request


def show_plan(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Show the checked plan; return the exit code. Raises HarnessError."""
    with ExitStack() as stack:
        _, prepared = prepare_run(request, experiment, stack, emit)
        emit(Planned(prepared.plan))
        fits: dict[str, str] = {}
        if request.memory and prepared.plan.trials:
            emit(Note(f"Tracing a step of each kind of cell, in at most {LIMIT_S:.0f} s each, to estimate its memory."))
            found = forecasts(prepared.plan, request.home)
            emit(MemoryForecast(found, prepared.plan.labels))
            fits = {cell.id: forecast.verdict for cell, forecast in found.items()}
        if prepared.plan.trials or request.like:
            emit(estimated(request, prepared.plan, prepared.folder).in_full(fits))
    return 0
