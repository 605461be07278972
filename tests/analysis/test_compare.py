"""Comparison of several runs: which cells are matched, what is claimed of them, and what is not."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from statistics import stdev
from typing import Any

import pandas as pd
import pytest

from harness.analysis.compare import Comparison, compare, parse_condition
from harness.analysis.history import side_by_side
from harness.analysis.results import load
from harness.analysis.run_pairs import Question
from harness.config.experiment import Experiment
from harness.errors import ComparisonError
from harness.plan.cell import Cell
from harness.report.compare import as_json, sentences
from harness.report.tables.text import NO_BREAK
from tests.conftest import Make
from tests.run_folders import NODE, make_run

Speed = Callable[[Cell, int], float | None]
GRID = {"model": "resnet8", "strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": 8}
SPEED = {("single", 1): 100.0, ("ddp", 1): 90.0, ("ddp", 2): 160.0}
NOISE = (0.99, 1.0, 1.01, 0.995, 1.005)
SPREAD = stdev(map(math.log, NOISE))
"""Factors of five earlier runs, and the standard deviation of their logarithms: 0.0079."""


def rate(factor: float = 1.0, *, ddp2: float = 1.0) -> Speed:
    """Speeds of a run, all by a factor and ddp on two devices by one of its own; blocks differ by 1 %."""

    def speed(cell: Cell, block: int) -> float:
        own = ddp2 if (cell.strategy, cell.devices) == ("ddp", 2) else 1.0
        return SPEED.get((cell.strategy, cell.devices), 50.0) * factor * own * (1 + 0.01 * block)

    return speed


def made(place: Path, experiment: Experiment, *speeds: Speed, at: float = 0.0, **given: Any) -> list[Path]:
    """Return runs of these speeds, each started a second after the one before."""
    return [make_run(place, experiment, one, started_at=1.7e9 + at + n, **given) for n, one in enumerate(speeds)]


def with_buckets(make: Make, sizes: int | list[int], **columns: Any) -> Experiment:
    options = {"ddp": {"bucket_cap_mb": sizes}}
    return make({**GRID, **columns}, throughput={"blocks": 1}, strategy_options=options)


@pytest.fixture(scope="module")
def experiment(make_experiment: Make) -> Experiment:
    return make_experiment(GRID, throughput={"blocks": 2})


@pytest.fixture(scope="module")
def results_folder(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five earlier runs, without a change."""
    place = tmp_path_factory.mktemp("results")
    made(place, experiment, *map(rate, NOISE))
    return place


loaded = lru_cache(maxsize=64)(load)
"""A run once for all tests: none changes a run after it has been compared."""


@pytest.fixture(scope="module", autouse=True)
def earlier_runs_are_loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.analysis.history.load", loaded)
        yield


def compared(*paths: Path, conditions: tuple[str, ...] = (), **question: Any) -> Comparison:
    return compare([loaded(path) for path in paths], Question(**question), list(map(parse_condition, conditions)))


def by_cell(comparison: Comparison) -> dict[tuple[str, int], dict[str, Any]]:
    rows = comparison.cells.to_dict("records")
    return {(str(row["strategy"]), int(row["devices"])): {str(k): v for k, v in row.items()} for row in rows}


@pytest.fixture(scope="module")
def runs(results_folder: Path, experiment: Experiment) -> dict[str, Path]:
    """The first run, a second one without a change, and one in which ddp on two devices is slower by 20 %."""
    speeds = {"first": rate(1.002), "same": rate(0.998), "slower": rate(1.0, ddp2=0.8)}
    return dict(zip(speeds, made(results_folder, experiment, *speeds.values(), at=100), strict=True))


def test_five_earlier_runs_and_no_change_claim_nothing_by_the_t_of_k_minus_1_times_s_root_2(
    runs: dict[str, Path],
) -> None:
    comparison = compared(runs["first"], runs["same"], conditions=("throughput < 0.95",))
    assert comparison.cells["change"].tolist() == ["within noise"] * 3
    assert comparison.cells["earlier_runs"].tolist() == [5] * 3
    assert comparison.gate["verdict"].tolist() == ["passes"] * 3
    assert comparison.exit_code == 0
    row = by_cell(comparison)["ddp", 2]
    half = 2.776445 * SPREAD * math.sqrt(2)
    assert row["ratio"] == pytest.approx(0.998 / 1.002)
    assert row["run_noise"] == pytest.approx(SPREAD)
    assert math.log(row["high"] / row["ratio"]) == pytest.approx(half, rel=1e-5)
    assert math.log(row["ratio"] / row["low"]) == pytest.approx(half, rel=1e-5)


