"""Checks of the doctor that need no rank: batches that devices share, and the nodes' network, links and versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.config.values import GIB
from harness.plan.cell import Cell
from harness.plan.rows import FindingRow, Severity
from harness.plan.run_environment import Adapter, Card, Interface, NodeEnvironment, Topology


@dataclass(frozen=True)
class Finding:
    """One finding of one check. ``seen`` has the numbers.

    ``stops``: an error after which no trial is tried: no training step, another device, a crash or a loss that is not
    finite. After other errors cells are measured, and marked as faulty. ``parts``: the names of the modules, or of what
    they hold, that the finding is about.
    """

    check: str
    severity: Severity
    seen: str
    means: str
    advice: str
    stops: bool = False
    parts: tuple[str, ...] = ()

    def row(self) -> FindingRow:
        """Return plain values for the trial's row."""
        row: FindingRow = {name: value for name, value in asdict(self).items() if name != "parts"}  # type: ignore
        if self.severity != "error":
            del row["stops"]
        return row


def join_names(names: list[str], most: int = 4) -> str:
    """Join at most ``most`` names: ``a, b, c, d and 12 more``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


SLOW_RANK, SLOW_OF_FEW = 1.20, 2.5
"""The times of a step from which its rank is slow: over the median rank's in a trial, over the fastest in the doctor.

A trial has the mean of many steps in several blocks. The doctor has the fastest of a few steps of the same work, which
other load may slow down by far more than a fifth, and its finding accuses the code: it names what load hardly explains.
"""
BATCHES = "batch divisibility"
SCRIPT = "script"
"""The check of a script, which its own trials make."""


def judge_batches(samples: int, batch: int, cell: Cell, *, epochs: bool) -> list[Finding]:
    """Judge a training set of ``samples`` and a step of ``batch`` samples, over all its micro-batches.

    ``epochs``: the cell is trained for whole epochs, whose last batch may be smaller.
    """
    # a cell that trains with unequal shares on purpose (convergence.uneven) is not skipped
    uneven = [] if cell.uneven else uneven_batch(cell.strategy, cell.devices, cell.global_batch_size)
    left = samples % batch
    if uneven or not epochs or not left or left >= cell.devices:
        return uneven
    return [
        Finding(
            BATCHES,
            "note",
            f"last batch of an epoch: {left} of {batch} samples for {cell.devices} devices "
            f"({samples:,} training samples)",
            f"devices without samples in that step: {cell.devices - left}; its gradient is the mean over its samples",
            "choose a batch size with a larger remainder, if that step matters",
        )
    ]


def uneven_batch(strategy: str, devices: int, batch: int) -> list[Finding]:
    """Return a finding if a global batch does not divide by the devices, with the samples of each."""
    if batch % devices == 0:
        return []
    sizes = part_sizes(strategy, batch, devices)
    idle = sizes.count(0)
    gets = ", ".join(map(str, sizes))
    nearest = max(devices, round(batch / devices) * devices)
    return [
        Finding(
            BATCHES,
            "error" if batch < devices else "warning",
            f"samples of each device under {strategy} on {devices} devices at a global batch of {batch}: {gets}"
            + (f" ({idle} without samples)" if idle else ""),
            "unequal work of the devices: cells with such a batch are skipped",
            f"use a global batch of {nearest}, or another multiple of {devices}",
            stops=True,
        )
    ]


def part_sizes(strategy: str, batch: int, devices: int) -> list[int]:
    """Return the samples of each device: dp scatters equal chunks, rounded up; other shares differ by at most one."""
    if strategy in BUILTIN_TRAITS and BUILTIN_TRAITS[strategy].replicates:
        chunk = -(-batch // devices)
        return [max(0, min(chunk, batch - index * chunk)) for index in range(devices)]
    return [(index + 1) * batch // devices - index * batch // devices for index in range(devices)]


NETWORK = "network"
USED = {"gloo": "GLOO_SOCKET_IFNAME", "NCCL": "NCCL_SOCKET_IFNAME"}
MUCH_FASTER = 2.0
"""The ratio of speeds from which on another interface is the better one."""
LEAST_SHARED_BYTES = GIB
LEAST_FILES = 4096
"""Ray warns below it, for servers; a rank's share is smaller."""


