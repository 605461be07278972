"""GPUs by name with their memory and peak FLOP/s, and links with their bandwidth, as their vendors state them.

The figures were read in November 2026. A file's section ``hardware`` replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.errors import closest, nearest

Figures = Mapping[str, float]
"""Dense TFLOP/s by precision."""


@dataclass(frozen=True)
class KnownDevice:
    """A GPU as its vendor lists it. ``gb``: memory in units of 10^9 bytes.

    ``drivers``: the names by which the driver reports it, as in ``torch.cuda.get_device_properties().name``: a MIG
    slice, a laptop GPU or another board is another device. ``peaks``: at the published boost clock and full power
    limit; ``peak_source``: where they were read.
    """

    name: str
    gb: int
    drivers: tuple[str, ...] = ()
    peak_source: str = ""
    peaks: Figures = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """The stated memory in bytes; what a driver reports may differ by some percent."""
        return self.gb * 10**9


_LIGHTNING = (
    "read in Lightning Fabric, "
    "https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/fabric/utilities/throughput.py"
)
_ML_ENGINEERING = (
    "read in Stas Bekman, Machine Learning Engineering, "
    "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md"
)
_PYTORCH = "read in PyTorch, https://github.com/pytorch/pytorch/blob/main/torch/_inductor/analysis/device_info.py"
_TORCHTITAN = "read in torchtitan, https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py"
_V100 = f"NVIDIA V100 datasheet (1165301-r5), {_LIGHTNING}"
_T4 = f"NVIDIA T4 datasheet (951643), {_LIGHTNING}"
_A10 = f"NVIDIA A10 datasheet, {_LIGHTNING}"
_A100 = f"NVIDIA A100 datasheet (1758950-r4), {_LIGHTNING}"
_ADA = f"NVIDIA Ada GPU architecture whitepaper (v2.1), {_LIGHTNING}"
_L40S = f"NVIDIA L40S, {_ML_ENGINEERING}"
_H100_PAGE = "NVIDIA, https://www.nvidia.com/en-us/data-center/h100/"
_H100 = f"{_H100_PAGE}, {_PYTORCH}"
_H100_PCIE = f"NVIDIA H100 whitepaper, https://resources.nvidia.com/en-us-tensor-core, {_LIGHTNING}"
_H100_NVL = f"{_H100_PAGE}, {_TORCHTITAN}"
_H200 = f"NVIDIA, https://www.nvidia.com/en-us/data-center/h200/, {_ML_ENGINEERING}"
_H20 = "NVIDIA H20, read in Hugging Face, https://huggingface.co/hardware/h20"
_B200 = f"NVIDIA, https://www.nvidia.com/en-us/data-center/hgx/, {_PYTORCH}"
_B300 = "NVIDIA HGX B300, read in Glenn K. Lockwood, https://glennklockwood.com/garden/processors/B300"
_GB200 = f"NVIDIA GB200, one of its two GPUs, {_ML_ENGINEERING}"
_MI300X = f"AMD Instinct MI300X data sheet, {_PYTORCH}"

# Memory is by the data sheet of each GPU, but by NVIDIA's product brief of the H100 PCIe, its page of the GB200 NVL72,
# its data sheets of the DGX B200 (1,440 GB of eight) and of the GH200 Grace Hopper Superchip, its white papers on the
# architectures Ampere GA102, Ada and RTX Blackwell (GeForce), Amazon's page of EC2 G5 instances (A10G), Glenn K.
# Lockwood's page of the B300, and Hugging Face's hardware page of the H20.
# From the H100 on, NVIDIA publishes tensor-core figures with sparsity; here they are halved.
_V100_SXM, _V100_PCIE = {"fp32": 15.7, "fp16": 125.0}, {"fp32": 14.0, "fp16": 112.0}
_A100_FIGURES = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0}
_HOPPER = {"fp32": 67.0, "tf32": 494.5, "bf16": 989.5}

_DEVICES = (
    KnownDevice("P100-12GB", 12, ("Tesla P100-PCIE-12GB",)),
    KnownDevice("P100-16GB", 16, ("Tesla P100-PCIE-16GB", "Tesla P100-SXM2-16GB")),
    KnownDevice("V100-16GB", 16, ("Tesla V100-SXM2-16GB",), _V100, _V100_SXM),
    KnownDevice("V100-16GB-PCIe", 16, ("Tesla V100-PCIE-16GB",), _V100, _V100_PCIE),
    KnownDevice("V100-32GB", 32, ("Tesla V100-SXM2-32GB",), _V100, _V100_SXM),
    KnownDevice("V100-32GB-SXM3", 32, ("Tesla V100-SXM3-32GB",)),
    KnownDevice("V100-32GB-PCIe", 32, ("Tesla V100-PCIE-32GB",), _V100, _V100_PCIE),
    KnownDevice("T4-16GB", 16, ("Tesla T4",), _T4, {"fp32": 8.1, "fp16": 65.0}),
    KnownDevice("A100-40GB", 40, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), _A100, _A100_FIGURES),
    KnownDevice("A100-80GB", 80, ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), _A100, _A100_FIGURES),
    KnownDevice("A2-16GB", 16, ("NVIDIA A2",)),
    # not the A10G, for which sources give 62.5 and 125 TFLOP/s in 16 bits
    KnownDevice("A10-24GB", 24, ("NVIDIA A10",), _A10, {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0}),
    KnownDevice("A10G-24GB", 24, ("NVIDIA A10G",)),
    # a board has four such GPUs
    KnownDevice("A16-16GB", 16, ("NVIDIA A16",)),
    KnownDevice("A30-24GB", 24, ("NVIDIA A30",)),
    KnownDevice("A40-48GB", 48, ("NVIDIA A40",)),
    KnownDevice("L4-24GB", 24, ("NVIDIA L4",), _ADA, {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0}),
    KnownDevice("L40-48GB", 48, ("NVIDIA L40",)),
    KnownDevice("L40S-48GB", 48, ("NVIDIA L40S",), _L40S, {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0}),
    KnownDevice("H100-80GB", 80, ("NVIDIA H100 80GB HBM3",), _H100, _HOPPER),
    KnownDevice("H100-80GB-PCIe", 80, ("NVIDIA H100 PCIe",), _H100_PCIE, {"fp32": 51.2, "tf32": 378.0, "bf16": 756.0}),
    # one of the two cards: 60 TFLOP/s in fp32, and 835 in tf32 with sparsity, by NVIDIA's page
    KnownDevice("H100-94GB-NVL", 94, ("NVIDIA H100 NVL",), _H100_NVL, {"fp32": 60.0, "tf32": 417.5, "bf16": 835.0}),
    KnownDevice("H200-141GB", 141, ("NVIDIA H200",), _H200, _HOPPER),
    # the NVL and the GH200: the sources above give no figures, and clocks other than those of the H200's board
    KnownDevice("H200-141GB-NVL", 141, ("NVIDIA H200 NVL",)),
    KnownDevice("H20-96GB", 96, ("NVIDIA H20",), _H20, {"bf16": 148.0}),
    KnownDevice("GH200-96GB", 96, ("NVIDIA GH200 480GB",)),
    KnownDevice("GH200-144GB", 144, ("NVIDIA GH200 144G HBM3e",)),
    # fp32: sources disagree, 80 TFLOP/s and 75
    KnownDevice("B200-180GB", 180, ("NVIDIA B200",), _B200, {"tf32": 1125.0, "bf16": 2250.0}),
    KnownDevice("B300-288GB", 288, ("NVIDIA B300 SXM6 AC",), _B300, {"fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0}),
    KnownDevice("GB200-186GB", 186, ("NVIDIA GB200",), _GB200, {"fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0}),
    KnownDevice("RTX-3080-10GB", 10, ("NVIDIA GeForce RTX 3080",)),
    KnownDevice("RTX-3090-24GB", 24, ("NVIDIA GeForce RTX 3090",)),
    KnownDevice("RTX-4080-16GB", 16, ("NVIDIA GeForce RTX 4080",)),
    # bf16: dense with fp32 accumulation (fp16 accumulation is no training)
    KnownDevice("RTX-4090-24GB", 24, ("NVIDIA GeForce RTX 4090",), _ADA, {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2}),
    KnownDevice("RTX-5080-16GB", 16, ("NVIDIA GeForce RTX 5080",)),
    KnownDevice("RTX-5090-32GB", 32, ("NVIDIA GeForce RTX 5090",)),
    KnownDevice("RTX-A5000-24GB", 24, ("NVIDIA RTX A5000",)),
    KnownDevice("RTX-A6000-48GB", 48, ("NVIDIA RTX A6000",)),
    KnownDevice("RTX-5000-Ada-32GB", 32),
    KnownDevice("RTX-6000-Ada-48GB", 48),
    KnownDevice("MI100-32GB", 32),
    KnownDevice("MI210-64GB", 64),
    # a module has two such devices
    KnownDevice("MI250X-64GB", 64),
    KnownDevice("MI300X-192GB", 192, ("AMD Instinct MI300X",), _MI300X, {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4}),
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


@dataclass(frozen=True)
class Peak:
    """Dense FLOP/s of one device, and the source of the figure."""

    flops_per_s: float
    source: str


def peak_flops(device_model: str, precision: str) -> Peak | None:
    """Return the dense peak of a GPU in "fp32" (TF32 off), "tf32", "bf16" or "fp16"; None if it is unknown.

    ``device_model``: the driver's name. None also if the GPU has no such unit: bf16 and TF32 on a V100 or a T4.
    """
    device = device_of_driver(device_model)
    figures = device.peaks if device else {}
    # from the A100 on, the sources give one figure for both dtypes of 16 bits
    named = "bf16" if precision == "fp16" and "fp16" not in figures else precision
    return Peak(figures[named] * 1e12, device.peak_source) if device and named in figures else None


@dataclass(frozen=True)
class KnownLink:
    """A link as its standard or vendor states it.

    ``gb_per_s``: 10^9 bytes a second in one direction: of all NVLinks of a GPU, of 16 PCIe lanes, of one network port.
    ``latency_us``: of one step of a ring.
    """

    name: str
    gb_per_s: float
    latency_us: float


# Bandwidth: of NVLink by NVIDIA's page of NVLink and NVSwitch, half of the figure for both directions; of PCIe by
# PCI-SIG's Base Specification, 128b/130b; of InfiniBand by its trade association's roadmap, 4 lanes; of Ethernet by
# IEEE 802.3, line rate.
# Latency: NCCL's model of a ring with its protocol Simple (src/graph/tuning.cc, 2024): NVLink 3.4, PCIe 5.7, network 14
# us. A ring over nodes with several GPUs goes over the network in few of its steps: 7 us, the geometric mean. Of
# sockets over Ethernet NCCL has no figure: 30 us is ours.
_LINKS = (
    KnownLink("nvlink-3", 300, 3.4),  # A100
    KnownLink("nvlink-4", 450, 3.4),  # H100, H200
    KnownLink("nvlink-5", 900, 3.4),  # B200
    KnownLink("pcie-4", 31.5, 5.7),
    KnownLink("pcie-5", 63.0, 5.7),
    KnownLink("infiniband-hdr", 25, 7),
    KnownLink("infiniband-ndr", 50, 7),
    KnownLink("infiniband-xdr", 100, 7),
    KnownLink("ethernet-10g", 1.25, 30),
    KnownLink("ethernet-25g", 3.125, 30),
    KnownLink("ethernet-100g", 12.5, 30),
    KnownLink("ethernet-400g", 50, 30),
)
KNOWN_LINKS: Mapping[str, KnownLink] = {link.name: link for link in _LINKS}


def link_named(text: str) -> tuple[KnownLink, int]:
    """Return the link and the number of ports of 'infiniband-ndr' or '8x infiniband-ndr'; raise ValueError."""
    count, times, rest = text.partition("x")
    ports = int(count) if times and count.strip().isdecimal() and len(count) < 4 else None
    name = (text if ports is None else rest).strip().casefold()
    if name not in KNOWN_LINKS or ports == 0:
        raise ValueError(f"got the link {text[:40]!r}; {nearest(name, KNOWN_LINKS)}; of 8 ports a node: 8x NAME")
    return KNOWN_LINKS[name], ports or 1
