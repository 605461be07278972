"""Trust in a run: its three levels, their reasons, and the blocks that decide what is open."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.common import Row
from harness.analysis.doubts import DOUBTS, CountedDoubt
from harness.analysis.stats import deciding_blocks, look_significance
from harness.analysis.verdict import Statement
from harness.analysis.verdict.rules import trust
from tests.analysis.verdict.test_rules import AXES, NOTHING, tables

NEAR, WIDE = (100.0, 108.0, 93.0), (100.0, 120.0, 83.0)
"""The throughputs of three blocks."""


def trust_in(*leaders: dict[str, Any], fixed: bool = True, **given: list[dict[str, Any]]) -> list[Statement]:
    of = [Row({**AXES, "leader_id": leader["cell_id"], **leader}) for leader in leaders]
    return trust(tables(1 if fixed else None, **given), of)


def verdict_on(
    *,
    blocks: int = 6,
    twins: dict[str, float | None] | None = None,
    doubts: dict[str, tuple[str, int]] | None = None,
    equivalence: str | None = "equivalent",
    rates: tuple[float, ...] = (),
    fixed: bool = True,
) -> Statement:
    """Return the statement on one leading cell against its base, whose throughput is 100 in every block.

    ``twins``: p-values of A/A tests by base; ``doubts``: by cell, each with how many of its trials have it.
    """
    count = len(rates) or blocks
    (statement,) = trust_in(
        {"cell_id": "a", "blocks": count},
        fixed=fixed,
        scaling=[{"cell_id": "a", "base_id": "base", "equivalence": equivalence}],
        cells=[
            {"cell_id": cell, "doubts": (CountedDoubt(name, number, 6),)}
            for cell, (name, number) in (doubts or {}).items()
        ],
        trials=of_blocks(a=rates or (200.0,) * blocks, base=(100.0,) * count),
        noise=[{"cell_id": cell, "p_value": p} for cell, p in ({"base": 0.5} if twins is None else twins).items()],
    )
    return statement


def of_blocks(axes: dict[str, Any] | None = None, **rates: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return the timed trials of these cells, a throughput a block."""
    timed = {"kind": "throughput", "purpose": "", "outcome": "ok", "invocation": 0, **(axes or {})}
    return [
        {**timed, "trial_id": f"{cell}{block}", "cell_id": cell, "block": block, "throughput_per_s": rate}
        for cell, speeds in rates.items()
        for block, rate in enumerate(speeds)
    ]


def test_high_needs_an_aa_test_five_blocks_no_doubt_that_repeats_and_a_verdict_on_equivalence() -> None:
    found = verdict_on()
    assert (found.code, found.reasons, found.n) == ("high", (), 0)
    assert verdict_on(doubts={"z": SWAPPED}).code == "high"


SWAPPED = ("memory swapped", 4)


@pytest.mark.parametrize(
    ("change", "level", "reason"),
    [
        ({"twins": {"base": 0.05}}, "low", "differs"),
        ({"twins": {"base": 0.02, "z": 0.4}}, "low", "differs"),
        ({"twins": {}}, "medium", "no A/A test"),
        ({"twins": {"base": None}}, "medium", "no A/A test"),  # below three blocks
        ({"blocks": 4}, "medium", "blocks"),
        ({"blocks": 2}, "low", "blocks"),
        ({"doubts": {"a": SWAPPED}}, "low", "doubt: memory swapped"),
        ({"doubts": {"base": SWAPPED}}, "low", "doubt: memory swapped"),
        ({"equivalence": "unknown"}, "low", "equivalence"),
        ({"equivalence": None}, "low", "equivalence"),
    ],
)
def test_one_fault_lowers_it_and_is_named(change: dict[str, Any], level: str, reason: str) -> None:
    found = verdict_on(**change)
    assert (found.code, found.reasons) == (level, (reason,))


@pytest.mark.parametrize(
    "change",
    [
        {"twins": {"base": 0.04, "z": 0.4}},  # one of two A/A tests differs so much by chance: Holm
        {"doubts": {"a": ("memory swapped", 3)}},  # not in most of its blocks: the interval has it
        *({"doubts": {"a": (name, 6)}} for name, doubt in DOUBTS.items() if doubt.widens),
    ],
)
def test_what_the_interval_has_already_is_no_distrust(change: dict[str, Any]) -> None:
    assert verdict_on(**change).code == "high"


def test_doubts_that_widen_intervals_are_those_of_noise() -> None:
    assert {name for name, doubt in DOUBTS.items() if doubt.widens} == {
        *("wide spread", "windows drift", "stalled", "foreign load", "foreign load on the GPU")
    }


