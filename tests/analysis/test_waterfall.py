"""Phases, ledger and waterfall from hand-made windows, with numbers that a reader can check by hand."""

from __future__ import annotations

from statistics import stdev
from typing import Any

import pandas as pd
import pytest

from harness.analysis import phases as phase_tables
from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.waterfall import waterfall
from tests.records import line, steps_of

STEPS = 10


def window(kind: str, rank: int, number: int, step_s: float, wait_s: float = 0.0) -> dict[str, Any]:
    return {
        "rank": rank,
        "window": number,
        "window_kind": kind,
        "duration_s": STEPS * step_s,
        "steps": STEPS,
        "weight": 100.0,
        "wait_s": STEPS * wait_s,
        "copy_s": 0.0,
        "forward_s": STEPS * (step_s - wait_s) / 4,
        "backward_s": STEPS * (step_s - wait_s) / 2,
        "optimizer_s": STEPS * (step_s - wait_s) / 8,
        "rest_s": STEPS * (step_s - wait_s) / 8,
    }


def trial(cell: str, windows: list[dict[str, Any]], **columns: Any) -> dict[str, Any]:
    ranks = len({one["rank"] for one in windows})
    return {**line(cell, rates=(1.0,) * ranks, **columns), "windows": windows}


def study(block: int = 0, *, single_s: float = 0.10, **ddp: Any) -> list[dict[str, Any]]:
    """Return trials; ms a step: single 100; ddp on one device 105, on two 110 and 120 alone, 150 + 10 wait together."""
    two = [
        *(window("timed", rank, 2, 0.160, 0.010) for rank in (0, 1)),
        window("alone", 0, 3, 0.110),
        window("alone", 1, 3, 0.120),
        *(window("together", rank, 4, 0.160, 0.010) for rank in (0, 1)),
    ]
    return [
        trial("single", [window("timed", 0, 2, single_s)], block=block, alone_id="single", wrapped_id="single"),
        trial("ddp1", [window("timed", 0, 2, 0.105)], block=block, strategy="ddp", devices=1, alone_id="single"),
        trial("ddp2", two, block=block, strategy="ddp", alone_id="single", wrapped_id="ddp1", **ddp),
    ]


def waterfall_of(lines: list[dict[str, Any]], pilot: int | None = None) -> pd.DataFrame:
    trials = trial_tables.trials(lines, steps_of(lines))
    trials["doubts"] = [()] * len(trials)
    return waterfall(trials, trial_tables.windows(lines), ratios.scaling(trials), pilot)


def test_where_a_rule_set_the_blocks_the_intervals_of_parts_keep_the_pilots_spread() -> None:
    lines = [one for block, s in enumerate((0.09, 0.10, 0.099, 0.1)) for one in study(block, single_s=s)]
    whole, kept = (waterfall_of(lines, pilot).set_index("part").loc["ideal"] for pilot in (None, 2))
    assert whole["share"] == pytest.approx(kept["share"]) and whole["blocks"] == kept["blocks"] == 4
    shares = [s / 0.160 for s in (0.09, 0.10, 0.099, 0.1)]
    assert kept["high"] - kept["share"] == pytest.approx(12.706 * stdev(shares[:2]) / 2, rel=1e-4)
    assert whole["high"] - whole["share"] == pytest.approx(3.182 * stdev(shares) / 2, rel=1e-3)


def test_ddps_parts_by_hand_and_they_add_up() -> None:
    rows = waterfall_of(study())
    seconds = dict(zip(rows["part"], rows["part_s"], strict=True))
    assert seconds == pytest.approx(
        {
            "ideal": 0.100,
            "wrapper": 0.005,
            "side by side": 0.005,
            "slowest rank": 0.010,
            "exposed communication": 0.030,
            "waiting for data": 0.010,
            "rest": 0.0,
        },
        abs=1e-9,
    )
    assert rows["share"].sum() == pytest.approx(1.0)
    assert rows["share"].iloc[0] == pytest.approx(0.100 / 0.160)


def test_the_ideal_share_is_the_efficiency() -> None:
    lines = study()
    trials = trial_tables.trials(lines, steps_of(lines))
    efficiency = ratios.scaling(trials).set_index("cell_id").loc["ddp2", "efficiency"]
    assert waterfall_of(lines)["share"].iloc[0] == pytest.approx(float(efficiency))


