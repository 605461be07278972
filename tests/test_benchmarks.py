"""The benchmarks run, and judge what they measured as they say."""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from harness.config.load import parse_experiment
from harness.launch.protocol import TrialStarted
from harness.plan.planner import make_plan
from tests.benchmarks import control_plane, growth, overhead, run_time, scale, shared_groups
from tests.conftest import laptop


def sizes(**changed: float) -> dict[str, float]:
    """What growth measured at its largest size, all of it well within the limits."""
    row = {name: 5.0 for name in (*growth.COLUMNS, "record first half", "record second half")}
    return {**row, "peak_gib": 1.0, "trials": 10_000.0, "cells": 10_000.0, **changed}


def smaller(row: dict[str, float], part: float) -> dict[str, float]:
    return {name: value if name == "peak_gib" else part * value for name, value in row.items()}


def test_linear_growth_within_the_limits_passes_and_small_sizes_are_not_judged() -> None:
    result, missed = growth.verdict([[smaller(sizes(), 0.1), smaller(sizes(), 0.3), sizes()]])
    assert not missed and result.endswith("met")
    assert growth.verdict([[smaller(sizes(), 0.001), smaller(sizes(report=9.0), 0.05)]])[1] is False


@pytest.mark.parametrize(
    ("changed", "output"),
    [
        ({"report": 30.1}, "report 30.1 s"),
        ({"peak_gib": 2.1}, "2.10 GiB"),
        ({"record second half": 7.0}, "the second half of recording 10,000 took 1.40 of the first"),
        ({"read": 7.0}, "read to 10,000: 1.40 a trial"),
    ],
)
def test_a_missed_target_is_named(changed: dict[str, float], output: str) -> None:
    result, missed = growth.verdict([[smaller(sizes(), 0.3), sizes(**changed)]])
    assert missed and output in result and result.endswith("MISSED")


def test_sizes_are_compared_inside_a_round_and_the_median_round_is_judged() -> None:
    calm = [smaller(sizes(), 0.3), sizes()]
    slow = [smaller(row, 1.9) for row in calm]  # all of the machine, for a minute: nothing of it is growth
    slow = [{**row, "trials": quiet["trials"], "cells": quiet["cells"]} for row, quiet in zip(slow, calm, strict=True)]
    once = [smaller(sizes(), 0.3), sizes(read=9.0)]
    assert not growth.verdict([calm, slow, once])[1]
    result, missed = growth.verdict([once, calm, once])
    assert missed and "read to 10,000: 1.80 a trial" in result
    median, most = growth.over([calm, slow, once], statistics.median), growth.over([calm, slow, once], max)
    assert (median[1]["read"], most[1]["read"], most[1]["trials"]) == (9.0, 9.5, 10_000)


def test_the_targets_of_run_time_are_judged_each() -> None:
    ours = {"outside_s": 10.0, "trial_beside_steps_max_s": 0.2}
    others = {"torchrun": {"outside_s": 40.0}, "fit() each": {"outside_s": 80.0}}
    rows = {"harness": ours, "explained": dict(ours), **others}
    assert not any(missed for _, missed in run_time._verdicts(rows).values())
    rows["torchrun"]["outside_s"], rows["explained"]["trial_beside_steps_max_s"] = 29.0, 0.6
    result = run_time._verdicts(rows)
    assert {way for way, (_, missed) in result.items() if missed} == {"torchrun", "explained"}
    assert result["torchrun"][0] == "MISSED: 0.333" and result["fit() each"][0] == "met: 0.167"


def test_run_time_takes_one_block_of_the_default_experiment_with_equal_steps() -> None:
    batches, strategies = [16, 32], ["single", "dp", "ddp", "fsdp"]
    experiment = run_time.experiment_of(batches, strategies, explained=False)
    plan = make_plan(experiment, laptop())
    timed = [trial for trial in plan.trials if trial.timed]
    assert len(timed) == 2 * len(batches) * 5 and {trial.purpose for trial in timed} == {""}
    assert {trial.kind for trial in plan.trials} == {"throughput", "convergence"} and plan.blocks == 1
    assert experiment.throughput and experiment.throughput.window_seconds == 0.0
    apart = run_time.apart(plan)
    assert [len(group.trials) for group in apart.groups] == [1] * len(plan.trials)
    more = make_plan(run_time.experiment_of(batches, strategies, explained=True), laptop())
    assert {trial.purpose for trial in more.trials} >= {"", "twin"}


def test_blocks_of_shared_groups_and_of_one_group_a_placement_alternate() -> None:
    plan = shared_groups.plan_of(shared_groups.DEFAULT, 2, laptop())
    assert not any(trial.kind == "convergence" for trial in plan.trials)
    cells, groups = [], []
    for block in range(4):
        in_block = [group for group in plan.groups if group.block == block]
        cells.append({trial.cell for group in in_block for trial in group.trials if not trial.purpose})
        groups.append(len(in_block))
    assert groups[0] == groups[3] == 1 and groups[1] == groups[2] == 3  # single x1 and ddp x1; ddp, fsdp x2; dp x2
    assert cells[0] == cells[1] == cells[2] == cells[3] and len(cells[0]) == 11


