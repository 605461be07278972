"""Phases, ledger and waterfall from hand-made windows, with numbers that a reader can check by hand."""

from __future__ import annotations

from statistics import stdev
from typing import Any

import pandas as pd
import pytest

from harness.analysis import phases as phase_tables
from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.waterfall import ExchangeTime, exchange_times, waterfall
from harness.record.schema import COLLECTIVES, EXCHANGES
from tests.records import line, trials_of

STEPS = 10
Needed = dict[tuple[str, str], ExchangeTime]


def window(kind: str, rank: int, number: int, step_s: float, wait_s: float = 0.0) -> dict[str, Any]:
    named = {"rank": rank, "window": number, "window_kind": kind, "steps": STEPS, "weight": 100.0}
    shares = {"forward_s": 1 / 4, "backward_s": 1 / 2, "optimizer_s": 1 / 8, "rest_s": 1 / 8}
    computed = {name: STEPS * (step_s - wait_s) * share for name, share in shares.items()}
    return {**named, "duration_s": STEPS * step_s, "wait_s": STEPS * wait_s, "copy_s": 0.0, **computed}


def trial(cell: str, windows: list[dict[str, Any]], **columns: Any) -> dict[str, Any]:
    ranks = len({one["rank"] for one in windows})
    return {**line(cell, rates=(1.0,) * ranks, **columns), "windows": windows}


def study(block: int = 0, *, single_s: float = 0.10, **ddp: Any) -> list[dict[str, Any]]:
    """Return trials; ms a step: single 100; ddp on one device 105, on two 110 and 120 alone, 150 + 10 wait together."""
    two = [window(kind, rank, at, 0.160, 0.010) for kind, at in (("timed", 2), ("together", 4)) for rank in (0, 1)]
    two += [window("alone", rank, 3, step_s) for rank, step_s in enumerate((0.110, 0.120))]
    return [
        trial("single", [window("timed", 0, 2, single_s)], block=block, alone_id="single", wrapped_id="single"),
        trial("ddp1", [window("timed", 0, 2, 0.105)], block=block, strategy="ddp", devices=1, alone_id="single"),
        trial("ddp2", two, block=block, strategy="ddp", alone_id="single", wrapped_id="ddp1", **ddp),
    ]


def waterfall_of(lines: list[dict[str, Any]], pilot: int | None = None, needed: Needed | None = None) -> pd.DataFrame:
    trials = trials_of(lines).assign(doubts=[()] * len(lines))
    return waterfall(trials, trial_tables.windows(lines), ratios.scaling(trials), pilot, needed or {})


def seconds_of(lines: list[dict[str, Any]]) -> pd.Series[float]:
    return waterfall_of(lines).set_index("part")["part_s"]


def in_ms(lines: list[dict[str, Any]]) -> str:
    return ", ".join(f"{part} {round(1e3 * seconds, 6) + 0:g}" for part, seconds in seconds_of(lines).items())


def test_if_a_rule_set_the_blocks_the_intervals_of_parts_keep_the_pilots_spread() -> None:
    lines = [one for block, s in enumerate((0.09, 0.10, 0.099, 0.1)) for one in study(block, single_s=s)]
    whole, kept = (waterfall_of(lines, pilot).set_index("part").loc["wrapper"] for pilot in (None, 2))
    assert whole["share"] == pytest.approx(kept["share"]) and whole["blocks"] == kept["blocks"] == 4
    seconds = [0.105 - s for s in (0.09, 0.10, 0.099, 0.1)]
    a_second = kept["share"] / kept["part_s"]
    assert kept["high"] - kept["share"] == pytest.approx(a_second * 12.706 * stdev(seconds[:2]) / 2, rel=1e-4)
    assert whole["high"] - whole["share"] == pytest.approx(a_second * 3.182 * stdev(seconds) / 2, rel=1e-3)