def test_shares_carry_an_interval_over_blocks() -> None:
    rows = waterfall_of(study(0) + study(1, single_s=0.104))
    ideal = rows[rows["part"] == "ideal"].iloc[0]
    assert ideal["blocks"] == 2
    assert ideal["low"] < ideal["share"] < ideal["high"]
    wrapper = rows[rows["part"] == "wrapper"].iloc[0]
    assert wrapper["share"] == pytest.approx((0.005 + 0.001) / 2 / 0.160)


def test_a_part_may_be_negative() -> None:
    rows = waterfall_of(study(single_s=0.12))
    assert rows.set_index("part").loc["wrapper", "share"] == pytest.approx(-0.015 / 0.160)
    assert rows["share"].sum() == pytest.approx(1.0)


def test_a_cell_without_diagnostic_cells_is_omitted() -> None:
    lines = study()
    assert waterfall_of([lines[0], lines[2]]).empty
    assert waterfall_of(lines[:2]).empty


def test_strong_scaling_names_the_smaller_batch() -> None:
    strong = {"scaling": "strong", "global_batch_size": 20}
    two = [window("timed", rank, 2, 0.070) for rank in (0, 1)]
    facts = {"fsdp_all_gather_s": 0.004, "fsdp_reduce_scatter_s": 0.001}
    lines = [
        trial("single", [window("timed", 0, 2, 0.100)], **strong, per_device_batch_size=20, alone_id="single"),
        trial(
            "small",
            [window("timed", 0, 2, 0.060)],
            base="small",
            strategy="single",
            kind="diagnostic",
            purpose="explain",
        ),
        trial(
            "fsdp2",
            two,
            strategy="fsdp",
            **strong,
            alone_id="small",
            facts=facts,
        ),
    ]
    lines[1]["windows"] = [window("timed", 0, 2, 0.060)]
    seconds = waterfall_of(lines).set_index("part")["part_s"].to_dict()
    assert seconds == pytest.approx(
        {
            "ideal": 0.05,
            "smaller batch": 0.01,
            "all-gather": 0.004,
            "reduce-scatter": 0.001,
            "waiting for data": 0.0,
            "rest": 0.005,
        },
        abs=1e-9,
    )


def fsdp_study(block: int, **facts: float) -> list[dict[str, Any]]:
    """Return trials; ms a step: single 100, fsdp on two devices 160."""
    two = [window("timed", rank, 2, 0.160) for rank in (0, 1)]
    facts = {"steady": True, **facts}
    return [
        trial("single", [window("timed", 0, 2, 0.100)], block=block, alone_id="single"),
        trial("fsdp2", two, block=block, strategy="fsdp", alone_id="single", facts=facts),
    ]


def test_a_collective_that_was_not_seen_in_every_block_is_in_the_rest_and_the_parts_add_up() -> None:
    seen = {"fsdp_all_gather_s": 0.02, "fsdp_reduce_scatter_s": 0.01}
    lines = [*fsdp_study(0, **seen), *fsdp_study(1, fsdp_all_gather_s=0.02)]
    rows = waterfall_of(lines).set_index("part")
    assert "reduce-scatter" not in rows.index and rows.loc["all-gather", "part_s"] == pytest.approx(0.02)
    assert rows.loc["rest", "part_s"] == pytest.approx(0.04) and rows["share"].sum() == pytest.approx(1.0)
    nothing = waterfall_of([*fsdp_study(0, **seen), *fsdp_study(1)])
    assert nothing["blocks"].unique().tolist() == [1], "a block of which nothing was profiled does not count"


@pytest.mark.parametrize(
    ("alone_s", "usual_s"), [((0.11, 0.12), 0.11), ((0.11, 0.12, 0.13), 0.12), ((0.10, 0.11, 0.13, 0.15), 0.12)]
)
def test_the_usual_rank_is_the_median_one_and_of_two_the_faster(alone_s: tuple[float, ...], usual_s: float) -> None:
    ranks = range(len(alone_s))
    windows = [
        *(window("timed", rank, 2, 0.2) for rank in ranks),
        *(window("alone", rank, 3, seconds) for rank, seconds in enumerate(alone_s)),
        *(window("together", rank, 4, 0.2) for rank in ranks),
    ]
    name = f"ddp{len(alone_s)}"
    lines = [*study()[:2], trial(name, windows, strategy="ddp", alone_id="single", wrapped_id="ddp1")]
    seconds = waterfall_of(lines).set_index("part")["part_s"]
    assert seconds["side by side"] == pytest.approx(usual_s - 0.105)
    assert seconds["slowest rank"] == pytest.approx(max(alone_s) - usual_s)


