"""Links: the links between the GPUs of each node, their NUMA nodes, and the IOMMU."""

from __future__ import annotations

from collections.abc import Sequence

from harness.plan.checks.finding import Finding, join_names
from harness.plan.environment import NodeEnvironment, Topology

NAME = "links"


def judge(nodes: Sequence[NodeEnvironment]) -> list[Finding]:
    """Judge the links of each node; a node with one GPU or none has no links."""
    found = []
    for node in nodes:
        topology = node.get("topology")
        if topology and len(topology["gpus"]) > 1:
            found += _findings_of(node, topology)
    return found


def _findings_of(node: NodeEnvironment, topology: Topology) -> list[Finding]:
    links = topology["links"]
    count = len(links)
    pairs = [(one, other, links[one][other]) for one in range(count) for other in range(one + 1, count)]
    slow = [f"{one}-{other} {link}" for one, other, link in pairs if link and not link.startswith("NV")]
    kinds = ", ".join(dict.fromkeys(str(link) for _, _, link in pairs if link))
    iommu = {True: "IOMMU on", False: "IOMMU off", None: "IOMMU unknown"}
    joined = f"{count} GPUs, links {kinds or 'unknown'}"
    seen = f"{node['host']}: {joined}{_near(node, topology)}; {iommu[node.get('iommu')]}"
    if apart := topology.get("apart"):
        pairs_apart = [f"{one} from {other}" for one, other in apart]
        return [
            Finding(
                NAME,
                "warning",
                f"{seen}; without peer access: {join_names(pairs_apart)} of {count * (count - 1)} ordered pairs",
                "copies between these GPUs pass through the host's memory",
                "compare pairs with device_ids in the grid; GPUs with NVLink or below one PCIe switch have peer access",
            )
        ]
    if slow and node.get("iommu"):
        return [
            Finding(
                NAME,
                "warning",
                f"{seen}; without NVLink: {join_names(slow)}",
                "copies between PCIe peers may be slow or, on some boards, silently corrupt (check: GPU copies)",
                "boot with iommu=pt, or disable PCIe ACS in the firmware; compare pairs with device_ids in the grid",
            )
        ]
    mixed = len({link for _, _, link in pairs}) > 1
    return [
        Finding(
            NAME,
            "note",
            seen,
            "different links: the speed of a cell depends on its GPUs" if mixed else "equal links of all pairs",
            "compare pairs with device_ids in the grid" if mixed else "none",
        )
    ]


def _near(node: NodeEnvironment, topology: Topology) -> str:
    """Return the GPUs of each NUMA node: '; NUMA node 0 (processors 0-31): GPU 0, 1, ...'."""
    places = topology.get("numa") or ()
    processors = node.get("numa") or {}
    numa_nodes = [
        f"NUMA node {place} (processors {processors.get(str(place), 'unknown')}): GPU "
        + ", ".join(str(gpu) for gpu, other in enumerate(places) if other == place)
        for place in sorted({place for place in places if place is not None})
    ]
    return "".join(f"; {text}" for text in numa_nodes)
