"""Doubts and stalls from hand-made records: which trials have them, how they are counted, which are usual."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.common import Row
from harness.analysis.doubts import (
    DOUBTS,
    CountedDoubt,
    Doubt,
    doubt_of,
    doubts,
    kind_of,
    plain_doubt,
    tail,
    tally,
    unusual,
    usual_doubts,
)
from harness.analysis.evidence import foreign_cores, slow_ranks, stalls
from harness.analysis.step_times import StepTimes, step_times
from harness.record.folder import RunFolder
from harness.record.schema import EPOCHS, STEPS, TRIALS, WINDOWS
from harness.report.tables.scaling import scaling_by_setting, scaling_table
from harness.report.tables.trust import stalls_table
from tests.records import epochs_of, line, steps_of, trials_of


def doubts_of(
    lines: list[dict[str, Any]],
    environment: dict[str, Any] | None = None,
    times: StepTimes | None = None,
    epochs: pd.DataFrame | None = None,
) -> list[tuple[str, ...]]:
    steps = times or steps_of(lines)
    trials, windows = trial_tables.trials(lines, steps), trial_tables.windows(lines)
    tables = (
        steps,
        windows,
        trial_tables.ranks(lines),
        environment or {},
        EPOCHS.frame([]) if epochs is None else epochs,
    )
    return doubts(trials, *tables, lines).tolist()


def with_ranks(one: dict[str, Any], *by_rank: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """Return the trial with these columns of each rank, and of all its ranks."""
    ranks = zip(one["ranks"], by_rank or ({},) * len(one["ranks"]), strict=True)
    return {**one, "ranks": [{**rank, "node_rank": 0, **WATCHED, **columns, **own} for rank, own in ranks]}


WATCHED = {"watched_s": 1.0, "own_cpu_s": 1.0, "node_cpu_s": 1.1, "swapped_bytes": 0, "threads": 1, "host": "a"}


@pytest.mark.parametrize(
    ("columns", "doubt"),
    [
        ({}, None),
        ({"node_cpu_s": 1.9}, "foreign load"),
        ({"swapped_bytes": 4096}, "memory swapped"),
        ({"settings": "anomaly mode"}, "settings of the process: anomaly mode"),
        ({"settings": ""}, None),
        ({"settings": None}, None),
        ({"foreign_gpu_processes": 1}, "foreign load on the GPU"),
        ({"throttled": "held by heat"}, "clocks throttled"),
        ({"throttled": "sw power cap, hw slowdown, held by power"}, "clocks throttled"),
        ({"throttled": "hw power brake"}, "clocks throttled"),
        # a power limit is a GPU's usual state
        *(({"throttled": words}, None) for words in ("", "held by power", "sw power cap", None)),
        ({"throttled": "sw power cap, held by power"}, None),
    ],
    ids=str,
)
def test_rank_observations_become_doubts(columns: dict[str, Any], doubt: str | None) -> None:
    assert doubts_of([with_ranks(line("single"), **columns)]) == [(doubt,) if doubt else ()]


@pytest.mark.parametrize(
    ("first", "second", "doubt"),
    [
        ({"threads": 4}, {"threads": 4}, "threads differ from the base's"),
        ({"device_model": "B"}, {"device_model": "B"}, "other devices than the base's"),
        ({"host": "z"}, {"host": "z"}, "other hosts than the base's"),
        (
            {"own_cpu_s": 1.0},
            {"own_cpu_s": 1.0, "host": "b", "node_rank": 1},
            None,
        ),  # it spans the base's host and another
        ({"sm_clock_mhz": 2100}, {"sm_clock_mhz": 1700}, None),
        ({"sm_clock_mhz": 2100}, {"sm_clock_mhz": 1980}, None),
        ({"sm_clock_mhz": 2100}, {"sm_clock_mhz": 1200}, "other clock than the base's"),  # slower
        ({"sm_clock_mhz": 2100}, {"sm_clock_mhz": 2090}, "other clock than the base's"),  # the base was slower
        # another model has another clock
        (
            {"sm_clock_mhz": 2100, "device_model": "B"},
            {"sm_clock_mhz": 1200, "device_model": "B"},
            "other devices than the base's",
        ),
    ],
    ids=str,
)
def test_differences_from_the_base_become_doubts(
    first: dict[str, Any], second: dict[str, Any], doubt: str | None
) -> None:
    base = with_ranks(line("single"), device_model="A", sm_clock_mhz=1800)
    other = with_ranks(line("ddp2", rates=(50.0, 50.0)), first, second, device_model="A", own_cpu_s=0.5)
    assert doubts_of([base, other]) == [(), (doubt,) if doubt else ()]


def test_a_base_with_all_threads_differs_from_itself_without_a_doubt() -> None:
    base, more = (with_ranks(line("single"), threads=threads) for threads in (1, 4))
    more |= {"trial_id": "single-b0c", "kind": "diagnostic", "purpose": "threads"}
    assert doubts_of([base, more]) == [(), ()]


def test_the_settings_of_all_ranks_are_one_doubt_with_its_words() -> None:
    texts = ("anomaly mode, dtype float64", "TORCH_DISTRIBUTED_DEBUG=DETAIL, anomaly mode")
    one = line("ddp2", rates=(50.0, 50.0))
    ((doubt,),) = doubts_of([with_ranks(one, *({"settings": text} for text in texts), own_cpu_s=0.5)])
    assert doubt == "settings of the process: TORCH_DISTRIBUTED_DEBUG=DETAIL, anomaly mode, dtype float64"
    assert kind_of(doubt) == "settings of the process" and doubt_of(doubt).meaning.startswith("a rank's process ran")
    assert plain_doubt(doubt).endswith("change its speed: TORCH_DISTRIBUTED_DEBUG=DETAIL, anomaly mode, dtype float64")
    assert (kind_of("slow rank 1"), kind_of("foreign load on the GPU")) == ("slow rank", "foreign load on the GPU")


@pytest.mark.parametrize(("rate", "doubt"), [(100.0, ()), (149.0, ()), (151.0, ("impossible efficiency",))])
def test_an_efficiency_that_cannot_be_is_a_doubt_of_its_own(rate: float, doubt: tuple[str, ...]) -> None:
    assert doubts_of([line("single"), line("ddp2", rates=(rate, rate))])[1] == doubt
    twin = {**line("single", rates=(rate,), purpose="twin"), "trial_id": "single-b0t"}
    assert doubts_of([line("single"), twin])[1] == ()  # noise alone


@pytest.mark.parametrize(("waits", "doubt"), [(0.4, ()), (0.9, ("waits for data",))])
def test_a_step_that_waits_for_data_for_most_of_its_time_is_a_doubt_beside_its_efficiency(
    waits: float, doubt: tuple[str, ...]
) -> None:
    lines = [line(f"ddp{n}", block=block, rates=(90.0,) * n) for n in (1, 2) for block in range(3)]
    trials = trials_of(lines).assign(wait_fraction=pd.array([waits] * len(lines), dtype="Float64"))
    found = doubts(
        trials, steps_of(lines), trial_tables.windows(lines), trial_tables.ranks(lines), {}, EPOCHS.frame([]), lines
    )
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
    made = [with_ranks(line, device_model=model) for line, model in zip(lines, ".AB", strict=True)]
    assert ["other devices than the base's" in names for names in doubts_of(made)] == [False, False, True]


@pytest.mark.parametrize(
    ("other", "doubt"),
    [
        ({"variables": {"CUDA_VISIBLE_DEVICES": "0,1"}}, ()),  # which GPUs a group has is no difference
        ({"cpu": "y"}, ("environment differs from the base's",)),
    ],
)
def test_worker_groups_with_different_environments_are_reported(other: dict[str, Any], doubt: tuple[str, ...]) -> None:
    lines = [line("single", group_id="g0"), line("ddp2", rates=(1.0, 1.0), group_id="g1")]
    node = {"cpu": "x", "variables": {"CUDA_VISIBLE_DEVICES": "0"}}
    nodes = {"g0": node, "g1": {**node, **other}}
    groups = [{"group_id": name, "invocation": 0, "whole_s": 1.0, "nodes": [one]} for name, one in nodes.items()]
    assert doubts_of(lines, {"groups": groups}) == [(), doubt]


@pytest.mark.parametrize(
    ("facts", "doubt"),
    [
        ({"steady": False}, ("no steady state",)),
        ({"steady": True, "skipped_updates": 0}, ()),  # of fp16
        ({"steady": True, "skipped_updates": 2}, ("skipped updates",)),
        ({"steady": True, "evaluations": 0}, ()),  # of a script
        ({"steady": True, "evaluations": 9}, ("evaluates",)),
        ({"steady": True, "evaluations": 10}, ()),
    ],
)
def test_facts_of_a_trial_become_doubts(facts: dict[str, Any], doubt: tuple[str, ...]) -> None:
    assert doubts_of([line("single", facts=facts)]) == [doubt]


def test_the_cores_of_other_programs_are_the_nodes_time_less_all_its_ranks_and_wide_steps_are_a_doubt() -> None:
    one = line("single")
    columns = {name: [np.zeros(10)] for name in ("wait_s", "mean_s", "rank")} | {"step_s": [np.array([0.1, 0.2] * 5)]}
    times = replace(steps_of([one]), column=columns.__getitem__)
    assert doubts_of([one], times=times) == [("wide spread",)]
    ranks = [{"watched_s": 2.0, "own_cpu_s": 1.5, "node_cpu_s": 4.0}] * 2
    assert foreign_cores(ranks) == pytest.approx((4.0 - 3.0) / 2.0)


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


@pytest.mark.parametrize(
    ("seconds", "slow"), [([1.0, 1.0], None), ([1.0, 1.15], None), ([1.0, 1.3], 1), ([1.0, 1.5, 1.0, 1.0], 1)]
)
def test_the_slow_rank_is_named(seconds: list[float], slow: int | None) -> None:
    alone = {"trial_id": "t", "attempt": 1, "window": 3, "window_kind": "alone", "steps": 10}
    windows = WINDOWS.frame({**alone, "rank": rank, "duration_s": value} for rank, value in enumerate(seconds))
    assert slow_ranks(windows) == ({} if slow is None else {("t", 1): slow})
    assert slow_ranks(windows.assign(steps=5)) == {}  # those of a script's profile: too few to know
    # beside a collective of the user's own all take as long, and the others wait in it
    waiting = windows.assign(duration_s=max(seconds), late_s=[max(seconds) - own for own in seconds])
    assert slow_ranks(waiting) == slow_ranks(windows)


def test_doubts_are_counted_over_blocks_a_list_in_memory_and_text_in_a_table(tmp_path: Path) -> None:
    rows = [Row({"doubts": names}) for names in (("wide spread",), (), ("wide spread", "foreign load"))]
    assert tally(rows) == (CountedDoubt("wide spread", 2, 3), CountedDoubt("foreign load", 1, 3))
    assert [*map(str, tally(rows, "base"))] == ["base: wide spread (2 of 3)", "base: foreign load (1 of 3)"]
    assert tally(rows[1:2]) == ()
    one = line("single", facts={"steady": False})
    trials = trials_of([one, line("single", block=1)]).assign(doubts=[("no steady state", "slow rank 1"), ()])
    path = RunFolder(tmp_path).write_table("trials", trials)
    assert pd.read_csv(path, keep_default_na=False)["doubts"].tolist() == ["no steady state; slow rank 1", ""]


def test_every_doubt_is_explained_also_one_that_names_a_rank_and_judged_by_one_function() -> None:
    for name, doubt in DOUBTS.items():
        assert doubt.meaning, name
        judged_by = {doubt.own, doubt.beside} - {Doubt("", "").own, Doubt("", "").beside}
        assert len(judged_by) == 1, name
    assert doubt_of("slow rank 12") is DOUBTS["slow rank"]
    assert doubt_of("wide spread") is DOUBTS["wide spread"]


def test_a_doubt_of_most_timed_trials_is_usual_whichever_rank_it_names() -> None:
    names = [("foreign load", "slow rank 0"), ("foreign load", "slow rank 1"), ("slow rank 1",), ("foreign load",), ()]
    rows = [{"throughput_per_s": 1.0, "outcome": "ok", "doubts": doubts} for doubts in names]
    others = [{"outcome": "ok", "doubts": ()}, {"throughput_per_s": 1.0, "outcome": "error", "doubts": ()}]
    found = TRIALS.frame([*rows, *others])
    assert usual_doubts(found) == {"foreign load": (3, 5), "slow rank": (3, 5)}
    half = TRIALS.frame([*rows[:2], *rows[-1:], *rows[-1:]])
    assert usual_doubts(half) == {}  # two of four are not most
    assert usual_doubts(TRIALS.frame([])) == {}
    assert usual_doubts(found.assign(purpose=[*[""] * 4, "threads", "", ""]))["foreign load"][1] == 4


def test_clearly_more_of_a_usual_doubt_is_unusual_by_the_tail_of_the_binomial() -> None:
    usual = {"foreign load": (60, 100)}
    three, six = CountedDoubt("foreign load", 3, 3), CountedDoubt("foreign load", 6, 6)
    assert unusual([three], usual) == ()  # 0.6 ** 3 = 0.22
    assert unusual([six], usual) == (six,)  # 0.6 ** 6 = 0.047
    other = CountedDoubt("slow rank 1", 1, 6)
    assert unusual([three, other], usual) == (other,)
    assert tail(0, 3, 0.5) == pytest.approx(1.0)
    assert tail(3, 3, 0.6) == pytest.approx(0.216)
    assert tail(2, 3, 0.5) == pytest.approx(0.5)


def test_a_cell_is_marked_only_for_what_is_not_usual() -> None:
    cells = {"single": (100.0,), "ddp2": (80.0,) * 2, "ddp4": (80.0,) * 4}
    lines = [line(name, block=block, rates=rates) for block in range(3) for name, rates in cells.items()]
    doubts = [("foreign load", "wide spread") if one["cell_id"] == "ddp4" else ("foreign load",) for one in lines]
    found = ratios.scaling(trials_of(lines).assign(doubts=doubts)).set_index("cell_id")
    assert "foreign load (3 of 3)" in [*map(str, found.loc["ddp2", "doubts"])]
    assert [[*map(str, found.loc[cell, "unusual"])] for cell in ("ddp2", "ddp4")] == [[], ["wide spread (3 of 3)"]]


# -- stalled steps ----------------------------------------------------------------------------------------------------


STEPS_OF_A_WINDOW = 10


def recorded(step_s: dict[tuple[int, int, int], float], *, wait_s: float = 0.0, **rank: Any) -> list[Any]:
    """A trial of two ranks and two timed windows of ten steps of 0.1 s, but for these (rank, window, step)."""
    places = [(r, w, s) for r in range(2) for w in range(3) for s in range(STEPS_OF_A_WINDOW)]
    trial = {"trial_id": "ddp2-b0", "attempt": 1}
    steps = [
        {**trial, "rank": r, "window": w, "step": s, "warmup": w == 0, "step_s": step_s.get((r, w, s), 0.1)}
        | {"wait_s": wait_s if (r, w, s) in step_s else 0.0}
        for r, w, s in places
    ]
    fixed = {"steps": STEPS_OF_A_WINDOW, "weight": 50.0}
    windows = [
        {**fixed, "rank": r, "window": w, "window_kind": "timed" if w else "warmup", "duration_s": sum(seconds)}
        for r in range(2)
        for w in range(3)
        for seconds in ([row["step_s"] for row in steps if (row["rank"], row["window"]) == (r, w)],)
    ]
    one = line("ddp2", rates=(1.0, 1.0), windows=windows)
    one["ranks"][1] |= rank
    return [one, STEPS.frame(steps)]


def stalls_of(one: dict[str, Any], steps: pd.DataFrame) -> pd.DataFrame:
    times, lines = step_times(steps), [one]
    trials = trial_tables.trials(lines, times)
    return stalls(trials, trial_tables.windows(lines), trial_tables.ranks(lines), steps, times)


STALL = {(0, 1, 3): 20.0, (1, 1, 3): 21.0}


def test_a_stalled_window_has_its_seconds_and_ranks_and_its_trial_counts_with_the_doubt() -> None:
    (row,) = stalls_of(*recorded(STALL)).to_dict("records")
    assert (row["window"], row["waiting_ranks"], row["stalled_s"]) == (1, "0, 1", 21.0)
    assert row["step_median_s"] == pytest.approx(0.1)
    assert row["throughput_per_s"] == pytest.approx(200 / (21.9 + 1.0))  # all samples, over the slowest rank's time
    assert row["unstalled_throughput_per_s"] == pytest.approx(100.0)
    assert pd.isna(row["cause"])
    (shown,) = stalls_table(stalls_of(*recorded(STALL))).rows
    assert shown.cells[3:] == ("21 s", "0.1", "0, 1", "not known", "8.73", "100")
    one, steps = recorded(STALL)
    assert one["outcome"] == "ok" and "stalled" in doubts_of([one], times=step_times(steps))[0]
    times = step_times(steps)
    assert len(trial_tables.cells(trial_tables.trials([one], times).assign(doubts=[()]), times)) == 1


@pytest.mark.parametrize(
    "step_s",
    [
        {},
        {(0, 1, 3): 1.9},  # 19 times the median, yet under 2 s
        {(0, 0, 3): 20.0},  # warm-up
        {(r, w, s): 3.0 for r in range(2) for w in range(3) for s in range(STEPS_OF_A_WINDOW)},  # all are slow
    ],
)
def test_what_is_no_stall(step_s: dict[tuple[int, int, int], float]) -> None:
    one, steps = recorded(step_s)
    assert stalls_of(one, steps).empty and "stalled" not in doubts_of([one], times=step_times(steps))[0]


def test_if_every_window_stalled_there_is_no_throughput_without() -> None:
    both = stalls_of(*recorded({(0, 1, 3): 20.0, (0, 2, 0): 5.0}))
    assert both["window"].tolist() == [1, 2] and both["waiting_ranks"].tolist() == ["0", "0"]
    assert both["unstalled_throughput_per_s"].isna().all()


def test_of_one_row_a_step_the_rank_that_waited_for_data_is_named_and_not_the_slowest() -> None:
    one, steps = recorded(STALL, wait_s=15.0)
    slowest = steps[steps["rank"] == 1].assign(wait_rank=0)
    (row,) = stalls_of(one, STEPS.typed(slowest)).to_dict("records")
    assert (row["waiting_ranks"], row["cause"]) == ("1", "waited for data (rank 0)")


def test_a_cause_is_named_only_if_a_counter_shows_it() -> None:
    assert stalls_of(*recorded(STALL, wait_s=15.0))["cause"].tolist() == ["waited for data (rank 0, 1)"]
    assert stalls_of(*recorded(STALL, wait_s=5.0))["cause"].isna().all()
    swapped = stalls_of(*recorded(STALL, swapped_bytes=4096, throttled="sw thermal slowdown"))
    assert swapped["cause"].tolist() == ["its node swapped memory (rank 1); clocks throttled (rank 1)"]
    assert stalls_of(*recorded(STALL, swapped_bytes=0, throttled=""))["cause"].isna().all()
    assert stalls_of(*recorded(STALL, swapped_bytes=0, throttled="held by power"))["cause"].isna().all()


def training_of(*epoch_s: float, **columns: Any) -> tuple[dict[str, Any], pd.DataFrame]:
    """One training of a cell whose timed steps take 0.1 s, and its epochs of ten steps with these seconds."""
    trained = line("trained", strategy="single", kind="convergence", **columns)
    epochs = epochs_of(trained["trial_id"], [0.5] * len(epoch_s))
    return trained, epochs.assign(train_s=pd.Series(np.cumsum(epoch_s)).astype("Float64"))


@pytest.mark.parametrize(
    ("epoch_s", "doubt"),
    [
        ((30.0, 1.1, 0.9, 1.0), ()),  # a slow first epoch is none: the warm-up leaves it out
        ((1.0, 1.9, 1.9, 1.9), ()),
        ((1.0,), ()),  # nothing is known after the first
        ((1.0, 0.02, 0.02), ("other speed in epochs: a step of an epoch takes 0.02 times as long",)),
        ((1.0, 1.0, 1.0, 3.0, 3.0), ("other speed in epochs: a step of an epoch takes 1 to 3 times as long",)),
        ((1.0, 1.0, 1.0, 9.0, 1.0, 1.0), ()),  # one epoch alone
    ],
)
def test_windows_are_compared_with_the_epochs_of_the_same_setting(
    epoch_s: tuple[float, ...], doubt: tuple[str, ...]
) -> None:
    trained, epochs = training_of(*epoch_s, scaling="strong")
    timed = [line(block=block) for block in (0, 1)]
    found = doubts_of([*timed, trained], epochs=epochs)
    assert [tuple(name for name in of_trial if "epochs" in name) for of_trial in found] == [doubt, doubt, ()]


def test_the_time_of_a_script_s_training_which_contains_evaluation_is_compared_with_no_window() -> None:
    trained, epochs = training_of(1.0, 50.0, 50.0, scaling="strong")
    unknown = epochs.assign(evaluation_s=pd.NA, samples=pd.NA)
    assert not any("epochs" in name for names in doubts_of([line(), trained], epochs=unknown) for name in names)


OTHERS = [{"model": "resnet14"}, {"global_batch_size": 20}, {"options": {"loader.workers": 2}}]


@pytest.mark.parametrize("columns", OTHERS)
def test_epochs_of_another_setting_say_nothing_about_windows(columns: dict[str, Any]) -> None:
    trained, epochs = training_of(1.0, 50.0, 50.0, **columns)
    assert not any("epochs" in name for names in doubts_of([line(), trained], epochs=epochs) for name in names)
    assert not any("epochs" in name for names in doubts_of([trained], epochs=epochs) for name in names)
