"""``--resume auto``: the run that a repeated command completes, chosen among those below the output folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import NamedTuple

from harness.analysis.results import IMPROVE_FOLDER
from harness.config.experiment import Experiment
from harness.errors import HarnessError, RunFolderError, StoreError, cause_of
from harness.record.folder import RunFolder
from harness.record.mirror import copy_down, runs_below
from harness.record.store import open_store
from harness.run.events import Emit, Note
from harness.run.prepare import Prepared, prepare
from harness.run.request import AUTO, Request
from harness.run.resume import OtherMeasuresError, same_experiment
from harness.system.scratch import Scratch
from harness.system.uri import below


def prepare_run(request: Request, experiment: Experiment, stack: ExitStack, emit: Emit) -> tuple[Request, Prepared]:
    """Return the request with the run folder that it resumes, and its checked plan; raises HarnessError.

    A run whose cells mean something else in this version is not resumed by ``auto``: a new one is started.
    """
    chosen, reason = copied_run(request, experiment, stack) if request.store else choose_run(request, experiment)
    if reason:
        emit(Note(reason))
    try:
        with ExitStack() as attempt:
            prepared = prepare(chosen, experiment, attempt, emit)
            stack.enter_context(attempt.pop_all())
            return chosen, prepared
    except OtherMeasuresError as error:
        if request.resume != AUTO:
            raise
        emit(Note(f"--resume auto: {error}"))
    chosen = replace(request, resume=None)
    return chosen, prepare(chosen, experiment, stack, emit)


def choose_run(request: Request, experiment: Experiment) -> tuple[Request, str]:
    """Return the request with the run folder that it resumes, and the reason; '' if the request names one itself.

    Of the runs below ``--output`` that the same experiment made (its limits aside) and that are not finished, the one
    whose last invocation began last; without one, a new run is started. Raises RunFolderError if two are equally new,
    as a run and its copy are.
    """
    if request.resume != AUTO:
        return request, ""
    made = list(_runs_of(experiment, request.output / experiment.name))
    unfinished = [run for run in made if run.why]
    if not unfinished:
        others = f"the {len(made)} of this experiment are finished" if made else "there is none of this experiment"
        return replace(request, resume=None), f"--resume auto: a new run: below {request.output} {others}"
    newest, *more = [run for run in unfinished if run.start == max(run.start for run in unfinished)]
    if more:
        names = ", ".join(str(run.path) for run in (newest, *more))
        raise RunFolderError(f"--resume auto: equally new runs of this experiment: {names}; give one with --resume")
    return (
        replace(request, resume=newest.path),
        f"--resume auto: {newest.path}, the newest unfinished run: {newest.why}",
    )


def copied_run(request: Request, experiment: Experiment, stack: ExitStack) -> tuple[Request, str]:
    """Return what ``choose_run`` does, of the runs in the request's store, with the run copied to its local folder.

    A plan leaves the local folder as it is. Raises StoreError if the store does not answer, or lacks the run.
    """
    if request.resume is None or request.store is None:
        return request, ""
    store, reason, folder = open_store(request.store), "", request.resume
    if request.resume == AUTO:
        with Scratch() as scratch:
            for run in runs_below(store, experiment.name):  # as far as the choice needs them
                try:
                    copy_down(store, run, scratch / run, raw=False)
                except (StoreError, RunFolderError) as error:
                    if isinstance(error.__cause__, OSError):  # the store does not answer; what is damaged is left out
                        raise
            try:
                chosen, said = choose_run(replace(request, output=scratch), experiment)
            except RunFolderError as error:
                raise RunFolderError(_in_store(str(error), scratch, request.store)) from None
        reason = _in_store(said, scratch, request.store)
        if chosen.resume is None:
            return replace(request, resume=None), reason
        folder = request.output / experiment.name / chosen.resume.name
    run = f"{folder.absolute().parent.name}/{folder.absolute().name}"
    if request.plans_only:
        folder = stack.enter_context(Scratch()) / run
    copy_down(store, run, folder)
    return replace(request, resume=folder), reason


def _in_store(text: str, scratch: Path, store: str) -> str:
    """Return a text with the URIs of runs in place of their paths in the folder that they were copied to."""
    return re.sub(
        rf"{re.escape(str(scratch))}((?:/[\w.-]+)*)", lambda match: below(store, *match[1].split("/")[1:]), text
    )


class _Run(NamedTuple):
    """A run of the experiment. ``why``: why it is unfinished; '' if it is finished.

    ``start``: when its last invocation began, by which runs are ordered, since a folder can have another name. A run
    that recorded no invocation comes before all others, by the time in its name, <time>-<id>.
    """

    path: Path
    why: str
    start: tuple[float, str]


def _runs_of(experiment: Experiment, parent: Path) -> Iterator[_Run]:
    """Yield the runs in a folder that the experiment made."""
    try:
        paths = sorted(parent.iterdir()) if os.path.isdir(parent) else []
    except OSError as error:
        raise RunFolderError(f"--resume auto: {parent} cannot be read: {cause_of(error)}") from None
    for path in paths:
        try:
            folder = RunFolder.open(path)
            if same_experiment(folder, experiment):
                invocations = folder.environment().get("invocations", [])
                began = invocations[-1].get("started_at") if invocations else None
                start = (began, "") if isinstance(began, int | float) else (-inf, path.name.rpartition("-")[0])
                yield _Run(path, folder.why_unfinished or _open_improvement(path), start)
        except HarnessError:  # another file, a damaged run, or one of another version: nothing to resume
            continue


def _open_improvement(path: Path) -> str:
    """Return why a run's improvement is not finished; '' if it is, or if there is none."""
    runs = (RunFolder.open(plan.parent) for plan in path.glob(f"{IMPROVE_FOLDER}/*/*/*/plan.json"))
    return next((f"of its improvement, {run.why_unfinished}" for run in runs if run.why_unfinished), "")
