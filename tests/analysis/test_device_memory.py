"""Memory by GPU, from hand-made rank rows."""

from __future__ import annotations

from typing import Any

from harness.analysis import trials as trial_tables
from harness.analysis.hardware import device_memory
from harness.report.tables.cost import device_memory_table
from tests.records import line, steps_of

GIB = 2**30


def trial(cell: str, *ranks: str, **columns: Any) -> dict[str, Any]:
    """A trial whose ranks have these devices, 'cuda:0 3, cuda:1 1' in GiB."""
    made = line(cell, rates=(100.0,) * len(ranks), device="cuda", emulated=False, **columns)
    rows = []
    for rank, text in enumerate(ranks):
        names, sizes = zip(*(part.split() for part in text.split(", ")), strict=True)
        peaks = ", ".join(str(int(size) * GIB) for size in sizes)
        known = {"devices": ", ".join(names), "allocated_by_device": peaks, "reserved_by_device": peaks}
        rows.append({"rank": rank, **known})
    return made | {"ranks": rows}


def table_of(lines: list[dict[str, Any]]) -> Any:
    return device_memory(trial_tables.trials(lines, steps_of(lines)), trial_tables.ranks(lines))


def test_gpus_are_numbered_by_rank_and_in_the_ranks_order_and_keep_their_largest_peak() -> None:
    found = table_of(
        [
            trial("dp2", "cuda:0 3, cuda:1 1", devices=2, block=0),
            trial("dp2", "cuda:0 2, cuda:1 2", devices=2, block=1),
            trial("ddp2", "cuda:0 1", "cuda:1 2"),
        ]
    )
    values = zip(found["cell_id"], found["rank"], found["gpu"], found["name"], found["allocated_bytes"], strict=True)
    assert list(values) == [
        ("dp2", 0, 0, "cuda:0", 3 * GIB),
        ("dp2", 0, 1, "cuda:1", 2 * GIB),
        ("ddp2", 0, 0, "cuda:0", 1 * GIB),
        ("ddp2", 1, 1, "cuda:1", 2 * GIB),
    ]


def test_the_first_gpu_stands_beside_the_others() -> None:
    shown = device_memory_table(
        table_of([trial("dp3", "cuda:0 3, cuda:1 1, cuda:2 2", devices=3), trial("single", "cuda:0 1")])
    )
    assert [row.cells[-4:] for row in shown.rows] == [("3 GiB", "1 GiB", "2 GiB", "1.50")]


def test_without_gpus_there_are_no_rows() -> None:
    assert table_of([line("dp2", devices=2)]).empty
