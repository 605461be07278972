"""The environment of a worker process: hardware, network, versions, settings; captured once a worker group."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, permutations
from operator import eq
from pathlib import Path

import psutil
import torch

from harness.measure.telemetry import Handle, Nvml, first
from harness.plan.run_environment import Adapter, Card, DeviceFacts, Interface, MachineState, NodeEnvironment, Topology
from harness.system import sanitize
from harness.system.files import package_version

PCIE = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's levels of the common ancestor: one switch, several, a host bridge, a NUMA node, beyond it."""
MOST_NVLINKS = 36
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_READ = 0  # NVML_P2P_CAPS_INDEX_READ


def capture_topology(nvml: Nvml | None = None) -> Topology | None:
    """Return the node's GPUs by UUID, and a square of their links: NV12, PIX, PXB, PHB, NODE or SYS; None without NVML.

    X on the diagonal, None if a link is not known. ``apart``: the pairs of which the first cannot read the other's
    memory directly; ``numa``: each GPU's NUMA node, None if not known; ``driver``: its version.
    ``cards``: the limits of each GPU.
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

    def rank(link: str) -> tuple[int, int]:
        if link.startswith("NV"):
            return 0, -int(link.removeprefix("NV"))
        return 1, list(PCIE.values()).index(link)

    return ", ".join(sorted(set(links), key=rank)) or None


def _persistence_mode(nvml: Nvml, handle: object) -> int:
    mode: int = nvml.nvmlDeviceGetPersistenceMode(handle)  # a name that an old version lacks
    return mode


def _captured(nvml: Nvml) -> Topology:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    remote = [_nvlinks(nvml, handle) for handle in handles]
    buses = [_text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower() for handle in handles]
    square: list[list[str | None]] = [["X"] * len(handles) for _ in handles]
    for one, other in combinations(range(len(handles)), 2):
        count = remote[one].count(buses[other]) + min(remote[one].count("switch"), remote[other].count("switch"))
        level = (
            None if count else first(partial(nvml.nvmlDeviceGetTopologyCommonAncestor, handles[one], handles[other]))
        )
        link = f"NV{count}" if count else None if level is None else PCIE.get(level)
        square[one][other] = square[other][one] = link
    modes = [first(partial(_persistence_mode, nvml, handle)) for handle in handles]
    return {
        "gpus": [nvml.nvmlDeviceGetUUID(handle) for handle in handles],
        "buses": buses,
        "links": square,
        "apart": [
            [one, other]
            for one, other in permutations(range(len(handles)), 2)
            if first(partial(nvml.nvmlDeviceGetP2PStatus, handles[one], handles[other], _READ))
        ],
        "numa": [numa_node_of_bus(bus) for bus in buses],
        "driver": first(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        "persistence": [None if mode is None else bool(mode) for mode in modes],
        "cards": [_card(nvml, one) for one in handles],
    }


def _card(nvml: Nvml, handle: Handle) -> Card:
    """Return a GPU's limits; of a GPU without a query's unit, such as ECC on a consumer's board, None."""
    return {
        "power_limit_w": first(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "usual_power_limit_w": first(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000),
        "ecc": first(lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),  # in force; the second is after a restart
        "pcie_generation": first(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))),
        "pcie_width": first(lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        "most_pcie_width": first(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
    }


def _nvlinks(nvml: Nvml, handle: Handle) -> list[str]:
    """Return the remote end of each active NVLink of a GPU: 'switch', or the PCI bus id of another GPU."""
    ends = []
    for link in range(MOST_NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            switched = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH
            ends.append(
                "switch" if switched else _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower()
            )
        except Exception:  # NVMLError: this GPU has no more links, or none at all
            break
    return ends


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def numa_nodes(root: Path = Path("/")) -> dict[str, str]:
    """Return the processors of each NUMA node that has some: ``{"0": "0-31", "1": "32-63"}``."""
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return {folder.name[4:]: processors for folder in folders if (processors := _read(folder / "cpulist"))}


def numa_node_of_bus(bus: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device by NVML's bus id, ``00000000:18:00.0``; None if it is not known."""
    domain, _, rest = bus.lower().partition(":")
    with suppress(ValueError):
        return _numa_node(root / f"sys/bus/pci/devices/{int(domain, 16):04x}:{rest}")
    return None


def _numa_node(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text and text.isdecimal() else None  # -1: the firmware has no value


INTERNET = (socket.AF_INET, socket.AF_INET6)
SHARED_MEMORY = "/dev/shm"
LIMITS = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
PACKAGES = ("torch", "torchvision", "ray", "numpy", "harness")
VARIABLES = (
    *("OMP_", "GOMP_", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_", "NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_"),
    *("TORCHINDUCTOR_", "CUBLAS", "CUDNN_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_MODULE_LOADING", "CUDA_SCALE_LAUNCH_QUEUES", "NVIDIA_TF32_OVERRIDE", "TORCHDYNAMO_", "TRITON_"),
)
"""Prefixes of the variables that set threads, collectives and devices; no other variable is read."""


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an internet address, by name; the loopback is left out.

    ``errors``: packets received or sent with an error, or dropped, since the node was started.
    """
    states, counters = psutil.net_if_stats(), psutil.net_io_counters(pernic=True)
    found: list[Interface] = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        known = [entry.address for entry in addresses if entry.family in INTERNET]
        state, counted = states.get(name), counters.get(name)
        if not known or state is None or not state.isup or "loopback" in state.flags or name == "lo":
            continue
        errors = counted and counted.errin + counted.errout + counted.dropin + counted.dropout
        found.append({"name": name, "mbit_per_s": state.speed or None, "mtu": state.mtu, "errors": errors})
    return found


def nccl_files(root: Path = Path("/")) -> dict[str, str]:
    """Return the variables that NCCL's files set: the user's or the one that NCCL_CONF_FILE names, then the system's.

    Source: NCCL's documentation of its environment variables. Those of the environment come before them.
    """
    own, found = os.environ.get("NCCL_CONF_FILE") or Path.home() / ".nccl.conf", dict[str, str]()
    for file in (Path(own), root / "etc/nccl.conf"):
        lines = (line.strip().partition("=") for line in (_read(file) or "").splitlines())
        found = {name: value for name, _, value in lines if name.startswith("NCCL_")} | found
    return found


def adapters(root: Path = Path("/"), buses: Sequence[str] = ()) -> list[Adapter]:
    """Return the RDMA adapters by name, each with its first active port, else its first one.

    ``buses``: the PCI addresses of the GPUs, of which those are nearest that share the most bridges with an adapter.
    """
    gpus = [_bridges(root / "sys/bus/pci/devices" / bus.lower()[-len("0000:00:00.0") :]) for bus in buses]
    files = {_read(verbs): verbs.parent.name for verbs in (root / "sys/class/infiniband_verbs").glob("uverbs*/ibdev")}
    found: list[Adapter] = []
    for device in sorted((root / "sys/class/infiniband").glob("*"), key=lambda path: (len(path.name), path.name)):
        states = {port: (_read(port / "state") or "").partition(": ")[2] for port in sorted(device.glob("ports/*"))}
        port = next((port for port, state in states.items() if state == "ACTIVE"), next(iter(states), device))
        file = files.get(device.name)
        found.append(
            {
                "name": device.name,
                "link_layer": _read(port / "link_layer"),
                "state": states.get(port) or None,
                "rate": _read(port / "rate"),
                "numa": _numa_node(device / "device"),
                "nearest": _nearest(_bridges(device / "device"), gpus),
                "has_file": file is not None and (root / "dev/infiniband" / file).exists(),
            }
        )
    return found


def _bridges(device: Path) -> list[str]:
    """Return the PCI addresses from the root to a device, from its place in /sys/devices."""
    return [part for part in os.path.realpath(device).split(os.sep) if part.count(":")]


def _nearest(adapter: Sequence[str], gpus: Sequence[Sequence[str]]) -> list[int]:
    """Return the numbers of the GPUs below the same bridge as the adapter, the lowest such; none if there is none."""
    shared = [sum(map(eq, adapter, gpu)) for gpu in gpus]  # an address is below one bridge alone
    return [number for number, count in enumerate(shared) if count == max(shared) > 0]


def _read(path: Path) -> str | None:
    """Return the text of a file of the system; None if it cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return None


def machine_state(root: Path = Path("/")) -> MachineState:
    """Return the settings of this machine on which the speed of its processors depends."""
    processors = root / "sys/devices/system/cpu"
    governors = {_read(path) for path in processors.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    boost, no_turbo = _read(processors / "cpufreq/boost"), _read(processors / "intel_pstate/no_turbo")
    cgroups = root / "sys/fs/cgroup"
    text = _read(cgroups / "cpu.stat") or _read(cgroups / "cpu/cpu.stat") or ""  # version 2, version 1
    quota = dict(line.split() for line in text.splitlines())
    counts = [int(quota[name]) if name in quota else None for name in ("nr_periods", "nr_throttled")]
    return {
        "governors": sorted(name for name in governors if name),
        "boost": boost == "1" if boost else no_turbo == "0" if no_turbo else None,
        "periods": counts[0],
        "throttled": counts[1],
    }


def capture_environment(node_id: str, devices: Sequence[torch.device]) -> NodeEnvironment:
    """Return the environment of this process as plain values."""
    cuda = devices[0].type == "cuda"
    joined = capture_topology() if cuda else None
    iommu = Path("/sys/class/iommu")
    soft = {name: resource.getrlimit(number)[0] for name, number in LIMITS.items()}
    known = (nccl_files() if cuda else {}) | os.environ
    return {
        "node_id": node_id,
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": sys.version.split()[0],
        "packages": {name: installed for name in PACKAGES if (installed := package_version(name))},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "devices": [describe_device(device) for device in devices],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "driver": joined and joined["driver"],
        "topology": joined,
        "iommu": any(iommu.iterdir()) if iommu.is_dir() else None,
        "numa": numa_nodes(),
        "threads": torch.get_num_threads(),
        "niceness": os.nice(0),
        "interfaces": interfaces(),
        "adapters": adapters(buses=joined.get("buses", ()) if joined else ()),
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).total if os.path.isdir(SHARED_MEMORY) else None,
        "limits": {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()},
        "state": machine_state(),
        "variables": sanitize.variables({k: v for k, v in sorted(known.items()) if k.startswith(VARIABLES)}),
    }


def describe_device(device: torch.device) -> DeviceFacts:
    """Return model, UUID and memory of a GPU; the processor's name for a CPU slot."""
    if device.type != "cuda":
        return {"kind": "cpu", "model": cpu_model(), "uuid": None, "memory_bytes": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": "cuda",
        "model": properties.name,
        "uuid": str(properties.uuid),
        "memory_bytes": properties.total_memory,
    }


def cpu_model() -> str:
    """Return the processor's name, or its architecture if the system has no name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_commit(folder: Path) -> str | None:
    """Return the commit of the checkout that holds a folder; None outside git.

    With uncommitted changes it ends in '-dirty-' and eight digits of a hash of the changes to tracked files.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit or not _git(folder, "status", "--porcelain"):
        return commit
    changes = _git(folder, "diff", "HEAD") or ""
    return f"{commit}-dirty-{hashlib.sha256(changes.encode()).hexdigest()[:8]}"


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
