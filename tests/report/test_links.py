"""The tables and the figure of links and collectives, from hand-made records."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis.hardware import collectives, links
from harness.report.figures import style
from harness.report.figures.devices import bus_bandwidth
from harness.report.tables.links import (
    MOST_COLUMNS,
    collectives_table,
    links_failed,
    links_table,
    links_tables,
    links_words,
    topology_table,
)
from harness.report.tables.text import TextTable
from tests.records import link_row, links_line
from tests.report.test_figures import with_tables

MIB = 2**20


def cells(table: TextTable) -> list[tuple[str, ...]]:
    return [line.cells for line in table.rows]


def sizes(operation: str, latency_s: float, bytes_per_s: float, **columns: Any) -> list[dict[str, Any]]:
    """1 KiB and 1 MiB."""
    return [
        link_row(operation, size_bytes=size, time_s=seconds, min_s=0.9 * seconds, max_s=1.5 * seconds, **columns)
        for size, seconds in ((1024, latency_s), (MIB, MIB / bytes_per_s))
    ]


def pairs(*ends: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what process 0 sent to these."""
    return [row for end in ends for row in sizes("send_receive", 1e-4, **{"bytes_per_s": 1e9, "source": 0, **end})]


def test_the_matrix_shows_bandwidth_and_latency_and_of_copies_both_directions_and_the_link() -> None:
    line = links_line(*sizes("send_receive", 2.5e-3, 2e9, source=0, target=1))
    assert cells(links_table(links([line]))) == [
        ("2, gloo", "0", "GB/s", "X", "2"),
        ("", "0", "us", "X", "2,500"),
        ("", "1", "GB/s", "2", "X"),
        ("", "1", "us", "2,500", "X"),
    ]
    there = sizes("copy", 1e-5, 2e11, source=0, target=1, link="NV12", backend="cuda")
    back = sizes("copy", 1e-5, 1e11, source=1, target=0, link="NV12", backend="cuda")
    line = links_line(*there, *back, device_ids="2,3")
    table = cells(links_table(links([line])))
    assert [row[2:] for row in table] == [
        ("GB/s", "X", "200"),
        ("us", "X", "10"),
        ("link", "X", "NV12"),
        ("GB/s", "100", "X"),
        ("us", "10", "X"),
        ("link", "NV12", "X"),
    ]
    assert table[0][0] == "2 (GPU 2,3), cuda"


def test_the_matrix_of_many_devices_is_cut_and_pairs_that_were_not_measured_are_empty() -> None:
    rows = pairs({"target": 1}, {"target": 15})
    table = links_table(links([links_line(*rows, devices=64, nodes=8)]))
    assert len(table.columns) == 3 + MOST_COLUMNS and len(table.rows) == 2 * MOST_COLUMNS
    assert table.rows[0].cells[:6] == ("64 on 8 nodes, gloo", "0", "GB/s", "X", "1", "")
    assert table.rows[0].cells[-1] == "1"


def test_operations_are_shown_at_their_smallest_and_largest_size_and_pairs_apart_by_tier() -> None:
    rows = [*sizes("all_reduce", 3e-4, 1e9), *sizes("all_gather", 4e-4, 2e9)]
    rows += pairs(*({"target": target, "bytes_per_s": rate} for target, rate in ((1, 1e9), (2, 3e9), (3, 2e9))))
    line = links_line(*rows, devices=4)
    assert cells(collectives_table(collectives([line]), links([line]))) == [
        ("4, gloo", "all-reduce", "300", "1 MiB", "1", "1.5", "5"),
        ("4, gloo", "all-gather", "400", "1 MiB", "2", "1.5", "5"),
        ("4, gloo", "send and receive", "100", "1 MiB", "2", "2", "5"),
    ]
    rows = pairs({"target": 1, "tier": "inside a node"}, {"target": 2, "tier": "between nodes"})
    line = links_line(*rows, devices=4, nodes=2)
    names = [row[1] for row in cells(collectives_table(collectives([line]), links([line])))]
    assert names == ["send and receive inside a node", "send and receive between nodes"]


def test_without_links_nothing_is_shown_but_the_reason_of_a_failure() -> None:
    tables = {"links": links([]), "collectives": collectives([])}
    assert links_tables(tables) == []
    drawing = bus_bandwidth(with_tables(**tables))
    assert drawing.figure is None and drawing.caption.startswith("Left out: ")
    trials = pd.DataFrame({"links_error": pd.Series([None, "all_gather: RuntimeError"], dtype="string")})
    assert links_failed(trials) == "Not measured: all_gather: RuntimeError."
    assert links_failed(trials[:1]) == "" and links_words(trials).endswith("Not measured: all_gather: RuntimeError.")


def test_the_figure_has_a_panel_a_placement_and_a_line_an_operation() -> None:
    two = links_line(*sizes("all_reduce", 3e-4, 1e9), *sizes("send_receive", 1e-4, 1e9, source=0, target=1))
    four = links_line(*sizes("all_reduce", 3e-4, 1e9), cell="fsdp", devices=4)
    with style():
        drawing = bus_bandwidth(with_tables(links=links([two, four]), collectives=collectives([two, four])))
    assert drawing.figure
    panels = [axes for axes in drawing.figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["2, gloo", "4, gloo"]
    assert [len(axes.containers) for axes in panels] == [2, 1]
    (line, *_) = panels[1].containers[0].lines  # type: ignore[attr-defined]
    assert line.get_ydata() == pytest.approx([1.5 * 1024 / 3e-4 / 1e9, 1.5])
    assert "Largest size: 1 MiB" in drawing.caption and "5 repetitions" in drawing.caption


def test_the_square_of_links_of_each_node_that_recorded_it() -> None:
    square = [["X", "NV4", None], ["NV4", "X", "SYS"], [None, "SYS", "X"]]
    topology = {"gpus": ["a", "b", "c"], "links": square, "apart": [], "numa": [0, 0, None], "driver": "1"}
    nodes = [
        {"node_id": "1", "host": "one", "topology": topology},
        {"node_id": "2", "host": "two", "topology": None},
        {"node_id": "3", "host": "three", "topology": {**topology, "links": [["X"]], "numa": [1]}},
    ]
    environment: Any = {"groups": [{"nodes": nodes}], "invocations": []}
    table = topology_table(environment)
    assert [column.title for column in table.columns] == ["node", "GPU", "GPU 0", "GPU 1", "GPU 2", "NUMA node"]
    assert cells(table) == [
        ("one", "GPU 0", "X", "NV4", "not known", "0"),
        ("", "GPU 1", "NV4", "X", "SYS", "0"),
        ("", "GPU 2", "not known", "SYS", "X", ""),
        ("three", "GPU 0", "X", "", "", "1"),
    ]
    assert not topology_table({"groups": [], "invocations": []}).rows
