"""Samples to a target by batch, and from them time and price: the fit, its intervals, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import harness
from harness.analysis import time_to_target
from harness.analysis.doubts import CountedDoubt
from harness.analysis.prediction.predictions import Asked
from harness.analysis.results import Results
from harness.analysis.time_to_target import Work, decision, fit_samples
from harness.cli.arguments import parse_target
from harness.config.load import parse_experiment
from harness.config.sections import Target
from harness.errors import PredictionError
from harness.plan.cell import Cell
from harness.plan.planner import make_plan
from harness.record.schema import table_of
from harness.report.decide import Wish, decision_lines, decision_table, pilot, write_decision
from harness.report.row import rows_of
from harness.report.tables.text import duration
from tests.conftest import laptop
from tests.run_folders import make_run

TARGET = Target(metric="val_accuracy", at_least=0.9)
BATCHES = [32, 64, 128]
CONTENT: dict[str, Any] = {
    "name": "batches",
    "grid": {"strategy": ["single", "ddp"], "devices": [1, 2], "global_batch_size": BATCHES, "model": ["resnet8"]},
    "training": {"lr_scaling": "sqrt", "lr_base_batch_size": 32},
    "throughput": {"blocks": 3, "explain": False, "twin": False},
    "convergence": {"epochs": 9, "seeds": [0, 1, 2], "only": {"global_batch_size": BATCHES}},
    "equivalence": False,
    "preflight": False,
}


def law(batch: int) -> float:
    return 3000 * (1 + batch / 96)


def test_the_law_is_found_in_noise_and_a_law_without_a_critical_batch_has_none() -> None:
    random, batches = np.random.default_rng(1), [16, 32, 64, 128, 256] * 20
    samples = [law(batch) * math.exp(0.1 * random.standard_normal()) for batch in batches]
    found = fit_samples(batches, samples)
    assert found.efficient == pytest.approx(3000, rel=0.1) and found.critical == pytest.approx(96, rel=0.2)
    assert found.spread == pytest.approx(0.1, rel=0.2) and found.trained == (16, 32, 64, 128, 256)
    assert found.at(512)[0] == pytest.approx(law(512), rel=0.1)
    falling = fit_samples([16, 16, 64, 64], [1000, 1010, 900, 910])
    assert falling.critical == math.inf and falling.at(64)[0] == falling.at(4096)[0]
    with pytest.raises(ValueError, match="more than in proportion"):
        fit_samples([10, 10, 20, 20, 40, 40], [100, 110, 230, 240, 500, 510])
    assert found.lack_of_fit and found.lack_of_fit > 0.01 and found.at(64, 0.3)[1] > 2 * found.at(64)[1]
    bent = [1000.0, 1010.0, 990.0, 1000.0, 1010.0, 990.0, 3000.0, 3010.0, 2990.0]  # the rate fails at the largest batch
    lack = fit_samples([32] * 3 + [64] * 3 + [128] * 3, bent).lack_of_fit
    assert lack is not None and lack < 1e-6
    alike = [3000.0] * 6 + [6000.0] * 3  # the target is looked at once an epoch
    with_epochs = [fit_samples([32] * 3 + [64] * 3 + [128] * 3, alike, size).lack_of_fit for size in (0.0, 0.02, 0.3)]
    assert [each is not None and each < 0.05 for each in with_epochs] == [True, True, False]
    with pytest.raises(ValueError, match="three trainings of two batches"):
        fit_samples([16, 16, 16], [1, 2, 3])


def test_the_interval_holds_a_further_training_in_95_of_100() -> None:
    random, held, draws = np.random.default_rng(2), 0, 600
    batches = [32, 64, 128] * 3
    for _ in range(draws):
        found = fit_samples(batches, [law(batch) * math.exp(0.15 * random.standard_normal()) for batch in batches])
        samples, half = found.at(256)
        held += abs(math.log(law(256)) + 0.15 * random.standard_normal() - math.log(samples)) <= half
    assert 0.925 <= held / draws <= 0.975


def rate(cell: Cell, block: int) -> float:
    apart = (0.9999 if cell.strategy == "ddp" else 1.0) * (0.9998 if cell.optimizer.get("lr") == 0.2 else 1.0)
    return 1000.0 * (1.6 if cell.devices == 2 else 1.0) * (1 + 0.01 * block) * apart


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """The results with these changes of the file, as JSON, once for all tests."""

    def of(changes: str) -> Results:
        experiment = parse_experiment({**CONTENT, **json.loads(changes)}, source="test")
        return harness.load(make_run(tmp_path_factory.mktemp("study"), experiment, rate))

    return cache(of)


Study = Callable[..., Results]


@pytest.fixture
def study(measured: Callable[[str], Results], monkeypatch: pytest.MonkeyPatch) -> Study:
    """Results of a run whose trainings reach the target after the samples of ``law``, a tenth apart by seed."""
    whole = time_to_target.convergence

    def of(
        reached: Callable[[Any], bool] = lambda row: True,
        needs: Callable[[int], float] = law,
        spread: float = 0.1,
        size: int = 20_000,
        **changes: Any,
    ) -> Results:
        def trained(*arguments: Any) -> Any:
            frame = whole(*arguments)
            samples = [round(needs(row.global_batch_size) * (1 + spread * (row.seed - 1))) for row in rows_of(frame)]
            hits = [*map(reached, rows_of(frame))]
            return frame.assign(samples_to_target=samples, reached=hits, training_samples=size, epochs_to_target=9)

        monkeypatch.setattr(time_to_target, "convergence", trained)
        return measured(json.dumps(changes))

    return of


NO_WISH = Wish()


def answer(results: Results, wish: Wish = NO_WISH, devices: tuple[int, ...] = ()) -> tuple[Any, list[Work], str]:
    table, works = decision(results, TARGET, Asked(tuple(devices)), wish.price)
    return table, works, " ".join(decision_lines(table, works, wish))


def test_time_and_price_are_samples_over_throughput_and_the_frontier_has_no_better_setting(
    study: Study, tmp_path: Path
) -> None:
    results = study()
    table, works, said = answer(results, Wish(price=2.5, currency="USD"))
    assert len(table) == 6 and table["source"].eq("measured").all() and table["trained"].all()
    start = time_to_target._start_s(results)
    for row in rows_of(table):
        speed = 1010.0 * (1.6 if row.devices == 2 else 1.0)
        assert row.time_s == pytest.approx(law(row.global_batch_size) / speed + start, rel=0.01)
        assert row.price == pytest.approx(2.5 * row.devices * row.time_s / 3600)
        assert row.time_low_s < row.time_s < row.time_high_s
    best = {(row.devices, row.global_batch_size) for row in rows_of(table) if row.on_frontier}
    assert best == {(1, 32), (2, 32)}
    assert "twice as many at about batch 96" in said and "the cheapest is single on 1 device, global batch 32" in said
    assert "The fastest is ddp on 2 devices, global batch 32" in said and "USD" in said
    shown = decision_table(table, Wish(price=2.5, currency="USD"))
    assert shown.lines[0].cells[0] == "ddp x2" and len(shown.lines) == 6
    assert said.startswith(f"* No other is both faster and cheaper. Times include {duration(start)} in which")
    assert [path.suffix for path in write_decision(tmp_path / "figures", table, Wish())] == [".png", ".svg"]
    unknown = table.assign(time_s=pd.NA)
    assert write_decision(tmp_path / "figures", unknown, Wish()) == [] == [*(tmp_path / "figures").glob("decision.*")]
    assert len(works) == 1
    for row in time_to_target._measured(results):  # of one further process, not of the mean of three blocks
        assert row.log_half == pytest.approx(2 * math.log(row.throughput_high / row.throughput_per_s))


def test_what_fits_is_chosen_by_the_upper_ends_and_nothing_that_fits_is_said(study: Study) -> None:
    results = study()
    table, *_ = answer(results)
    rows = {(row.devices, row.global_batch_size): row for row in rows_of(table)}
    between = (rows[2, 32].time_high_s + rows[1, 32].time_high_s) / 2
    assert "use ddp on 2 devices, global batch 32" in answer(results, Wish(within_s=between))[2]
    assert "use single on 1 device, global batch 32" in answer(results, Wish(within_s=1e6))[2]
    rich = Wish(price=2.5, budget=1e6)
    assert "use ddp on 2 devices, global batch 32" in answer(results, rich)[2]  # the fastest that it pays
    nothing = answer(results, Wish(within_s=0.001))[2]
    assert "nothing fits with 95 % certainty: the fastest takes up to" in nothing


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {}}, "no rule of the learning rate is declared"),
        ({"convergence": None}, "no training was measured"),
        ({"convergence": {**CONTENT["convergence"], "seeds": [0, 1]}}, "needs 3 global batches with 3 seeds each"),
    ],
)
def test_what_cannot_be_known_is_refused_with_what_to_measure_and_a_pilot_that_plans(
    study: Study, changes: dict[str, Any], words: str
) -> None:
    results = study(**changes)
    table, works, said = answer(results)
    assert table.empty and words in said
    found = pilot(results, TARGET, table, works, Wish())
    asked = parse_experiment(yaml.safe_load(found.file), source="pilot")
    assert found.why.startswith("What is missing: trainings at 3 global batches, 3 seeds each")
    assert asked.convergence and len(asked.convergence.seeds) >= 3 and asked.throughput
    assert asked.grid and len(asked.grid.global_batch_size or ()) == 3 and asked.grid.devices == (1, 2)
    assert set(asked.training.lr_scaling) != {"none"}
    plan = make_plan(asked, laptop())
    trained = {(trial.cell.global_batch_size, trial.seed) for trial in plan.trials if trial.kind == "convergence"}
    assert len(trained) == 9  # of every batch and seed


def test_batches_that_no_training_reached_and_far_ones_are_refused(study: Study) -> None:
    late = study(lambda row: row.global_batch_size != 128 or row.seed != 1)
    table, works, said = answer(late)
    assert "not reached by each training at 128" in said
    found = pilot(late, TARGET, table, works, Wish())
    assert "twice the epochs" in found.why and "epochs: 18" in found.file
    annealed = study(lambda row: False, schedule={"name": "CosineAnnealingLR", "T_max": 9})
    table, works, _ = answer(annealed)
    assert "T_max: 18" in pilot(annealed, TARGET, table, works, Wish()).file
    more = [*BATCHES, 256]
    grid = {**CONTENT["grid"], "global_batch_size": more}
    training = {**CONTENT["convergence"], "only": {"global_batch_size": more}, "seeds": [0, 1, 2, 3]}
    trains = {"convergence": training, "grid": grid}
    results = study(lambda row: row.global_batch_size != 256 or row.seed != 3, **trains)
    table, works, _ = answer(results)
    assert works[0].law.trained == (32, 64, 128)  # nothing of 256 counts
    reasons = {row.global_batch_size: row.reason for row in rows_of(table)}
    assert reasons[256] == "not each training at batch 256 reached the target" and reasons[128] is None


@pytest.mark.parametrize(
    "needs", [{32: 1000, 64: 3000, 128: 1000}, {32: 3000, 64: 2000, 128: 1000}, {32: 1000, 64: 1000, 128: 3000}]
)
def test_trained_batches_off_the_law_have_the_mean_of_their_own_trainings_and_others_none(
    study: Study, needs: dict[int, float]
) -> None:
    grid = {**CONTENT["grid"], "global_batch_size": [*BATCHES, 256]}
    table, works, said = answer(study(needs=lambda batch: needs.get(batch, 0), spread=0.02, grid=grid))
    rows = {(row.devices, row.global_batch_size): row for row in rows_of(table)}
    assert [round(rows[1, batch].samples) for batch in BATCHES] == [needs[batch] for batch in BATCHES]
    assert "was not trained, and the samples at 32, 64, 128 do not follow E (1 + B / Bc)" in rows[1, 256].reason
    assert "each batch has the mean of its own trainings (9 trainings in all)" in said
    best = min(needs, key=lambda batch: needs[batch])
    assert f"the cheapest is single on 1 device, global batch {best}:" in said
    row = rows[1, best]
    assert row.time_low_s < row.time_s < row.time_high_s < 1.3 * row.time_s
    assert works[0].law is None


def test_an_untrained_batch_is_refused_above_a_tenth_of_the_data_and_under_a_warm_up_in_epochs(study: Study) -> None:
    grid = {**CONTENT["grid"], "global_batch_size": [*BATCHES, 256]}
    rows = {row.global_batch_size: row for row in rows_of(answer(study(grid=grid, size=2000))[0])}
    assert rows[256].reason == "batch 256 is more than a tenth of the 2,000 training samples"
    warms = {**CONTENT["training"], "warmup_epochs": 2}
    rows = {row.global_batch_size: row for row in rows_of(answer(study(grid=grid, training=warms))[0])}
    assert rows[128].time_s > 0 and "the schedule is fixed" in rows[256].reason


def test_only_batches_near_to_what_was_trained_are_extrapolated_to(study: Study) -> None:
    more = [*BATCHES, 256, 512]
    grid = {**CONTENT["grid"], "global_batch_size": more}
    rows = {row.global_batch_size: row for row in rows_of(answer(study(grid=grid))[0])}
    assert rows[256].time_s > 0 and rows[256].trained is False
    assert rows[512].reason == "batch 512 is beyond 2 times the largest that was trained (128)"
    schedule = {"name": "CosineAnnealingLR", "T_max": 9}
    rows = {row.global_batch_size: row for row in rows_of(answer(study(grid=grid, schedule=schedule))[0])}
    assert rows[128].time_s > 0 and "the schedule is fixed" in rows[256].reason


def test_a_setting_is_named_with_what_tells_it_from_the_others_and_evaluation_is_said_to_be_left_out(
    study: Study,
) -> None:
    results = study(loader={"workers": [0, 2]})
    table, works, said = answer(results)
    assert re.search(r"the cheapest is single on 1 device, workers=[02], global batch 32", said)
    assert "workers=" in " ".join(cell for row in decision_table(table, NO_WISH).rows for cell in row.cells)
    assert "and no evaluation." in said
    assert "and no evaluation, which took 2 s an epoch." in " ".join(decision_lines(table, works, NO_WISH, 2.0))


def test_a_pilot_is_of_the_work_of_its_answer(study: Study) -> None:
    grid = {**CONTENT["grid"], "model": ["resnet8", "resnet14"]}
    results = study(lambda row: row.model == "resnet14", grid=grid)
    table, works, _ = answer(results)
    found = pilot(results, TARGET, table, works, Wish())
    asked = parse_experiment(yaml.safe_load(found.file), source="pilot")
    assert "more seeds" in found.why and asked.grid and asked.grid.model == ("resnet14",)


def test_a_pilot_keeps_a_rule_for_the_number_of_blocks(study: Study) -> None:
    rule = {"at_least": 3, "at_most": 6, "halfwidth": 0.05}
    results = study(throughput={"blocks": rule, "explain": False, "twin": False})
    table, works, _ = answer(results)
    asked = parse_experiment(yaml.safe_load(pilot(results, TARGET, table, works, Wish()).file), source="pilot")
    assert asked.throughput and asked.throughput.blocks == results.experiment.throughput.blocks  # type: ignore[union-attr]


def test_the_pilot_of_an_answer_has_more_seeds_at_the_chosen_batch(study: Study) -> None:
    results = study()
    table, works, _ = answer(results)
    found = pilot(results, TARGET, table, works, Wish())
    asked = parse_experiment(yaml.safe_load(found.file), source="pilot")
    assert found.why.startswith("Most of the interval comes from the samples: 3 more seeds")
    assert asked.convergence and asked.convergence.seeds == (0, 1, 2, 3, 4, 5)
    assert asked.grid and asked.grid.global_batch_size == (32, 64, 128)  # its run alone answers


def test_what_has_no_interval_or_another_recipe_is_no_answer(study: Study) -> None:
    few = study(throughput={"blocks": 2, "explain": False, "twin": False})
    table, *_ = answer(few)
    assert table["time_s"].isna().all() and set(table["reason"]) == {"needs 3 blocks for an interval, has 2"}
    two = study(optimizer={"name": "SGD", "lr": [0.1, 0.2]})
    _, works, _ = answer(two)
    assert {work.name.partition(" · optimizer.")[2] for work in works} == {"lr=0.1", "lr=0.2"}
    assert all(len(work.samples) == 9 for work in works)
    table, works, _ = answer(two)
    assert table["time_s"].notna().all() and table.groupby("work").size().tolist() == [6, 6]  # the slower one's too
    name = str(rows_of(table)[0].work)
    lacks = (table["devices"] * 64 == table["global_batch_size"]) & (table["work"] == name)
    table.loc[lacks, ["time_s", "reason"]] = [math.nan, "unknown"]
    (line,) = (line for line in decision_lines(table, works, NO_WISH) if line.startswith("Without a time"))
    rate = name.partition("optimizer.")[2]
    places = {f"single x1 · {rate} at batch 64", f"ddp x2 · {rate} at batch 128"}
    head, named, why = line.removesuffix(".").split(": ")
    assert (head, set(named.split("; ")), why) == (f"Without a time, {name}", places, "unknown")


def test_devices_that_were_not_measured_are_predicted_or_have_a_reason(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = copy(study())
    table, _, said = answer(results, devices=(2, 8))
    assert "Without a time: 8 devices: not measured, and not predicted" in said
    assert len(decision_table(table, NO_WISH).lines) == 3
    reasons = {row.devices: row.reason for row in rows_of(table)}
    assert reasons == {2: None, 8: "not measured, and not predicted: no exchanges of this setting were recorded"}
    on_nodes, works = decision(results, TARGET, Asked((2, 2, 2), (1, 2, 2)))
    found = {(row.devices, row.nodes): row.reason for row in rows_of(on_nodes)}
    assert found[2, 1] is None and "not predicted" in found[2, 2] and len(on_nodes) == 4  # three batches of the first
    assert "Without a time: 2 devices of 2 nodes: not" in " ".join(decision_lines(on_nodes, works, NO_WISH))
    slow = results.leaders.assign(nodes=2, throughput_per_s=500.0, cell_id="slower")  # and so no leader
    vars(results)["leaders"] = pd.concat([results.leaders, slow])
    slower = rows_of(decision(results, TARGET, Asked((2, 2), (1, 2)))[0])
    assert {(row.nodes, round(row.throughput_per_s)) for row in slower} == {(1, 1616), (2, 500)}
    vars(results)["leaders"] = study().leaders
    known = rows_of(results.leaders)[0]
    asked = {**known, "kind": "asked", "devices": 8, "step_s": 0.1, "high": 0.11, "low": 0.09, "refusal": None}
    lacks = {**asked, "devices": 16, "global_batch_size": None, "step_s": None, "refusal": "32 does not divide by 16"}
    asked["marks"] = ("far", "assumed link: ethernet-10g")
    both = [{**asked, "throughput_per_s": 4000.0}, {**lacks, "throughput_per_s": None}]
    columns = table_of("prediction").names
    frame = table_of("prediction").frame([{name: row.get(name) for name in columns} for row in both])
    monkeypatch.setattr(time_to_target, "predict", lambda results, asked, links: frame)
    vars(results)["exchanges"] = pd.DataFrame([{"cell_id": "a"}])
    rows = {row.devices: row for row in rows_of(answer(results, devices=(8, 16))[0])}
    assert (
        rows[8].source == "predicted, assumed link: ethernet-10g"
        and rows[8].time_s
        and rows[16].reason == "32 does not divide by 16"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("val_accuracy=0.95", Target(metric="val_accuracy", at_least=0.95)),
        ("val_loss=0.3", Target(metric="val_loss", at_most=0.3)),
        ("val_mae <= 2", Target(metric="val_mae", at_most=2.0)),
        ("val_iou>=0.5", Target(metric="val_iou", at_least=0.5)),
    ],
)
def test_a_target_is_read_from_text(text: str, expected: Target) -> None:
    assert parse_target(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "0.95",
        "val_accuracy=",
        "val_accuracy=good",
        "val_a=1.2.3",
        "val accuracy=1",
        "epoch=1",
        "val_mae=2",
        "val_loss=1e999",
    ],
)
def test_a_wrong_target_is_one_error(text: str) -> None:
    with pytest.raises(PredictionError, match="allowed: METRIC=VALUE"):
        parse_target(text)


def test_what_no_interval_has_is_said_beside_the_answer(study: Study) -> None:
    """Epochs that run at another speed than the timed windows."""
    results = copy(study())
    cells = results.cells
    slow = cells["doubts"].iloc[0].__class__((CountedDoubt("other speed in epochs", 3, 3),))
    vars(results)["cells"] = cells.assign(doubts=[slow if n == 2 else () for n in cells["devices"]])
    said = answer(results)[2]
    assert (
        "Do not rely on the time of ddp on 2 devices, global batch 32, " in said and "by the time to a target" in said
    )
    assert "Do not rely" not in answer(study())[2]


def test_a_pilot_is_of_what_was_measured_whatever_devices_are_asked_for(study: Study) -> None:
    results = study()
    table, works, said = answer(results, devices=(16, 64))
    assert "Without a time: 16 devices; 64 devices: not measured" in said
    found = pilot(results, TARGET, table, works, Wish())
    asked = parse_experiment(yaml.safe_load(found.file), source="pilot")
    assert asked.grid and asked.grid.devices == (1, 2) and asked.grid.global_batch_size == (32, 64, 128)
    assert asked.throughput and asked.throughput.explain and "from which it is predicted" in found.why


def test_a_pilot_trains_batches_that_an_answer_may_have_and_a_device_may_hold(study: Study) -> None:
    grid = {**CONTENT["grid"], "global_batch_size": [128]}
    results = study(grid=grid, size=1437, convergence={**CONTENT["convergence"], "only": {"global_batch_size": 128}})
    table, works, _ = answer(results)
    content = yaml.safe_load(pilot(results, TARGET, table, works, Wish()).file)
    assert content["grid"]["global_batch_size"] == [32, 64, 128]  # a tenth of the data is 143
    grid = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [32], "model": ["resnet8"]}
    results = study(grid={**grid, "data": "synthetic"}, convergence=None)
    found = pilot(results, TARGET, *answer(results)[:2], Wish())
    content = yaml.safe_load(found.file)
    assert content["grid"]["per_device_batch_size"] == [32] and content["grid"]["training.accumulation"] == ["auto"]
    assert "name your own in the file" in found.why
    plan = make_plan(parse_experiment(content, source="pilot"), laptop())
    assert (
        max(-(-trial.cell.global_batch_size // trial.cell.devices // trial.cell.micro_batches) for trial in plan.trials)
        <= 32
    )
