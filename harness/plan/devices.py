"""GPUs by name, with the memory that their vendors state: what ``--assume 2x8:H100-80GB`` may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import closest


@dataclass(frozen=True)
class KnownDevice:
    """A GPU as its vendor lists it. ``gb``: memory in units of 10^9 bytes; ``source``: title of the document.

    ``drivers``: the names by which the driver reports it, as in ``torch.cuda.get_device_properties().name``.
    """

    name: str
    gb: int
    source: str
    drivers: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """The stated memory in bytes; what a driver reports may differ by some percent."""
        return self.gb * 10**9


_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip data sheet"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"
_P100 = "NVIDIA Tesla P100 GPU accelerator data sheet"
_ADA = "NVIDIA Ada GPU architecture white paper"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper"

_DEVICES = (
    KnownDevice("P100-12GB", 12, _P100, ("Tesla P100-PCIE-12GB",)),
    KnownDevice("P100-16GB", 16, _P100, ("Tesla P100-PCIE-16GB", "Tesla P100-SXM2-16GB")),
    KnownDevice("V100-16GB", 16, _V100, ("Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB")),
    KnownDevice("V100-32GB", 32, _V100, ("Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB", "Tesla V100-SXM3-32GB")),
    KnownDevice("T4-16GB", 16, "NVIDIA T4 Tensor Core GPU data sheet", ("Tesla T4",)),
    KnownDevice("A100-40GB", 40, _A100, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
    KnownDevice("A100-80GB", 80, _A100, ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
    KnownDevice("A2-16GB", 16, "NVIDIA A2 Tensor Core GPU data sheet", ("NVIDIA A2",)),
    KnownDevice("A10-24GB", 24, "NVIDIA A10 Tensor Core GPU data sheet", ("NVIDIA A10",)),
    KnownDevice("A10G-24GB", 24, "Amazon EC2 G5 instances, product page", ("NVIDIA A10G",)),
    # a board has four such GPUs
    KnownDevice("A16-16GB", 16, "NVIDIA A16 GPU data sheet", ("NVIDIA A16",)),
    KnownDevice("A30-24GB", 24, "NVIDIA A30 Tensor Core GPU data sheet", ("NVIDIA A30",)),
    KnownDevice("A40-48GB", 48, "NVIDIA A40 data center GPU data sheet", ("NVIDIA A40",)),
    KnownDevice("L4-24GB", 24, "NVIDIA L4 Tensor Core GPU data sheet", ("NVIDIA L4",)),
    KnownDevice("L40-48GB", 48, "NVIDIA L40 GPU data sheet", ("NVIDIA L40",)),
    KnownDevice("L40S-48GB", 48, "NVIDIA L40S GPU data sheet", ("NVIDIA L40S",)),
    KnownDevice("H100-80GB", 80, _H100, ("NVIDIA H100 80GB HBM3",)),
    KnownDevice("H100-80GB-PCIe", 80, "NVIDIA H100 PCIe GPU product brief", ("NVIDIA H100 PCIe",)),
    KnownDevice("H100-94GB-NVL", 94, _H100, ("NVIDIA H100 NVL",)),
    KnownDevice("H200-141GB", 141, _H200, ("NVIDIA H200",)),
    KnownDevice("H200-141GB-NVL", 141, _H200, ("NVIDIA H200 NVL",)),
    KnownDevice("GH200-96GB", 96, _GH200, ("NVIDIA GH200 480GB",)),
    KnownDevice("GH200-144GB", 144, _GH200, ("NVIDIA GH200 144G HBM3e",)),
    # 1,440 GB of eight
    KnownDevice("B200-180GB", 180, "NVIDIA DGX B200 data sheet", ("NVIDIA B200",)),
    KnownDevice("GB200-186GB", 186, "NVIDIA GB200 NVL72, product page", ("NVIDIA GB200",)),
    KnownDevice("RTX-3080-10GB", 10, _AMPERE, ("NVIDIA GeForce RTX 3080",)),
    KnownDevice("RTX-3090-24GB", 24, _AMPERE, ("NVIDIA GeForce RTX 3090",)),
    KnownDevice("RTX-4080-16GB", 16, _ADA, ("NVIDIA GeForce RTX 4080",)),
    KnownDevice("RTX-4090-24GB", 24, _ADA, ("NVIDIA GeForce RTX 4090",)),
    KnownDevice("RTX-5080-16GB", 16, _BLACKWELL, ("NVIDIA GeForce RTX 5080",)),
    KnownDevice("RTX-5090-32GB", 32, _BLACKWELL, ("NVIDIA GeForce RTX 5090",)),
    KnownDevice("RTX-A5000-24GB", 24, "NVIDIA RTX A5000 data sheet", ("NVIDIA RTX A5000",)),
    KnownDevice("RTX-A6000-48GB", 48, "NVIDIA RTX A6000 data sheet", ("NVIDIA RTX A6000",)),
    KnownDevice("RTX-5000-Ada-32GB", 32, "NVIDIA RTX 5000 Ada Generation data sheet"),
    KnownDevice("RTX-6000-Ada-48GB", 48, "NVIDIA RTX 6000 Ada Generation data sheet"),
    KnownDevice("MI100-32GB", 32, "AMD Instinct MI100 accelerator data sheet"),
    KnownDevice("MI210-64GB", 64, "AMD Instinct MI210 accelerator data sheet"),
    # a module has two such devices
    KnownDevice("MI250X-64GB", 64, "AMD Instinct MI250X accelerator data sheet"),
    KnownDevice("MI300X-192GB", 192, "AMD Instinct MI300X accelerator data sheet"),
)
KNOWN_DEVICES: Mapping[str, KnownDevice] = {device.name: device for device in _DEVICES}


def device_named(name: str) -> KnownDevice:
    """Return the device of a name, upper or lower case.

    Raises ValueError, with the choices if several memories or boards have the name, or with the nearest names.
    """
    found = next((device for device in _DEVICES if device.name.casefold() == name.casefold()), None)
    if found:
        return found
    alike = [device.name for device in _DEVICES if device.name.casefold().startswith(f"{name.casefold()}-")]
    if alike:
        memories = "one of" if len(alike) > 1 else "its name with the memory,"
        raise ValueError(f"got the device {name[:40]!r}; give {memories} {', '.join(alike)}")
    near = closest(name, KNOWN_DEVICES)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"got the unknown device {name[:40]!r}; {hint}(allowed: {', '.join(KNOWN_DEVICES)})")


def device_of_driver(model: str) -> KnownDevice | None:
    """Return the device that the driver reports by this name; None if the table lacks it."""
    return next((device for device in _DEVICES if model in device.drivers), None)
