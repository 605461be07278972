"""Provenance of one invocation: code, versions and hardware, and their differences to an earlier invocation."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from harness.measure.environment import PACKAGES, cpu_model, git_commit, package_version
from harness.plan.environment import Invocation, VariantFacts
from harness.plan.inventory import Node
from harness.plan.planner import Plan
from harness.system.code_version import CodeVersion
from harness.system.files import PACKAGE_FOLDER, python_files
from harness.system.units import GIB

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
    timed = plan.experiment.throughput
    return {
        "blocks": timed.most_blocks if timed else None,
        "git_commit": git_commit(home) if home else None,
        "harness": f"{package_version('harness') or 'not installed'}, source {_digest(python_files(PACKAGE_FOLDER))}",
        "workload_code": _own_code(home) if home and plan.experiment.own_code and not plan.variants else None,
        "variants": {name: _variant(own.version) for name, own in plan.variants.items()},
        "python": sys.version.split()[0],
        "packages": {name: package_version(name) for name in PACKAGES if name != "harness"},
        "driver": f"{platform.node()}, {cpu_model()}",
        "nodes": sorted(map(_described, plan.inventory.nodes)),
        "device": plan.machine.device,
        "devices": plan.machine.devices,
        "threads_per_device": plan.machine.threads_per_device,
    }


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the differences between two invocations, such as 'torch 2.14.0 -> 2.15.0'; absent facts are equal."""
    found: list[str] = []
    for key, name in COMPARED.items():
        if key not in before or key not in now or before[key] == now[key]:
            continue
        old, new = before[key], now[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += [_changed(part, old.get(part), new.get(part)) for part in _unequal(old, new)]
        else:
            found.append(_changed(name, old, new))
    return found


def _unequal(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    return (part for part in {**old, **new} if old.get(part) != new.get(part))


def _changed(name: str, old: object, new: object) -> str:
    return f"{name} {_words(old)} -> {_words(new)}"


def _words(value: object) -> str:
    return "none" if value is None else " + ".join(map(str, value)) if isinstance(value, list) else str(value)


def _described(node: Node) -> str:
    gpus = f", {node.gpus} x {node.gpu_model}" if node.gpus else ""
    memory = f", {node.memory_bytes / GIB:.0f} GiB" if node.memory_bytes else ""
    return f"{node.host} ({node.cores} cores{gpus}{memory})"


def _variant(version: CodeVersion) -> VariantFacts:
    return {"code": version.code, "git_commit": git_commit(version.place)}


def _own_code(home: Path) -> str:
    return _digest(islice(python_files(home), MOST_FILES))


def _digest(files: Iterable[Path]) -> str:
    """Return eight characters that change if the content of a file does."""
    content = hashlib.sha256()
    for file in files:
        content.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return content.hexdigest()[:8]
