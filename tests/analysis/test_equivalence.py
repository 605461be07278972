"""Noise floor and equivalence from hand-made records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.equivalence import Verdict, equivalence, verdicts
from harness.config.sections import BlockRule
from harness.record.schema import CHECKS, EQUIVALENCE
from tests.records import line, steps_of, trials_of

NO_TRIALS = trials_of([])


def twin(block: int, rate: float) -> dict[str, Any]:
    one = line("single", block=block, rates=(rate,), purpose="twin", kind="diagnostic")
    return {**one, "trial_id": f"single-b{block}t", "windows": line("single", rates=(rate,))["windows"]}


def test_the_noise_floor_pairs_the_twin_with_its_base_by_block() -> None:
    lines = [line("single", block=b, rates=(100.0 * (b + 1),)) for b in range(3)]
    lines += [twin(b, 110.0 * (b + 1)) for b in range(3)]
    noise = ratios.noise(trials_of(lines))
    assert noise[["ratio", "blocks", "excludes_one"]].to_numpy().tolist() == [[pytest.approx(1.1), 3, True]]
    lines = [line("single", block=b) for b in range(3)] + [twin(0, 99.0), twin(1, 101.0), twin(2, 100.0)]
    assert ratios.noise(trials_of(lines))["excludes_one"].tolist() == [False]
    assert ratios.noise(trials_of([lines[0], lines[3]]))["excludes_one"].isna().all()


def test_a_base_that_was_measured_twice_counts_twice() -> None:
    lines = [
        line("single"),
        line("single", block=1),
        twin(0, 400.0),
        line("ddp", devices=2),
        line("ddp", block=1, devices=2),
    ]
    trials = trials_of(lines)
    cells = trial_tables.cells(trials, steps_of(lines)).set_index("cell_id")["throughput_per_s"]
    assert cells["single"] == pytest.approx((200 * 100) ** 0.5)
    speedups = ratios.scaling(trials).set_index("cell_id")["speedup"]
    assert speedups["ddp"] == pytest.approx(cells["ddp"] / cells["single"])
    assert speedups["single"] == 1


def check(cell: str, base: str, outcome: str = "ok") -> dict[str, Any]:
    one = line(cell, base=base, kind="diagnostic", purpose="equivalence", outcome=outcome)
    return {**one, "trial_id": f"{cell}-b0e", "windows": []}


def checks_of(updates: dict[str, list[float]], **columns: Any) -> pd.DataFrame:
    columns = {"quantity": "scaled_update", "computed_in": "fp32", **columns}
    rows = [
        {"trial_id": f"{cell}-b0e", "attempt": 1, "bucket": i, "update": value, **columns}
        for cell, values in updates.items()
        for i, value in enumerate(values)
    ]
    return CHECKS.frame(rows)


LINES = [check("single", "single"), check("ddp2", "single")]


def test_updates_that_differ_by_rounding_agree_and_others_are_named_with_their_difference() -> None:
    found = equivalence(trials_of(LINES), checks_of({"single": [3.0, 4.0], "ddp2": [3.0, 4.001]}))
    assert found["difference"].tolist() == pytest.approx([0.001 / 5])
    assert found["equivalent"].tolist() == [True]
    assert verdicts(found, NO_TRIALS) == {"ddp2": Verdict("equivalent")}
    found = equivalence(trials_of(LINES), checks_of({"single": [3.0, 4.0], "ddp2": [6.0, 8.0]}))
    reason = "not equivalent to one device: its update differs by 100 %"
    assert verdicts(found, NO_TRIALS) == {"ddp2": Verdict("not equivalent", reason)}


@pytest.mark.parametrize(
    ("fp32", "bf16", "equivalent"), [(0.0, 0.02, [True, True]), (0.0, 0.06, [True, False]), (0.02, 0.0, [False, True])]
)
def test_steps_in_16_bits_have_a_bound_of_their_own(fp32: float, bf16: float, equivalent: list[bool]) -> None:
    """6 % in bf16 is no rounding, 2 % is; the same 2 % in fp32 is none."""
    updates = ({"single": [1.0], "ddp2": [1.0 + far]} for far in (fp32, bf16))
    both = [checks_of(update, computed_in=name) for update, name in zip(updates, ("fp32", "bf16"), strict=True)]
    found = equivalence(trials_of([{**each, "precision": "bf16"} for each in LINES]), pd.concat(both))
    assert found["computed_in"].tolist() == ["fp32", "bf16"] and found["bound"].tolist() == [0.01, 0.05]
    assert found["equivalent"].tolist() == equivalent
    compressed = [LINES[0], {**LINES[1], "options": {"ddp.comm_hook": "bf16_compress"}}]
    found = equivalence(trials_of(compressed), checks_of({"single": [1.0], "ddp2": [1.02]}))
    assert found["equivalent"].tolist() == [True] and found["bound"].tolist() == [0.05]


def quantities_of(*cells: tuple[str, dict[str, list[float]]], **columns: Any) -> pd.DataFrame:
    frames = [checks_of({cell: v}, quantity=name, **columns) for cell, vectors in cells for name, v in vectors.items()]
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
    fp32 = quantities_of(("single", RIGHT), ("ddp2", RIGHT), computed_in="fp32")

    def reason(**own: list[float]) -> object:
        bf16 = quantities_of(("single", RIGHT), ("ddp2", RIGHT | own), computed_in="bf16")
        return equivalence(trials_of(lines), pd.concat([fp32, bf16]))["reason"].tolist()[1]

    assert pd.isna(reason(first_update=[0.34, 0.37]))  # (0.3, 0.4) and a tenth of it across
    assert reason(first_update=[0.33, 0.44]) == "not equivalent to one device: its first update in bf16 differs by 10 %"
    assert reason(gradient=[3.4, 3.7]) == "not equivalent to one device: its gradient in bf16 differs by 10 %"


@pytest.mark.parametrize(
    ("gradient", "update", "equivalent"),
    [
        ([3.0, 4.0], [0.316, 0.388], False),  # 4 % across: an equal gradient explains none of it
        ([3.003, 4.004], [0.316, 0.388], True),
        ([3.003, 4.004], [0.309, 0.412], False),  # a rate that is 3 % too large
        ([3.003, 4.004], [0.332, 0.376], False),  # 8 % across
        ([3.06, 4.08], [0.316, 0.388], False),
    ],
)
def test_if_a_gradient_differs_by_more_than_rounding_the_signs_of_adam_do_too(
    gradient: list[float], update: list[float], equivalent: bool
) -> None:
    own = {"gradient": gradient, "first_update": update}
    found = equivalence(trials_of(LINES), quantities_of(("single", RIGHT), ("ddp2", RIGHT | own)))
    assert found["equivalent"].tolist() == [equivalent]


def test_a_strategy_without_gradients_is_judged_by_its_updates_and_a_check_without_them_not_at_all() -> None:
    own = {name: vector for name, vector in RIGHT.items() if name != "gradient"}
    found = equivalence(trials_of(LINES), quantities_of(("single", RIGHT), ("ddp2", own)))
    assert found["equivalent"].tolist() == [True] and found["gradient_difference"].isna().all()
    without = checks_of({"ddp2": [3.0, 4.0]}, quantity="first_update")
    found = equivalence(trials_of(LINES), pd.concat([without, quantities_of(("single", RIGHT))]))
    assert found["reason"].tolist() == ["unknown: the update is missing from the check or from that of one device"]


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
    assert "not equivalent" not in {verdict.equivalence for verdict in verdicts(found, NO_TRIALS).values()}


def test_a_pair_that_disagrees_keeps_its_ratio_with_the_reason_that_it_is_no_claim_unless_on_other_hardware() -> None:
    lines = [line("single", block=block) for block in range(3)]
    lines += [line("ddp2", rates=(r, r), block=b, check_id="c") for b, r in enumerate((88.0, 90.0, 93.0))]
    checked = {"c": Verdict("not equivalent", "because")}
    row, alone = (ratios.scaling(trials_of(lines), None, of).to_dict("records")[1] for of in (checked, None))
    assert (row["excluded"], row["equivalence"]) == ("because", "not equivalent")
    for column in ("speedup", "low", "high", "efficiency", "efficiency_low", "throughput_per_s"):
        assert row[column] == pytest.approx(alone[column], nan_ok=False)
    here, there = ({"ranks": [{"rank": 0, "device_model": model}]} for model in ("A100", "H100"))
    lines = [line("single") | here, line("ddp2", check_id="c") | there]
    row = ratios.scaling(trials_of(lines), None, checked).to_dict("records")[1]
    assert pd.isna(row["speedup"]) and row["excluded"].startswith("other hardware: ")
    assert row["equivalence"] == "not equivalent"


def test_a_pair_without_a_verdict_has_a_ratio_that_says_so_and_one_in_two_precisions_the_worse_verdict() -> None:
    lines = [line("single"), *(line(f"ddp{n}", rates=(90.0,) * n, check_id=f"c{n}") for n in (2, 4))]
    checked = {"c2": Verdict("equivalent"), "c4": Verdict("unknown", "unknown: the check ended as oom")}
    found = ratios.scaling(trials_of(lines), None, checked)
    assert found["equivalence"].fillna("-").tolist() == ["-", "equivalent", "unknown"]
    assert found["speedup"].notna().all() and found["excluded"].isna().all()
    planned = ratios.scaling(trials_of(lines), None, {})  # the checks were planned, and never run
    assert planned["equivalence"].fillna("-").tolist() == ["-", "unknown", "unknown"]
    assert ratios.scaling(trials_of(lines))["equivalence"].isna().all()
    rows = [{"cell_id": "c", "equivalent": value, "reason": reason} for value, reason in ((True, None), (None, "why"))]
    assert verdicts(EQUIVALENCE.frame(rows), NO_TRIALS) == {"c": Verdict("unknown", "why")}
    worst = EQUIVALENCE.frame([*rows, {"cell_id": "c", "equivalent": False, "reason": "differs"}])
    assert verdicts(worst, NO_TRIALS) == {"c": Verdict("not equivalent", "differs")}


def test_the_pilot_is_its_blocks_not_the_first_that_are_there() -> None:
    rates = {0: 100.0, 2: 110.0, 3: 400.0, 4: 25.0}  # block 1 failed
    lines = [line("single", block=b) for b in rates]
    lines += [line("ddp2", block=b, rates=(rate / 2, rate / 2)) for b, rate in rates.items()]
    trials = trials_of(lines)
    row = ratios.scaling(trials, BlockRule(at_least=3, at_most=9, halfwidth=0.1)).to_dict("records")[1]
    half = 12.7062 * abs(np.log(1.1)) / np.sqrt(2) / np.sqrt(4)  # t of one degree of freedom, s0 of blocks 0 and 2
    assert np.log(row["high"] / row["speedup"]) == pytest.approx(half, rel=1e-4)
    assert row["precise"] is False or row["precise"] == np.False_


def test_estimates_of_peak_memory_by_cell_are_the_largest_of_its_kind() -> None:
    lines = [line("single", block=b, purpose="doctor", kind="diagnostic") for b in range(3)]
    for one, estimates in zip(lines, ({"a": 1, "b": 2}, {"a": 3}, None), strict=True):
        one["facts"] = {"estimates": estimates} if estimates else {}
    assert trial_tables.peak_estimates(lines) == {"a": 3, "b": 2}


def script(devices: int, connected: int) -> dict[str, Any]:
    """A trial of a script, which is its own check if it has several ranks."""
    one = line(
        f"script{devices}", base="script1", strategy="script", rates=(100.0,) * devices, facts={"ended_early": False}
    )
    facts = {**one["facts"], **({} if connected is None else {"connected_ranks": connected})}
    return {**one, "facts": facts, "check_id": one["cell_id"] if devices > 1 else None}


@pytest.mark.parametrize(
    ("connected", "equivalence_of", "reason"),
    [
        (2, "connected", None),
        (0, "not equivalent", "independent copies: its 2 ranks train each alone"),
        (1, "not equivalent", "independent copies: its 2 ranks train each alone"),
    ],
)
def test_ranks_of_a_script_that_are_not_connected_have_no_speedup(
    connected: int, equivalence_of: str, reason: str | None
) -> None:
    trials = trials_of([script(1, 0), script(2, connected)])
    found = verdicts(equivalence(trials, CHECKS.frame([])), trials)
    assert found == {"script2": Verdict(equivalence_of, reason)}  # type: ignore[arg-type]
    scaling = ratios.scaling(trials, checked=found).set_index("cell_id")
    assert scaling.loc["script2", "equivalence"] == equivalence_of
    assert (scaling.loc["script2", "excluded"] == reason) if reason else pd.isna(scaling.loc["script2", "excluded"])