def test_a_planted_slow_down_of_20_percent_is_named_and_fails(runs: dict[str, Path]) -> None:
    comparison = compared(runs["first"], runs["slower"], conditions=("throughput < 0.95",))
    changes = {key: row["change"] for key, row in by_cell(comparison).items()}
    assert changes == {("single", 1): "within noise", ("ddp", 1): "within noise", ("ddp", 2): "slower"}
    assert by_cell(comparison)["ddp", 2]["ratio"] == pytest.approx(0.8 / 1.002)
    verdicts = dict(zip(comparison.gate["cell_id"], comparison.gate["verdict"], strict=True))
    assert verdicts[by_cell(comparison)["ddp", 2]["cell_id"]] == "fails"
    assert comparison.exit_code == 3


def test_the_same_without_history_is_undecided(runs: dict[str, Path], tmp_path: Path) -> None:
    comparison = compared(runs["first"], runs["slower"], conditions=("throughput < 0.95",), history=tmp_path)
    assert comparison.cells["change"].isna().all() and comparison.cells["low"].isna().all()
    assert set(comparison.cells["reason"]) == {"no earlier runs of this cell in this environment; 3 are needed"}
    assert set(comparison.gate["verdict"]) == {"undecided"}
    assert comparison.exit_code == 4


def spread(*logs: float, factor: float = 1.0) -> Speed:
    """Speeds of which those of ddp on two devices differ between blocks by these logarithms."""

    def speed(cell: Cell, block: int) -> float:
        of_block = math.exp(logs[block % len(logs)]) if (cell.strategy, cell.devices) == ("ddp", 2) else 1.0
        return SPEED.get((cell.strategy, cell.devices), 50.0) * factor * of_block

    return speed


@pytest.mark.parametrize(
    ("logs", "later", "shown"),
    [((0.2, 0.0, -0.2), 0.673, 0.2), ((0.0, 0.5, 0.1), 0.6, None), ((-0.3, 0.3, 0.0), 1.4, 0.3)],
    ids=["identical code", "one block far off", "faster"],
)
def test_a_stated_run_noise_below_the_spread_of_the_runs_is_contradicted_and_not_used(
    make_experiment: Make, tmp_path: Path, logs: tuple[float, ...], later: float, shown: float | None
) -> None:
    three = make_experiment(GRID, throughput={"blocks": 3})
    paths = made(tmp_path, three, *(spread(*logs, factor=factor) for factor in (1.0, later)))
    comparison = compared(*paths, run_noise=0.05, conditions=("throughput < 0.95",))
    rows = by_cell(comparison)
    row = rows["ddp", 2]
    assert row["change"] == "within noise" and row["low"] < 1 < row["high"] and row["run_noise"] > 0.15
    if shown:
        assert row["run_noise"] == pytest.approx(shown)
        assert math.log(row["high"] / row["ratio"]) == pytest.approx(2.776445 * shown * math.sqrt(2), rel=1e-5)
    verdicts = dict(zip(comparison.gate["cell_id"], comparison.gate["verdict"], strict=True))
    assert verdicts[row["cell_id"]] == "undecided"
    assert rows["single", 1]["run_noise"] == 0.05 and rows["single", 1]["change"] != "within noise"  # its blocks agree
    text = " ".join(sentences(comparison))
    assert "In 1 of 3 cells the blocks of a run themselves spread by" in text and "which contradicts 5 %" in text


