"""Noise floor, equivalence and doubts from hand-made records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.common import Record
from harness.analysis.doubts import DOUBTS, CountedDoubt, Doubt, doubts, kind_of, meaning, plain_doubt, tally
from harness.analysis.equivalence import Verdict, equivalence, verdicts
from harness.analysis.evidence import foreign_cores, slow_ranks
from harness.record.folder import RunFolder
from harness.record.schema import CHECKS, EQUIVALENCE, WINDOWS
from harness.report.tables.scaling import scaling_by_setting, scaling_table
from tests.records import line, steps_of


def twin(block: int, rate: float) -> dict[str, Any]:
    one = line("single", block=block, rates=(rate,), purpose="twin", kind="diagnostic")
    return {**one, "trial_id": f"single-b{block}t", "windows": line("single", rates=(rate,))["windows"]}


def trials_of(lines: list[dict[str, Any]]) -> pd.DataFrame:
    trials = trial_tables.trials(lines, steps_of(lines))
    return trials


def test_the_noise_floor_pairs_the_twin_with_its_base_by_block() -> None:
    lines = [line("single", block=b, rates=(100.0 * (b + 1),)) for b in range(3)]
    lines += [twin(b, 110.0 * (b + 1)) for b in range(3)]
    noise = ratios.noise(trials_of(lines))
    assert noise["ratio"].tolist() == pytest.approx([1.1])
    assert noise["blocks"].tolist() == [3]
    assert noise["excludes_one"].tolist() == [True]


def test_a_noise_floor_that_includes_one_is_no_finding_and_one_block_has_no_interval() -> None:
    lines = [line("single", block=b) for b in range(3)] + [twin(0, 99.0), twin(1, 101.0), twin(2, 100.0)]
    assert ratios.noise(trials_of(lines))["excludes_one"].tolist() == [False]
    assert ratios.noise(trials_of([lines[0], lines[3]]))["excludes_one"].isna().all()


def test_a_twin_stays_out_of_the_headlines() -> None:
    lines = [line("single"), twin(0, 500.0)]
    trials = trials_of(lines)
    assert trial_tables.cells(trials, steps_of(lines))["throughput_per_s"].tolist() == pytest.approx([100.0])
    assert ratios.scaling(trials).shape[0] == 1


def check(cell: str, base: str, outcome: str = "ok") -> dict[str, Any]:
    one = line(cell, base=base, kind="diagnostic", purpose="equivalence", outcome=outcome)
    return {**one, "trial_id": f"{cell}-b0e", "windows": []}


def checks_of(updates: dict[str, list[float]]) -> pd.DataFrame:
    return CHECKS.frame(
        {"trial_id": f"{cell}-b0e", "attempt": 1, "bucket": i, "update": value}
        for cell, values in updates.items()
        for i, value in enumerate(values)
    )


LINES = [check("single", "single"), check("ddp2", "single")]


def test_updates_that_differ_by_rounding_agree() -> None:
    found = equivalence(trials_of(LINES), checks_of({"single": [3.0, 4.0], "ddp2": [3.0, 4.001]}))
    assert found["difference"].tolist() == pytest.approx([0.001 / 5])
    assert found["equivalent"].tolist() == [True]
    assert "not equivalent" not in {verdict.equivalence for verdict in verdicts(found).values()}


def test_updates_that_differ_are_named_with_their_difference() -> None:
    found = equivalence(trials_of(LINES), checks_of({"single": [3.0, 4.0], "ddp2": [6.0, 8.0]}))
    assert verdicts(found) == {
        "ddp2": Verdict("not equivalent", "not equivalent to one device: its update differs by 100 %")
    }


def test_steps_in_16_bits_have_a_bound_of_their_own() -> None:
    """6 % in bf16 is no rounding, 2 % is; the same 2 % in fp32 is none."""
    lines = [{**each, "precision": "bf16"} for each in LINES]

    def verdicts(fp32: float, bf16: float) -> list[bool]:
        both = [
            checks_of({"single": [1.0], "ddp2": [1.0 + far]}).assign(computed_in=name)
            for name, far in (("fp32", fp32), ("bf16", bf16))
        ]
        found = equivalence(trials_of(lines), pd.concat(both))
        assert found["computed_in"].tolist() == ["fp32", "bf16"] and found["bound"].tolist() == [0.01, 0.05]
        return [bool(value) for value in found["equivalent"]]

    assert verdicts(0.0, 0.02) == [True, True]
    assert verdicts(0.0, 0.06) == [True, False]
    assert verdicts(0.02, 0.0) == [False, True]


def test_compressed_gradients_have_the_bound_of_16_bits() -> None:
    lines = [LINES[0], {**LINES[1], "options": {"ddp.comm_hook": "bf16_compress"}}]
    found = equivalence(trials_of(lines), checks_of({"single": [1.0], "ddp2": [1.02]}))
    assert found["equivalent"].tolist() == [True] and found["bound"].tolist() == [0.05]


def quantities_of(*cells: tuple[str, dict[str, list[float]]]) -> pd.DataFrame:
    frames = [
        checks_of({cell: vector}).assign(quantity=name) for cell, vectors in cells for name, vector in vectors.items()
    ]
    return pd.concat(frames)


RIGHT = {"gradient": [3.0, 4.0], "first_update": [0.3, 0.4], "scaled_update": [0.6, 0.8]}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({}, None),
        ({"gradient": [6.0, 8.0]}, "gradient differs by 100 %"),
        ({"first_update": [0.33, 0.44]}, "first update differs by 10 %"),
        ({"scaled_update": [0.6, 0.4]}, "update differs by 40 %"),
        ({"gradient": [3.0, 4.5], "scaled_update": [0.6, 0.4]}, "gradient differs by 10 %"),
    ],
)
def test_gradient_first_update_and_scaled_update_must_all_agree(wrong: dict[str, Any], reason: str | None) -> None:
    found = equivalence(trials_of(LINES), quantities_of(("single", RIGHT), ("ddp2", RIGHT | wrong)))
    (row,) = found.to_dict("records")
    assert bool(row["equivalent"]) == (reason is None)
    assert pd.isna(row["reason"]) if reason is None else row["reason"] == f"not equivalent to one device: its {reason}"


def test_in_16_bits_an_update_is_judged_by_its_part_along_that_of_one_device() -> None:
    """Rounding decides the sign of Adam's step for a gradient near 0; the gradient itself is compared whole."""
    lines = [{**each, "precision": "bf16"} for each in LINES]
    fp32 = quantities_of(("single", RIGHT), ("ddp2", RIGHT)).assign(computed_in="fp32")

    def reason(**own: list[float]) -> object:
        bf16 = quantities_of(("single", RIGHT), ("ddp2", RIGHT | own)).assign(computed_in="bf16")
        return equivalence(trials_of(lines), pd.concat([fp32, bf16]))["reason"].tolist()[1]

    assert pd.isna(reason(first_update=[0.34, 0.37]))  # (0.3, 0.4) and a tenth of it across
    assert reason(first_update=[0.33, 0.44]) == "not equivalent to one device: its first update in bf16 differs by 10 %"
    assert reason(gradient=[3.4, 3.7]) == "not equivalent to one device: its gradient in bf16 differs by 10 %"


