"""The plan of a request, shown; nothing is started, and neither the report nor its libraries are imported."""

from __future__ import annotations

from contextlib import ExitStack

from harness.config.experiment import Experiment
from harness.run.auto_resume import choose_run
from harness.run.events import Emit, Note, Planned
from harness.run.prepare import prepare
from harness.run.request import Request


def show_plan(request: Request, experiment: Experiment, emit: Emit) -> int:
    """Show the checked plan; return the exit code. Raises HarnessError."""
    request, choice = choose_run(request, experiment)
    if choice:
        emit(Note(choice))
    with ExitStack() as stack:
        emit(Planned(prepare(request, experiment, stack).plan))
    return 0