def test_a_stated_run_noise_above_the_spread_has_the_normal_quantile_and_a_change_beyond_a_larger_one_is_found(
    make_experiment: Make, tmp_path: Path
) -> None:
    three = make_experiment(GRID, throughput={"blocks": 3})
    quiet = made(tmp_path, three, *(spread(0.03, 0.0, -0.03, factor=factor) for factor in (1.0, 0.8)))
    comparison = compared(*quiet, run_noise=0.05)
    row = by_cell(comparison)["ddp", 2]
    assert row["run_noise"] == 0.05 and row["change"] == "slower"
    assert pd.isna(row["earlier_runs"]) and comparison.history is None
    assert pd.isna(row["speedup_low"]) and row["speedup_ratio"] == pytest.approx(1.0)
    assert math.log(row["high"] / row["ratio"]) == pytest.approx(1.959964 * 0.05 * math.sqrt(2), rel=1e-5)
    assert "contradicts" not in " ".join(sentences(comparison))
    changed = math.exp(-5 * 0.2 * math.sqrt(2))  # five times the noise of a difference
    loud = made(tmp_path, three, *(spread(0.2, 0.0, -0.2, factor=factor) for factor in (1.0, changed)), at=1e8)
    row = by_cell(compared(*loud, run_noise=0.05))["ddp", 2]
    assert row["change"] == "slower" and row["run_noise"] == pytest.approx(0.2)


def test_speedups_are_paired_inside_each_run_and_have_a_noise_of_their_own(runs: dict[str, Path]) -> None:
    comparison = compared(runs["first"], runs["slower"], conditions=("speedup < 0.95",))
    rows = by_cell(comparison)
    assert pd.isna(rows["single", 1]["speedup"])
    assert rows["ddp", 2]["first_speedup"] == pytest.approx(1.6)
    assert rows["ddp", 2]["speedup_ratio"] == pytest.approx(0.8)
    # all cells of an earlier run share its factor, so that their speedups are equal: no noise at all
    assert rows["ddp", 2]["speedup_noise"] == pytest.approx(0.0, abs=1e-12)
    assert dict(zip(comparison.gate["devices"], comparison.gate["verdict"], strict=True)) == {1: "passes", 2: "fails"}


def test_earlier_runs_count_over_as_many_blocks_as_the_shorter_run_has(
    runs: dict[str, Path], results_folder: Path, experiment: Experiment
) -> None:
    (one_block,) = made(results_folder, experiment, rate(), at=200, trials=lambda trial: trial.block == 0)
    comparison = compared(runs["first"], one_block)
    assert not comparison.runs["finished"].tolist()[1] and comparison.runs["missing"].tolist() == [0, 3]
    assert comparison.cells["blocks"].tolist() == [1] * 3
    assert comparison.cells["ratio"].iloc[0] == pytest.approx(1 / math.sqrt(1.01) / 1.002)


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"packages": {"torch": "2.14.0"}},
        {"variables": {"OMP_NUM_THREADS": "4"}},
        {"cpu": "Another CPU"},
        {"threads": 2},
    ],
    ids=str,
)
def test_earlier_runs_in_another_environment_do_not_count(
    experiment: Experiment, tmp_path: Path, node: dict[str, Any]
) -> None:
    made(tmp_path, experiment, *map(rate, NOISE[:3]), node={**NODE, **node})
    counts = compared(*made(tmp_path, experiment, rate(), rate(), at=10)).cells["earlier_runs"]
    assert counts.fillna(0).tolist() == [0 if node else 3] * 3


@pytest.mark.parametrize(
    ("node", "decided"), [({"packages": {"torch": "2.16.0"}}, True), ({"cpu": "Another CPU"}, False)]
)
def test_other_versions_are_compared_by_the_first_runs_noise_and_other_machines_are_not(
    runs: dict[str, Path], experiment: Experiment, tmp_path: Path, node: dict[str, Any], decided: bool
) -> None:
    (later,) = made(tmp_path, experiment, rate(ddp2=0.8), at=1e8, node={**NODE, **node})
    row = by_cell(compared(runs["first"], later))["ddp", 2]
    assert (row["change"] == "slower") if decided else pd.isna(row["change"])
    assert decided or row["reason"].startswith("the runs are of different machines")


def test_only_runs_before_both_count_and_each_of_them_once(experiment: Experiment, tmp_path: Path) -> None:
    earlier = made(tmp_path, experiment, *[rate()] * 3)
    first, second, third = made(tmp_path, experiment, *[rate()] * 3, at=10)
    assert compared(first, third).cells["earlier_runs"].tolist() == [3] * 3  # without the one between them
    assert compared(third, first).cells["earlier_runs"].tolist() == [3] * 3
    assert compared(second, third).cells["earlier_runs"].tolist() == [4] * 3
    assert compared(second, third, first).cells["earlier_runs"].tolist() == [3] * 6
    shutil.copytree(earlier[0], tmp_path / "copy")
    assert compared(first, third).cells["earlier_runs"].tolist() == [3] * 3
    assert compared(earlier[0], third).cells["earlier_runs"].isna().all()


