"""Machines and invocations of a run, as facts of the report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from typing_extensions import TypedDict

from harness.plan.environment import NodeEnvironment, RunEnvironment
from harness.report.tables.text import plural
from harness.system.units import GIB


class NodeFacts(TypedDict):
    """A node as the template takes it."""

    host: str
    facts: list[tuple[str, str]]


class Facts(TypedDict):
    """The machines and invocations as the template takes them."""

    started: str
    machine_line: str
    nodes: list[NodeFacts]
    environment_differs: str
    invocations_differ: list[str]


NO_FACTS = Facts(started="", machine_line="", nodes=[], environment_differs="", invocations_differ=[])


def facts(environment: RunEnvironment) -> Facts:
    """Return the variables of the template that come from environment.json."""
    seen = nodes(environment)
    return {
        "started": started(environment),
        "machine_line": machine_line(seen),
        "nodes": [{"host": node["host"], "facts": node_facts(node)} for node in seen],
        "environment_differs": difference(environment),
        "invocations_differ": invocation_differences(environment),
    }


def nodes(environment: RunEnvironment) -> list[NodeEnvironment]:
    """Return each node once, as first recorded."""
    nodes = {node["node_id"]: node for group in environment.get("groups", []) for node in group["nodes"]}
    control = nodes.pop("torchrun", None)  # this machine, which Ray knows by an id
    if control and control["host"] not in {node["host"] for node in nodes.values()}:
        nodes["torchrun"] = control
    return list(nodes.values())


def node_facts(node: NodeEnvironment) -> list[tuple[str, str]]:
    packages = ", ".join(f"{name} {version}" for name, version in node["packages"].items())
    models = [
        f"{device['model']} {device['uuid'] or ''}".strip() for device in node["devices"] if device["kind"] == "cuda"
    ]
    facts = [
        ("processor", f"{node['cpu']}, {node['cores']} cores, {node['logical_cpus']} logical"),
        ("memory", f"{node['memory_bytes'] / GIB:.1f} GiB"),
        ("GPUs", ", ".join(models) or "none used"),
        ("system", node["system"]),
        ("software", f"Python {node['python']}, {packages}, CUDA {node['cuda'] or 'none'}"),
        ("threads per device", str(node["threads"])),
    ]
    if node.get("niceness"):
        facts.append(("niceness", f"{node['niceness']}: the ranks yield to other processes"))
    if node["variables"]:
        facts.append(("variables", ", ".join(f"{name}={value}" for name, value in node["variables"].items())))
    return facts


def machine_line(nodes: Sequence[NodeEnvironment]) -> str:
    if not nodes:
        return "no worker group started"
    first = nodes[0]
    gpus = [device["model"] for device in first["devices"] if device["kind"] == "cuda"]
    what = gpus[0] if gpus else f"{first['cpu']}, {first['cores']} cores, no GPU used"
    return f"{plural(len(nodes), 'node')}: {what} · torch {first['packages'].get('torch', '?')}"


def difference(environment: RunEnvironment) -> str:
    """Return a sentence if worker groups recorded different hardware or versions on the same node."""
    keys = ("cpu", "cores", "memory_bytes", "python", "packages", "cuda", "threads", "niceness")
    seen: dict[str, set[str]] = {}
    for group in environment.get("groups", []):
        for node in group["nodes"]:
            seen.setdefault(node["host"], set()).add(json.dumps([node.get(key) for key in keys], sort_keys=True))
    different = [host for host, versions in seen.items() if len(versions) > 1]
    return f"Worker groups saw different hardware or software on {', '.join(different)}." if different else ""


def invocation_differences(environment: RunEnvironment) -> list[str]:
    """Return a sentence for each invocation with other code, versions or hardware than the one before."""
    return [
        f"Invocation {number} differs from the one before: {'; '.join(invocation['differs'])}."
        for number, invocation in enumerate(environment.get("invocations", []))
        if invocation.get("differs")
    ]


def started(environment: RunEnvironment) -> str:
    """Return the start, the number of resumptions and the commit."""
    invocations = [invocation for invocation in environment.get("invocations", []) if "started_at" in invocation]
    if not invocations:
        return "not started"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(invocations[0]["started_at"]))
    again = f", resumed {plural(len(invocations) - 1, 'time')}" if len(invocations) > 1 else ""
    commit = invocations[0].get("git_commit")
    return f"{began}{again}{f' · git {commit[:12]}' if commit else ''}"