def test_ddps_parts_by_hand_and_they_add_up() -> None:
    parts = "wrapper 5, side by side 5, slowest rank 10, unequal steps 0, exposed communication 30"
    assert in_ms(study()) == f"ideal 100, {parts}, waiting for data 10, rest 0"
    rows = waterfall_of(study())
    assert rows["share"].sum() == pytest.approx(1.0)
    assert rows["share"].iloc[0] == pytest.approx(0.100 / 0.160)
    faster = trial("single", [window("timed", 0, 2, 0.05)], alone_id="single", wrapped_id="single", purpose="threads")
    faster |= {"trial_id": "single-b0c", "kind": "diagnostic"}
    assert in_ms([*study(), faster]) == in_ms(study())
    rows = waterfall_of(study(single_s=0.12))  # a part may be negative
    assert rows.set_index("part").loc["wrapper", "share"] == pytest.approx(-0.015 / 0.160)
    assert rows["share"].sum() == pytest.approx(1.0)


def test_broadcasts_of_buffers_and_the_codes_own_collectives_have_their_names() -> None:
    """The first are in a step with exchange alone, the others in every step on several ranks."""
    both = {"buffer broadcast": 0.02, "own collectives": 0.004, "all-reduce": 0.03}
    parts = "wrapper 5, side by side 1, slowest rank 10, unequal steps 0, own collectives 4, buffer broadcast 20"
    ends = "exposed communication 10, waiting for data 10, rest 0"
    assert in_ms(study(facts={"exchange_s": both})) == f"ideal 100, {parts}, {ends}"
    split = both | {"CPU time of the exchange": 0.008}
    ends = ends.replace("exposed communication 10", "CPU time of the exchange 8, exposed communication 2")
    assert in_ms(study(facts={"exchange_s": split})).endswith(f"{parts}, {ends}")
    more = split | {"CPU time of the exchange": 0.8}  # beside other ranks' waits: no more than is exposed
    assert "CPU time of the exchange 10, exposed communication 0" in in_ms(study(facts={"exchange_s": more}))
    rows = split | {"sparse gradients": 0.007}  # before the CPU time, which may be of the same exchange
    named = "buffer broadcast 20, sparse gradients 7, CPU time of the exchange 3, exposed communication 0"
    assert named in in_ms(study(facts={"exchange_s": rows}))
    blocks = [*study(facts={"exchange_s": rows}), *study(block=1, facts={"exchange_s": both})]  # one lacks it
    assert in_ms(blocks).endswith(f"{parts}, exposed communication 10, waiting for data 10, rest 0")
    only = "wrapper 5, side by side 5, slowest rank 10, unequal steps 0, buffer broadcast 20, exposed communication 10"
    assert in_ms(study(facts={"exchange_s": {"buffer broadcast": 0.02}})).startswith(f"ideal 100, {only}")


@pytest.mark.parametrize("name", ["script", "ddp"])  # what the file calls the script's strategy
def test_parts_of_a_script_are_of_the_profile_after_its_windows(name: str) -> None:
    """Steps without exchange and wait take 105 ms on one device, 110 and 120 on two, in the profile."""
    one = [window("timed", 0, 2, 0.102, 0.002), window("alone", 0, 3, 0.107, 0.002)]
    two = [
        *(window("timed", rank, 2, 0.170, 0.010) for rank in (0, 1)),
        window("alone", 0, 3, 0.120, 0.010),
        window("alone", 1, 3, 0.130, 0.010),
    ]
    facts = {"exposed_s": {"exposed communication": 0.03}, "exchange_s": {"exposed communication": 0.05}}
    facts["connected_ranks"] = 2  # type: ignore[assignment]
    base, of_two = {"devices": 1, "alone_id": "script1"}, {"base_id": "script1", "alone_id": "script1", "facts": facts}
    lines = [trial("script1", one, strategy=name, **base), trial("script2", two, strategy=name, **of_two)]
    parts = "side by side 5, slowest rank 10, exposed communication 30, waiting for data 8, rest 15"
    assert in_ms(lines) == f"ideal 102, {parts}"


def timed_by_ddp(*timers_s: float, needed: Needed | None = None) -> pd.DataFrame:
    """Return blocks whose exposed communication is 30 ms a step by difference, and by DDP's own timers as given."""
    facts = ({"exposed_s": {"all-reduce": seconds}} for seconds in timers_s)
    lines = [one for block, each in enumerate(facts) for one in study(block, facts=each)]
    return waterfall_of(lines, needed=needed).set_index("part")