def test_a_strategy_without_gradients_is_judged_by_its_updates() -> None:
    own = {name: vector for name, vector in RIGHT.items() if name != "gradient"}
    found = equivalence(trials_of(LINES), quantities_of(("single", RIGHT), ("ddp2", own)))
    assert found["equivalent"].tolist() == [True] and found["gradient_difference"].isna().all()


def test_checks_of_different_versions_have_no_verdict() -> None:
    older = checks_of({"ddp2": [3.0, 4.0]})
    found = equivalence(trials_of(LINES), pd.concat([older, quantities_of(("single", RIGHT))]))
    assert found["reason"].tolist() == ["unknown: the check and that of one device are of different versions"]


@pytest.mark.parametrize(
    ("lines", "updates", "reason"),
    [
        ([LINES[0], check("ddp2", "single", "error")], {"single": [1.0]}, "the check ended as error: because of error"),
        ([check("single", "single", "oom"), LINES[1]], {"ddp2": [1.0]}, "one device's check ended as oom: because"),
        (LINES, {"single": [0.0], "ddp2": [1.0]}, "one device's parameters did not change"),
        ([LINES[0], check("ddp2", "single", "skipped")], {"single": [1.0]}, "because of skipped"),
        ([check("single", "single", "skipped"), LINES[1]], {"ddp2": [1.0]}, "because of skipped"),
    ],
)
def test_an_unchecked_pair_has_a_reason_and_keeps_its_ratio(lines: Any, updates: Any, reason: str) -> None:
    found = equivalence(trials_of(lines), checks_of(updates))
    assert found["equivalent"].isna().all()
    assert found["reason"].iloc[0].startswith(f"unknown: {reason}")
    assert "not equivalent" not in {verdict.equivalence for verdict in verdicts(found).values()}


