"""Trust in a run: its three levels, their reasons, and the blocks that would narrow the intervals."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.common import Record
from harness.analysis.doubts import CountedDoubt
from harness.analysis.verdict import Statement, Tables
from harness.analysis.verdict.trust import trust
from tests.analysis.verdict.test_rules import AXES, tables

NEAR, WIDE = (100.0, 108.0, 93.0), (100.0, 120.0, 83.0)
"""The throughputs of three blocks."""


def trust_in(*leaders: dict[str, Any], fixed: bool = True, **given: list[dict[str, Any]]) -> list[Statement]:
    of = [Record({**AXES, "leader_id": leader["cell_id"], **leader}) for leader in leaders]
    return trust(tables(fixed, **given), of)


def verdict_on(
    *,
    blocks: int = 6,
    noise: tuple[float, float] | None = (0.97, 1.03),
    excludes_one: bool = False,
    doubted: str = "",
    equivalence: str | None = "equivalent",
    rates: tuple[float, ...] = (),
    fixed: bool = True,
) -> Statement:
    """Return the statement on one leading cell against its base, whose throughput is 100 in every block."""
    doubts = (CountedDoubt("wide spread", 1, 3),)
    (statement,) = trust_in(
        {"cell_id": "a", "blocks": len(rates) or blocks},
        fixed=fixed,
        scaling=[{"cell_id": "a", "base_id": "base", "equivalence": equivalence}],
        cells=[{"cell_id": cell, "doubts": doubts if cell == doubted else ()} for cell in ("a", "base", "z")],
        trials=of_blocks(a=rates or (100.0,) * blocks, base=(100.0,) * (len(rates) or blocks)),
        noise=[{"cell_id": "base", "low": noise[0], "high": noise[1], "excludes_one": excludes_one}] if noise else [],
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


def test_high_needs_a_quiet_base_five_blocks_no_doubt_and_a_verdict_on_equivalence() -> None:
    found = verdict_on()
    assert (found.code, found.reasons, found.n) == ("high", (), 0)
    assert found.value == pytest.approx(0.03)
    assert verdict_on(doubted="z").code == "high"


@pytest.mark.parametrize(
    ("change", "level", "reason"),
    [
        ({"noise": (0.90, 1.02)}, "medium", "noise"),
        ({"noise": (0.84, 1.02)}, "low", "noise"),
        ({"noise": (0.97, 1.16)}, "low", "noise"),
        ({"noise": (0.97, 0.99), "excludes_one": True}, "medium", "differs"),
        ({"noise": None}, "medium", "no A/A test"),
        ({"blocks": 4}, "medium", "blocks"),
        ({"blocks": 2}, "low", "blocks"),
        ({"doubted": "a"}, "low", "doubt: wide spread"),
        ({"doubted": "base"}, "low", "doubt: wide spread"),
        ({"equivalence": "unknown"}, "low", "equivalence"),
        ({"equivalence": None}, "low", "equivalence"),
    ],
)
def test_one_fault_lowers_it_and_is_named(change: dict[str, Any], level: str, reason: str) -> None:
    found = verdict_on(**change)
    assert (found.code, found.reasons) == (level, (reason,))


def test_further_blocks_follow_from_the_spread_alone_and_are_at_least_five() -> None:
    """The same spread asks for as many blocks whether the ratio is 1 or 3; a wider one asks for more."""
    near, far = (verdict_on(rates=rates).n for rates in (NEAR, (300.0, 324.0, 279.0)))
    assert near == far > 2
    assert verdict_on(rates=WIDE).n > near
    assert verdict_on(rates=(100.0, 100.1, 99.9)).n == 2


def test_a_choice_asks_for_blocks_too() -> None:
    """The base of a file that varies only an option is the leading cell itself: its ratio is that of the option."""
    asked = {}
    for axis in ("ddp.bucket_cap_mb", "devices"):
        (statement,) = trust_in(
            {"cell_id": "a", "blocks": 4},
            trials=of_blocks(a=(100.0,) * 4, b=(*WIDE, 105.0)),
            versus=[{"cell_id": "b", "other_id": "a", "axis": axis}],
            scaling=[{"cell_id": "a", "base_id": "a"}],
        )
        asked[axis] = statement.n or 0
    assert asked["devices"] == 1 and asked["ddp.bucket_cap_mb"] > 10


def test_a_cell_that_is_compared_with_none_asks_by_the_spread_of_its_own_throughput() -> None:
    def asked(*speeds: float) -> int | None:
        alone = [{"cell_id": "a", "base_id": "a"}]
        (statement,) = trust_in({"cell_id": "a", "blocks": len(speeds)}, trials=of_blocks(a=speeds), scaling=alone)
        return statement.n

    assert asked(100.0, 100.1, 99.9) == 2
    assert asked(234.0, 273.0, 213.0) == verdict_on(rates=(234.0, 273.0, 213.0)).n


def test_it_says_whether_blocks_can_be_added_and_nothing_without_a_leading_cell() -> None:
    assert verdict_on(blocks=2).subject == "fixed"
    assert verdict_on(blocks=2, fixed=False).subject == "rule"
    assert trust(Tables({}), []) == []


def trust_in_two(noises: dict[str, tuple[float, float]], **rates: tuple[float, ...]) -> list[Statement]:
    """Return the statements on a leading cell of each of two models, ``a`` and ``b``, each with a base of its own."""
    models = {"a": {"model": "resnet8"}, "b": {"model": "resnet14"}}
    bases = {cell: {**model, "cell_id": f"base {cell}"} for cell, model in models.items()}
    return trust_in(
        *({**model, "cell_id": cell, "blocks": 3} for cell, model in models.items()),
        scaling=[
            {**model, "cell_id": cell, "base_id": f"base {cell}", "equivalence": "equivalent"}
            for cell, model in models.items()
        ],
        noise=[
            {**bases[cell], "low": low, "high": high, "excludes_one": False} for cell, (low, high) in noises.items()
        ],
        trials=[
            row
            for cell, speeds in rates.items()
            for row in of_blocks(models[cell], **{cell: speeds, f"base {cell}": (100.0,) * 3})
        ],
    )


def test_a_noisy_base_lowers_the_trust_in_its_own_model_alone() -> None:
    quiet, noisy = trust_in_two({"a": (0.97, 1.03), "b": (0.70, 1.30)})
    assert (quiet.cell_id, quiet.code, quiet.reasons) == ("a", "medium", ("blocks",))
    assert (noisy.cell_id, noisy.code, noisy.reasons) == ("b", "low", ("noise",))
    assert quiet.value == pytest.approx(0.03) and noisy.value == pytest.approx(0.30)
    known, unknown = trust_in_two({"a": (0.97, 1.03)})
    assert known.value is not None and unknown.value is None and unknown.reasons == ("no A/A test", "blocks")
    (both,) = trust_in_two({"a": (0.97, 1.03), "b": (0.96, 1.01)})
    assert (both.cell_id, both.others) == ("a", ("b",)) and both.value == pytest.approx(0.04)


def test_blocks_are_asked_for_once_by_the_cell_that_needs_most() -> None:
    first, second = trust_in_two({"a": (0.97, 1.03), "b": (0.70, 1.30)}, a=NEAR, b=WIDE)
    assert first.n == 0 and second.n is not None and second.n > 2