@pytest.mark.parametrize(
    ("timers_s", "contradicted"),
    [
        ((0.010, 0.011, 0.012), True),
        ((0.010, 0.031, 0.012), False),  # their own noise is as large as the difference
        ((0.029, 0.0291, 0.0289), False),  # apart by less than 1 % of the step
        ((0.010, 0.011), False),  # two blocks have no interval
    ],
)
def test_timers_that_contradict_the_difference_beyond_their_noise_stand_beside_it(
    timers_s: tuple[float, ...], contradicted: bool
) -> None:
    rows = timed_by_ddp(*timers_s)
    assert rows.loc["exposed communication", "part_s"] == pytest.approx(0.030)
    cpu = {
        "exchange_s": {"CPU time of the exchange": 0.020}
    }  # the timers have 10 ms of the 30 without it, or with half
    for timer_s, apart in ((0.010, False), (0.021, False), (0.005, True), (0.0305, False), (0.035, True)):
        facts = {**cpu, "exposed_s": {"all-reduce": timer_s}}
        split = waterfall_of([one for block in range(3) for one in study(block, facts=facts)]).set_index("part")
        assert split.loc["CPU time of the exchange", "part_s"] == pytest.approx(0.020)
        assert split["reason"].notna().any() == apart
    sparse = {
        "exchange_s": {"sparse gradients": 0.025},
        "exposed_s": {"all-reduce": 0.030},
    }  # whose buckets it times too
    split = waterfall_of([one for block in range(3) for one in study(block, facts=sparse)]).set_index("part")
    assert split.loc["exposed communication", "part_s"] == pytest.approx(0.005) and split["reason"].isna().all()
    said = "by difference, of steps with exchange and without; by DDP's own timers it is 7 % of the step (11 ms)"
    assert rows["reason"].dropna().to_dict() == ({"exposed communication": said} if contradicted else {})


def test_timers_stand_beside_what_contradicts_the_difference() -> None:
    rows = timed_by_ddp(0.010, 0.011, 0.012, needed={("ddp2", "exposed communication"): ExchangeTime(100, 0.001)})
    assert rows.loc["rest", "reason"].endswith("bandwidth; by DDP's own timers it is 7 % of the step (11 ms)")
    assert "exposed communication" not in rows.index


def two_blocks(*single_s: float, step_s: tuple[float, float] = (0.160, 0.160)) -> list[dict[str, Any]]:
    """Return two blocks in which the throughputs are those of the windows."""
    lines = [one for block, seconds in enumerate(single_s) for one in study(block, single_s=seconds)]
    for one, seconds in ((lines[2], step_s[0]), (lines[5], step_s[1])):
        for two in one["windows"]:
            two["duration_s"] += STEPS * (seconds - 0.160) * (two["window_kind"] in ("timed", "together"))
    return lines


def test_the_efficiency_is_the_headlines_and_all_parts_are_scaled_to_it() -> None:
    """The headline is a geometric mean of ratios; the mean of the shares would be another number."""
    lines = two_blocks(0.08, 0.12)
    headline = ratios.scaling(trials_of(lines)).set_index("cell_id").loc["ddp2"]
    rows = waterfall_of(lines).set_index("part")
    assert headline["efficiency"] != pytest.approx(0.100 / 0.160, rel=1e-3)
    ideal = rows.loc["ideal"]
    expected = headline[["efficiency", "efficiency_least", "efficiency_most"]].astype(float).tolist()
    assert [ideal["share"], ideal["least"], ideal["most"]] == pytest.approx(expected)
    assert rows["low"].isna().all() and rows["high"].isna().all()  # two blocks
    assert ideal["part_s"] == pytest.approx(0.100)
    assert rows["share"].sum() == pytest.approx(1.0)
    lost = rows.drop(index="ideal")
    a_second = (1 - headline["efficiency"]) / 0.060
    assert lost["share"].tolist() == pytest.approx([a_second * seconds for seconds in lost["part_s"]], abs=1e-9)
    wrapper = rows.loc["wrapper"]
    seconds = (0.105 - 0.08, 0.105 - 0.12)
    assert [wrapper["most"], wrapper["least"]] == pytest.approx([a_second * one for one in seconds])


