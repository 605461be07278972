"""The types of environment.jsonl: facts of each node, worker group and invocation; and the time that a run took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from harness.plan.rows import RankPlace, RecordedTrial


class DeviceFacts(TypedDict):
    """A GPU, or a CPU slot, which has neither UUID nor memory of its own."""

    kind: str
    model: str
    uuid: str | None
    memory_bytes: int | None


class Card(TypedDict):
    """What a GPU's speed depends on, by NVML; None if unknown.

    ``power_limit_w``: that in force; ``usual_power_limit_w``: the GPU's own. ``ecc``: whether its memory corrects
    errors. ``pcie_generation``: the newest that GPU and slot have; an idle link is slower. ``pcie_width``: lanes in use
    of the ``most_pcie_width`` that GPU and slot have.
    """

    power_limit_w: float | None
    usual_power_limit_w: float | None
    ecc: bool | None
    pcie_generation: int | None
    pcie_width: int | None
    most_pcie_width: int | None


class Topology(TypedDict):
    """The GPUs of a node by UUID, and the matrix of links between them in the terms of ``nvidia-smi topo -m``.

    ``apart``: the pairs of which the first cannot read the memory of the second; ``numa``: the NUMA node of each GPU;
    ``buses``: the PCI address of each; ``persistence``: whether the driver stays loaded while no process uses the GPU.
    """

    gpus: list[str]
    buses: NotRequired[list[str]]
    links: list[list[str | None]]
    apart: list[list[int]]
    numa: list[int | None]
    driver: str | None
    persistence: NotRequired[list[bool | None]]
    cards: NotRequired[list[Card]]


class Interface(TypedDict):
    """A network interface of a node. ``errors``: packets with errors, and dropped ones, since the node's start."""

    name: str
    mbit_per_s: int | None
    mtu: int
    errors: int | None


class Adapter(TypedDict):
    """An RDMA adapter of a node. ``link_layer``: InfiniBand, or Ethernet (RoCE).

    ``state``, ``rate``: of its port, as Linux names them: 'ACTIVE', '400 Gb/sec (4X NDR)'. ``numa``: its NUMA node.
    ``nearest``: the GPUs below the same PCI bridge. ``has_file``: whether its device file is there; a container may
    lack it.
    """

    name: str
    link_layer: str | None
    state: str | None
    rate: str | None
    numa: int | None
    nearest: NotRequired[list[int]]
    has_file: bool


class MachineState(TypedDict):
    """Settings of a node on which speed depends; None if unknown.

    ``governors``: of the processors' clocks; ``boost``: whether few busy cores clock higher than all; ``periods``: of
    the container's CPU quota, of which ``throttled`` were cut short.
    """

    governors: list[str]
    boost: bool | None
    periods: int | None
    throttled: int | None


class NodeFacts(TypedDict):
    """What every version has recorded of a node, and tables and report are made from."""

    node_id: str
    host: str
    system: str
    cpu: str
    cores: int | None
    logical_cpus: int | None
    memory_bytes: int
    python: str
    packages: dict[str, str]
    cuda: str | None
    devices: list[DeviceFacts]
    threads: int
    variables: dict[str, str]


class NodeEnvironment(NodeFacts):
    """Hardware, versions and settings of one node, captured once per worker group.

    ``nccl_network``: what NCCL's log names, if there is one, as 'IB: mlx5_0:1/IB'.
    """

    cudnn: int | None
    nccl: NotRequired[str | None]
    driver: NotRequired[str | None]
    topology: NotRequired[Topology | None]
    iommu: NotRequired[bool | None]
    numa: NotRequired[dict[str, str]]
    niceness: NotRequired[int]
    interfaces: NotRequired[list[Interface]]
    adapters: NotRequired[list[Adapter]]
    nccl_network: NotRequired[str | None]
    shared_memory_bytes: NotRequired[int | None]
    limits: NotRequired[dict[str, int | None]]
    state: NotRequired[MachineState]


class GroupRank(RankPlace):
    """One rank of a worker group."""

    pid: int
    devices: list[str]


class GroupEnvironment(TypedDict):
    """One launch of a worker group. ``nodes`` and ``ranks`` are empty if its start-up failed."""

    group_id: str
    invocation: int
    placement: str
    started_at: float
    start_s: float | None
    whole_s: float
    parts: NotRequired[dict[str, float]]
    nodes: list[NodeEnvironment]
    ranks: list[GroupRank]


class VariantFacts(TypedDict):
    """The version of the user's code behind a variant: the hash of its files, and the git commit of its folder."""

    code: str
    git_commit: str | None


Ended = Literal["finished", "interrupted", "error"]


class FileFacts(TypedDict):
    """A file by its absolute path and the SHA-256 of its content."""

    file: str
    sha256: str


class SourceFacts(FileFacts):
    """The experiment file, and the user's own modules that it names; not their content."""

    modules: dict[str, FileFacts]


class Invocation(TypedDict, total=False):
    """One invocation: its code, versions, hardware and start, and, after it has ended, its end.

    ``wall_s``: until the report, which took ``report_s``. ``running``: the trial that was cut short; ``differs``: the
    changes since the previous invocation; ``submit``: the command that goes on with a run whose cluster was a job's.
    ``source``: absent if the experiment was no file.
    """

    started_at: float
    command: list[str]
    submit: NotRequired[str]
    source: NotRequired[SourceFacts]
    blocks: int | None
    git_commit: str | None
    harness: str
    workload_code: str | None
    variants: dict[str, VariantFacts]
    python: str
    packages: dict[str, str | None]
    driver: str
    nodes: list[str]
    device: str
    devices: NotRequired[int]
    threads_per_device: int
    differs: list[str]
    wall_s: float
    report_s: float
    ended: Ended
    running: str | None


class RunEnvironment(TypedDict, total=False):
    """The content of environment.jsonl, its entries together."""

    invocations: list[Invocation]
    groups: list[GroupEnvironment]


def spent_device_seconds(environment: RunEnvironment, lines: Sequence[RecordedTrial], devices: int) -> float:
    """Return the device-seconds of the recorded invocations of a run.

    ``devices``: those of the machine, for invocations that did not record their number.
    """
    walls = zip(wall_seconds(environment, lines), environment.get("invocations", []), strict=True)
    return sum(wall_s * invocation.get("devices", devices) for wall_s, invocation in walls)


def wall_seconds(environment: RunEnvironment, lines: Sequence[RecordedTrial]) -> list[float]:
    """Return the wall time of each invocation until its report; of a killed one until its last record."""
    walls = []
    for number, invocation in enumerate(environment.get("invocations", [])):
        if "wall_s" in invocation:
            walls.append(invocation["wall_s"])
            continue
        own = (line for line in lines if line["invocation"] == number)
        ends = [(line["started_at"] or 0.0) + (line["trial_s"] or 0.0) for line in own]
        groups = (group for group in environment.get("groups", []) if group["invocation"] == number)
        ends += [group["started_at"] + group["whole_s"] for group in groups]
        last = max(ends, default=0.0)
        walls.append(max(0.0, last - invocation.get("started_at", last)))
    return walls
