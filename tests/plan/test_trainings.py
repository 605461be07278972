"""Which cells are trained to convergence, and the reason that the plan gives."""

from __future__ import annotations

import pytest

from harness.config.experiment import Experiment
from harness.errors import ExperimentError
from harness.plan.comparison import partner_ids
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import Trial
from harness.run.plan_text import plan_lines
from tests.conftest import Make, laptop

GRID = {"strategy": ["single", "ddp"], "devices": [1, 2, 64], "per_device_batch_size": [8, 16]}


def experiment(make: Make, **settings: object) -> Experiment:
    exclude = [{"strategy": "single", "devices": [2, 64]}]
    return make(GRID, exclude=exclude, throughput=None, convergence={"epochs": 1, "seeds": 0, **settings})


def test_named_device_counts_are_trained_and_those_that_are_absent_here_skipped(make_experiment: Make) -> None:
    plan = make_plan(experiment(make_experiment, devices=[1, 64]), laptop())
    trained = {(t.cell.strategy, t.cell.devices, t.cell.per_device_batch_size) for t in plan.trials}
    assert trained == {("single", 1, 8), ("ddp", 1, 8)}
    assert {(skip.trial.cell.strategy, skip.trial.cell.devices) for skip in plan.skips} == {("ddp", 64)}
    (line,) = (line for line in plan_lines(plan) if line.startswith("Convergence: "))
    assert line.endswith(
        "(on the devices of convergence.devices, 1, 64, at the first batch size of the grid; and the base of each)."
    )


def test_the_plan_names_them_in_the_order_of_tables(make_experiment: Make) -> None:
    rates = {"optimizer.lr": [0.1, 0.01, 0.05, 0.001]}
    grid = {"strategy": ["ddp", "single"], "devices": 1, "per_device_batch_size": 8, **rates}
    plan = make_plan(make_experiment(grid, throughput=None, convergence={"epochs": 1, "seeds": 0}), laptop())
    (line,) = (line for line in plan_lines(plan) if line.startswith("Convergence: "))
    each = [f"{strategy} x1 · lr={rate}" for strategy in ("single", "ddp") for rate in (0.001, 0.01, 0.05, 0.1)]
    assert line.startswith(f"Convergence: {'; '.join(each)} (")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "each strategy on the most devices that it can have here, at the first batch size of the grid"),
        ({"global_batch_size": 32}, "each strategy on the most devices that it can have here, at convergence."),
        ({"only": {"devices": 2, "strategy": "ddp"}}, "cells that match convergence.only (strategy), on the"),
        ({"only": {"per_device_batch_size": 16}}, "convergence.only (per_device_batch_size), each strategy"),
    ],
)
def test_the_plan_says_why(settings: dict[str, object], reason: str, make_experiment: Make) -> None:
    plan = make_plan(experiment(make_experiment, **settings), laptop())
    assert reason in "".join(plan_lines(plan))


def test_device_counts_that_the_grid_lacks_or_that_are_named_twice_are_bad_input(make_experiment: Make) -> None:
    with pytest.raises(ExperimentError, match=r"convergence.devices.*\n?.*got 3, 4; allowed: 1, 2, 64"):
        make_plan(experiment(make_experiment, devices=[1, 3, 4]), laptop())
    with pytest.raises(ExperimentError, match="devices: got it here and in only; give one of both"):
        experiment(make_experiment, devices=2, only={"devices": 2})


def of_two_batches(make: Make, **settings: object) -> Plan:
    cells = [{"strategy": "ddp", "devices": n, "global_batch_size": batch} for n, batch in ((1, 32), (2, 64))]
    found = {"epochs": 1, "seeds": 0, "devices": [1, 2], **settings}
    return make_plan(make(cells[0], cells=cells[1:], throughput=None, convergence=found), laptop())


def test_a_named_device_count_without_the_first_batch_is_bad_input(make_experiment: Make) -> None:
    with pytest.raises(ExperimentError, match=r"got 2, without a cell at the first batch size, 32; give convergence"):
        of_two_batches(make_experiment)


@pytest.mark.parametrize(
    ("settings", "batches"),
    [({"global_batch_size": 16}, [16, 16]), ({"only": {"global_batch_size": [32, 64]}}, [32, 64])],
)
def test_a_named_batch_is_trained_on_every_named_device_count(
    settings: dict[str, object], batches: list[int], make_experiment: Make
) -> None:
    cells = [trial.cell for trial in of_two_batches(make_experiment, **settings).trials if trial.cell.strategy == "ddp"]
    assert sorted((cell.devices, cell.global_batch_size) for cell in cells) == list(zip([1, 2], batches, strict=True))


UNEVEN = {"strategy": ["single", "dp", "ddp"], "devices": [1, 2]}


def uneven_plan(make: Make, throughput: object = None, batch: int = 5, **settings: object) -> Plan:
    exclude = [{"strategy": "single", "devices": 2}, {"strategy": ["dp", "ddp"], "devices": 1}]
    found = {"epochs": 1, "seeds": 0, "only": {"devices": [1, 2]}, **settings}
    return make_plan(
        make({**UNEVEN, "global_batch_size": batch}, exclude=exclude, throughput=throughput, convergence=found),
        laptop(),
    )


def test_a_batch_that_does_not_divide_is_trained_if_the_file_asks_for_it(make_experiment: Make) -> None:
    cells = {(t.cell.strategy, t.cell.uneven): t.cell for t in uneven_plan(make_experiment, uneven=True).trials}
    assert {("single", None), ("dp", True), ("ddp", True)} == cells.keys()
    assert partner_ids(cells["ddp", True])["base_id"] == cells["single", None].id
    assert not uneven_plan(make_experiment, uneven=True).impossible
    plain = uneven_plan(make_experiment)
    assert {trial.cell.strategy for trial in plan_trials(plain)} == {"single"} and len(plain.impossible) == 2


def plan_trials(plan: Plan) -> list[Trial]:
    return [trial for trial in plan.trials if trial.kind == "convergence"]


def test_an_uneven_cell_is_trained_and_not_timed(make_experiment: Make) -> None:
    plan = uneven_plan(make_experiment, throughput={"blocks": 1}, uneven=True)
    timed = {trial.cell.strategy for trial in plan.trials if trial.kind == "throughput"}
    assert timed == {"single"} and len(plan.impossible) == 2
    assert {trial.cell.strategy for trial in plan_trials(plan)} == {"single", "dp", "ddp"}


def test_a_stated_global_batch_may_be_uneven_too_and_even_cells_keep_their_ids(make_experiment: Make) -> None:
    stated = uneven_plan(make_experiment, uneven=True, global_batch_size=7)
    assert {(t.cell.strategy, t.cell.uneven) for t in plan_trials(stated)} == {
        ("single", None),
        ("dp", True),
        ("ddp", True),
    }
    even = [uneven_plan(make_experiment, batch=8, uneven=flag) for flag in (True, False)]
    assert [t.id for t in even[0].trials] == [t.id for t in even[1].trials]