def test_the_rest_is_scaled_like_the_parts_and_near_an_efficiency_of_one_is_what_noise_leaves() -> None:
    lines = two_blocks(0.08, 0.12)
    for one in (lines[2], lines[5]):
        for two in one["windows"]:
            two["duration_s"] += STEPS * 0.02 * (two["window_kind"] == "timed")
    rows = waterfall_of(lines).set_index("part")
    assert rows.loc["rest", "part_s"] == pytest.approx(0.02)
    quotients = (rows["share"] / rows["part_s"])[["exposed communication", "rest"]]
    assert quotients.iloc[0] == pytest.approx(quotients.iloc[1])
    lines = two_blocks(0.10, 0.20, step_s=(0.09, 0.224))
    headline = float(ratios.scaling(trials_of(lines)).set_index("cell_id").loc["ddp2", "efficiency"])
    assert abs(headline - 1) < 0.01
    rows = waterfall_of(lines).set_index("part")
    assert rows.loc["ideal", "share"] == pytest.approx(headline)
    assert rows.loc["wrapper", "share"] == pytest.approx(rows.loc["wrapper", "part_s"] / ((0.09 + 0.224) / 2))
    assert rows["share"].sum() == pytest.approx(1.0)


def test_strong_scaling_names_the_smaller_batch() -> None:
    strong = {"scaling": "strong", "global_batch_size": 20}
    two = [{**window("timed", rank, 2, 0.070), "weight": 50.0} for rank in (0, 1)]
    seen = {"all-gather": 0.004, "reduce-scatter": 0.001}
    small = {"base": "small", "strategy": "single", "kind": "diagnostic", "purpose": "explain"}
    lines = [
        trial("single", [window("timed", 0, 2, 0.1)], **strong, per_device_batch_size=20, alone_id="single"),
        trial("small", [window("timed", 0, 2, 0.060)], **small),
        trial("fsdp2", two, strategy="fsdp", **strong, alone_id="small"),
        profile("fsdp2", seen, **strong),
    ]
    expected = "ideal 50, smaller batch 10, all-gather 4, reduce-scatter 1, waiting for data 0, rest 5"
    assert in_ms(lines) == expected


def test_a_base_of_two_devices_has_half_of_each_batch() -> None:
    """As of a program whose run on one device failed: 20 samples on 2 devices in 100 ms are 50 ms on 4."""
    strong = {"strategy": "script", "scaling": "strong", "global_batch_size": 20, "base_id": "script2"}
    facts = {"exposed_s": {"exposed communication": 0.005}, "connected_ranks": 2}

    def windows(step_s: float, ranks: int) -> list[dict[str, Any]]:
        kinds = ((2, "timed"), (3, "alone"))
        each = {"weight": 20.0 * STEPS / ranks}
        return [{**window(kind, rank, at, step_s), **each} for at, kind in kinds for rank in range(ranks)]

    lines = [
        trial("script1", windows(0.052, 1), strategy="script", kind="diagnostic", purpose="explain"),
        trial("script2", windows(0.100, 2), **strong, facts=facts, alone_id="script2"),
        trial("script4", windows(0.060, 4), **strong, facts=facts, alone_id="script1"),
    ]
    of_four = waterfall_of(lines).query("cell_id == 'script4'").set_index("part")["part_s"]
    assert of_four["ideal"] == pytest.approx(0.050) and of_four["smaller batch"] == pytest.approx(0.002)


def profile(
    cell: str, exposed: dict[str, float] | None, *, block: int = 0, strategy: str = "fsdp", **columns: Any
) -> dict[str, Any]:
    """Return a trial that profiles the cell's collectives, with the exposed seconds of each."""
    one = line(cell, rates=(1.0, 1.0), block=block, strategy=strategy, facts={"exposed_s": exposed or {}}, **columns)
    return {**one, "kind": "diagnostic", "purpose": "profile", "trial_id": f"{cell}-b{block}p", "windows": []}