def judge_network(nodes: Sequence[NodeEnvironment]) -> list[Finding]:
    """Judge the nodes of a worker group; interfaces are judged if it spans several."""
    found = [
        Finding(NETWORK, "warning", f"{node['host']}: {seen}", means, advice)
        for node in nodes
        for seen, means, advice in _of_limits(node)
    ]
    for name in sorted({name for node in nodes for name in node.get("limits") or {}}):
        values = {node["host"]: limits.get(name) for node in nodes if (limits := node.get("limits"))}
        texts = {host: "unlimited" if value is None else value for host, value in values.items()}
        found += _different(f"limit of {name}", texts, "set the same ulimit on every node")
    if len(nodes) > 1:
        found += [finding for node in nodes for finding in _of_interfaces(node)]
        sizes: dict[str, object] = {}
        for node in nodes:
            used = {(node.get("variables") or {}).get(variable) for variable in USED.values()}
            known = node.get("interfaces") or ()
            sizes.update((node["host"], each["mtu"]) for each in known if each["name"] in used)
        found += _different("MTU of the ranks' interfaces", sizes, "ip link set dev INTERFACE mtu SIZE on every node")
    return found


def _of_limits(node: NodeEnvironment) -> Iterator[tuple[str, str, str]]:
    """Yield what is seen of each limit of a node that is too low, what it means, and what raises it."""
    size, files = node.get("shared_memory_bytes"), (node.get("limits") or {}).get("open files")
    if size is not None and size < LEAST_SHARED_BYTES:
        means = "NCCL, loader workers and Ray's object store keep data there: they fail, or fall back to disk"
        advice = "start the container with --shm-size=16g, or mount memory at /dev/shm"
        yield f"{size / GIB:.2g} GiB of shared memory in /dev/shm", means, advice
    if files is not None and files < LEAST_FILES:
        means = "loader workers and Ray open more on large nodes, and fail then"
        yield f"at most {files} open files", means, "ulimit -n 65536 before ray start"
    if niceness := node.get("niceness"):
        means = "they yield to every other process of the node: slower and less regular steps"
        advice = "RAY_worker_niceness=0 before ray start, on every node; it has no effect on the command"
        yield f"ranks have niceness {niceness}", means, advice


def _of_interfaces(node: NodeEnvironment) -> Iterator[Finding]:
    """Yield a note on the link that the ranks use, and a warning if it is an interface beside a much faster one.

    Beside NCCL's adapters gloo carries the harness's own small messages alone.
    """
    known, variables = {each["name"]: each for each in node.get("interfaces") or ()}, node.get("variables") or {}
    socket = variables.get(USED["NCCL"], "its socket interface")
    adapters, unused = _adapters(node)
    logged = node.get("nccl_network")
    by_socket = logged.startswith("Socket") if logged else not adapters
    if logged or adapters:
        first = f"{places_of(node, adapters)}; {socket} is for the first contact of its ranks alone"
        seen = f"{node['host']}: NCCL uses {f'{logged}, by its log' if logged else first}"
        yield Finding(NETWORK, "note", seen, "the link of its ranks", "none")
    for (severity, why, advice), names in unused.items():
        means = f"NCCL exchanges through {socket}" if by_socket else "less bandwidth between nodes"
        seen = f"{node['host']}: NCCL does not use {join_names(names, 8)}: {why}"
        yield Finding(NETWORK, severity, seen, means, advice)
    by_interface: dict[str, list[str]] = {}
    for library, variable in USED.items():
        no_nccl = not by_socket or node.get("nccl", "") is None
        if (library == "gloo" or not no_nccl) and (name := variables.get(variable)):
            by_interface.setdefault(name, []).append(library)
    for name, libraries in by_interface.items():
        if (used := known.get(name)) is None:
            continue
        users = f"{' and '.join(libraries)} use{'s' * (len(libraries) == 1)}"
        yield Finding(NETWORK, "note", f"{node['host']}: {users} {_text(used)}", "the link of its ranks", "none")
        speed = used["mbit_per_s"]
        others = [each for each in known.values() if each["mbit_per_s"] and each is not used]
        fastest = max(others, key=lambda each: each["mbit_per_s"] or 0, default=None)
        if by_socket and speed and fastest and (fastest["mbit_per_s"] or 0) >= MUCH_FASTER * speed:
            yield Finding(
                NETWORK,
                "warning",
                f"{node['host']}: {users} {_text(used)} beside {_text(fastest)}",
                "collectives between nodes are as slow as the interface",
                "give ray start --node-ip-address the other's address, or set "
                + " and ".join(USED[library] for library in libraries),
            )


Reason = tuple[Severity, str, str]
"""Why NCCL does not use an adapter: the severity, the reason, and the advice."""