def test_an_earlier_run_that_cannot_be_read_is_left_out_and_runs_without_an_environment_are_undecided(
    experiment: Experiment, tmp_path: Path
) -> None:
    paths = made(tmp_path, experiment, *[rate()] * 6)
    (paths[0] / "trials.jsonl").write_text("damaged\n")
    comparison = compared(*paths[4:])
    assert comparison.cells["earlier_runs"].tolist() == [3] * 3
    for path in paths[1:]:
        lines = (path / "environment.jsonl").read_text().splitlines(keepends=True)
        (path / "environment.jsonl").write_text("".join(line for line in lines if not line.startswith('{"group"')))
    loaded.cache_clear()
    assert set(compared(*paths[4:]).cells["reason"]) == {"the environment of a run was not recorded"}


def test_a_cell_that_a_run_lost_is_undecided_and_one_that_it_never_planned_is_only_listed(
    runs: dict[str, Path], results_folder: Path, experiment: Experiment, make_experiment: Make
) -> None:
    def failing(cell: Cell, block: int) -> float | None:
        return None if cell.devices == 2 else rate()(cell, block)

    (lost,) = made(results_folder, experiment, failing, at=300)
    comparison = compared(runs["first"], lost, conditions=("throughput < 0.5",))
    (lost_cell,) = comparison.unmatched
    assert (lost_cell["measured_in"], lost_cell["planned"]) == ("A", True)
    assert lost_cell["reason"] == "B: error: ValueError on rank 0: bad"
    assert comparison.exit_code == 4
    smaller = make_experiment({**GRID, "devices": [1]}, throughput={"blocks": 2})
    (narrow,) = made(results_folder, smaller, rate(), at=301)
    comparison = compared(runs["first"], narrow, conditions=("throughput < 0.5",))
    assert [row["reason"] for row in comparison.unmatched] == ["no cell of B"]
    assert comparison.exit_code == 0


def test_rehearsals_are_shown_and_never_decided(make_experiment: Make, tmp_path: Path) -> None:
    grid = make_experiment({**GRID, "strategy": ["single", "dp"]}, throughput={"blocks": 1})
    paths = made(tmp_path, grid, rate(), rate(0.5))
    comparison = compared(*paths, conditions=("throughput < 0.95",), run_noise=0.01)
    row = by_cell(comparison)["dp", 2]
    assert row["ratio"] == pytest.approx(0.5) and pd.isna(row["change"]) and pd.isna(row["low"])
    assert row["reason"] == "emulated"
    assert "dp" not in comparison.gate["strategy"][comparison.gate["devices"] == 2].tolist()


def test_cells_are_matched_but_for_the_axes_of_by(make_experiment: Make, tmp_path: Path) -> None:
    paths = [path for size in (25, 1) for path in made(tmp_path, with_buckets(make_experiment, size), rate(), at=-size)]
    comparison = compared(*paths, by=("ddp.bucket_cap_mb",))
    assert len(comparison.cells) == 3 and not comparison.unmatched
    row = by_cell(comparison)["ddp", 2]
    assert row["by"] == "ddp.bucket_cap_mb 25 -> 1" and row["cell_id"] != row["first_cell_id"]
    assert row["speedup_ratio"] == pytest.approx(1.0)
    assert len(compared(*paths).unmatched) == 4  # without it, ddp's cells have no counterpart


def test_noise_is_pooled_over_both_cells_of_a_pair(make_experiment: Make, tmp_path: Path) -> None:
    experiments = [with_buckets(make_experiment, size, strategy="ddp") for size in (25, 1)]
    factors = [(1.0, 1.1, 1.2), (1.0, 1.2, 1.4, 1.6)]
    for which, one in enumerate(experiments):
        made(tmp_path, one, *map(rate, factors[which]), at=10 * which)
    paths = [path for n, one in enumerate(experiments) for path in made(tmp_path, one, rate(), at=100 + n)]
    row = by_cell(compared(*paths, by=("ddp.bucket_cap_mb",)))["ddp", 2]
    squares = [(len(each) - 1) * stdev(map(math.log, each)) ** 2 for each in factors]
    assert row["earlier_runs"] == 7
    assert row["run_noise"] == pytest.approx(math.sqrt(sum(squares) / 5))