def fsdp_study(block: int, exposed: dict[str, float] | None = None, *, profiled: bool = True) -> list[dict[str, Any]]:
    """Return trials; ms a step: single 100; fsdp on one device 104, 90 alone; on two devices 160, 95 and 99 alone."""
    two = [window("timed", rank, 2, 0.160) for rank in (0, 1)]
    two += [window("alone", rank, 3, step_s) for rank, step_s in enumerate((0.095, 0.099))]
    one = [window("timed", 0, 2, 0.104), window("alone", 0, 3, 0.090)]
    trials = [
        trial("single", [window("timed", 0, 2, 0.100)], block=block, alone_id="single"),
        trial("fsdp1", one, block=block, strategy="fsdp", devices=1),
        trial("fsdp2", two, block=block, strategy="fsdp", alone_id="single", wrapped_id="fsdp1"),
    ]
    return [*trials, profile("fsdp2", exposed, block=block)] if profiled else trials


def test_dps_and_fsdps_parts_by_hand_each_measured_by_itself() -> None:
    facts = {"steady": True, "exchange_s": {"threads": 0.003, "side by side": 0.030}}
    cell = {"strategy": "dp", "devices": 2, "global_batch_size": 20, "alone_id": "single", "facts": facts}
    exposed = dict.fromkeys(("replicate", "scatter", "gather", "reduce"), 0.001)
    lines = [
        trial("single", [window("timed", 0, 2, 0.100)], alone_id="single"),
        trial("dp2", [{**window("timed", 0, 2, 0.140), "weight": 200.0}], **cell),
        profile("dp2", exposed, strategy="dp"),
    ]
    collectives = "replicate 1, scatter 1, gather 1, reduce 1"
    assert in_ms(lines) == f"ideal 100, threads 3, side by side 30, {collectives}, waiting for data 0, rest 3"
    lines = fsdp_study(0, {"all-gather": 0.02, "reduce-scatter": 0.01})
    alone = "ideal 100, wrapper 4, side by side 5, slowest rank 4, unequal steps 0"
    assert in_ms(lines) == f"{alone}, all-gather 20, reduce-scatter 10, waiting for data 0, rest 17"


def test_a_collective_that_was_not_seen_in_every_block_is_in_the_rest_and_the_parts_add_up() -> None:
    seen = {"all-gather": 0.02, "reduce-scatter": 0.01}
    lines = [*fsdp_study(0, seen), *fsdp_study(1, {"all-gather": 0.02})]
    rows = waterfall_of(lines).set_index("part")
    assert "reduce-scatter" not in rows.index and rows.loc["all-gather", "part_s"] == pytest.approx(0.02)
    assert rows.loc["rest", "part_s"] == pytest.approx(0.027) and rows["share"].sum() == pytest.approx(1.0)
    for second in (fsdp_study(1), fsdp_study(1, profiled=False)):
        rows = waterfall_of([*fsdp_study(0, seen), *second]).set_index("part")
        assert rows.loc["rest", "blocks"] == 1, "a block of which nothing was profiled does not count"


def test_a_profile_of_another_invocation_or_launcher_counts_and_without_any_collectives_are_in_the_rest() -> None:
    lines = fsdp_study(0, {"all-gather": 0.02})
    lines[3] |= {"invocation": 1, "cell_id": "under-ray", "launchers_id": "both"}
    lines[2]["launchers_id"] = "both"
    assert seconds_of(lines)["all-gather"] == pytest.approx(0.02)
    old = fsdp_study(0, profiled=False)  # as in a container that forbids CUPTI
    old[2]["facts"] = {"steady": True, "exchange_s": {"all-gather": 0.02}}  # its total, which is no loss
    for rank in (0, 1):
        old[2]["windows"][rank]["duration_s"] -= STEPS * 0.030
    seconds = seconds_of(old)
    assert "all-gather" not in seconds and seconds[["wrapper", "rest"]].tolist() == pytest.approx([0.004, 0.017])


