"""Versions: the same packages, driver and device libraries on every node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.plan.checks.finding import Finding, join_names
from harness.plan.environment import NodeEnvironment

NAME = "versions"


def judge(nodes: Sequence[NodeEnvironment]) -> list[Finding]:
    """Compare the recorded environments of the nodes."""
    found = []
    for what in ("python", "cuda", "cudnn", "nccl", "driver"):
        found += _compare(what, {str(node["host"]): node.get(what) for node in nodes if node.get(what) is not None})
    names = {name for node in nodes for name in node.get("packages", {})}
    for name in sorted(names):
        found += _compare(name, {str(node["host"]): node.get("packages", {}).get(name, "missing") for node in nodes})
    return found


def cannot_import(failing: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Report modules that a node cannot import. ``failing``: node -> module -> error."""
    errors = [f"{module} on {node}: {why}" for node, modules in failing.items() for module, why in modules.items()]
    if not errors:
        return []
    return [
        Finding(
            NAME,
            "error",
            f"import errors of modules that the ranks need: {join_names(errors)}",
            "every worker group on such a node fails",
            "install the missing modules there, or start Ray there in an environment that has them",
        )
    ]


def _compare(what: str, versions: Mapping[str, object]) -> list[Finding]:
    if len(set(versions.values())) < 2:
        return []
    by_host = ", ".join(f"{version} on {host}" for host, version in versions.items())
    severe = what in ("torch", "harness", "nccl", "python")
    return [
        Finding(
            NAME,
            "error" if severe else "warning",
            f"{what}: {by_host}",
            "different software on the ranks: collectives may hang or fail, and the speed of a node depends on its "
            "software",
            "install the same versions on every node",
        )
    ]
