"""``per_device_batch_size: max``: what is tried, what is found, and what is said of it; rounds are made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.config.values import MAX_BATCH
from harness.config.yaml_source import dump
from harness.errors import ClusterError, ExperimentError, WriteError
from harness.plan.comparison import axes_of, set_ids
from harness.plan.inventory import Inventory
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder
from harness.report.causes import ACCUMULATION, applicable, grid_of
from harness.report.row import Row, rows_of
from harness.run import largest_batch
from harness.run.events import Event, Note
from harness.run.largest_batch import FIRST, Search, with_largest_batches
from harness.run.prepare import prepare
from harness.run.request import Request, read_experiment
from harness.run.resume import reopen
from harness.system.process import INTERRUPTED
from tests.conftest import laptop
from tests.run_folders import make_run

GB = 10**9
GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [32, "max"], "model": ["resnet8"]}
SOUGHT: dict[str, Any] = {"name": "sought", "grid": GRID, "hardware": {"memory_gb": 4}, "equivalence": False}


def experiment(**changes: Any) -> Experiment:
    return parse_experiment({**SOUGHT, **changes}, source="test")


def needed(row: Row, batch: int) -> float:
    """The planted peak: one GB and, a sample, 5 MB, of ddp on two devices 6 MB."""
    return GB + batch * (6e6 if (row.strategy, row.devices) == ("ddp", 2) else 5e6)


class Rounds:
    """Stands for a round: cells whose peak is above ``memory`` bytes run out of it. ``tried``: the batches of each.

    ``lost``: whether the first attempt at each is lost.
    """

    def __init__(self, place: Path, memory: float = 1e12, outcome: str = "oom", *, lost: bool = False) -> None:
        self.place, self.memory, self.outcome, self.lost = place, memory, outcome, lost
        self.tried, self.parts = list[list[int]](), set[int]()

    def __call__(self, request: Request, content: Mapping[str, Any]) -> list[tuple[Row, int | None]]:
        path = make_run(self.place, parse_experiment(dict(content), source="round"), lambda cell, block: 100.0)
        rows = [row for row in rows_of(harness.load(path).trials) if not row.added]
        skipped: list[tuple[Row, int | None]] = [(row, None) for row in rows if row.outcome == "skipped"]
        rows = [row for row in rows if row.outcome != "skipped"]
        self.parts |= {row.options["training.accumulation"] for row in rows}
        self.tried.append([row.per_device_batch_size for row in rows])
        peaks = [needed(row, row.per_device_batch_size) for row in rows]
        before = [(Row(row, outcome="lost"), None) for row in rows] if self.lost else []
        return [*skipped, *before] + [
            (row, int(peak)) if peak <= self.memory else (Row(row, outcome=self.outcome), None)
            for row, peak in zip(rows, peaks, strict=True)
        ]


def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: Rounds, **changes: Any) -> tuple[Any, list[str]]:
    """The batches of a device by strategy and devices, and the notes."""
    events: list[Event] = []
    monkeypatch.setattr(largest_batch, "_round", rounds)
    request = Request(file=tmp_path / "x.yaml", output=tmp_path / "results")
    resolved = with_largest_batches(request, experiment(**changes), events.append, search=True)
    assert not resolved.seeks_batches
    batches: dict[tuple[str, int], set[int]] = {}
    for cell in {
        trial.cell for trial in make_plan(resolved, Inventory.assume(1, 0, cores=2)).trials if not trial.added
    }:
        batches.setdefault((cell.strategy, cell.devices), set()).add(cell.per_device_batch_size or 0)
    return batches, [event.text for event in events if isinstance(event, Note)]


def test_the_forecast_of_two_peaks_is_tried_and_is_within_3_percent_of_the_largest_multiple_of_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path / "rounds")
    batches, notes = found(tmp_path, monkeypatch, rounds)
    assert batches == {("single", 1): {32, 512}, ("ddp", 1): {32, 512}, ("ddp", 2): {32, 432}}
    assert [len(tried) for tried in rounds.tried] == [3, 3, 3] and {*rounds.tried[0]} == {FIRST}
    assert "max of resnet8 ddp 2 fp32: 432 a device (3.59 of 3.6 GB that may be used; tried 8, 32, 432)." in notes


@pytest.mark.parametrize("memory_gb", [1.7, 2.6])
def test_a_batch_that_runs_out_of_memory_before_the_limit_is_a_step_of_the_bisection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_gb: float
) -> None:
    rounds = Rounds(tmp_path / "rounds", memory=memory_gb * GB)
    batches, _ = found(tmp_path, monkeypatch, rounds)
    for (strategy, devices), (_, best) in ((key, sorted(of)) for key, of in batches.items()):
        true = (memory_gb * GB - GB) / (6e6 if (strategy, devices) == ("ddp", 2) else 5e6)
        assert max(0.97 * true - 8, 32) <= best <= true
    assert len(rounds.tried) <= 9


def test_attempts_that_were_lost_and_cells_that_cannot_run_here_are_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path / "rounds", lost=True)
    batches, _ = found(tmp_path, monkeypatch, rounds, grid={**GRID, "devices": [1, 2, 64]})
    assert batches == {("single", 1): {32, 512}, ("ddp", 1): {32, 512}, ("ddp", 2): {32, 432}}
    cells = json.loads((tmp_path / "results" / "sought" / "largest_batch.json").read_text())["cells"]
    left = [cell for cell in cells if cell["devices"] == [64]]
    assert [cell["per_device_batch_size"] for cell in left] == [[FIRST]], "it stays in the plan, with its reason"


def test_a_folder_that_cannot_be_made_is_an_error_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path / "rounds")
    monkeypatch.setattr(largest_batch, "_round", rounds)
    monkeypatch.setattr(largest_batch, "check_output", lambda request: None)
    (tmp_path / "results").write_text("a file")
    request = Request(file=tmp_path / "x.yaml", output=tmp_path / "results")
    with pytest.raises(WriteError):
        with_largest_batches(request, experiment(), lambda event: None, search=True)
    assert not rounds.tried


def test_a_rule_that_excludes_a_batch_is_none_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(tmp_path / "rounds")
    rules = [{"devices": 2, "per_device_batch_size": 32}, {"strategy": "ddp", "devices": 1}]
    batches, _ = found(tmp_path, monkeypatch, rounds, exclude=rules)
    assert batches == {("single", 1): {32, 512}, ("ddp", 2): {432}}


def test_a_search_that_a_failure_cut_short_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found(tmp_path, monkeypatch, Rounds(tmp_path / "rounds", memory=GB / 2, outcome="timeout"))
    assert not (tmp_path / "results" / "sought" / "largest_batch.json").exists()
    rounds = Rounds(tmp_path / "rounds")
    assert found(tmp_path, monkeypatch, rounds)[0]["single", 1] == {32, 512}


def test_batches_are_multiples_of_the_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {**GRID, "strategy": "single", "devices": 1, "per_device_batch_size": "max", "training.accumulation": [1, 3]}
    rounds = Rounds(tmp_path / "rounds")
    batches, _ = found(tmp_path, monkeypatch, rounds, grid=grid)
    assert rounds.tried[0] == [9, 9] and len(batches["single", 1]) == 2
    assert any(batch % 3 == 0 and batch >= 480 for batch in batches["single", 1])


@pytest.mark.parametrize("data", ["synthetic", "./images"])  # a path is relative to the file
def test_a_run_is_resumed_with_the_batches_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setattr(largest_batch, "_round", Rounds(tmp_path / "rounds"))
    file = tmp_path / "x.yaml"
    file.write_text(dump({**SOUGHT, "grid": {**SOUGHT["grid"], "data": data}}, flow=None, width=100))
    request = Request(file=file, output=tmp_path / "results")
    asked = read_experiment(request)
    resolved = with_largest_batches(request, asked, lambda event: None, search=True)
    plan = make_plan(resolved, laptop())
    run = RunFolder.create(request.output, resolved, plan, request.source_text()).path
    (request.output / "sought" / "largest_batch.json").unlink()
    monkeypatch.setattr(largest_batch, "_round", None)  # no search
    resumed = with_largest_batches(replace(request, resume=run), asked, lambda event: None, search=True)
    assert reopen(run, file, resumed)[1] == resolved


def test_a_cell_of_which_not_one_sample_fits_or_that_does_not_train_stays_in_the_run_at_batch_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Rounds(tmp_path / "rounds", memory=GB / 2)
    batches, notes = found(tmp_path, monkeypatch, small)
    assert batches["single", 1] == {1, 32} and len(small.tried) == 3
    assert "not even 1 sample a device trains in 3.6 GB; the run has it at batch 1" in notes[-1]
    broken = Rounds(tmp_path / "rounds", memory=GB / 2, outcome="error")
    _, notes = found(tmp_path, monkeypatch, broken, seed=1)
    assert len(broken.tried) == 1 and "batch 8 ended with error; the run has it at batch 8" in notes[-1]


def test_a_search_is_kept_for_the_same_cells_and_a_plan_has_a_stand_in_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, events = Request(file=tmp_path / "x.yaml", output=tmp_path / "results"), list[Event]()
    planned = with_largest_batches(request, experiment(), events.append, search=False)
    assert [grid.per_device_batch_size for grid in planned.grids] == [(32, FIRST)]
    rounds = Rounds(tmp_path / "rounds")
    first, _ = found(tmp_path, monkeypatch, rounds)
    count = len(rounds.tried)
    again, notes = found(tmp_path, monkeypatch, rounds, limits={"wall": 60}, throughput={"blocks": 2})
    assert again == first and len(rounds.tried) == count and "by an earlier search" in notes[0]
    found(tmp_path, monkeypatch, rounds, hardware={"memory_gb": 3})
    assert len(rounds.tried) > count
    damaged = tmp_path / "results" / "sought" / "largest_batch.json"
    damaged.write_text("{")
    assert found(tmp_path, monkeypatch, rounds)[0] == first


def test_the_global_batch_is_kept_by_micro_batches_of_at_most_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = {**GRID, "per_device_batch_size": "max", "global_batch_size": [1024, 96], "training.accumulation": "auto"}
    rounds = Rounds(tmp_path / "rounds")
    monkeypatch.setattr(largest_batch, "_round", rounds)
    request = Request(file=tmp_path / "x.yaml", output=tmp_path / "results")
    resolved = with_largest_batches(
        request, experiment(grid=grid, training={"accumulation": 4}), lambda event: None, search=True
    )
    assert rounds.parts == {1}, "the batch of a micro-batch"
    cells = {trial.cell for trial in make_plan(resolved, Inventory.assume(1, 0, cores=2)).trials}
    most = {("single", 1): 512, ("ddp", 1): 512, ("ddp", 2): 432}
    asked = {(c.strategy, c.devices, c.global_batch_size): c for c in cells if c.global_batch_size in (1024, 96)}
    assert len(asked) == 6 and {cell.scaling for cell in asked.values()} == {"strong"}
    for cell in cells:  # bases included
        assert cell.global_batch_size / cell.devices / cell.micro_batches <= most[cell.strategy, cell.devices]


def test_automatic_micro_batches_are_the_fewest_that_divide_the_share() -> None:
    grid = {"devices": [1, 2, 4], "strategy": "ddp", "per_device_batch_size": 48, "global_batch_size": 480}
    asked = experiment(
        grid={**grid, "training.accumulation": "auto"}, convergence={"epochs": 1, "global_batch_size": 96}
    )
    trials = make_plan(asked, Inventory.assume(1, 0, cores=4)).trials
    parts = {(t.cell.devices, t.cell.global_batch_size): t.cell.micro_batches for t in trials}
    # bases, cells that explain others, and trainings at another batch included
    asked_for = {(1, 480): 10, (2, 480): 5, (4, 480): 3, (1, 96): 2, (4, 96): 1}
    assert parts.items() >= asked_for.items()
    assert {t.cell.global_batch_size / t.cell.devices / t.cell.micro_batches for t in trials} == {48, 40, 24}
    ddp = [t.cell for t in trials if (t.kind, t.purpose, t.cell.strategy) == ("throughput", "", "ddp")]
    assert len({set_ids(axes_of(cell))["family_id"] for cell in ddp}) == 1, "one curve along devices"


def test_a_cell_of_automatic_micro_batches_is_a_grid_again(tmp_path: Path) -> None:
    grid = {"devices": [2], "strategy": "ddp", "per_device_batch_size": 48, "global_batch_size": 480}
    asked = experiment(grid={**grid, "training.accumulation": "auto"}, throughput={"blocks": 1})
    results = harness.load(make_run(tmp_path, asked, lambda cell, block: 100.0))
    row = next(row for row in rows_of(results.trials) if row.strategy == "ddp" and row.devices == 2)
    content = {**SOUGHT, "cells": [grid_of(row, asked)]}
    del content["grid"]
    cells = {t.cell.id for t in make_plan(parse_experiment(content, source="again"), laptop()).trials}
    assert row.cell_id in cells
    assert ACCUMULATION not in applicable([ACCUMULATION], row, asked), "its number follows from the devices"


def test_a_share_that_only_far_smaller_micro_batches_divide_is_no_possible_cell() -> None:
    grid = {"devices": 1, "strategy": "ddp", "per_device_batch_size": 16, "global_batch_size": 997}
    asked = experiment(grid={**grid, "training.accumulation": "auto"})
    plan = make_plan(asked, Inventory.assume(1, 0, cores=4))
    assert not plan.trials
    assert "does not divide into 63 micro-batches" in next(iter(plan.impossible.values())).text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"grid": {**GRID, "global_batch_size": 64}},
            "training.accumulation: auto in the grid, where per_device_batch_size is",
        ),
        ({"grid": {**GRID, "training.accumulation": "auto"}}, "auto needs both per_device_batch_size and global"),
        ({"training": {"accumulation": "auto"}}, "got 'auto'; allowed: an integer"),
        ({"script": "x.py", "arguments": "", "step": {"samples": 1}}, "max is found for workloads"),
        ({"training": {"accumulation": "most"}}, "accumulation"),
        ({"grid": {**GRID, "per_device_batch_size": "most"}}, "per_device_batch_size"),
    ],
)
def test_batches_that_contradict_each_other_are_one_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        experiment(**changes)


def test_a_store_is_refused_and_a_round_has_no_bases_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_store = Request(tmp_path / "x", dump(SOUGHT, flow=None, width=100), store="s3://b/f")
    with pytest.raises(ExperimentError, match="max is kept in the local folder"):
        read_experiment(in_store)
    grid = {"strategy": "ddp", "devices": 2, "per_device_batch_size": 8, "model": "resnet8"}
    rounds: list[tuple[Request, Experiment]] = []
    monkeypatch.setattr(largest_batch, "run", lambda *asked: rounds.append(asked[:2]) or INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        largest_batch._round(Request(tmp_path / "x"), largest_batch._content(experiment(), [grid]))
    with ExitStack() as stack:
        trials = prepare(*rounds[0], stack, lambda event: None).plan.trials
    assert [(trial.cell.strategy, trial.cell.devices) for trial in trials] == [("ddp", 2)]


def test_cpu_slots_need_a_stated_memory_before_anything_is_started(tmp_path: Path) -> None:
    request = Request(file=tmp_path / "x.yaml", output=tmp_path)
    with pytest.raises(ExperimentError, match="max needs hardware"):
        with_largest_batches(request, experiment(hardware={}), lambda event: None, search=True)


def test_a_machine_that_holds_no_cell_is_one_error(tmp_path: Path) -> None:
    request = Request(file=tmp_path / "x.yaml", output=tmp_path)
    many = experiment(grid={**GRID, "strategy": "ddp", "devices": 4096})
    with pytest.raises(ClusterError, match="no cell can run on"):
        with_largest_batches(request, many, lambda event: None, search=True)


@pytest.mark.parametrize("per_sample", [1.0, 7.0, 1e4, 1e7, 1e9])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_search_ends_near_the_limit_for_any_amount_a_sample(per_sample: float, noise: float) -> None:
    one, limit = Search({}), 3.6e9
    for number in range(largest_batch.MOST_ROUNDS):
        if (batch := one.next_batch(limit)) is None:
            break
        one.add(batch, int(1e9 * (1 + noise * (number % 2)) + per_sample * batch), limit)
    truly = min((limit - 1e9) / per_sample, MAX_BATCH)
    assert one.fits <= truly
    assert noise or one.fits >= min(0.9 * truly - 8, 8 * 4 * 16**9), "as far as the rounds reach"


@pytest.mark.slow
def test_a_round_trains_and_gives_the_peak_of_each_cell(tmp_path: Path) -> None:
    """In this process: of one rank."""
    grid = {"strategy": "single", "per_device_batch_size": "max", "model": "resnet8", "data": "digits"}
    asked = experiment(grid=grid, hardware={"memory_gb": 64}, workload="image_classification")
    content = largest_batch._content(asked, [{**grid, "per_device_batch_size": [16]}])
    ((row, peak),) = largest_batch._round(Request(file=tmp_path / "x.yaml", inline=True), content)
    assert (row.outcome, row.per_device_batch_size) == ("ok", 16) and peak and peak > 10**7