@pytest.mark.parametrize(
    ("alone_s", "usual_s"), [((0.11, 0.12), 0.11), ((0.11, 0.12, 0.13), 0.12), ((0.10, 0.11, 0.13, 0.15), 0.12)]
)
def test_the_usual_rank_is_the_median_one_and_of_two_the_faster(alone_s: tuple[float, ...], usual_s: float) -> None:
    windows = [
        window(kind, rank, number, seconds if kind == "alone" else 0.2)
        for number, kind in enumerate(("timed", "alone", "together"), start=2)
        for rank, seconds in enumerate(alone_s)
    ]
    name = f"ddp{len(alone_s)}"
    lines = [*study()[:2], trial(name, windows, strategy="ddp", alone_id="single", wrapped_id="ddp1")]
    seconds = seconds_of(lines)
    assert seconds["side by side"] == pytest.approx(usual_s - 0.105)
    assert seconds["slowest rank"] == pytest.approx(max(alone_s) - usual_s)


def test_phases_are_means_of_the_timed_steps_and_add_up() -> None:
    trials, windows = trials_of(study()), trial_tables.windows(study())
    two = phase_tables.phases(trials, windows).set_index("cell_id").loc["ddp2"]
    assert two[["step_s", "wait_s", "backward_s"]].tolist() == pytest.approx([0.160, 0.010, 0.075])
    assert phase_tables.host_phases(trials, windows).empty


def waiting(*shares: float, pilot: int | None = None) -> dict[str, Any]:
    """Return the phases of a cell that waits for data for these shares of its step, block by block."""
    lines = [line("ddp2", rates=(9.0, 9.0), block=block) for block in range(len(shares))]
    for one, share in zip(lines, shares, strict=True):
        one["windows"] = [window | {"wait_s": share, "rest_s": 1.0 - share} for window in one["windows"]]
    (row,) = phase_tables.phases(trials_of(lines), trial_tables.windows(lines), pilot).to_dict("records")
    return row


def test_the_wait_for_data_has_an_interval_over_three_blocks_which_ends_at_0_and_1() -> None:
    row = waiting(0.5, 0.6, 0.7)
    halfwidth = 4.302653 * 0.1 / 3**0.5  # t(2), standard deviation 0.1, three blocks
    assert row["waits"] == pytest.approx(0.6) and row["blocks"] == 3
    assert (row["waits_low"], row["waits_high"]) == (pytest.approx(0.6 - halfwidth), pytest.approx(0.6 + halfwidth))
    assert (row["waits_least"], row["waits_most"]) == (pytest.approx(0.5), pytest.approx(0.7))
    assert waiting(0.5, 0.6, 0.7, 0.1, pilot=3)["waits_low"] == pytest.approx(0.475 - 4.302653 * 0.1 / 2)
    assert waiting(0.9, 0.99, 0.7)["waits_high"] == 1.0 and waiting(0.01, 0.2, 0.02)["waits_low"] == 0.0
    assert pd.isna(waiting(0.5, 0.6)["waits_low"]) and waiting(0.5, 0.6)["waits"] == pytest.approx(0.55)


def test_ddps_wrapper_and_contention_start_from_its_own_step_without_exchange_and_its_wait_is_the_longest() -> None:
    """A step with exchange holds the copies into buckets, which the communication holds again."""
    lines = study()
    lines[1]["windows"] = [window("timed", 0, 2, 0.109), window("alone", 0, 3, 0.104)]
    seconds = seconds_of(lines)
    assert (seconds["wrapper"], seconds["side by side"]) == (pytest.approx(0.004), pytest.approx(0.110 - 0.104))
    lines = study()
    for one in lines[2]["windows"]:
        if one["window_kind"] in ("timed", "together") and one["rank"] == 1:
            one["wait_s"] = 0.0
            one["duration_s"] += 1e-6  # chance makes it the slowest
    assert seconds_of(lines)["waiting for data"] == pytest.approx(0.010, abs=1e-6)


