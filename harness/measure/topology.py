"""The links between the GPUs of a node, by NVML, in the terms of ``nvidia-smi topo -m``; NUMA nodes."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from harness.measure.telemetry import Handle, Nvml, first
from harness.plan.environment import Topology

PCIE = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's levels of the common ancestor: one switch, several, a host bridge, a NUMA node, beyond it."""
MOST_NVLINKS = 36
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_READ = 0  # NVML_P2P_CAPS_INDEX_READ
SYSTEM = Path("/sys")


def capture_topology(nvml: Nvml | None = None) -> Topology | None:
    """Return the node's GPUs by UUID, and a square of their links: NV12, PIX, PXB, PHB, NODE or SYS; None without NVML.

    X on the diagonal, None if a link is not known. ``apart``: the pairs of which the first cannot read the other's
    memory directly; ``numa``: each GPU's NUMA node, None if not known; ``driver``: its version.
    """
    with suppress(Exception):  # a description of the node never fails a trial
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            return _captured(nvml)
        finally:
            nvml.nvmlShutdown()
    return None


def links_between(topology: Topology | None, uuids: Iterable[str | None]) -> list[str] | None:
    """Return the links between each two of these GPUs, by torch's or NVML's UUID; None if one is not known."""
    if topology is None:
        return None
    places = {uuid: place for place, uuid in enumerate(topology["gpus"])}
    wanted = [places.get(f"GPU-{(uuid or '').removeprefix('GPU-')}") for uuid in dict.fromkeys(uuids)]
    known = [place for place in wanted if place is not None]
    found = [topology["links"][one][other] for one, other in combinations(known, 2)]
    links = [link for link in found if link is not None]
    return links if len(known) == len(wanted) and len(links) == len(found) else None


def format_links(links: Iterable[str]) -> str | None:
    """Return links as text, each once, the best first: 'NV12, SYS'; None if there are none."""
    return ", ".join(sorted(set(links), key=_quality)) or None


def _quality(link: str) -> tuple[int, int]:
    if link.startswith("NV"):
        return 0, -int(link.removeprefix("NV"))
    return 1, list(PCIE.values()).index(link)


def _captured(nvml: Nvml) -> Topology:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    remote = [_nvlinks(nvml, handle) for handle in handles]
    buses = [_bus(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
    square: list[list[str | None]] = [["X"] * len(handles) for _ in handles]
    for one, other in combinations(range(len(handles)), 2):
        count = remote[one].count(buses[other]) + min(remote[one].count("switch"), remote[other].count("switch"))
        level = (
            None if count else first(partial(nvml.nvmlDeviceGetTopologyCommonAncestor, handles[one], handles[other]))
        )
        link = f"NV{count}" if count else None if level is None else PCIE.get(level)
        square[one][other] = square[other][one] = link
    return {
        "gpus": [nvml.nvmlDeviceGetUUID(handle) for handle in handles],
        "links": square,
        "apart": [
            [one, other]
            for one, other in permutations(range(len(handles)), 2)
            if first(partial(nvml.nvmlDeviceGetP2PStatus, handles[one], handles[other], _READ))
        ],
        "numa": [numa_node_of_bus(bus) for bus in buses],
        "driver": first(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
    }


def _nvlinks(nvml: Nvml, handle: Handle) -> list[str]:
    """Return the remote end of each active NVLink of a GPU: 'switch', or the PCI bus id of another GPU."""
    ends = []
    for link in range(MOST_NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            switched = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH
            ends.append("switch" if switched else _bus(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
        except Exception:  # NVMLError: this GPU has no more links, or none at all
            break
    return ends


def _bus(facts: Any) -> str:
    return _text(facts.busId).lower()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def numa_nodes(system: Path = SYSTEM) -> dict[str, str]:
    """Return the processors of each NUMA node that has some: ``{"0": "0-31", "1": "32-63"}``."""
    found = {}
    with suppress(OSError):
        for folder in sorted((system / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
            if processors := (folder / "cpulist").read_text().strip():
                found[folder.name[4:]] = processors
    return found


def numa_node_of_bus(bus: str, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of a PCI device by NVML's bus id, ``00000000:18:00.0``; None if it is not known."""
    with suppress(OSError, ValueError):
        domain, rest = bus.lower().split(":", 1)
        number = int((system / f"bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node").read_text())
        return number if number >= 0 else None  # -1: the firmware has no value
    return None