def test_blocks_are_asked_for_where_a_comparison_is_open() -> None:
    assert verdict_on(rates=(200.0, 210.0, 190.0)).n == 0  # clear after three blocks
    assert verdict_on(rates=(100.0, 100.1, 99.9)).n == 0  # within 5 %: about equal
    assert (
        verdict_on(rates=NEAR).n == max(5, deciding_blocks([r / 100 for r in NEAR], 0.05, look_significance(2))) - 3 > 2
    )
    assert verdict_on(rates=WIDE).n > verdict_on(rates=NEAR).n
    leaning = (108.0, 130.0, 112.0)
    assert 0 < verdict_on(rates=leaning).n < verdict_on(rates=WIDE).n  # a large difference is soon decided
    assert verdict_on(blocks=2).n == 3  # without an interval


@pytest.mark.parametrize("table", ["versus", "leaders"])
def test_a_choice_and_a_rival_ask_for_blocks_too(table: str) -> None:
    """The base of a file that varies only an option is the leading cell itself: its ratio is that of the option."""
    asked = {}
    for axis, tied in (("ddp.bucket_cap_mb", True), ("devices", False)):
        row = {"versus": {"other_id": "a", "axis": axis}, "leaders": {"leader_id": "a", "tied": tied}}[table]
        (statement,) = trust_in(
            {"cell_id": "a", "blocks": 4},
            trials=of_blocks(a=(100.0,) * 4, b=(*WIDE, 105.0)),
            scaling=[{"cell_id": "a", "base_id": "a"}],
            **{table: [{"cell_id": "b", **row}]},
        )
        asked[axis] = statement.n
    assert asked["devices"] == 0 and asked["ddp.bucket_cap_mb"] > 5


def test_a_cell_that_is_compared_with_none_has_nothing_to_decide() -> None:
    alone = [{"cell_id": "a", "base_id": "a"}]
    for fixed in (True, False):  # a rule has chosen how many blocks suffice
        few = {"cell_id": "a", "blocks": 3}
        (statement,) = trust_in(few, fixed=fixed, trials=of_blocks(a=WIDE), scaling=alone)
        assert statement.n == 0 and ("blocks" in statement.reasons) == fixed


@pytest.mark.parametrize(
    ("later", "reasons"),
    [((100.0, 95.0, 98.0), ("invocations: 1.43, then 0.98",)), ((150.0, 140.0, 139.0), ()), ((100.0,), ())],
    ids=["disagree", "agree", "one block"],
)
def test_blocks_that_were_added_and_say_something_else_are_no_reason_to_trust_either(
    later: tuple[float, ...], reasons: tuple[str, ...]
) -> None:
    """Added under load, they moved a result from 1.43 (1.26 to 1.64) to 1.06 (0.75 to 1.50), and nothing said so."""
    rates = {"a": (140.0, 143.0, 146.0, *later), "base": (100.0,) * (3 + len(later))}
    trials = [{**row, "invocation": int(row["block"] >= 3)} for row in of_blocks(**rates)]
    (statement,) = trust_in(
        {"cell_id": "a", "blocks": 6},
        trials=trials,
        scaling=[{"cell_id": "a", "base_id": "base", "equivalence": "equivalent"}],
        noise=[{"cell_id": "base", "p_value": 0.5}],
    )
    assert statement.reasons == reasons


def test_it_says_whether_blocks_can_be_added_and_nothing_without_a_leading_cell() -> None:
    assert verdict_on(blocks=2).subject == "fixed"
    assert verdict_on(blocks=2, fixed=False).subject == "rule"
    assert trust(NOTHING, []) == []


def trust_in_two(p_values: dict[str, float], **rates: tuple[float, ...]) -> list[Statement]:
    """Return the statements on a leading cell of each of two models, ``a`` and ``b``, each with a base of its own."""
    models = {"a": {"model": "resnet8"}, "b": {"model": "resnet14"}}
    return trust_in(
        *({**model, "cell_id": cell, "blocks": 3} for cell, model in models.items()),
        scaling=[
            {**model, "cell_id": cell, "base_id": f"base {cell}", "equivalence": "equivalent"}
            for cell, model in models.items()
        ],
        noise=[{**models[cell], "cell_id": f"base {cell}", "p_value": value} for cell, value in p_values.items()],
        trials=[
            row
            for cell, speeds in rates.items()
            for row in of_blocks(models[cell], **{cell: speeds, f"base {cell}": (100.0,) * 3})
        ],
    )


def test_a_base_that_differs_from_itself_lowers_the_trust_in_its_own_model_alone() -> None:
    quiet, noisy = trust_in_two({"a": 0.5, "b": 0.02})
    assert (quiet.cell_id, quiet.code, quiet.reasons) == ("a", "medium", ("blocks",))
    assert (noisy.cell_id, noisy.code, noisy.reasons) == ("b", "low", ("differs",))
    _, unknown = trust_in_two({"a": 0.5})
    assert unknown.reasons == ("no A/A test", "blocks")
    (both,) = trust_in_two({"a": 0.5, "b": 0.4})
    assert (both.cell_id, both.others) == ("a", ("b",))


def test_blocks_are_asked_for_once_by_the_cell_that_needs_most() -> None:
    first, second = trust_in_two({"a": 0.5, "b": 0.02}, a=NEAR, b=WIDE)
    assert first.n == 0 and second.n > 2