@pytest.mark.parametrize(
    ("speeds", "memory", "wrong"),
    [
        ([0.99, 1.0, 1.01], [1.0, 1.01, 1.0], []),
        ([1.1, 1.11, 1.1], [1.0, 1.0, 1.0], ["pooled", "cells that exclude 1: b:"]),
        ([0.8, 1.0, 1.2], [1.0, 1.0, 1.0], ["pooled"]),  # too wide to tell
        ([0.99, 1.0, 1.01], [1.03, 1.03, 1.02], ["peak memory"]),
    ],
)
def test_shared_groups_judges_the_pooled_ratio_each_cell_and_its_memory(
    speeds: list[float], memory: list[float], wrong: list[str]
) -> None:
    even = [1.001, 1.0, 0.999]
    rows, said, missed = shared_groups.verdict({"a": even, "b": speeds}, {"a": even, "b": memory})
    assert [row[0] for row in rows] == ["a", "b"] and missed is bool(wrong)
    parts = [part for part in said.split("; ") if part.endswith("MISSED")]
    assert len(parts) == len(wrong) and all(part.startswith(start) for part, start in zip(parts, wrong, strict=True))


def test_growth_prints_every_round_and_compares_no_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(name: str, one: str, size: str, folder: str, plain: str) -> dict[str, float]:
        return {**sizes(), "trials": float(size), "cells": float(size)}

    monkeypatch.setattr(growth, "measured_apart", measured)
    path = tmp_path / "figures.json"
    options = ["--sizes", "60", "40", "--rounds", "2", "--plain", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["growth", *options])
    assert growth.main() == 0
    result = json.loads(path.read_text())["figures"]
    assert [(row["round"], row["cells"]) for row in result] == [(0, 40), (0, 60), (1, 40), (1, 60)]
    assert "median of 2 rounds" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_growth_takes_a_study_through_every_stage_in_a_process_of_its_own(tmp_path: Path) -> None:
    row = growth.measured_apart("growth", "--one", "50", str(tmp_path))
    assert all(row[stage] > 0 for stage in growth.COLUMNS) and 40 <= row["trials"] <= 80
    (run,) = (tmp_path / "growth").iterdir()
    assert (run / "report.html").stat().st_size > 10_000
    assert len((run / "tables" / "waterfall.csv").read_text().splitlines()) > 1


def counted(ranks: int, **changed: float) -> control_plane.Row:
    """What the control plane costs on so many ranks, a rank and a trial as much as on others."""
    return {**dict.fromkeys(control_plane.COLUMNS, 8.0), "ranks": float(ranks), **changed}


@pytest.mark.parametrize(
    ("changed", "output"),
    [
        ({"start_s": 500.0, "trial_s": 90.0, "peak_mib": 70.0, "threads": 12.0}, ""),  # whatever the seconds
        ({"messages_per_trial": 9.0}, "messages a trial: 8.0, then 9.0"),
        ({"bytes_per_rank_and_trial": 900.0}, "bytes a rank and trial: 8.0, then 900.0"),
        ({"threads": 13.0}, "driver's threads: 5 more"),
        ({"peak_mib": 80.0}, "driver's peak, MiB: 72 more"),
    ],
)
def test_what_grows_with_the_ranks_is_named_and_nothing_else(changed: dict[str, float], output: str) -> None:
    assert control_plane.missed([counted(2), counted(8), counted(16, **changed)]) == [output] * bool(output)


def test_messages_to_the_driver_are_counted_by_their_class() -> None:
    class Group:
        def take(self, timeout_s: float) -> list[TrialStarted]:
            return [TrialStarted("a"), TrialStarted("b" * 1000)]

    traffic = control_plane.Traffic()
    traffic.count(Group)  # type: ignore[arg-type]
    assert len(Group().take(0.0)) == 2
    assert traffic.messages == {"TrialStarted": 2} and 1000 < traffic.sizes["TrialStarted"] < 2000
    assert traffic.threads >= 1


@pytest.mark.parametrize("ranks", control_plane.RANKS)
def test_the_control_plane_s_trials_are_one_worker_group(ranks: int) -> None:
    experiment = parse_experiment(control_plane.experiment_of(ranks), source="control_plane")
    (group,) = control_plane.without_bases(make_plan(experiment, laptop(ranks)), ranks).groups
    assert len(group.trials) == control_plane.TRIALS and group.placement.workers == ranks


@pytest.mark.slow
def test_scale_runs_ranks_as_threads_through_driver_record_and_report() -> None:
    row = scale.measure(16, 10, 40)
    assert row.keys() == scale.COLUMNS.keys() and all(value > 0 for value in row.values())
    assert row["ranks"] == 16 and 10 <= row["trials"] <= 14  # with profiles
    # 16 ranks' windows reach rank 0 alone
    assert row["received_first_kib"] > 16 * 5 and row["received_kib"] < row["received_first_kib"] / 20
    assert row["line_kib"] < 2.5 < row["by_rank_kib"]


@pytest.mark.slow
def test_overhead_compares_tokens_on_one_rank_and_two_with_and_without_accumulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process in place of a fresh one, as which growth is measured above."""

    def here(name: str, *arguments: str) -> Any:
        with monkeypatch.context() as patch, redirect_stdout(StringIO()) as printed:
            patch.setattr(sys, "argv", [name, *arguments])
            overhead.main()
        return json.loads(printed.getvalue())

    path = tmp_path / "figures.json"
    options = ["--models", "small GPT", "--processes", "1", "--pairs", "3", "--window", "0.01", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["overhead", *options])
    monkeypatch.setattr(overhead, "measured_apart", here)
    overhead.main()
    (rows,) = json.loads(path.read_text())["figures"]
    compared = [(row["strategy"], row["ranks"], row["parts"]) for row in rows]
    alone = [(strategy, 1, parts) for parts in (1, 4) for strategy in ("single", "ddp")]
    assert sorted(compared) == sorted([*alone, ("ddp", 2, 1), ("ddp", 2, 4)])
    assert all(0.2 < row[ratio] < 5 for row in rows for ratio in ("step", "window", "cpu"))
