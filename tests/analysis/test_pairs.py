"""Ratios of cells that differ in one factor, Ray against torchrun, and the fastest setting of each group."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis import ratios
from harness.analysis.doubts import CountedDoubt
from harness.analysis.equivalence import Verdict
from harness.analysis.ratios import leaders, scaling
from harness.record.schema import NOISE, VERSUS
from harness.report.tables.ratios import main_axes, parity_table, versus_table
from harness.report.tables.text import NO_BREAK
from tests.records import line, trials_of, with_set_ids


def study(*blocks: float, **columns: Any) -> list[dict[str, Any]]:
    """Return trials of dp, ddp and fsdp on two devices; each block has a speed factor of its own, which cancels."""
    return [
        line(f"{name}2", block=block, rates=(factor * rate,) * 2, check_id=f"check-{name}2", **columns)
        for block, factor in enumerate(blocks)
        for name, rate in (("dp", 50.0), ("ddp", 80.0), ("fsdp", 60.0))
    ]


def versus_of(lines: list[dict[str, Any]]) -> pd.DataFrame:
    return ratios.versus(trials_of(lines))


def pairs_in(found: pd.DataFrame, *names: str) -> list[list[Any]]:
    return found[["axis", "value", "other_value", *names]].to_numpy().tolist()


def test_each_strategy_is_paired_by_block_with_the_one_before_it_and_the_last_with_the_first() -> None:
    found = versus_of([line("single"), *study(1.0, 3.0, 0.5)])
    names = [["ddp", "dp"], ["fsdp", "ddp"], ["fsdp", "dp"]]
    assert pairs_in(found, "other_strategy") == [["strategy", one, other, other] for one, other in names]
    assert found["ratio"].tolist() == pytest.approx([1.6, 0.75, 1.2])
    assert found["low"].tolist() == pytest.approx([1.6, 0.75, 1.2])  # the factors of the blocks are in both
    assert found["blocks"].tolist() == [3, 3, 3]
    assert found["excludes_one"].tolist() == [True, True, True]
    assert found["emulated"].tolist() == [True, False, True]  # dp on a CPU is a rehearsal, and so is a ratio to it


def series(*values: dict[str, Any], blocks: int = 3) -> list[dict[str, Any]]:
    """Return trials of ddp with these columns; the n-th is n times as fast as the first."""
    return [
        line(f"ddp{n}", strategy="ddp", block=block, rates=(50.0 * n,) * of.get("devices", 2), **of)
        for block in range(blocks)
        for n, of in enumerate(values, start=1)
    ]


def test_after_looks_a_speedup_has_their_level_and_other_ratios_of_sizes_that_of_a_pair() -> None:
    """One ratio has one interval, in the table of speedups as in this one."""
    based = [{**values, "base": "ddp1"} for values in DEVICES[:2]]
    for values, wider in ((based, True), (DEVICES[:2], False), (BATCHES, False)):
        lines = series(*values)
        lines[0]["windows"] = line("x", rates=(45.0,) * values[0].get("devices", 2))["windows"]
        plain, looked = (ratios.versus(trials_of(lines), rule) for rule in (None, "decide"))
        assert looked["ratio"].tolist() == plain["ratio"].tolist()
        assert (looked["high"].iloc[0] > plain["high"].iloc[0] + 1e-6) == wider


def test_several_cpu_slots_are_compared_with_one_process_with_all_threads_which_enters_no_other_ratio() -> None:
    lines = [*(line("single", block=block) for block in range(3)), *study(1.0, 1.1, 1.2)]
    more = [line("single", block=block, rates=(150.0,), purpose="threads") for block in range(3)]
    for one in more:
        one |= {"kind": "diagnostic", "trial_id": f"{one['trial_id']}c"}
        one["ranks"] = [{**rank, "threads": 2} for rank in one["ranks"]]
    for one in lines:
        one["ranks"] = [{**rank, "threads": 1} for rank in one["ranks"]]
    found, before = versus_of([*lines, *more]), versus_of(lines)
    pd.testing.assert_frame_equal(found.iloc[:-3], before)
    last = found.iloc[-3:].set_index("cell_id")
    assert set(last["axis"]) == {"threads"} and set(last["other_id"]) == {"single"} and set(last["blocks"]) == {3}
    # dp, ddp and fsdp make 100, 160 and 120 samples/s, and more in later blocks
    rates = {"dp2": 100.0, "ddp2": 160.0, "fsdp2": 120.0}
    grows = (1.0 * 1.1 * 1.2) ** (1 / 3)
    assert last["ratio"].to_dict() == pytest.approx({name: rate * grows / 150.0 for name, rate in rates.items()})
    assert last.loc["ddp2", "other_label"].endswith("all CPU threads") and "all" not in last.loc["ddp2", "label"]
    same = [{**one, "ranks": [{**rank, "threads": 1} for rank in one["ranks"]]} for one in more]  # it was pinned
    pd.testing.assert_frame_equal(versus_of([*lines, *same]), before)
    for table in (ratios.scaling, ratios.noise, ratios.leaders):
        pd.testing.assert_frame_equal(table(trials_of([*lines, *more])), table(trials_of(lines)))


BUCKETS = [{"options": {"ddp.bucket_cap_mb": size, "optimizer.lr": 0.1}} for size in (25, 1, 100)]
BATCHES = [{"per_device_batch_size": batch, "global_batch_size": 2 * batch} for batch in (20, 10)]
DEVICES = [{"devices": n, "global_batch_size": 10 * n} for n in (1, 4, 2)]


@pytest.mark.parametrize(
    ("values", "axis", "expected", "shown"),
    [
        (BUCKETS, "ddp.bucket_cap_mb", "25/1 100/25 100/1", "ddp x2 · bucket_cap_mb=25 / 1"),
        (
            BATCHES,
            "per_device_batch_size",
            "20/10",
            "ddp x2 · batch 20/device / 10/device",
        ),  # the global batch follows
        (DEVICES, "devices", "2/1 4/2 4/1", "ddp x2 / ddp x1"),
    ],
)
def test_options_batches_and_devices_are_compared_in_the_order_of_the_file_or_of_their_size(
    values: list[dict[str, Any]], axis: str, expected: str, shown: str
) -> None:
    found = versus_of(series(*values))
    assert pairs_in(found) == [[axis, *pair.split("/")] for pair in expected.split()]
    assert versus_table(found).rows[0].cells[0] == shown
    if axis == "ddp.bucket_cap_mb":
        assert found["ratio"].tolist() == pytest.approx([1 / 2, 3 / 1, 3 / 2])


def test_a_file_is_about_its_options_then_its_strategies() -> None:
    buckets, strategies = versus_of(series(*BUCKETS[:2])), versus_of(study(1.0))
    both = pd.concat([buckets, strategies], ignore_index=True)
    assert set(main_axes(both)["axis"]) == {"ddp.bucket_cap_mb"}
    assert set(main_axes(strategies)["axis"]) == {"strategy"}
    sizes = [strategies.assign(axis=axis) for axis in ("devices", "per_device_batch_size")]
    assert set(main_axes(pd.concat(sizes))["axis"]) == {"per_device_batch_size"}  # devices have a table of their own
    assert set(main_axes(sizes[0])["axis"]) == {"devices"}
    threads = strategies.assign(axis="threads")  # which the verdict has
    assert set(main_axes(pd.concat([sizes[0], threads]))["axis"]) == {"devices"} and main_axes(threads).empty


def test_pairs_of_gpus_are_compared_with_an_interval_against_one_common_pair() -> None:
    rates, links = {"0,4": 20.0, "5,6": 40.0, "6,7": 50.0}, {"0,4": "SYS", "5,6": "PHB", "6,7": "NV4"}
    dp = {"strategy": "dp", "devices": 2, "emulated": False, "device": "cuda", "global_batch_size": 20}
    lines = [
        line(f"dp{ids}", block=block, rates=(factor * rate,), **dp, facts={"steady": True, "link": links[ids]})
        | {"device_ids": ids, "base_id": f"single{ids[0]}"}
        for block, factor in enumerate((1.0, 3.0, 0.5))
        for ids, rate in rates.items()
    ]
    found = ratios.versus(trials_of(list(map(with_set_ids, lines))), placements=("6,7", "5,6", "0,4"))
    assert pairs_in(found) == [["device_ids", "5,6", "6,7"], ["device_ids", "0,4", "6,7"]]
    assert found["ratio"].tolist() == pytest.approx([0.8, 0.4]) and found["low"].tolist() == pytest.approx([0.8, 0.4])
    named = [f"dp x2 (GPU {ids}) / dp x2 (GPU 6,7: NV4)" for ids in ("5,6: PHB", "0,4: SYS")]
    assert [row.cells[0] for row in versus_table(found).rows] == named


def test_if_a_strategy_is_missing_its_neighbours_meet() -> None:
    found = versus_of([one for one in study(1.0) if one["strategy"] != "ddp"])
    assert found[["strategy", "other_strategy"]].to_numpy().tolist() == [["fsdp", "dp"]]
    assert found["low"].isna().all() and found["excludes_one"].isna().all()


@pytest.mark.parametrize(
    ("axis", "value"), [("per_device_batch_size", 20), ("devices", 4), ("precision", "bf16"), ("model", "other")]
)
def test_cells_that_differ_in_more_are_not_paired(axis: str, value: Any) -> None:
    lines = [with_set_ids(one | {axis: value}) if one["strategy"] == "dp" else one for one in study(1.0)]
    assert versus_of(lines)["other_strategy"].tolist() == ["ddp"]


def test_a_strategys_own_options_are_no_difference_others_are() -> None:
    own = {"ddp": {"ddp.bucket_cap_mb": 1, "optimizer.lr": 0.1}, "dp": {"optimizer.lr": 0.1}}
    lines = [with_set_ids(one | {"options": own[one["strategy"]]}) for one in study(1.0) if one["strategy"] in own]
    assert len(versus_of(lines)) == 1
    ddp, dp = sorted(lines, key=lambda one: len(one["options"]), reverse=True)
    assert versus_of([ddp, with_set_ids(dp | {"options": {"optimizer.lr": 0.2}})]).empty


def test_the_ratio_of_a_non_equivalent_cell_is_marked() -> None:
    differs = Verdict("not equivalent", "not equivalent to one device")
    found = ratios.versus(trials_of(study(1.0, 1.0)), None, {"check-ddp2": differs})
    of_ddp = found[found["strategy"].eq("ddp") | found["other_strategy"].eq("ddp")]
    alone = ratios.versus(trials_of(study(1.0, 1.0)))
    for column in ("ratio", "low", "high"):
        assert found[column].equals(alone[column])
    assert of_ddp["excluded"].tolist() == ["not equivalent to one device"] * 2
    rows = versus_table(found).rows
    marks = {("ddp" in row.cells[0], any(cell.endswith(" (not equivalent)") for cell in row.cells)) for row in rows}
    assert marks == {(False, False), (True, True)}
    assert {row.kind for row in rows if "ddp" in row.cells[0]} == {"apart"}


def test_doubts_of_the_other_are_named_as_its_own_and_noise_and_parity_carry_those_of_both() -> None:
    trials = trials_of(study(1.0))
    doubts = trials["strategy"].map({"dp": ("wide spread",), "ddp": ("no steady state",), "fsdp": ()})
    found = ratios.versus(trials.assign(doubts=doubts))
    ddp, dp = "no steady state (1 of 1)", "dp: wide spread (1 of 1)"
    assert VERSUS.as_text(found)["doubts"].tolist() == [f"{ddp}; {dp}", f"ddp: {ddp}", dp]
    base = line("single")
    twin = line("single", purpose="twin", kind="diagnostic", trial_id="single-b0t") | {"windows": base["windows"]}
    lines = [base, twin]
    trials = trials_of(lines).assign(doubts=[("wide spread",), ("no steady state",)])
    (result,) = NOISE.as_text(ratios.noise(trials))["doubts"]
    assert result == "twin: no steady state (1 of 1); base: wide spread (1 of 1)"
    lines = [line(f"ddp2{name}", strategy="ddp", rates=(9.0, 9.0), launcher=name) for name in ("ray", "torchrun")]
    trials = trials_of(lines).assign(doubts=[(), ("slow rank 1",)])
    (result,) = ratios.parity(trials)["doubts"]
    assert result == (CountedDoubt("slow rank 1", 1, 1, "torchrun"),)


def test_the_table_names_both_cells_and_marks_emulated_ones() -> None:
    rows = versus_table(versus_of(study(1.0, 1.0, 1.0))).rows
    names = ["ddp x2 / dp (emulated) x2", "fsdp x2 / ddp x2", "fsdp x2 / dp (emulated) x2"]
    assert [row.cells[0] for row in rows] == names
    assert [row.kind for row in rows] == ["apart", "base", "apart"]
    assert [cell.replace(NO_BREAK, " ") for cell in rows[1].cells[1:]] == ["160", "120", "0.750 (0.750 to 0.750)", "3"]


def launched(ray: float, torchrun: float, block: int) -> list[dict[str, Any]]:
    return [
        line(f"ddp2{name}", strategy="ddp", block=block, launcher=name, rates=(rate, rate), check_id=f"check-{name}")
        for name, rate in (("ray", ray), ("torchrun", torchrun))
    ]


def test_ray_is_paired_with_torchrun_by_block_if_both_have_one() -> None:
    lines = [*launched(95.0, 100.0, 0), *launched(190.0, 200.0, 1), *launched(9.5, 10.0, 2)]
    found = ratios.parity(trials_of(lines))
    assert found[["cell_id", "control_id"]].to_numpy().tolist() == [["ddp2ray", "ddp2torchrun"]]
    assert found[["ratio", "high"]].to_numpy().tolist() == [pytest.approx([0.95, 0.95])]
    (row,) = parity_table(found).rows
    assert row.kind == "base" and row.cells[0] == "ddp x2"
    assert ratios.parity(trials_of(study(1.0))).empty
    lines = [launched(95.0, 100.0, 0)[0], launched(95.0, 100.0, 1)[1]]
    assert ratios.parity(trials_of(lines)).empty
    checked = {"check-torchrun": Verdict("not equivalent", "why")}
    found = ratios.parity(trials_of(launched(95.0, 100.0, 0)), None, checked)
    assert found["ratio"].notna().all() and found["excluded"].tolist() == ["why"]


PAIR = (50.0, 50.0)


def on(model: str, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    """Return trials that ran on devices of this model."""
    return [one | {"ranks": [{"rank": rank, "device_model": model} for rank in range(2)]} for one in lines]


def test_cells_on_other_hardware_or_on_two_types_have_no_ratio() -> None:
    found = ratios.versus(trials_of([*on("A100", line("ddp2", rates=PAIR)), *on("H100", line("fsdp2", rates=PAIR))]))
    (row,) = found.to_dict("records")
    assert pd.isna(row["ratio"]) and row["throughput_per_s"] > 0 and row["other_throughput_per_s"] > 0
    assert row["excluded"] == "other hardware: H100; what it is compared with ran on A100"
    shown = versus_table(found)
    assert "other hardware" in str(shown) and "not equivalent" not in str(shown)
    mixed = line("ddp2", rates=PAIR)
    mixed["ranks"] = [{"rank": rank, "device_model": model} for rank, model in enumerate(("H100", "A100"))]
    frame = trials_of([mixed, *on("A100", line("fsdp2", rates=PAIR))])
    assert set(frame["device_model"]) == {"A100 + H100", "A100"}
    words = "other hardware: A100; what it is compared with ran on A100 + H100"
    assert ratios.versus(frame)["excluded"].tolist() == [words]


def test_only_blocks_on_the_same_hardware_count() -> None:
    """In the second block fsdp was repeated on another type of node; in the third both were."""
    lines = [
        *on("A100", line("ddp2", block=0, rates=(50.0, 50.0)), line("fsdp2", block=0, rates=(100.0, 100.0))),
        *on("A100", line("ddp2", block=1, rates=(50.0, 50.0))),
        *on("H100", line("fsdp2", block=1, rates=(900.0, 900.0))),
        *on("H100", line("ddp2", block=2, rates=(200.0, 200.0)), line("fsdp2", block=2, rates=(400.0, 400.0))),
    ]
    (row,) = versus_of(lines).to_dict("records")
    assert (row["ratio"], row["blocks"]) == (pytest.approx(2.0), 2) and pd.isna(row["excluded"])


def test_a_cell_and_its_base_on_other_hardware_have_no_speedup_unless_that_is_not_known() -> None:
    base, cell = line("single", rates=(100.0,)), line("ddp2", rates=(90.0, 90.0))
    found = scaling(trials_of([*on("A100", base), *on("H100", cell)])).set_index("cell_id")
    row = found.loc["ddp2"]
    assert pd.isna(row["speedup"]) and pd.isna(row["efficiency"]) and pd.isna(row["low"])
    assert row[["throughput_per_s", "base_throughput_per_s"]].tolist() == pytest.approx([180, 100])
    assert row["excluded"] == "other hardware: H100; what it is compared with ran on A100"
    assert found.loc["single", "speedup"] == pytest.approx(1)
    for lines in ([*on("A100", base), *on("A100", cell)], [base, *on("H100", cell)]):
        same = scaling(trials_of(lines)).set_index("cell_id").loc["ddp2"]
        assert same["speedup"] == pytest.approx(1.8) and pd.isna(same["excluded"])


# -- leaders --------------------------------------------------------------------------------------------------------


def setting(cell: str, rates: list[float], **columns: Any) -> list[dict[str, Any]]:
    """Return the trials of a setting on two devices, a throughput a block."""
    columns = {"strategy": "ddp", "check_id": f"check-{cell}", **columns}
    return [line(cell, block=block, rates=(rate / 2, rate / 2), **columns) for block, rate in enumerate(rates)]


def rows_by_cell(lines: list[dict[str, Any]], **options: Any) -> dict[str, dict[str, Any]]:
    frame = leaders(trials_of(lines), **options)
    return {row["cell_id"]: row for row in frame.to_dict("records")}


def test_the_fastest_leads_and_a_slower_one_is_told_apart_from_three_blocks_on() -> None:
    found = rows_by_cell([*setting("a", [100, 101, 102, 100]), *setting("b", [50, 51, 50, 50.5])])
    assert found["a"]["leader_id"] == found["b"]["leader_id"] == "a"
    assert found["a"]["ratio"] == 1 and pd.isna(found["a"]["tied"])
    assert found["b"]["ratio"] == pytest.approx(0.5, abs=0.01) and found["b"]["tied"] is False
    assert found["b"]["high"] < 1
    found = rows_by_cell([*setting("a", [100, 100]), *setting("b", [50, 50])])
    assert found["b"]["ratio"] == pytest.approx(0.5) and pd.isna(found["b"]["tied"])


def test_settings_within_the_noise_are_tied() -> None:
    found = rows_by_cell([*setting("a", [100, 110, 90, 105]), *setting("b", [104, 92, 101, 99])])
    assert found["b"]["tied"] is True and found["b"]["p_value"] > 0.05


def test_many_settings_raise_the_bar() -> None:
    """One comparison of this size is significant by itself, and is not among eight (Holm)."""
    leader, near = [100.0, 102.0, 101.0, 100.0], [97.0, 100.5, 96.5, 98.5]
    alone = rows_by_cell([*setting("a", leader), *setting("b", near)])
    others = [one for number in range(8) for one in setting(f"c{number}", [near[(at + number) % 4] for at in range(4)])]
    among = rows_by_cell([*setting("a", leader), *setting("b", near), *others])
    assert alone["b"]["tied"] is False
    assert among["b"]["tied"] is True and among["b"]["p_value"] > alone["b"]["p_value"]


def test_a_setting_that_is_faster_in_the_blocks_that_both_have_leads() -> None:
    """Its mean is lower, since it alone was measured in three slow blocks."""
    found = rows_by_cell([*setting("a", [200, 200, 200]), *setting("b", [210, 211, 209.5, 100, 100, 100])])
    assert {row["leader_id"] for row in found.values()} == {"b"}
    assert found["a"]["ratio"] < 1 and found["a"]["tied"] is False


@pytest.mark.parametrize(
    "columns",
    [
        *({"model": "other"}, {"data": "other"}, {"precision": "bf16"}, {"options": {"workload.width": 50}}),
        *({"global_batch_size": 40}, {"devices": 4, "global_batch_size": 20}),
    ],
    ids=str,
)
def test_other_questions_are_other_groups(columns: dict[str, Any]) -> None:
    given = {"options": {"workload.width": 100}}
    found = rows_by_cell([*setting("a", [100] * 3, **given), *setting("b", [50] * 3, **{**given, **columns})])
    assert found["a"]["leader_id"] == "a" and found["b"]["leader_id"] == "b" and found["b"]["settings"] == 1


@pytest.mark.parametrize(
    "columns", [{"emulated": True}, {"oversubscribed": True}, {"launcher": "torchrun"}, {}], ids=str
)
def test_rehearsals_the_control_and_what_is_not_equivalent_do_not_compete(columns: dict[str, Any]) -> None:
    lines = [*setting("a", [100] * 3), *setting("b", [500] * 3, **columns)]
    checked = {} if columns else {"check-b": Verdict("not equivalent", "it differs")}
    assert set(rows_by_cell(lines, checked=checked)) == {"a"}


def test_a_control_that_alone_was_measured_leads_and_nothing_measured_is_an_empty_table() -> None:
    assert set(rows_by_cell(setting("b", [500] * 3, launcher="torchrun"))) == {"b"}
    assert leaders(trials_of([line("a", outcome="oom")])).empty
