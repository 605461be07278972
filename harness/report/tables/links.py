"""Text tables of the links between devices and of collectives, by placement."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from harness.plan.labels import devices_text
from harness.plan.run_environment import RunEnvironment
from harness.report.row import Row, rows_of
from harness.report.summary import nodes
from harness.report.tables.text import TextTable, decimal, flush_right, make_table, or_dash, size, speed, words

MOST_COLUMNS = 16
"""The most devices of the matrix; tables/links.csv has all."""
GIGA = decimal("{:.3g}", 1e-9)
PLACEMENT = ["devices", "device_ids", "nodes", "backend"]
NAMES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "send_receive": "send and receive",
    "copy": "copy",
}


@or_dash
def microseconds(seconds: float) -> str:
    """Return seconds as microseconds with three significant digits at least."""
    return speed(1e6 * seconds)


def placement_label(row: Row) -> str:
    """Return '4 on 2 nodes, nccl', or '2 (GPU 0,1), cuda'."""
    return f"{devices_text(Row(row, link=None))}, {row.backend}"


def topology_table(environment: RunEnvironment) -> TextTable:
    """Return the square of links between the GPUs of each node that recorded one, as ``nvidia-smi topo -m`` does."""
    found = {node["host"]: topology for node in nodes(environment) if (topology := node.get("topology"))}
    widest = max((len(topology["links"]) for topology in found.values()), default=0)
    gpus = [f"GPU {place}" for place in range(min(widest, MOST_COLUMNS))]
    rows: list[Row] = []
    for host, topology in found.items():
        for place, links in enumerate(topology["links"]):
            named = {f"GPU {other}": link or "not known" for other, link in enumerate(links)}
            numa = topology["numa"][place] if place < len(topology.get("numa", [])) else None
            ends = {"node": "" if place else host, "GPU": f"GPU {place}", "numa": numa}
            rows.append(Row({**dict.fromkeys(gpus), **named, **ends}))
    columns = (
        ("node", "node", words),
        ("GPU", "GPU", words),
        *((gpu, gpu, words) for gpu in gpus),
        ("NUMA node", "numa", flush_right),
    )
    return make_table(columns, rows)


def links_table(links: pd.DataFrame) -> TextTable:
    """Return the matrix of pairs of each placement: from the device of the row to that of the column.

    Bandwidth of the largest size, latency (time of the smallest size) and, for GPUs, the kind of link.
    """
    count = min(MOST_COLUMNS, max(int(links["devices"].max()), 2)) if len(links) else 0
    columns = [("devices", "label", words), ("from", "from", flush_right), ("", "quantity", words)]
    columns += [(f"to {target}", str(target), flush_right) for target in range(count)]
    lines = [line for _, part in links.groupby(PLACEMENT, dropna=False, sort=False) for line in _matrix(part, count)]
    return make_table(columns, lines, ordered=True)


def _matrix(links: pd.DataFrame, count: int) -> list[Row]:
    """Return the rows of one placement; a message that is sent and returned fills both directions."""
    label = placement_label(rows_of(links[:1])[0])
    ends: dict[tuple[int, int], tuple[Row, Row]] = {}
    for _, pair in links.sort_values("size_bytes").groupby(["source", "target"]):
        sizes = rows_of(pair)
        first = sizes[0]
        ends[first.source, first.target] = first, sizes[-1]
        if first.operation == "send_receive":
            ends[first.target, first.source] = first, sizes[-1]
    lines: list[Row] = []
    for source in range(min(count, int(links["devices"].iloc[0]))):
        here = {target: ends[source, target] for target in range(count) if (source, target) in ends}
        quantities = {
            "GB/s": {target: GIGA(last.bus_bytes_per_s) for target, (_, last) in here.items()},
            "us": {target: microseconds(first.time_s) for target, (first, _) in here.items()},
            "link": {target: words(first.link) for target, (first, _) in here.items()},
        }
        for quantity, cells in quantities.items():
            if quantity != "link" or any(cells.values()):
                shown = {str(target): cells.get(target, "X" if target == source else "") for target in range(count)}
                named = label if source == 0 and quantity == "GB/s" else ""
                lines.append(Row({"label": named, "from": str(source), "quantity": quantity, **shown}))
    return lines


def collectives_table(collectives: pd.DataFrame, links: pd.DataFrame) -> TextTable:
    """Return, for each operation of each placement, its latency, its largest size and the bandwidths there.

    Of pairs, the median over the pairs of a tier.
    """
    columns = (
        ("devices", "label", words),
        ("operation", "name", words),
        ("latency (us)", "latency_s", microseconds),
        ("up to", "size_bytes", size),
        ("GB/s", "algorithm_bytes_per_s", GIGA),
        ("bus GB/s", "bus_bytes_per_s", GIGA),
        ("n", "repetitions", flush_right),
    )
    rows = []
    for sizes in map(rows_of, operations(collectives, links)):
        last = sizes[-1]
        named = {"label": placement_label(last), "name": operation_label(last)}
        rows.append(Row(last, latency_s=sizes[0].time_s, **named))
    return make_table(columns, rows)


def operations(collectives: pd.DataFrame, links: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the sizes of each operation of each placement and tier, one row a size; of pairs the median over them."""
    keys = [*PLACEMENT, "operation", "tier"]
    values = ["time_s", "min_s", "max_s", "algorithm_bytes_per_s", "bus_bytes_per_s"]
    found = [part for frame in (collectives, links) for _, part in frame.groupby(keys, dropna=False, sort=False)]
    found.sort(key=lambda part: (part["nodes"].iloc[0], part["devices"].iloc[0]))
    medians = []
    for sizes in found:
        first = sizes.drop_duplicates("size_bytes").set_index("size_bytes").sort_index()
        medians.append(first.assign(**sizes.groupby("size_bytes")[values].median()).reset_index())
    return medians


def operation_label(row: Row) -> str:
    """Return 'all-reduce', or 'send and receive inside a node' for pairs if the placement has several nodes."""
    pair = row.operation in ("send_receive", "copy") and (row.nodes or 0) > 1
    return f"{NAMES[row.operation]} {row.tier}" if pair else NAMES[row.operation]


def links_tables(tables: Mapping[str, pd.DataFrame]) -> list[tuple[str, TextTable]]:
    """Return the tables of a run's links under their titles; none if no links were measured."""
    both = {
        "Links and collectives": collectives_table(tables["collectives"], tables["links"]),
        "Links between devices": links_table(tables["links"]),
    }
    return [(title, table) for title, table in both.items() if table.rows]


def links_words(trials: pd.DataFrame) -> str:
    """Return the sentences above the tables: definitions, the largest size, measurements that failed."""
    return (
        "Bus bandwidth as nccl-tests defines it: the size over the time, times 2(n-1)/n for all-reduce and (n-1)/n for "
        "all-gather and reduce-scatter of n devices. Latency: the time of 1 KiB. Times are medians over n repetitions, "
        "of pairs also over the pairs; sizes double until the next would exceed throughput.links_seconds. "
        f"{links_failed(trials)}"
    ).strip()


def links_failed(trials: pd.DataFrame) -> str:
    """Return a sentence on the operations that could not be measured; empty if there are none."""
    failed = trials["links_error"].dropna().unique()
    return f"Not measured: {'; '.join(map(str, failed))}." if len(failed) else ""
