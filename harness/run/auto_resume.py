"""``--resume auto``: the run that a repeated command completes, chosen among those below the output folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness.config.experiment import Experiment
from harness.errors import HarnessError, RunFolderError
from harness.record.folder import RunFolder
from harness.run.request import AUTO, Request
from harness.run.resume import same_experiment


def choose_run(request: Request, experiment: Experiment) -> tuple[Request, str]:
    """Return the request with the run folder that it resumes, and the reason; '' if the request names one itself.

    Of the runs below ``--output`` that the same experiment made (its limits aside) and that are not finished, the
    newest; without one, a new run is started. Raises RunFolderError if two are equally new.
    """
    if request.resume != AUTO:
        return request, ""
    made = [folder for folder in _folders(request.output / experiment.name) if same_experiment(folder, experiment)]
    unfinished = [(folder, why) for folder in made if (why := _why_unfinished(folder))]
    if not unfinished:
        others = f"the {len(made)} of this experiment are finished" if made else "there is none of this experiment"
        return replace(request, resume=None), f"--resume auto: a new run: below {request.output} {others}"
    newest = max(_stamp(folder) for folder, _ in unfinished)
    (folder, why), *more = [(folder, why) for folder, why in unfinished if _stamp(folder) == newest]
    if more:
        names = ", ".join(str(each.path) for each, _ in [(folder, why), *more])
        raise RunFolderError(f"--resume auto: equally new runs of this experiment: {names}; give one with --resume")
    return replace(request, resume=folder.path), f"--resume auto: {folder.path}, the newest unfinished run: {why}"


def _folders(parent: Path) -> Iterator[RunFolder]:
    """Yield the run folders in ``parent`` that this harness reads."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        try:
            yield RunFolder.open(path)
        except HarnessError:  # another file, or a run of a newer harness
            continue


def _why_unfinished(folder: RunFolder) -> str:
    """Return why a run is not finished; '' if it is. A failed trial alone does not make it unfinished."""
    invocations = folder.environment().get("invocations", [])
    if not invocations:
        return "it recorded no trial"
    lines = {line["trial_id"]: line for line in folder.lines()}
    if any(line["facts"].get("inline") or line["skip_code"] == "inline" for line in lines.values()):
        return ""  # a run for a debugger is never resumed
    if (ended := invocations[-1].get("ended")) != "finished":
        return "it was interrupted" if ended == "interrupted" else "its last invocation ended early"
    late = sum(line["skip_code"] == "time_up" for line in lines.values())
    return f"limits.wall left out {late} trials" if late else ""


def _stamp(folder: RunFolder) -> str:
    """Return the time in a run folder's name, <time>-<id>."""
    return folder.path.name.rpartition("-")[0]
