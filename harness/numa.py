"""Which processors and GPUs share a memory controller, as Linux tells it; empty where it does not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/sys")


def nodes(system: Path = SYSTEM) -> dict[str, str]:
    """The processors of each NUMA node that has some: ``{"0": "0-31", "1": "32-63"}``."""
    found = {}
    with suppress(OSError):
        for folder in sorted((system / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
            if processors := (folder / "cpulist").read_text().strip():
                found[folder.name[4:]] = processors
    return found


def of_bus(bus: str, system: Path = SYSTEM) -> int | None:
    """The NUMA node of a PCI device by NVML's bus id, ``00000000:18:00.0``; None where it is not told."""
    with suppress(OSError, ValueError):
        domain, rest = bus.lower().split(":", 1)
        number = int((system / f"bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node").read_text())
        return number if number >= 0 else None  # -1: the firmware does not say
    return None