def test_cells_of_the_same_earlier_runs_have_the_degrees_of_freedom_of_those_runs(
    make_experiment: Make, tmp_path: Path
) -> None:
    both, large, small = (
        with_buckets(make_experiment, sizes, strategy="ddp", devices=2) for sizes in ([1, 25], [25], [1])
    )
    made(tmp_path, both, *map(rate, NOISE))
    paths = [path for n, one in enumerate((large, small)) for path in made(tmp_path, one, rate(), at=100 + n)]
    row = by_cell(compared(*paths, by=("ddp.bucket_cap_mb",)))["ddp", 2]
    assert (row["earlier_runs"], row["run_noise"]) == (5, pytest.approx(SPREAD))
    assert row["high"] == pytest.approx(math.exp(2.776445 * SPREAD * math.sqrt(2)), rel=1e-5)


@pytest.mark.parametrize("sections", [{}, {"throughput": None, "convergence": {"epochs": 1, "seeds": [0]}}])
def test_cells_or_trainings_that_by_cannot_tell_apart_are_an_error(
    make_experiment: Make, tmp_path: Path, sections: dict[str, Any]
) -> None:
    given = {"throughput": {"blocks": 1}, "strategy_options": {"ddp": {"bucket_cap_mb": [1, 25]}}, **sections}
    paths = made(tmp_path, make_experiment(GRID, **given), rate(), rate())
    with pytest.raises(ComparisonError, match=r"differ in nothing else \(ddp.bucket_cap_mb\).*--only"):
        compared(*paths, by=("ddp.bucket_cap_mb",))
    narrowed = compared(*paths, by=("ddp.bucket_cap_mb",), only={"ddp.bucket_cap_mb": 1})
    assert sections or (len(compared(*paths).cells), len(narrowed.cells)) == (5, 2)


@pytest.mark.parametrize("metrics", [(1.0, math.nan, 0.5), (math.nan, 0.5, 1.0), (0.5, 1.0, math.inf)])
def test_a_metric_that_is_not_finite_in_a_seed_is_left_out_and_said(
    make_experiment: Make, tmp_path: Path, metrics: tuple[float, ...]
) -> None:
    trained = make_experiment(GRID, throughput=None, convergence={"epochs": 1, "seeds": [0, 1, 2]})
    comparison = compared(*made(tmp_path, trained, rate(), rate(), accuracy=metrics.__getitem__))
    for metric in ("val_accuracy", "reported_f1"):
        row = next(row for row in comparison.convergence if row["metric"] == metric)
        assert (row["seeds"], row["first"], row["reason"]) == (2, 0.75, "no finite value in 1 of 3 seeds")
    json.loads(as_json(comparison))


def test_the_cell_in_place_of_a_failed_base_has_no_speedup_to_decide(experiment: Experiment, tmp_path: Path) -> None:
    def without_base(cell: Cell, block: int) -> float | None:
        return None if cell.strategy == "single" else rate()(cell, block)

    paths = made(tmp_path, experiment, *[without_base] * 7)
    gate = compared(*paths[5:], conditions=("speedup < 0.5",)).gate
    assert gate[["devices", "verdict"]].values.tolist() == [[2, "passes"]]


def test_a_cell_of_two_of_three_runs_is_named_with_the_run_that_lacks_it(
    make_experiment: Make, experiment: Experiment, tmp_path: Path
) -> None:
    smaller = make_experiment({**GRID, "devices": [1]}, throughput={"blocks": 2})
    runs = enumerate((experiment, smaller, experiment))
    paths = [path for n, one in runs for path in made(tmp_path, one, rate(), at=n)]
    (sentence,) = (text for text in sentences(compared(*paths)) if text.startswith("Measured in"))
    assert sentence.startswith("Measured in A, not in B: ")


def test_runs_that_share_no_cell_are_an_error_with_the_axes_that_differ(make_experiment: Make, tmp_path: Path) -> None:
    sizes = [make_experiment({**GRID, "per_device_batch_size": size}, throughput={"blocks": 1}) for size in (8, 16)]
    paths = [path for n, one in enumerate(sizes) for path in made(tmp_path, one, rate(), at=n)]
    words = r"share no cell; the two most alike differ in per_device_batch_size: 8 an.*--by per_device_batch_size$"
    with pytest.raises(ComparisonError, match=f"(?s){words}"):
        compared(*paths)
    assert len(compared(*paths, by=("per_device_batch_size",)).cells) == 3