def _adapters(node: NodeEnvironment) -> tuple[list[Adapter], dict[Reason, list[str]]]:
    """Return the adapters that NCCL uses between nodes, and the names of others by their reason; none without NCCL."""
    variables, used, unused = node.get("variables") or {}, list[Adapter](), dict[Reason, list[str]]()
    off = {name: variables.get(name, "") for name in ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA")}
    for adapter in (node.get("adapters") or []) if node.get("nccl") is not None else []:
        reason: Reason | None = None
        if (state := adapter.get("state", "ACTIVE")) != "ACTIVE":  # of an earlier run it is not known
            why = f"its port is {state or 'in an unknown state'}"
            reason = ("note", why, "check its cable and the subnet manager, if the ranks are to use it")
        elif not adapter.get("has_file", True):
            why = "its device file is not in /dev/infiniband"
            reason = ("warning", why, "give the container /dev/infiniband (docker run --device=/dev/infiniband)")
        elif off["NCCL_IB_DISABLE"] not in ("", "0"):
            reason = ("note", f"NCCL_IB_DISABLE={off['NCCL_IB_DISABLE']}", "unset it, if the ranks are to use it")
        elif off["NCCL_NET"].lower() == "socket":
            reason = ("note", f"NCCL_NET={off['NCCL_NET']}", "unset it, if the ranks are to use it")
        elif not _selected(adapter["name"], off["NCCL_IB_HCA"]):
            reason = ("note", f"NCCL_IB_HCA={off['NCCL_IB_HCA']}", "change it, if the ranks are to use it")
        elif (node.get("nccl_network") or "").startswith("Socket"):
            reason = ("warning", "its log names sockets", "look for NET/IB and NET/Plugin in that log, which says why")
        if reason:
            unused.setdefault(reason, []).append(adapter["name"])
        else:
            used.append(adapter)
    return used, unused


def _selected(name: str, adapters: str) -> bool:
    """Return whether NCCL_IB_HCA selects an adapter: by prefixes, = exact names, ^ all but these; ports may follow.

    Source: NCCL's documentation of its environment variables.
    """
    rest = adapters.removeprefix("^")
    names = [entry.partition(":")[0] for entry in rest.removeprefix("=").split(",")]
    found = name in names if rest.startswith("=") else name.startswith(tuple(names))
    return found != adapters.startswith("^")


def places_of(node: NodeEnvironment, adapters: Sequence[Adapter]) -> str:
    """Return adapters by kind and NUMA node, with the nearest GPUs, or else those of the node:
    'InfiniBand at 400 Gb/sec (4X NDR): mlx5_0 at NUMA node 0 (GPU 0, 1)'.
    """
    kinds, topology = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}, node.get("topology")
    numas = (topology.get("numa") or ()) if topology else ()
    alike: dict[str, dict[tuple[int | None, tuple[int, ...]], list[str]]] = {}
    for each in adapters:
        kind = kinds.get(each["link_layer"] or "", "a network of its own plugin, if there is one,")
        of_kind = alike.setdefault(f"{kind} at {each.get('rate') or 'an unknown rate'}", {})
        numa = each.get("numa")
        near = each.get("nearest") or [gpu for gpu, place in enumerate(numas) if place == numa is not None]
        of_kind.setdefault((numa, tuple(near)), []).append(each["name"])
    words = []
    for kind, by_numa in alike.items():
        places = []
        for (numa, gpus), names in by_numa.items():
            at = "" if numa is None else f" at NUMA node {numa}"
            places.append(join_names(names, 8) + at + (f" (GPU {', '.join(map(str, gpus))})" if gpus else ""))
        words.append(f"{kind}: {', '.join(places)}")
    return "; ".join(words)


def _text(interface: Interface) -> str:
    """Return 'eth0 (10000 Mbit/s, MTU 9000, 0 errors)'."""
    speed, errors = interface["mbit_per_s"], interface["errors"]
    parts = [f"{speed} Mbit/s" if speed else "speed unknown", f"MTU {interface['mtu']}"]
    parts += [] if errors is None else [f"{errors} error{'s' * (errors != 1)}"]
    return f"{interface['name']} ({', '.join(parts)})"


def _different(what: str, values: Mapping[str, object], advice: str) -> Iterator[Finding]:
    """Yield a finding if the values of the hosts differ."""
    if seen := _unlike(what, values):
        means = "nodes that differ: large messages or one node's ranks may fail"
        yield Finding(NETWORK, "warning", seen, means, advice)


