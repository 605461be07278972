"""Provenance of one invocation: code, versions, hardware; the recorded experiment file and the user's modules."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.config.experiment import Experiment
from harness.config.load import load_experiment
from harness.config.values import GIB
from harness.errors import ExperimentError, RunFolderError, cause_of
from harness.measure.environment import PACKAGES, cpu_model, git_commit
from harness.plan.planner import Plan
from harness.plan.run_environment import FileFacts, Invocation, SourceFacts
from harness.system.files import PACKAGE_FOLDER, code_hash, package_version
from harness.system.user_code import module_file

MOST_FILES = 2000
"""The most files that are hashed of a workload's own folder, which may hold anything."""
COMPARED = {
    "git_commit": "git commit",
    "harness": "harness",
    "workload_code": "the workload's code",
    "python": "Python",
    "packages": "",
    "driver": "driver",
    "nodes": "nodes",
    "device": "device",
    "threads_per_device": "threads per device",
}
"""The facts that are compared between invocations, with the names that messages use."""


def invocation_facts(plan: Plan, home: Path | None) -> Invocation:
    """Return code, versions and hardware of this invocation.

    ``home``: the experiment file's folder; None if it must not be read.
    """
    timed, nodes = plan.experiment.throughput, []
    for node in plan.inventory.nodes:
        gpus = f", {node.gpus} x {node.gpu_model}" if node.gpus else ""
        memory = f", {node.memory_bytes / GIB:.0f} GiB" if node.memory_bytes else ""
        nodes.append(f"{node.host} ({node.cores} cores{gpus}{memory})")
    own_code = home and plan.experiment.own_modules and not plan.variants
    folders = [home] if home and own_code else [Path(program).parent for program in plan.experiment.programs if home]
    versions = {name: own.version for name, own in plan.variants.items()}
    return {
        "blocks": timed.most_blocks if timed else None,
        "git_commit": git_commit(home) if home else None,
        "harness": f"{package_version('harness') or 'not installed'}, source {code_hash(PACKAGE_FOLDER)[:8]}",
        "workload_code": code_hash(*folders, most=MOST_FILES)[:8] if folders else None,
        "variants": {name: {"code": own.code, "git_commit": git_commit(own.place)} for name, own in versions.items()},
        "python": sys.version.split()[0],
        "packages": {name: package_version(name) for name in PACKAGES if name != "harness"},
        "driver": f"{platform.node()}, {cpu_model()}",
        "nodes": sorted(nodes),
        "device": plan.machine.device,
        "devices": plan.machine.devices,
        "threads_per_device": plan.machine.threads_per_device,
    }


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the differences between two invocations, such as 'torch 2.14.0 -> 2.15.0'; absent facts are equal."""
    found: list[tuple[str, object, object]] = []
    for key, name in COMPARED.items():
        if key in before and key in now:
            old, new = before[key], now[key]
            if isinstance(old, Mapping) and isinstance(new, Mapping):
                found += [(part, old.get(part), new.get(part)) for part in {**old, **new}]
            else:
                found.append((name, old, new))
    return [f"{name} {_words(old)} -> {_words(new)}" for name, old, new in found if old != new]


def _words(value: object) -> str:
    return "none" if value is None else " + ".join(map(str, value)) if isinstance(value, list) else str(value)


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
    modules: dict[str, None] = {}
    for module in experiment.own_modules:  # an import executes the packages from the outermost, then the module
        parts = module.split(".")
        modules |= dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    if experiment.variants:
        folders = experiment.variants.items()
        return {f"{m} of {name}": module_file(m, [at]) for name, at in folders for m in modules}
    named: dict[str, Path | None] = {Path(program).name: Path(program) for program in experiment.programs}
    return named | {module: module_file(module, [str(home), *path]) for module in modules}


def file_to_resume(run_folder: Path, invocations: Sequence[Mapping[str, object]], path: list[str]) -> Path:
    """Return the experiment file of a run, if it and the user's modules are as they were; raise RunFolderError.

    ``invocations``: those of the run, from its environment.jsonl. Nothing inside the run folder is used, whoever wrote
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
        if file.is_relative_to(run_folder.resolve()):
            return file, f"{file} lies inside the run folder, of which nothing is executed"
        if not file.is_file():
            return file, f"{file} is no longer there"
        return file, "" if _sha256(file) == facts.get("sha256") else f"{file} has changed since the run"
    except (OSError, ValueError) as error:
        return file, f"{file} cannot be read: {cause_of(error)}"


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _ask(run_folder: Path, reason: str) -> RunFolderError:
    command = f"harness run FILE --resume {shlex.quote(str(run_folder))}"
    return RunFolderError(f"--resume without FILE: {run_folder}: {reason}. Give the file: {command}")