def test_windows_that_mark_no_phases_wait_as_those_that_do() -> None:
    lines = study()
    unmarked = {"wait_s": None, "idle_s": None, "host_wait_s": None}
    for one in lines:
        marked = [{**w, "window_kind": "phases", "window": 9} for w in one["windows"] if w["window_kind"] == "timed"]
        one["windows"] = [w | unmarked for w in one["windows"]] + marked
    seconds = seconds_of(lines)
    assert seconds["side by side"] == pytest.approx(0.110 - 0.010 - 0.105)
    assert seconds["exposed communication"] == pytest.approx(0.160 - 0.120)


@pytest.mark.parametrize(
    ("more", "rest"),
    [({}, {"between trials and end": 5.0}), ({"teardown": 2.0}, {"teardown": 2.0, "between trials": 3.0})],
)
def test_the_time_accounting_sums_to_wall_time(more: dict[str, float], rest: dict[str, float]) -> None:
    lines = [line("single"), line("ddp2", rates=(1.0, 1.0))]  # 3 s each, all of it in parts
    group = {"group_id": "b0-g0", "invocation": 0, "whole_s": 20.0, "parts": {"worker start": 9.0, **more}}
    ledger = phase_tables.ledger(lines, {"groups": [group], "invocations": [{"wall_s": 25.0}]})
    assert ledger["seconds"].sum() == pytest.approx(25.0)
    assert ledger[ledger["level"] == "run"]["seconds"].tolist() == [5.0]
    of_group = ledger[ledger["level"] == "group"].set_index("part")["seconds"].to_dict()
    assert of_group == {"worker start": 9.0, **rest}


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
    seconds = seconds_of(lines)
    assert seconds["waiting for data"] == pytest.approx(0.008)
    assert seconds["side by side"] == pytest.approx((0.110 - 0.003) - 0.105)
    assert waterfall_of(lines)["share"].sum() == pytest.approx(1.0)


def test_blocks_and_cells_without_diagnostics_are_omitted() -> None:
    lines = study(0) + study(1)
    whole = waterfall_of(lines)
    lines[5]["windows"] = [one for one in lines[5]["windows"] if one["window_kind"] == "timed"]
    part = waterfall_of(lines)
    assert set(whole["blocks"]) == {2}
    assert part.set_index("part")["blocks"].to_dict() == {"ideal": 2} | dict.fromkeys(part["part"][1:], 1)
    assert part["share"].sum() == pytest.approx(1.0)
    single, one, two = study()
    assert waterfall_of([single, two]).empty and waterfall_of([single, one]).empty


def test_ranks_that_are_slow_in_turn_wait_for_the_slowest_one_of_each_step() -> None:
    """Their slowest steps, without exchange, alternate: each step loses 25 ms more."""
    lines = study()
    for one in lines[2]["windows"]:
        if one["window_kind"] == "alone":
            one["in_turn_s"] = STEPS * 0.025
    more = seconds_of(lines) - seconds_of(study())
    assert more["unequal steps"] == pytest.approx(0.025) and more["exposed communication"] == pytest.approx(-0.025)
    assert more.drop(["unequal steps", "exposed communication"]).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("late_ms", "parts"),
    [
        ((0, 0), "side by side 11, slowest rank 0, unequal steps 0, own collectives 4"),  # the collective itself
        ((10, 0), "side by side 1, slowest rank 10, unequal steps 0, own collectives 4"),
        ((0, 10), "side by side 1, slowest rank 10, unequal steps 0, own collectives 4"),
        ((8, 8), "side by side 3, slowest rank 0, unequal steps 8, own collectives 4"),  # late in turn
    ],
)
def test_the_wait_in_a_collective_of_the_users_own_is_for_a_late_rank(late_ms: tuple[int, int], parts: str) -> None:
    """Every step without exchange takes 120 ms on both ranks, which the collective keeps together."""
    lines = study(facts={"exchange_s": {"own collectives": 0.004}})
    for one in lines[2]["windows"]:
        if one["window_kind"] == "alone":
            one |= {"duration_s": STEPS * 0.120, "late_s": STEPS * late_ms[one["rank"]] / 1000}
    assert f"wrapper 5, {parts}, exposed communication 30" in in_ms(lines)


