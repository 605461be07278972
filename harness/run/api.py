"""``harness.run_experiment``: a run from a notebook or a script, whose results are returned."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import NoneType

import yaml

from harness.config.axes import check_filter
from harness.config.values import PlainValue
from harness.config.yaml_source import dump, parse_value
from harness.errors import ExperimentError
from harness.report.notebook import RunResults, load
from harness.run.console import ConsoleSink, Lasting
from harness.run.events import Event, RunStarted
from harness.run.improve import run_and_improve
from harness.run.largest_batch import with_largest_batches
from harness.run.request import Request, places_of, read_experiment
from harness.system.process import INTERRUPTED, UNSETTLED, handle_signals

IN_NO_FILE = "experiment (a dict)"
"""Stands for the file of an experiment that is given as a dict, in messages."""
ARGUMENTS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "experiment": ((str, os.PathLike, Mapping), "the path of an experiment file, or its content as a dict"),
    "output": ((str, os.PathLike, NoneType), "the path of the folder of run folders, or the URI of a store"),
    "local": ((str, os.PathLike, NoneType), "the path of the local folder of run folders, with a URI"),
    "only": ((Mapping, NoneType), "a dict of axes, such as {'strategy': 'ddp', 'devices': [1, 2]}"),
    "resume": ((str, os.PathLike, NoneType), "the path of a run folder, the URI of a run, or 'auto'"),
    "address": ((str, NoneType), "HOST:PORT of a Ray cluster's head"),
    "preflight": ((bool,), "True or False"),
    "quiet": ((bool,), "True or False"),
}
"""The types of each argument, with what a message says of them."""


def run_experiment(
    experiment: str | os.PathLike[str] | Mapping[str, object],
    *,
    output: str | os.PathLike[str] | None = None,
    local: str | os.PathLike[str] | None = None,
    only: Mapping[str, PlainValue] | None = None,
    resume: str | os.PathLike[str] | None = None,
    address: str | None = None,
    preflight: bool = True,
    quiet: bool = False,
) -> RunResults:
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
    given: dict[str, object] = {"experiment": experiment, "output": output, "local": local, "only": only}
    given |= {"resume": resume, "address": address, "preflight": preflight, "quiet": quiet}
    if problems := [
        f"{name}: got {repr(value)[:80]}, {type(value).__name__}; allowed: {ARGUMENTS[name][1]}"
        for name, value in given.items()
        if not isinstance(value, ARGUMENTS[name][0])
    ]:
        raise ExperimentError("harness.run_experiment", problems)
    content = _text(experiment, IN_NO_FILE) if isinstance(experiment, Mapping) else None
    file = Path(IN_NO_FILE if isinstance(experiment, Mapping) else experiment)
    try:
        wanted = check_filter(parse_value(_text(only or {}, "only"), source="only"))
    except ValueError as error:
        raise ExperimentError("only", [str(error)]) from None
    places = places_of(*(None if path is None else os.fspath(path) for path in (output, local, resume)))
    request = Request(
        file=file,
        content=content,
        address=address,
        **places._asdict(),
        only=wanted,
        preflight=preflight,
        quiet=quiet,
    )
    checked, folders = read_experiment(request), list[Path]()
    with handle_signals(), warnings.catch_warnings(), ConsoleSink(Lasting(), quiet=quiet) as sink:
        warnings.simplefilter("ignore")  # warnings of libraries, as in the command

        def emit(event: Event) -> None:
            if isinstance(event, RunStarted) and event.folder:
                folders.append(event.folder)
            sink(event)

        code = run_and_improve(request, with_largest_batches(request, checked, emit, search=True), emit)
    if code in (INTERRUPTED, UNSETTLED):
        raise KeyboardInterrupt
    return load(folders[0])


def _text(content: Mapping[str, object], source: str) -> str:
    """Return a dict as YAML, in which numbers of numpy are plain ones; raise ExperimentError if it has other values."""
    try:
        return dump(dict(content))
    except yaml.YAMLError as error:
        problem = f"{' '.join(str(error).split())[:200]}; allowed: mappings, lists, text, numbers, true, false and null"
        raise ExperimentError(source, [problem]) from None
