"""The plan of a request, shown; no rank is started, and neither the report nor its libraries are imported."""

from __future__ import annotations

from contextlib import ExitStack

from harness.config.experiment import Experiment
from harness.run.auto_resume import prepare_run
from harness.run.events import Emit, MemoryForecast, Note, Planned
from harness.run.memory import LIMIT_S, forecasts
from harness.run.request import Request


def show_plan(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Show the checked plan; return the exit code. Raises HarnessError."""
    with ExitStack() as stack:
        _, prepared = prepare_run(request, experiment, stack, emit)
        emit(Planned(prepared.plan))
        if request.memory and prepared.plan.trials:
            emit(Note(f"Tracing a step of each kind of cell, in at most {LIMIT_S:.0f} s each, to estimate its memory."))
            emit(MemoryForecast(forecasts(prepared.plan, request.home), prepared.plan.labels))
    return 0
