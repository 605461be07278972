"""The collectives of a step: from points to rows, and as real ranks record them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.measure.exchanges import _median, _of_buckets, _of_groups, record_exchanges, split_wait
from harness.measure.stepper import Stepper, TrainingData
from harness.plan.cell import Cell
from harness.train.ranks import Ranks
from harness.train.strategies.base import ExchangePoint
from harness.train.training import Training
from harness.train.workloads.emulated_compute import EmulatedCompute
from tests.worlds import fork_ranks

MIB = 2**20


forward, backward = (partial(ExchangePoint, kind, gather_bytes=8) for kind in ("forward", "backward"))
gradients = partial(ExchangePoint, "gradients", reduce_bytes=8)


TWO_GROUPS = [(forward(0), 0.0), (forward(1), 1.0), (backward(1), 3.0), (gradients(1), 4.0)]
TWO_GROUPS += [(gradients(1), 5.0), (backward(0), 5.1), (gradients(0), 7.0)]
"""A step of two units: the second has two parameters, whose gradients come one after the other."""


def of(rows: list[Any]) -> list[tuple[str, float, float]]:
    return [(row["operation"], row["ready_s"], row["needed_s"]) for row in rows]


def test_buckets_are_needed_when_the_last_one_is_ready() -> None:
    rows = _of_buckets([(ExchangePoint("bucket", reduce_bytes=4), 1.0), (ExchangePoint("bucket", reduce_bytes=8), 2.0)])
    assert of(rows) == [("all_reduce", 1.0, 2.0), ("all_reduce", 2.0, 2.0)]
    assert [row["size_bytes"] for row in rows] == [4, 8]
    sparse = _of_buckets([(ExchangePoint("rows", gather_bytes=24), 1.0)])
    assert [(row["operation"], row["size_bytes"]) for row in sparse] == [("all_gather", 24)]


GATHER, REDUCE = "all_gather", "reduce_scatter"
ONCE = [(forward(0), 0.0), (backward(0), 2.0), (gradients(0), 3.0)]
KEPT = [(forward(0), 0.0), (backward(0, gather_bytes=0), 2.0), (gradients(0), 3.0)]
FIRST_FROZEN = [(forward(0), 0.0), (forward(1), 1.0), (backward(1), 2.0), (gradients(1), 3.0)]
"""The first unit is frozen, and its outputs need no gradient."""
FROZEN = [(forward(0), 0.0), (backward(0), 2.0), (forward(0), 4.0), (backward(0), 6.0)]


def test_without_overlap_every_call_waits_and_with_it_a_group_is_gathered_while_the_one_before_computes() -> None:
    waiting = zip((GATHER, GATHER, GATHER, REDUCE, GATHER, REDUCE), (0.0, 1.0, 3.0, 5.0, 5.1, 7.0), strict=True)
    assert of(_of_groups(TWO_GROUPS, 7.5, overlapped=False)) == [(operation, at, at) for operation, at in waiting]
    gathers = [(GATHER, 0.0, 0.0), (GATHER, 0.0, 1.0), (GATHER, 3.0, 3.0), (GATHER, 3.0, 5.1)]
    assert of(_of_groups(TWO_GROUPS, 7.5, overlapped=True)) == [*gathers, (REDUCE, 5.0, 7.5), (REDUCE, 7.0, 7.5)]


@pytest.mark.parametrize(
    ("points", "gathers", "reductions"),
    [
        (KEPT, [0.0], [3.0]),  # kept after forward
        ([*ONCE, *((point, seconds + 4) for point, seconds in ONCE)], [0.0, 2.0, 4.0, 6.0], [7.0]),
        (FROZEN, [0.0, 2.0, 4.0, 6.0], []),
        ([*FIRST_FROZEN, *((point, at + 4) for point, at in FIRST_FROZEN)], [0.0, 1.0, 2.0, 4.0, 5.0, 6.0], [7.0]),
    ],
    ids=["kept", "accumulation", "without gradients", "accumulation behind a frozen unit"],
)
def test_passes_gather_and_the_last_reduces(points: list[Any], gathers: list[float], reductions: list[float]) -> None:
    rows = _of_groups(points, points[-1][1], overlapped=False)
    wanted = [*((GATHER, at, at) for at in gathers), *((REDUCE, at, at) for at in reductions)]
    assert of(rows) == wanted and [row["position"] for row in rows] == [*range(len(wanted))]


def test_computing_a_group_again_in_its_backward_pass_gathers_nothing() -> None:
    """As activation checkpointing around a unit does: its forward pass, whose outputs get gradients again."""
    again: list[Any] = []
    for point, seconds in TWO_GROUPS:
        again.append((point, seconds))
        if point.kind == "backward":
            again += [(forward(point.group), seconds + 0.01), (backward(point.group), seconds + 0.02)]
    for overlapped in (False, True):
        assert _of_groups(again, 7.5, overlapped=overlapped) == _of_groups(TWO_GROUPS, 7.5, overlapped=overlapped)


def test_medians_are_over_steps_of_different_length() -> None:
    def step(length: float, first: float) -> list[Any]:
        return _of_buckets([(ExchangePoint("bucket"), first * length), (ExchangePoint("bucket"), length)])

    first, last = _median([step(1.0, 0.5), step(2.0, 0.5), step(4.0, 0.6)])
    assert first["ready_s"] == pytest.approx(0.5 * 2.0) and last["needed_s"] == pytest.approx(2.0)


def test_steps_with_other_exchanges_than_the_last_are_left_out() -> None:
    other = _of_buckets([(ExchangePoint("bucket", reduce_bytes=1), 9.0)])
    last = _of_buckets([(ExchangePoint("bucket", reduce_bytes=2), 1.0)])
    (row,) = _median([other, last, last])
    assert row["size_bytes"] == 2 and row["ready_s"] == pytest.approx(1.0)
    assert _median([other, []]) == ()


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        ([[("0", 0.031)], [("0", 0.001)]], [(0.001, 0.030), (0.001, 0.0)]),  # the second rank is late
        ([[("0", 0.250)], [("0", 0.252)]], [(0.250, 0.0), (0.250, 0.002)]),  # the collective is slow
        ([[("0", 5), ("0", 1)], [("0", 1), ("0", 5)]], [(2, 4), (2, 4)]),  # each late in turn, in one step
        ([[("0", 2), ("1", 9)], [("1", 3), ("0", 1)], [("0", 1)]], [(4, 7), (4, 0), (1, 0)]),  # by group
        ([[], []], [(0, 0), (0, 0)]),
    ],
)
def test_what_is_more_than_on_the_last_rank_in_a_collective_is_a_wait(ranks: Any, parts: Any) -> None:
    found = split_wait(ranks)
    assert [exchange for exchange, _ in found] == pytest.approx([exchange for exchange, _ in parts])
    assert [wait for _, wait in found] == pytest.approx([wait for _, wait in parts])


def record(rank: int, world_size: int, out: Path) -> None:
    """Record the exchanges of several cells of one workload; write those of rank 0."""
    torch.set_num_threads(1)
    ranks = Ranks(rank, world_size, rank, 0, "node", "127.0.0.1", (torch.device("cpu"),))
    found: dict[str, Any] = {}
    for name, strategy, options in (
        ("ddp", "ddp", {"bucket_cap_mb": 1}),
        ("compressed", "ddp", {"bucket_cap_mb": 1, "comm_hook": "bf16_compress", "gradient_as_bucket_view": True}),
        ("fsdp", "fsdp", {}),
        ("kept", "fsdp", {"reshard_after_forward": False}),
        ("single", "single", {}),
    ):
        workload = ("emulated_compute", "synthetic", "small")
        cell = Cell(*workload, strategy, "cpu", world_size, 1, "weak", 4, 4 * world_size, strategy_options=options)
        cell = replace(cell, optimizer={"name": "SGD", "lr": 0.01})
        emulated = EmulatedCompute(mebibytes=4, layers=4, step_ms=40)
        training = Training(cell, emulated, 0, ranks)
        data = TrainingData(cell, 0, ranks, *emulated.datasets(), emulated)
        steps: list[None] = []
        stepper = Stepper(training, data, partial(steps.append, None))
        stepper.step()
        steps.clear()
        found[name] = record_exchanges(stepper)
        found[f"{name}, steps"] = len(steps)
    if rank == 0:
        out.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = json.loads(fork_ranks(record, 2, tmp_path_factory.mktemp("ranks")).read_text())
    return found


@pytest.mark.slow
def test_ddp_records_its_buckets_when_they_are_ready(recorded: dict[str, list[Any]]) -> None:
    rows = recorded["ddp"]
    assert [row["size_bytes"] for row in rows] == [MIB] * 4
    assert [row["size_bytes"] for row in recorded["compressed"]] == [MIB // 2] * 4  # by a compressing hook
    ready = [row["ready_s"] for row in rows]
    assert ready == sorted(ready) and {row["needed_s"] for row in rows} == {ready[-1]}
    # a layer's backward pass takes 40 ms x 2/3 / 4, after 40 ms / 3 of forward; waits are never too short
    for number, seconds in enumerate(ready):
        assert seconds >= 0.9 * 0.04 * (1 + 2 * (number + 1) / 4) / 3


@pytest.mark.slow
def test_fsdp_records_gathers_in_both_passes_and_reductions(recorded: dict[str, list[Any]]) -> None:
    rows = recorded["fsdp"]
    assert [row["operation"] for row in rows] == ["all_gather"] * 4 + ["all_gather", "reduce_scatter"] * 4
    assert {row["size_bytes"] for row in rows} == {MIB}
    assert all(row["needed_s"] == row["ready_s"] for row in rows)  # on a CPU the host waits in each call
    assert [row["operation"] for row in recorded["kept"]] == ["all_gather"] * 4 + ["reduce_scatter"] * 4


@pytest.mark.slow
def test_a_recording_takes_at_most_five_steps_and_none_on_one_device(recorded: dict[str, Any]) -> None:
    assert recorded["single"] == []
    taken = {name: recorded[f"{name}, steps"] for name in ("ddp", "compressed", "fsdp", "kept")}
    assert all(0 < steps <= 5 for steps in taken.values()), taken
