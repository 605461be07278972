"""What to use: one sentence with strategy, devices, batch, what it was faster than and by how much."""

from __future__ import annotations

from typing import Any

import pytest

from tests.report.test_verdict import CELL, CELLS, DDP, FASTEST, text_of, verdict_of

RATE = "1,000 (900 to 1,100) samples/s over 5 blocks"
STATED = {**FASTEST, "low": 900.0, "high": 1100.0}
OVER = {"base_id": "base", "base_strategy": "single", "base_devices": 1, "base_throughput_per_s": 150.0}
RATIO = {**CELL, **OVER, "cell_id": "a", "speedup": 7.0, "low": 6.5, "high": 7.5}
BASE = "1 device (strategy single, same batch per device)"


UNCLEAR = f"Undecided: 1 device, or {DDP}: no clear gain over {BASE}: 1.23 (0.95 to 1.58) times its throughput; {RATE}."
UNKNOWN = (
    f"Undecided: 1 device, or {DDP}: not known to be faster than {BASE}: 7.00 times its throughput, without an interval"
)
SLOWER = {"speedup": 0.7, "low": 0.68, "high": 0.72}
FASTER_ALONE = (
    f"single on 1 device · batch 32: 150 samples/s; the fastest setting on 8 devices, {DDP}, has only "
    "0.70 (0.68 to 0.72) times its throughput."
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, f"{DDP}: 7.00 (6.50 to 7.50) times the throughput of {BASE}; {RATE}."),
        ({"speedup": 1.23, "low": 0.95, "high": 1.58}, UNCLEAR),
        ({"low": None, "high": None}, f"{UNKNOWN}; {RATE}."),
        (SLOWER, FASTER_ALONE),
        (
            {"base_strategy": "ddp", "base_devices": 2, "scaling": "strong"},
            f"{DDP}: 7.00 (6.50 to 7.50) times the throughput of 2 devices (strategy ddp, same global batch); {RATE}.",
        ),
    ],
    ids=["a clear gain", "no clear gain", "no interval", "one device is faster", "another base"],
)
def test_it_names_strategy_devices_and_batch_and_what_it_is_compared_with(
    change: dict[str, Any], expected: str
) -> None:
    assert text_of(STATED, scaling=[{**RATIO, **change}]) == expected


def test_a_setting_without_a_ratio_says_so() -> None:
    assert text_of(STATED) == f"{DDP}: {RATE}; not compared with one device, which has no result beside it."
    assert text_of({**STATED, "cell_id": "base"}) == f"single on 1 device · batch 32: {RATE}."


RIVALS = [
    {**CELL, "cell_id": "a", "leader_id": "a", "ratio": 1.0},
    {**CELLS["b"], "cell_id": "b", "leader_id": "a", "ratio": 0.8, "low": 0.75, "high": 0.85},
]


FASTER = "Faster on 8 devices at this batch than fsdp (0.80 times its throughput, 0.75 to 0.85)."
TIED = "No clear difference from fsdp (0.80 times its throughput, 0.75 to 0.85)."
SMALLEST = "The smallest batch that reaches 95 % of the highest throughput on 8 devices."


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, FASTER),
        ({"others": ("b",)}, TIED),
        ({"reasons": ("b",)}, "For lack of blocks not compared with fsdp on 8 devices · batch 32/device."),
        ({"code": "smallest batch"}, f"{FASTER} {SMALLEST}"),
    ],
)
def test_the_other_settings_are_named_with_their_ratio(change: dict[str, Any], expected: str) -> None:
    text = text_of({**STATED, **change}, scaling=[RATIO], leaders=RIVALS)
    assert text == f"{DDP}: 7.00 (6.50 to 7.50) times the throughput of {BASE}; {RATE}. {expected}"


@pytest.mark.parametrize(("tied", "high", "said"), [(True, 0.99, True), (True, 1.01, False), (False, 0.99, False)])
def test_an_interval_that_excludes_1_without_a_clear_difference_is_explained(
    tied: bool, high: float, said: bool
) -> None:
    rival = {**RIVALS[1], "ratio": 0.9, "low": 0.85, "high": high, "tied": tied}
    text = text_of({**STATED, "others": ("b",) if tied else ()}, leaders=[RIVALS[0], rival])
    assert ("; of so many comparisons one may differ as much by chance)" in text) == said


def test_settings_of_one_strategy_are_named_in_full() -> None:
    rival = {**RIVALS[1], "strategy": "ddp", "cell_id": "base"}
    assert "than single on 1 device · batch 32 (0.80 times" in text_of(STATED, leaders=[RIVALS[0], rival])


def test_fewer_devices_have_the_same_sentence() -> None:
    fewer = {**STATED, "topic": "fewer", "others": ("b",)}
    assert text_of(fewer, leaders=RIVALS).endswith(TIED)
    slower = text_of(fewer, scaling=[{**RATIO, **SLOWER}])
    assert f"0.70 (0.68 to 0.72) times the throughput of {BASE}, slower; " in slower


def test_what_a_ratio_is_over_is_said_in_full_once() -> None:
    found = verdict_of(STATED, {**STATED, "topic": "fewer"}, scaling=[RATIO]).by_heading
    (first,), (second,) = found["What to use"], found["On fewer devices"]
    assert BASE in first.text and "throughput of 1 device; 1,000" in second.text
