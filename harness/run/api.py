"""``harness.run_experiment``: a run from a notebook or a script, whose results are returned."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import yaml

from harness.config.axes import check_filter
from harness.config.values import PlainValue
from harness.config.yaml_source import dump
from harness.errors import ExperimentError
from harness.report.notebook import RunResults, load
from harness.run.console import ConsoleSink, Lasting
from harness.run.events import Event, Planned, RunStarted
from harness.run.pipeline import run
from harness.run.request import Request, read_experiment, run_to_resume
from harness.system.signals import INTERRUPTED, handle_signals

IN_NO_FILE = "experiment (a dict)"
"""Stands for the file of an experiment that is given as a dict, in messages."""


def run_experiment(
    experiment: str | os.PathLike[str] | Mapping[str, object],
    *,
    output: str | os.PathLike[str] = "results",
    only: Mapping[str, PlainValue] | None = None,
    resume: str | os.PathLike[str] | None = None,
    address: str | None = None,
    preflight: bool = True,
    quiet: bool = False,
) -> RunResults:
    """Run an experiment as ``harness run`` does, and return the results of its run folder.

    See ``harness.run_experiment``, which is this function.
    """
    file, content = _source(experiment)
    request = Request(
        file=file,
        content=content,
        address=address,
        resume=run_to_resume(None if resume is None else os.fspath(resume), absolute=False),
        output=Path(output),
        only=_filter(only),
        preflight=preflight,
        quiet=quiet,
    )
    checked = read_experiment(request)
    with handle_signals(), warnings.catch_warnings(), ConsoleSink(Lasting(), quiet=quiet) as sink:
        warnings.simplefilter("ignore")  # those of libraries, as in the command
        emit = _Following(sink)
        code = run(request, checked, emit)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if emit.folder is None:
        reasons = "; ".join(emit.reasons) or "no cell can run"
        raise ExperimentError(str(request.file), [f"nothing can be measured on this machine: {reasons}"])
    return load(emit.folder)


class _Following:
    """Passes events on, and keeps the run folder and the reasons of cells that cannot run."""

    def __init__(self, sink: ConsoleSink) -> None:
        self._sink = sink
        self.folder: Path | None = None
        self.reasons: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            reasons = [skip.reason for skip in event.plan.skips] + [cell.reason for cell in event.plan.impossible]
            self.reasons = list(dict.fromkeys(reasons))
        if isinstance(event, RunStarted):
            self.folder = event.folder
        self._sink(event)


def _source(experiment: str | os.PathLike[str] | Mapping[str, object]) -> tuple[Path, str | None]:
    """Return the experiment's file and, if it is given as a dict, its text."""
    if not isinstance(experiment, Mapping):
        return Path(experiment), None
    try:
        return Path(IN_NO_FILE), dump(dict(experiment))
    except yaml.YAMLError as error:
        problem = f"{' '.join(str(error).split())[:200]}; allowed: mappings, lists, text, numbers, true, false and null"
        raise ExperimentError(IN_NO_FILE, [problem]) from None


def _filter(only: Mapping[str, PlainValue] | None) -> dict[str, PlainValue]:
    try:
        return check_filter(dict(only or {}))
    except ValueError as error:
        raise ExperimentError("only", [str(error)]) from None
