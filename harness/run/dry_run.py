"""The plan of a request, shown; nothing is started, and neither the report nor its libraries are imported."""

from __future__ import annotations

from contextlib import ExitStack

from harness.config.experiment import Experiment
from harness.run.auto_resume import prepare_run
from harness.run.events import Emit, Planned
from harness.run.request import Request


def show_plan(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Show the checked plan; return the exit code. Raises HarnessError."""
    with ExitStack() as stack:
        _, prepared = prepare_run(request, experiment, stack, emit)
        emit(Planned(prepared.plan))
    return 0