def _unlike(what: str, values: Mapping[str, object]) -> str:
    """Return 'MTU: 1500 on a, 9000 on b' of the values of hosts; empty if they are equal."""
    each = ", ".join(f"{value} on {host}" for host, value in values.items())
    return f"{what}: {each}" if len(set(values.values())) > 1 else ""


MACHINE = "machine state"
LOWERED = 0.99
"""A power limit below this part of a GPU's own was lowered."""
THROTTLED_LEAST = 0.01
"""The least share of a container's periods, cut short by its quota, that is reported."""


def judge_machine(nodes: Iterable[NodeEnvironment]) -> list[Finding]:
    """Report the settings of nodes that make speeds vary, each with the command that changes it."""
    return [
        Finding(MACHINE, "note", f"{node['host']}: {seen}", means, advice)
        for node in nodes
        for seen, means, advice in _settings(node)
    ]


def _settings(node: NodeEnvironment) -> Iterator[tuple[str, str, str]]:
    """Yield what is seen of each such setting, what it means, and what changes it."""
    state, topology = node.get("state"), node.get("topology")
    if state and (others := [name for name in state["governors"] if name != "performance"]):
        seen = f"the processors' frequency governor is {', '.join(others)}"
        means = "clocks follow the load, and take time to rise"
        yield seen, means, "sudo cpupower frequency-set --governor performance"
    if state and state["boost"] and not topology:
        means = "one busy core is faster than all of them, which lowers the efficiency of several CPU slots"
        boost, intel = "/sys/devices/system/cpu/cpufreq/boost", "/sys/devices/system/cpu/intel_pstate/no_turbo"
        yield "the processors boost their clocks", means, f"echo 0 | sudo tee {boost}; Intel: echo 1 | sudo tee {intel}"
    if state and (state["throttled"] or 0) > THROTTLED_LEAST * (state["periods"] or 0):
        periods = f"{state['throttled']:,} of {state['periods']:,} periods"
        seen = f"since it was started, the container's CPU quota has cut short {periods}"
        yield seen, "processes may stand still within steps", "give the container a higher CPU limit, or none"
    modes = topology.get("persistence", []) if topology else []
    if off := [str(gpu) for gpu, mode in enumerate(modes) if mode is False]:
        means = "the driver is loaded anew for each worker group, and clocks that were set are lost"
        yield f"persistence mode is off on GPU {', '.join(off)}", means, "sudo nvidia-smi -pm 1"
    yield from _of_cards(topology.get("cards", []) if topology else [])


def _of_cards(cards: Sequence[Card]) -> Iterator[tuple[str, str, str]]:
    """Yield what limits single GPUs of a node: a lowered power limit, fewer PCIe lanes, ECC on some alone."""
    for gpu, card in enumerate(cards):
        limit, usual = card["power_limit_w"], card["usual_power_limit_w"]
        if limit and usual and limit < LOWERED * usual:
            means = "under load it clocks lower than such GPUs usually do"
            yield f"the power limit of GPU {gpu} is {limit:.0f} W of {usual:.0f} W", means, "sudo nvidia-smi -pl WATTS"
        lanes, most = card["pcie_width"], card["most_pcie_width"]
        if lanes and most and lanes < most:
            means = "copies between it and the host, and to GPUs without NVLink, are slower"
            yield f"GPU {gpu} uses {lanes} of {most} PCIe lanes", means, "another slot, riser or BIOS setting"
    if len({card["ecc"] for card in cards} - {None}) > 1:
        off = ", ".join(str(gpu) for gpu, card in enumerate(cards) if card["ecc"] is False)
        means = "its GPUs differ in memory bandwidth and size"
        yield f"ECC is off on GPU {off} alone", means, "sudo nvidia-smi -e 1, or 0, for all; then restart"


LINKS = "links"


def judge_links(nodes: Sequence[NodeEnvironment]) -> list[Finding]:
    """Judge the links of each node; a node with one GPU or none has no links."""
    known = ((node, node.get("topology")) for node in nodes)
    return [_of_links(node, topology) for node, topology in known if topology and len(topology["gpus"]) > 1]


