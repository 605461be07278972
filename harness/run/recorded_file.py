"""The experiment file and the user's modules of a run: recorded as paths and hashes, never as code to execute.

``--resume RUN`` alone finds them again, and uses them only if they are unchanged. Imports neither torch nor ray.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.config.experiment import Experiment, load_experiment
from harness.errors import ExperimentError, RunFolderError, cause_of
from harness.plan.environment import FileFacts, SourceFacts
from harness.system.code_version import module_file


def source_facts(file: Path, experiment: Experiment, path: list[str]) -> SourceFacts:
    """Return the path and hash of the experiment file and of each module of the user's own that it names.

    ``path``: the import path, on which a module is looked for after the file's folder; nothing is imported.
    """
    file = file.resolve()
    found = module_files(experiment, file.parent, path)
    return {**_facts(file), "modules": {name: _facts(place) for name, place in found.items() if place}}


def module_files(experiment: Experiment, home: Path, path: list[str]) -> dict[str, Path | None]:
    """Return the file of each module of the user's own and of the packages that it is in, by name.

    With variants that of each, by name and variant.
    """
    modules = dict.fromkeys(name for module in experiment.own_modules for name in _executed(module))
    if experiment.variants:
        folders = experiment.variants.items()
        return {f"{m} of {name}": module_file(m, [at]) for name, at in folders for m in modules}
    return {module: module_file(module, [str(home), *path]) for module in modules}


def _executed(module: str) -> list[str]:
    """Return the names of what an import of the module executes: its packages, from the outermost, and itself."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def file_to_resume(run_folder: Path, invocations: Sequence[Mapping[str, object]], path: list[str]) -> Path:
    """Return the experiment file of a run, if it and the user's modules are as they were; raise RunFolderError.

    ``invocations``: those of the run, from its environment.json. Nothing inside the run folder is used, whoever wrote
    it, since its content may come from others.
    """
    recorded = next((found for facts in reversed(invocations) if (found := facts.get("source"))), None)
    if not isinstance(recorded, Mapping):
        raise _ask(run_folder, "the run does not name the file that made it")
    file, reason = _unchanged(recorded, run_folder)
    if reason:
        raise _ask(run_folder, f"its experiment file {reason}")
    try:
        experiment = load_experiment(file)
    except ExperimentError as error:
        raise _ask(run_folder, f"its experiment file cannot be read: {error.problems[0]}") from None
    modules = recorded.get("modules")
    for name, here in module_files(experiment, file.parent, path).items():
        facts = modules.get(name) if isinstance(modules, Mapping) else None
        if here is None and facts is None:  # a package without a file: nothing to execute
            continue
        place, reason = _unchanged(facts, run_folder) if isinstance(facts, Mapping) else (file, "is not recorded")
        if not reason and here != place:
            reason = f"{place} is not what would be imported now"
        if reason:
            raise _ask(run_folder, f"the module {name} {reason}")
    return file


def _facts(file: Path) -> FileFacts:
    return {"file": str(file), "sha256": _sha256(file)}


def _unchanged(facts: Mapping[str, object], run_folder: Path) -> tuple[Path, str]:
    """Return a recorded file, and why it is not used; '' if it is unchanged and lies outside the run folder."""
    file = Path(str(facts.get("file")))
    try:
        file = file.resolve()
        return file, _objection(file, facts.get("sha256"), run_folder.resolve())
    except (OSError, ValueError) as error:
        return file, f"{file} cannot be read: {cause_of(error)}"


def _objection(file: Path, sha256: object, run_folder: Path) -> str:
    if file.is_relative_to(run_folder):
        return f"{file} lies inside the run folder, of which nothing is executed"
    if not file.is_file():
        return f"{file} is no longer there"
    return "" if _sha256(file) == sha256 else f"{file} has changed since the run"


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _ask(run_folder: Path, reason: str) -> RunFolderError:
    command = f"harness run FILE --resume {shlex.quote(str(run_folder))}"
    return RunFolderError(f"--resume without FILE: {run_folder}: {reason}. Give the file: {command}")