def test_one_and_the_same_run_is_an_error(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(runs["first"])
    for second in (runs["first"], tmp_path / "link"):
        with pytest.raises(ComparisonError, match="one and the same run"):
            compared(runs["first"], second)
    with pytest.raises(ComparisonError, match="got 1 run; allowed: 2 to 26 run folders"):
        compared(runs["first"])


def test_three_runs_are_each_compared_with_the_first_and_adjusted_together(runs: dict[str, Path]) -> None:
    comparison = compared(runs["first"], runs["same"], runs["slower"])
    assert comparison.cells["run"].tolist() == ["B"] * 3 + ["C"] * 3
    pair = compared(runs["first"], runs["slower"])
    three, two = (each.cells.set_index(["run", "cell_id"])["p_adjusted"].astype(float) for each in (comparison, pair))
    cell_id = by_cell(pair)["ddp", 2]["cell_id"]
    assert three["C", cell_id] == pytest.approx(2 * two["B", cell_id], rel=1e-6)  # six tests instead of three


def test_what_differs_between_environments_is_listed(
    runs: dict[str, Path], experiment: Experiment, tmp_path: Path
) -> None:
    node = {**NODE, "packages": {"torch": "2.16.0"}}
    (later,) = made(tmp_path, experiment, rate(), at=1e8, node=node, invocation={"git_commit": "b" * 40})
    environment = compared(runs["first"], later).environment
    facts = {fact["name"]: [*fact["values"].values()] for fact in environment if fact["differs"]}
    assert facts == {"git commit": ["a" * 12, "b" * 12], "torch": ["2.15.0", "2.16.0"]}


def test_convergence_is_compared_seed_by_seed(make_experiment: Make, tmp_path: Path) -> None:
    trained = make_experiment(GRID, throughput=None, convergence={"epochs": 1, "seeds": [0, 1, 2]})
    (first,) = made(tmp_path, trained, rate())
    (later,) = made(tmp_path, trained, rate(), at=1, accuracy=lambda seed: 0.9 - 0.02 * seed)
    comparison = compared(first, later)
    rows = [row for row in comparison.convergence if row["metric"] == "val_accuracy"]
    said = next(text for text in sentences(comparison) if "less A, accuracy" in text)
    assert said.startswith(
        "Convergence, B less A, accuracy: single x1 "
    ) and "-2 (-6.97 to +2.97) % over 3 seeds" in said.replace(NO_BREAK, " ")
    assert {row["seeds"] for row in rows} == {3} and comparison.cells.empty
    half = 4.302653 * 0.02 / math.sqrt(3)
    assert rows[0]["difference"] == pytest.approx(-0.02)
    assert rows[0]["high"] == pytest.approx(-0.02 + half, rel=1e-5)
    assert (rows[0]["first"], rows[0]["later"]) == (pytest.approx(0.9), pytest.approx(0.88))


def test_trainings_of_unlike_length_or_target_have_no_interval_and_no_times(
    make_experiment: Make, tmp_path: Path
) -> None:
    def trained(epochs: int, target: float, at: float) -> Path:
        aim = {"metric": "val_accuracy", "at_least": target}
        settings = {"epochs": epochs, "seeds": [0, 1], "target": aim}
        asked = make_experiment(GRID, throughput=None, convergence=settings)
        (run,) = made(tmp_path, asked, rate(), at=at, epochs=epochs)
        return run

    first, longer = trained(1, 0.5, 0), trained(2, 0.6, 1)
    comparison = compared(first, longer)
    assert {row["metric"] for row in comparison.convergence} >= {"val_accuracy"}
    rows = comparison.convergence
    assert all(row["low"] is None and row["reason"] == "trained for 1 and 2 epochs" for row in rows)
    assert "time_to_target_s" not in {row["metric"] for row in comparison.convergence}
    assert {"convergence.epochs", "convergence.target"} <= {
        row["name"] for row in side_by_side({"A": load(first), "B": load(longer)}) if row["differs"]
    }
