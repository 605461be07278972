"""This node's network interfaces, RDMA adapters, shared memory and limits, as the worker processes find them."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from harness.plan.environment import Adapter, Interface

INTERNET = (socket.AF_INET, socket.AF_INET6)
SHARED_MEMORY = "/dev/shm"
LIMITS = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}


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


def adapters(root: Path = Path("/")) -> list[Adapter]:
    """Return the RDMA adapters with an active port, by name, whose device file is there: a container may lack it."""
    found: dict[str, Adapter] = {}
    with suppress(OSError):  # a description of the node never fails a trial
        for verbs in (root / "sys/class/infiniband_verbs").glob("uverbs*/ibdev"):
            name = verbs.read_text().strip()
            for port in (root / "sys/class/infiniband" / name / "ports").glob("*"):
                if "ACTIVE" in (port / "state").read_text() and (root / "dev/infiniband" / verbs.parent.name).exists():
                    found[name] = {"name": name, "link_layer": (port / "link_layer").read_text().strip()}
    return [found[name] for name in sorted(found)]


def shared_memory_bytes() -> int | None:
    """Return the size of the node's shared memory; None if it has none at the usual place."""
    return shutil.disk_usage(SHARED_MEMORY).total if os.path.isdir(SHARED_MEMORY) else None


def limits() -> dict[str, int | None]:
    """Return the soft limits of this process; None is unlimited."""
    soft = {name: resource.getrlimit(number)[0] for name, number in LIMITS.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}