def _of_links(node: NodeEnvironment, topology: Topology) -> Finding:
    links = topology["links"]
    count = len(links)
    pairs = [(one, other, links[one][other]) for one, other in combinations(range(count), 2)]
    slow = [f"{one}-{other} {link}" for one, other, link in pairs if link and not link.startswith("NV")]
    kinds = ", ".join(dict.fromkeys(str(link) for _, _, link in pairs if link))
    iommu = {True: "IOMMU on", False: "IOMMU off", None: "IOMMU unknown"}
    joined = f"{count} GPUs, links {kinds or 'unknown'}"
    seen = f"{node['host']}: {joined}{_near(node, topology)}; {iommu[node.get('iommu')]}"
    severity: Severity = "warning"
    if apart := topology.get("apart"):
        pairs_apart = [f"{one} from {other}" for one, other in apart]
        seen += f"; without peer access: {join_names(pairs_apart)} of {count * (count - 1)} ordered pairs"
        means = "copies between these GPUs pass through the host's memory"
        advice = "compare pairs with device_ids in the grid; GPUs with NVLink or below one PCIe switch have peer access"
    elif slow and node.get("iommu"):
        seen += f"; without NVLink: {join_names(slow)}"
        means = "copies between PCIe peers may be slow or, on some boards, silently corrupt (check: GPU copies)"
        advice = "boot with iommu=pt, or disable PCIe ACS in the firmware; compare pairs with device_ids in the grid"
    elif len({link for _, _, link in pairs}) > 1:
        severity, means = "note", "different links: the speed of a cell depends on its GPUs"
        advice = "compare pairs with device_ids in the grid"
    else:
        severity, means, advice = "note", "equal links of all pairs", "none"
    return Finding(LINKS, severity, seen, means, advice)


def _near(node: NodeEnvironment, topology: Topology) -> str:
    """Return the GPUs of each NUMA node: '; NUMA node 0 (processors 0-31): GPU 0, 1, ...'."""
    places = topology.get("numa") or ()
    processors = node.get("numa") or {}
    return "".join(
        f"; NUMA node {place} (processors {processors.get(str(place), 'unknown')}): GPU "
        + ", ".join(str(gpu) for gpu, other in enumerate(places) if other == place)
        for place in sorted({place for place in places if place is not None})
    )


THREADS, PLACEMENT = "threads", "device placement"


def judge_threads(threads: Sequence[int], workers: int, processors: int, less: tuple[str, str]) -> list[Finding]:
    """Judge the computing threads of each rank of a node, and the loader workers of all, by its processors.

    ``threads``: empty if these hardly compute, as beside a GPU. ``less``: the advice against too many threads, and
    against too many workers.
    """
    if sum(threads) + workers <= processors:
        return []
    busy, ranks = [f"{workers} loader workers"] if workers else [], ""
    if threads:
        busy.insert(0, f"{sum(threads)} computing threads")
        own = f"{threads[0]} thread{'s' * (threads[0] > 1)}"
        ranks = f" ({own} in the first of its {len(threads)} rank{'s' * (len(threads) > 1)})"
    text = f"{' and '.join(busy)} on a node with {processors} processors{ranks}"
    means = "oversubscribed processors: slower and less regular steps, increasingly so with more ranks"
    return [Finding(THREADS, "warning", text, means, less[0] if sum(threads) > processors else less[1])]


VERSIONS = "versions"


def judge_versions(nodes: Sequence[NodeEnvironment]) -> list[Finding]:
    """Compare the recorded environments of the nodes."""
    versions: dict[str, dict[str, object]] = {}
    for what in ("python", "cuda", "cudnn", "nccl", "driver"):
        versions[what] = {node["host"]: node.get(what) for node in nodes if node.get(what) is not None}
    for name in sorted({name for node in nodes for name in node.get("packages", {})}):
        versions[name] = {node["host"]: node.get("packages", {}).get(name, "missing") for node in nodes}
    return [
        Finding(
            VERSIONS,
            "error" if what in ("torch", "harness", "nccl", "python") else "warning",
            seen,
            "different software on the ranks: collectives may hang or fail, and the speed of a node depends on its "
            "software",
            "install the same versions on every node",
        )
        for what, by_host in versions.items()
        if (seen := _unlike(what, by_host))
    ]


def cannot_import(failing: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Report modules that a node cannot import. ``failing``: node -> module -> error."""
    errors = [f"{module} on {node}: {why}" for node, modules in failing.items() for module, why in modules.items()]
    if not errors:
        return []
    return [
        Finding(
            VERSIONS,
            "error",
            f"import errors of modules that the ranks need: {join_names(errors)}",
            "every worker group on such a node fails",
            "install the missing modules there, or start Ray there in an environment that has them",
        )
    ]