def test_phases_are_means_of_the_timed_steps_and_add_up() -> None:
    lines = study()
    trials = trial_tables.trials(lines, steps_of(lines))
    phases = phase_tables.phases(trials, trial_tables.windows(lines)).set_index("cell_id")
    two = phases.loc["ddp2"]
    assert two["step_s"] == pytest.approx(0.160)
    assert two["wait_s"] == pytest.approx(0.010)
    assert two["backward_s"] == pytest.approx(0.075)
    assert phase_tables.host_phases(trials, trial_tables.windows(lines)).empty


def test_collectives_are_listed_beside_their_phases() -> None:
    lines = [
        line("fsdp2", rates=(9.0, 9.0), block=block, facts={"steady": True, "fsdp_all_gather_s": seconds})
        for block, seconds in enumerate((0.002, 0.004))
    ]
    for one in lines:
        one["windows"] = [window | {"forward_s": 1.0, "rest_s": 1.0} for window in one["windows"]]
    trials = trial_tables.trials(lines, steps_of(lines))
    (row,) = phase_tables.phases(trials, trial_tables.windows(lines)).to_dict("records")
    assert row["fsdp_all_gather_s"] == pytest.approx(0.003) and pd.isna(row["dp_replicate_s"])
    assert row["step_s"] == pytest.approx(0.2), "they are not added to it"


def test_the_time_accounting_sums_to_wall_time() -> None:
    lines = [line("single"), line("ddp2", rates=(1.0, 1.0))]  # 3 s each, all of it in parts
    environment = {
        "groups": [{"group_id": "b0-g0", "invocation": 0, "whole_s": 20.0, "parts": {"worker start": 9.0}}],
        "invocations": [{"wall_s": 25.0}],
    }
    ledger = phase_tables.ledger(lines, environment)
    assert ledger["seconds"].sum() == pytest.approx(25.0)
    assert ledger[ledger["level"] == "group"].set_index("part")["seconds"].to_dict() == {
        "worker start": 9.0,
        "between trials and end": 5.0,
    }
    assert ledger[ledger["level"] == "run"]["seconds"].tolist() == [5.0]
    environment["groups"][0]["parts"]["teardown"] = 2.0  # type: ignore[index]
    ledger = phase_tables.ledger(lines, environment)
    assert ledger[ledger["level"] == "group"].set_index("part")["seconds"].to_dict() == {
        "worker start": 9.0,
        "teardown": 2.0,
        "between trials": 3.0,
    }


def on_gpu(one: dict[str, Any], idle_s: float, host_wait_s: float) -> dict[str, Any]:
    """Return the window as a GPU's, with these seconds a step of an idle stream and of the host's wait for data."""
    phases = {"idle_s": STEPS * idle_s, "host_wait_s": STEPS * host_wait_s}
    return {name: value for name, value in one.items() if not name.endswith("_s") or name == "duration_s"} | phases


def test_on_cuda_waiting_is_host_wait_while_the_stream_is_idle() -> None:
    lines = study()
    bare = {"idle_s": None, "host_wait_s": None}  # timed windows mark no phases there
    for one in lines:
        one["windows"] = [
            on_gpu(w, 0.0, 0.0) | bare if w["window_kind"] == "timed" else on_gpu(w, 0.004, 0.003)
            for w in one["windows"]
        ]
    lines[2]["windows"] += [on_gpu(window("phases", rank, 5, 0.160), 0.012, 0.008) for rank in (0, 1)]
    rows = waterfall_of(lines)
    seconds = dict(zip(rows["part"], rows["part_s"], strict=True))
    assert seconds["waiting for data"] == pytest.approx(0.008)
    assert seconds["side by side"] == pytest.approx((0.110 - 0.003) - 0.105)
    assert rows["share"].sum() == pytest.approx(1.0)


def test_a_block_with_failed_diagnostics_is_omitted_from_the_waterfall() -> None:
    lines = study(0) + study(1)
    whole = waterfall_of(lines)
    lines[5]["windows"] = [one for one in lines[5]["windows"] if one["window_kind"] == "timed"]
    part = waterfall_of(lines)
    assert set(whole["blocks"]) == {2}
    assert set(part["blocks"]) == {1}
    assert part["share"].sum() == pytest.approx(1.0)


def test_the_wait_is_that_of_the_rank_that_waited_longest() -> None:
    lines = study()
    for one in lines[2]["windows"]:
        if one["window_kind"] in ("timed", "together") and one["rank"] == 1:
            one["wait_s"] = 0.0
            one["duration_s"] += 1e-6  # chance makes it the slowest
    seconds = waterfall_of(lines).set_index("part")["part_s"]
    assert seconds["waiting for data"] == pytest.approx(0.010, abs=1e-6)