def test_a_pair_that_disagrees_keeps_its_ratio_with_the_reason_that_it_is_no_claim() -> None:
    rates = (88.0, 90.0, 93.0)
    lines = [one for block, rate in enumerate(rates) for one in (
        line("single", block=block), line("ddp2", rates=(rate, rate), block=block, check_id="c"))]  # fmt: skip
    checked = {"c": Verdict("not equivalent", "because")}
    row, alone = (ratios.scaling(trials_of(lines), None, of).to_dict("records")[1] for of in (checked, None))
    assert (row["excluded"], row["equivalence"]) == ("because", "not equivalent")
    for column in ("speedup", "low", "high", "efficiency", "efficiency_low", "throughput_per_s"):
        assert row[column] == pytest.approx(alone[column], nan_ok=False)


def test_a_pair_that_disagrees_on_other_hardware_has_no_ratio() -> None:
    there = {"ranks": [{"rank": 0, "device_model": "H100"}]}
    lines = [line("single") | {"ranks": [{"rank": 0, "device_model": "A100"}]}, line("ddp2", check_id="c") | there]
    row = ratios.scaling(trials_of(lines), None, {"c": Verdict("not equivalent", "because")}).to_dict("records")[1]
    assert pd.isna(row["speedup"]) and row["excluded"].startswith("other hardware: ")
    assert row["equivalence"] == "not equivalent"


def test_a_pair_without_a_verdict_has_a_ratio_that_says_so() -> None:
    lines = [line("single"), *(line(f"ddp{n}", rates=(90.0,) * n, check_id=f"c{n}") for n in (2, 4))]
    checked = {"c2": Verdict("equivalent"), "c4": Verdict("unknown", "unknown: the check ended as oom")}
    found = ratios.scaling(trials_of(lines), None, checked)
    assert found["equivalence"].fillna("-").tolist() == ["-", "equivalent", "unknown"]
    assert found["speedup"].notna().all() and found["excluded"].isna().all()
    planned = ratios.scaling(trials_of(lines), None, {})  # the checks were planned, and never run
    assert planned["equivalence"].fillna("-").tolist() == ["-", "unknown", "unknown"]
    assert ratios.scaling(trials_of(lines))["equivalence"].isna().all()


def test_a_check_in_two_precisions_has_the_worse_verdict() -> None:
    rows = [{"cell_id": "c", "equivalent": value, "reason": reason} for value, reason in ((True, None), (None, "why"))]
    assert verdicts(EQUIVALENCE.frame(rows)) == {"c": Verdict("unknown", "why")}
    worst = EQUIVALENCE.frame([*rows, {"cell_id": "c", "equivalent": False, "reason": "differs"}])
    assert verdicts(worst) == {"c": Verdict("not equivalent", "differs")}


def doubts_of(lines: list[dict[str, Any]], environment: dict[str, Any] | None = None) -> list[tuple[str, ...]]:
    trials = trials_of(lines)
    found = doubts(trials, steps_of(lines), trial_tables.windows(lines), trial_tables.ranks(lines), environment or {})
    return found.tolist()


