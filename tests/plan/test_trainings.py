"""Which cells are trained to convergence, and the reason that the plan gives."""

from __future__ import annotations

import pytest

from harness.errors import ExperimentError
from harness.plan.comparison import partner_ids
from harness.plan.planner import Plan
from harness.run.plan_text import plan_lines
from tests.conftest import plan_of

GRID = {"strategy": ["single", "ddp"], "devices": [1, 2, 64], "per_device_batch_size": [8, 16]}


def trainings_plan(**settings: object) -> Plan:
    exclude = [{"strategy": "single", "devices": [2, 64]}]
    return plan_of(GRID, exclude=exclude, throughput=None, convergence={"epochs": 1, "seeds": 0, **settings})


def line_of(plan: Plan) -> str:
    """The line of a plan about its trainings."""
    (line,) = (line for line in plan_lines(plan) if line.startswith("Convergence: "))
    return line


def test_named_device_counts_are_trained_and_those_that_are_absent_here_skipped() -> None:
    plan = trainings_plan(devices=[1, 64])
    trained = {(t.cell.strategy, t.cell.devices, t.cell.per_device_batch_size) for t in plan.trials}
    assert trained == {("single", 1, 8), ("ddp", 1, 8)}
    assert {(trial.cell.strategy, trial.cell.devices) for trial in plan.skips} == {("ddp", 64)}
    words = "on the devices of convergence.devices, 1, 64, at the first batch size of the grid; and the base of each"
    assert line_of(plan).endswith(f"({words}).")


def test_the_plan_names_them_in_the_order_of_tables() -> None:
    rates = {"optimizer.lr": [0.1, 0.01, 0.05, 0.001]}
    grid = {"strategy": ["ddp", "single"], "devices": 1, "per_device_batch_size": 8, **rates}
    plan = plan_of(grid, throughput=None, convergence={"epochs": 1, "seeds": 0})
    each = [f"{strategy} x1 · lr={rate}" for strategy in ("single", "ddp") for rate in (0.001, 0.01, 0.05, 0.1)]
    assert line_of(plan).startswith(f"Convergence: {'; '.join(each)} (")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "each strategy on the most devices that it can have here, at the first batch size of the grid"),
        ({"global_batch_size": 32}, "each strategy on the most devices that it can have here, at convergence."),
        ({"only": {"devices": 2, "strategy": "ddp"}}, "cells that match convergence.only (strategy), on the"),
        ({"only": {"per_device_batch_size": 16}}, "convergence.only (per_device_batch_size), each strategy"),
    ],
)
def test_the_plan_says_why(settings: dict[str, object], reason: str) -> None:
    assert reason in line_of(trainings_plan(**settings))


def test_device_counts_without_cells_or_first_batch_or_named_twice_are_bad_input() -> None:
    with pytest.raises(ExperimentError, match=r"convergence.devices.*\n?.*got 3, 4; allowed: 1, 2, 64"):
        trainings_plan(devices=[1, 3, 4])
    with pytest.raises(ExperimentError, match="devices: got it here and in only; give one of both"):
        trainings_plan(devices=2, only={"devices": 2})
    with pytest.raises(ExperimentError, match=r"got 2, without a cell at the first batch size, 32; give convergence"):
        of_two_batches()


def of_two_batches(**settings: object) -> Plan:
    cells = [{"strategy": "ddp", "devices": n, "global_batch_size": batch} for n, batch in ((1, 32), (2, 64))]
    found = {"epochs": 1, "seeds": 0, "devices": [1, 2], **settings}
    return plan_of(cells[0], cells=cells[1:], throughput=None, convergence=found)


@pytest.mark.parametrize(
    ("settings", "batches"),
    [({"global_batch_size": 16}, [16, 16]), ({"only": {"global_batch_size": [32, 64]}}, [32, 64])],
)
def test_a_named_batch_is_trained_on_every_named_device_count(settings: dict[str, object], batches: list[int]) -> None:
    cells = [trial.cell for trial in of_two_batches(**settings).trials if trial.cell.strategy == "ddp"]
    assert sorted((cell.devices, cell.global_batch_size) for cell in cells) == list(zip([1, 2], batches, strict=True))


def uneven_plan(throughput: object = None, batch: int = 5, **settings: object) -> Plan:
    exclude = [{"strategy": "single", "devices": 2}, {"strategy": ["dp", "ddp"], "devices": 1}]
    found = {"epochs": 1, "seeds": 0, "only": {"devices": [1, 2]}, **settings}
    grid = {"strategy": ["single", "dp", "ddp"], "devices": [1, 2], "global_batch_size": batch}
    return plan_of(grid, exclude=exclude, throughput=throughput, convergence=found)


UNEVEN = {("single", None), ("dp", True), ("ddp", True)}


def trained(plan: Plan) -> set[tuple[str, bool | None]]:
    return {(t.cell.strategy, t.cell.uneven) for t in plan.trials if t.kind == "convergence"}


def test_a_batch_that_does_not_divide_is_trained_if_the_file_asks_and_never_timed() -> None:
    cells = {(t.cell.strategy, t.cell.uneven): t.cell for t in uneven_plan(uneven=True).trials}
    assert cells.keys() == UNEVEN
    assert partner_ids(cells["ddp", True])["base_id"] == cells["single", None].id
    assert not uneven_plan(uneven=True).impossible
    plain = uneven_plan()
    assert trained(plain) == {("single", None)} and len(plain.impossible) == 2
    plan = uneven_plan(throughput={"blocks": 1}, uneven=True)
    timed = {trial.cell.strategy for trial in plan.trials if trial.kind == "throughput"}
    assert timed == {"single"} and len(plan.impossible) == 2
    assert trained(plan) == UNEVEN


def test_a_stated_global_batch_may_be_uneven_too_and_even_cells_keep_their_ids() -> None:
    stated = uneven_plan(uneven=True, global_batch_size=7)
    assert trained(stated) == UNEVEN
    even = [uneven_plan(batch=8, uneven=flag) for flag in (True, False)]
    assert [t.id for t in even[0].trials] == [t.id for t in even[1].trials]