def needs(seconds: float, part: str = "exposed communication") -> Needed:
    return {("ddp2", part): ExchangeTime(340_008, seconds)}


TOO_LONG = "exposed communication of 30 ms a step is 3 times the 9.9 ms that its 340,008 bytes need at the measured "
TOO_LONG += "latency and bandwidth"


@pytest.mark.parametrize(
    ("needed", "reason"),
    [
        (needs(0.0099), TOO_LONG),
        *((needed, None) for needed in (needs(0.0101), needs(0.030), {}, needs(0.001, "all-gather"))),
    ],
)
def test_a_part_of_over_three_times_its_exchange_is_not_explained(needed: Needed, reason: str | None) -> None:
    rows = waterfall_of(study(), needed=needed).set_index("part")
    assert ("exposed communication" in rows.index) == (reason is None)
    assert rows.loc["rest" if reason else "exposed communication", "part_s"] == pytest.approx(0.030)
    assert rows.loc["rest", "reason"] == reason if reason else pd.isna(rows.loc["rest", "reason"])
    assert rows["share"].sum() == pytest.approx(1.0)


@pytest.mark.parametrize(("more_s", "withheld"), [(0.030, False), (0.045, True)])
def test_parts_that_leave_more_than_a_fifth_unexplained_are_withheld(more_s: float, withheld: bool) -> None:
    lines = study()
    for one in lines[2]["windows"]:
        one["duration_s"] += STEPS * more_s * (one["window_kind"] == "timed")
    rows = waterfall_of(lines, needed={}).set_index("part")
    assert (list(rows.index) == ["ideal", "rest"]) == withheld
    assert rows["share"].sum() == pytest.approx(1.0)
    if withheld:
        assert rows.loc["rest", "share"] == pytest.approx(1 - rows.loc["ideal", "share"])
        assert rows.loc["rest", "reason"] == "the measured parts miss it by 22 % of the step, and are withheld"


def test_the_time_of_an_exchange_is_that_of_its_measured_collectives() -> None:
    placement = {"backend": "gloo", "devices": 2, "nodes": 1, "operation": "all_reduce"}
    measured = [{**placement, "size_bytes": 10**n, "time_s": 10 ** (n - 9)} for n in (4, 6)]
    other = [{**placement, **change, "size_bytes": 10**5, "time_s": 9.0} for change in ({"devices": 4}, {"nodes": 2})]
    cell = {"cell_id": "c", "strategy": "ddp", "device": "cpu", "devices": 2, "nodes": 1}
    sizes = (10**4, 10**5, 10**7, 100)
    exchanges = [{**cell, "operation": "all_reduce", "size_bytes": size} for size in sizes]
    found = exchange_times(EXCHANGES.frame(exchanges), COLLECTIVES.frame([*measured, *other]))
    # between two sizes in proportion, beyond the largest too; a small one takes the latency
    assert found[("c", "exposed communication")] == (sum(sizes), pytest.approx(1e-5 + 1e-4 + 1e-2 + 1e-5))
    assert exchange_times(EXCHANGES.frame(exchanges), COLLECTIVES.frame(other)) == {}
    on_gpus = [{**row, "device": "cuda"} for row in exchanges]
    assert exchange_times(EXCHANGES.frame(on_gpus), COLLECTIVES.frame(measured)) == {}


@pytest.mark.parametrize(("environments", "blocks"), [(("a", "a"), 1), (("a", "b"), 0)])
def test_a_block_of_two_invocations_needs_equal_environments(environments: tuple[str, str], blocks: int) -> None:
    """The base is of the first invocation; that of ddp on one device, and of both, of the second."""
    lines = [
        one | {"invocation": int(one["cell_id"] != "single"), "environment": environments[one["cell_id"] != "single"]}
        for one in study()
    ]
    found = waterfall_of(lines)
    assert set(found["blocks"]) == ({blocks} if blocks else set())
    if blocks:
        whole = waterfall_of(study())
        assert found[["part", "part_s"]].to_numpy().tolist() == whole[["part", "part_s"]].to_numpy().tolist()