def with_ranks(one: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {**one, "ranks": [{**rank, "node_rank": 0, **columns} for rank in one["ranks"]]}


WATCHED = {"watched_s": 1.0, "own_cpu_s": 1.0, "node_cpu_s": 1.1, "swapped_bytes": 0, "threads": 1, "host": "a"}


def test_a_healthy_trial_has_no_doubts() -> None:
    assert doubts_of([with_ranks(line("single"), **WATCHED)]) == [()]


@pytest.mark.parametrize(
    ("columns", "doubt"),
    [
        ({"node_cpu_s": 1.9}, "foreign load"),
        ({"swapped_bytes": 4096}, "memory swapped"),
        ({"settings": "anomaly mode"}, "settings of the process: anomaly mode"),
        ({"throttled": "held by heat"}, "clocks throttled"),
        ({"throttled": "sw power cap, hw slowdown, held by power"}, "clocks throttled"),
        ({"throttled": "hw power brake"}, "clocks throttled"),
        ({"foreign_gpu_processes": 1}, "foreign load on the GPU"),
    ],
)
def test_rank_observations_become_doubts(columns: dict[str, Any], doubt: str) -> None:
    assert doubts_of([with_ranks(line("single"), **{**WATCHED, **columns})]) == [(doubt,)]


@pytest.mark.parametrize(
    ("columns", "doubt"),
    [
        ({"threads": 4}, "threads differ from the base's"),
        ({"device_model": "B"}, "other devices than the base's"),
        ({"host": "z"}, "other hosts than the base's"),
    ],
)
def test_differences_from_the_base_become_doubts(columns: dict[str, Any], doubt: str) -> None:
    base = with_ranks(line("single"), **WATCHED, device_model="A")
    other = with_ranks(
        line("ddp2", rates=(50.0, 50.0)), **{**WATCHED, "device_model": "A", "own_cpu_s": 0.5, **columns}
    )
    assert doubts_of([base, other]) == [(), (doubt,)]


def test_the_settings_of_all_ranks_are_one_doubt_with_its_words() -> None:
    one = line("ddp2", rates=(50.0, 50.0))
    texts = ("anomaly mode, dtype float64", "TORCH_DISTRIBUTED_DEBUG=DETAIL, anomaly mode")
    one["ranks"] = [
        {**rank, **WATCHED, "node_rank": 0, "own_cpu_s": 0.5, "settings": text}
        for rank, text in zip(one["ranks"], texts, strict=True)
    ]
    ((doubt,),) = doubts_of([one])
    assert doubt == "settings of the process: TORCH_DISTRIBUTED_DEBUG=DETAIL, anomaly mode, dtype float64"
    assert kind_of(doubt) == "settings of the process" and meaning(doubt).startswith("a rank's process ran")
    assert plain_doubt(doubt).endswith("change its speed: TORCH_DISTRIBUTED_DEBUG=DETAIL, anomaly mode, dtype float64")
    assert (kind_of("slow rank 1"), kind_of("foreign load on the GPU")) == ("slow rank", "foreign load on the GPU")
    for healthy in ("", None):
        assert doubts_of([with_ranks(line("single"), **WATCHED, settings=healthy)]) == [()]


@pytest.mark.parametrize("throttled", ["", "held by power", "sw power cap", "sw power cap, held by power", None])
def test_a_power_limit_is_a_gpus_usual_state_and_no_doubt(throttled: str | None) -> None:
    assert doubts_of([with_ranks(line("single"), **WATCHED, throttled=throttled)]) == [()]


@pytest.mark.parametrize(
    ("clock_mhz", "model", "doubts"),
    [
        (1700, "A", ()),
        (1980, "A", ()),
        (1200, "A", ("other clock than the base's",)),  # slower
        (2090, "A", ("other clock than the base's",)),  # the base was slower
        (1200, "B", ("other devices than the base's",)),  # another model has another clock
        (None, "A", ()),
    ],
)
def test_a_clock_unlike_the_bases_is_a_doubt(clock_mhz: int | None, model: str, doubts: tuple[str, ...]) -> None:
    base = with_ranks(line("single"), **WATCHED, device_model="A", sm_clock_mhz=1800)
    other = line("ddp2", rates=(50.0, 50.0))
    other["ranks"] = [
        {**rank, **WATCHED, "node_rank": 0, "device_model": model, "own_cpu_s": 0.5, "sm_clock_mhz": clock}
        for rank, clock in zip(other["ranks"], (clock_mhz and 2100, clock_mhz), strict=True)
    ]
    assert doubts_of([base, other]) == [(), doubts]


@pytest.mark.parametrize(("rate", "doubt"), [(100.0, ()), (149.0, ()), (151.0, ("impossible efficiency",))])
def test_an_efficiency_that_cannot_be_is_a_doubt_of_its_own(rate: float, doubt: tuple[str, ...]) -> None:
    assert doubts_of([line("single"), line("ddp2", rates=(rate, rate))])[1] == doubt


@pytest.mark.parametrize(("waits", "doubt"), [(0.4, ()), (0.9, ("waits for data",))])
def test_a_step_that_waits_for_data_for_most_of_its_time_is_a_doubt_beside_its_efficiency(
    waits: float, doubt: tuple[str, ...]
) -> None:
    lines = [line(name, block=block, rates=(90.0,) * int(name[-1])) for name in ("ddp1", "ddp2") for block in range(3)]
    trials = trials_of(lines).assign(wait_fraction=pd.array([waits] * len(lines), dtype="Float64"))
    found = doubts(trials, steps_of(lines), trial_tables.windows(lines), trial_tables.ranks(lines), {})
    assert set(found) == {doubt}
    scaling = ratios.scaling(trials.assign(doubts=found))
    (table,) = [content for _, content in scaling_by_setting(scaling.assign(label="x", setting=pd.NA))]
    assert ["waits for data" in row.cells[3] for row in table.rows] == [bool(doubt)] * len(table.rows)  # all have it


@pytest.mark.parametrize(
    ("invocation", "environments", "doubt"),
    [(1, "aa", ("block cut in two",)), (0, "aa", ()), (0, "ab", ()), (1, "ab", ())],  # the last has no ratio
)
def test_a_ratio_of_two_invocations_is_marked(invocation: int, environments: str, doubt: tuple[str, ...]) -> None:
    base, other = environments
    lines = [line(f"ddp{n}", block=1, rates=(50.0,) * n, strategy="ddp", environment=base) for n in (2, 4, 8)]
    lines += [line("single", environment=base), line("single", block=1, environment=base)]
    lines += [line("ddp2", rates=(50.0, 50.0), invocation=invocation, environment=other)]
    found = doubts_of(lines)
    assert found == [()] * 5 + [doubt]
    trials = trials_of(lines).assign(doubts=found)
    shown = "\n".join(str(row.cells) for row in scaling_table(ratios.scaling(trials)).rows)
    assert ("block cut in two (1 of 2)" in shown) == bool(doubt)


def test_a_substitute_base_is_the_reference_for_doubts() -> None:
    """If the planned base, one device, could not run, two devices are the base of four."""
    names = ("single", "ddp2", "ddp4")
    lines = [line(names[0], outcome="oom"), *(line(name, rates=(9.0,) * int(name[-1])) for name in names[1:])]
    made = [
        lines[0],
        *(with_ranks(line, **WATCHED, device_model=model) for line, model in zip(lines[1:], "AB", strict=True)),
    ]
    assert ["other devices than the base's" in names for names in doubts_of(made)] == [False, False, True]


def test_a_cell_that_spans_the_bases_host_and_another_has_no_doubt_for_it() -> None:
    base = with_ranks(line("single"), **WATCHED)
    other = line("ddp2", rates=(50.0, 50.0))
    other["ranks"] = [
        {**rank, **WATCHED, "host": host, "node_rank": n}
        for n, (rank, host) in enumerate(zip(other["ranks"], "ab", strict=True))
    ]
    assert doubts_of([base, other]) == [(), ()]


def test_worker_groups_with_different_environments_are_reported_gpus_excepted() -> None:
    lines = [line("single", group_id="g0"), line("ddp2", rates=(1.0, 1.0), group_id="g1")]

    def environment(**other: Any) -> dict[str, Any]:
        node = {"cpu": "x", "variables": {"CUDA_VISIBLE_DEVICES": "0"}}
        return {
            "groups": [
                {"group_id": "g0", "invocation": 0, "whole_s": 1.0, "nodes": [node]},
                {"group_id": "g1", "invocation": 0, "whole_s": 1.0, "nodes": [{**node, **other}]},
            ]
        }

    assert doubts_of(lines, environment(variables={"CUDA_VISIBLE_DEVICES": "0,1"})) == [(), ()]
    assert doubts_of(lines, environment(cpu="y")) == [(), ("environment differs from the base's",)]


def test_no_steady_state_and_a_wide_spread() -> None:
    assert doubts_of([line("single", facts={"steady": False})]) == [("no steady state",)]
    one = line("single")
    times = replace(steps_of([one]), step_s=[np.array([0.1, 0.2] * 5)])
    found = doubts(trials_of([one]), times, trial_tables.windows([one]), trial_tables.ranks([one]), {})
    assert found.tolist() == [("wide spread",)]


@pytest.mark.parametrize(("rates", "doubted"), [((1.0, 1.04), False), ((1.0, 1.0, 0.94), True), ((1.0,), False)])
def test_timed_windows_of_different_rates_are_a_doubt(rates: tuple[float, ...], doubted: bool) -> None:
    one = line("ddp2", rates=(1.0, 1.0))
    first, *_ = (window for window in one["windows"] if window["window_kind"] == "timed")
    one["windows"] = [
        {**first, "rank": rank, "window": number, "duration_s": (1.0 if rank else 0.5) / rate}
        for number, rate in enumerate(rates, start=1)
        for rank in (0, 1)
    ]
    assert doubts_of([one]) == [("windows drift",) if doubted else ()]


@pytest.mark.parametrize(("skipped", "doubted"), [(0, False), (2, True)])
def test_updates_that_fp16_skipped_are_a_doubt(skipped: int, doubted: bool) -> None:
    one = line("single", facts={"steady": True, "skipped_updates": skipped})
    assert doubts_of([one]) == [("skipped updates",) if doubted else ()]


def alone(rank: int, seconds: float) -> dict[str, Any]:
    return {
        "trial_id": "t",
        "attempt": 1,
        "rank": rank,
        "window": 3,
        "window_kind": "alone",
        "duration_s": seconds,
        "steps": 10,
    }


@pytest.mark.parametrize(
    ("seconds", "slow"), [([1.0, 1.0], None), ([1.0, 1.15], None), ([1.0, 1.3], 1), ([1.0, 1.5, 1.0, 1.0], 1)]
)
def test_the_slow_rank_is_named(seconds: list[float], slow: int | None) -> None:
    windows = WINDOWS.frame(alone(rank, value) for rank, value in enumerate(seconds))
    assert slow_ranks(windows) == ({} if slow is None else {("t", 1): slow})


def test_foreign_cores_are_the_nodes_time_less_all_its_ranks() -> None:
    ranks = [{"watched_s": 2.0, "own_cpu_s": 1.5, "node_cpu_s": 4.0}] * 2
    assert foreign_cores(ranks) == pytest.approx((4.0 - 3.0) / 2.0)


def test_doubts_are_counted_over_blocks() -> None:
    rows = [Record({"doubts": names}) for names in (("wide spread",), (), ("wide spread", "foreign load"))]
    assert tally(rows) == (CountedDoubt("wide spread", 2, 3), CountedDoubt("foreign load", 1, 3))
    assert [str(doubt) for doubt in tally(rows, "base")] == [
        "base: wide spread (2 of 3)",
        "base: foreign load (1 of 3)",
    ]
    assert tally(rows[1:2]) == ()


def test_doubts_are_a_list_in_memory_and_text_in_a_table(tmp_path: Path) -> None:
    one = line("single", facts={"steady": False})
    trials = trials_of([one, line("single", block=1)]).assign(doubts=[("no steady state", "slow rank 1"), ()])
    path = RunFolder(tmp_path).write_table("trials", trials)
    assert pd.read_csv(path, keep_default_na=False)["doubts"].tolist() == ["no steady state; slow rank 1", ""]


def test_a_doubt_that_names_a_rank_has_its_meaning() -> None:
    assert meaning("slow rank 12") == DOUBTS["slow rank"].meaning
    assert meaning("wide spread") == DOUBTS["wide spread"].meaning


def test_every_doubt_is_explained_and_judged_by_one_function() -> None:
    for name, doubt in DOUBTS.items():
        assert doubt.meaning, name
        judged_by = {doubt.own, doubt.beside} - {Doubt("", "").own, Doubt("", "").beside}
        assert len(judged_by) == 1, name


def test_the_pilot_is_its_blocks_not_the_first_that_are_there() -> None:
    rates = {0: 100.0, 2: 110.0, 3: 400.0, 4: 25.0}  # block 1 failed
    lines = [line("single", block=b) for b in rates]
    lines += [line("ddp2", block=b, rates=(rate / 2, rate / 2)) for b, rate in rates.items()]
    trials = trials_of(lines)
    row = ratios.scaling(trials, {"at_least": 3, "at_most": 9, "halfwidth": 0.1}).to_dict("records")[1]
    half = 12.7062 * abs(np.log(1.1)) / np.sqrt(2) / np.sqrt(4)  # t of one degree of freedom, s0 of blocks 0 and 2
    assert np.log(row["high"] / row["speedup"]) == pytest.approx(half, rel=1e-4)
    assert row["precise"] is False or row["precise"] == np.False_


def test_estimates_of_peak_memory_by_cell_are_the_largest_of_its_kind() -> None:
    lines = [line("single", block=b, purpose="doctor", kind="diagnostic") for b in range(3)]
    for one, estimates in zip(lines, ({"a": 1, "b": 2}, {"a": 3}, None), strict=True):
        one["facts"] = {"estimates": estimates} if estimates else {}
    assert trial_tables.peak_estimates(lines) == {"a": 3, "b": 2}
