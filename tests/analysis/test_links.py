"""Bandwidths of transfers and collectives, by numbers that a reader can check."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.hardware import bus_factor, collectives, links
from tests.records import link_row, links_line


@pytest.mark.parametrize(
    ("operation", "devices", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("send_receive", 8, 1.0),
        ("copy", 8, 1.0),
    ],
)
def test_the_bus_bandwidth_is_that_of_nccl_tests(operation: Any, devices: int, factor: float) -> None:
    assert bus_factor(operation, devices) == factor


def test_a_collective_has_both_bandwidths_and_its_placement() -> None:
    line = links_line(link_row("all_reduce", size_bytes=4096, time_s=1e-3), devices=4, nodes=2)
    (row,) = collectives([line]).to_dict("records")
    assert row["algorithm_bytes_per_s"] == pytest.approx(4.096e6)
    assert row["bus_bytes_per_s"] == pytest.approx(1.5 * 4.096e6)
    assert (row["devices"], row["nodes"], row["device_model"], row["tier"]) == (4, 2, "a processor", "inside a node")
    assert links([line]).empty


def test_a_pair_has_its_ends_and_its_link() -> None:
    line = links_line(link_row("send_receive", source=0, target=3, link="NV12"), link_row("all_gather"))
    (row,) = links([line]).to_dict("records")
    assert (row["source"], row["target"], row["link"]) == (0, 3, "NV12")
    assert row["bus_bytes_per_s"] == row["algorithm_bytes_per_s"]
    assert collectives([line])["operation"].tolist() == ["all_gather"]


def test_the_latest_measurement_of_a_placement_counts_and_failed_ones_have_none() -> None:
    first, second = (links_line(link_row("all_reduce", time_s=seconds)) for seconds in (2.0, 1.0))
    failed = {**links_line(), "outcome": "error", "links": None}
    other = links_line(link_row("all_reduce", time_s=3.0), cell="fsdp")
    found = collectives([first, second, failed, other])
    assert dict(zip(found["trial_id"], found["time_s"], strict=True)) == {"ddp-b0l": 1.0, "fsdp-b0l": 3.0}
    old = {name: value for name, value in first.items() if name != "links"}
    assert collectives([old]).empty and links([old]).empty
