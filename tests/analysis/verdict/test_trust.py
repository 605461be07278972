"""Trust in a run: its three levels, their reasons, and the blocks that would narrow the intervals."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.common import Record
from harness.analysis.doubts import CountedDoubt
from harness.analysis.verdict import READ, Statement, Tables
from harness.analysis.verdict.trust import trust
from tests.analysis.verdict.test_rules import AXES

LEADER: dict[str, Any] = {**AXES, "cell_id": "a", "leader_id": "a", "blocks": 6}


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
    given: dict[str, list[dict[str, Any]]] = {
        "scaling": [{**AXES, "cell_id": "a", "base_id": "base", "equivalence": equivalence}],
        "cells": [
            {**AXES, "cell_id": cell_id, "doubts": doubts if cell_id == doubted else ()}
            for cell_id in ("a", "base", "z")
        ],
        "trials": [
            {**AXES, **_trial(cell, block, rate)}
            for block, speed in enumerate(rates or (100.0,) * blocks)
            for cell, rate in (("a", speed), ("base", 100.0))
        ],
    }
    if noise:
        row = {**AXES, "cell_id": "base", "low": noise[0], "high": noise[1], "excludes_one": excludes_one}
        given["noise"] = [row]
    tables = Tables({name: READ[name].frame(rows) for name, rows in given.items()}, fixed_blocks=fixed)
    (statement,) = trust(tables, [Record({**LEADER, "blocks": blocks})])
    return statement


def _trial(cell_id: str, block: int, rate: float) -> dict[str, Any]:
    return {
        "trial_id": f"{cell_id}{block}",
        "cell_id": cell_id,
        "kind": "throughput",
        "purpose": "",
        "outcome": "ok",
        "block": block,
        "invocation": 0,
        "throughput_per_s": rate,
    }


def test_high_needs_a_quiet_base_five_blocks_no_doubt_and_a_verdict_on_equivalence() -> None:
    found = verdict_on()
    assert (found.code, found.reasons, found.n) == ("high", (), 0)
    assert found.value == pytest.approx(0.03)


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


def test_a_doubt_on_another_cell_does_not_matter() -> None:
    assert verdict_on(doubted="z").code == "high"


def test_further_blocks_follow_from_the_spread_alone() -> None:
    """The same spread asks for as many blocks whether the ratio is 1 or 3; a wider one asks for more."""
    near, far = (100.0, 108.0, 93.0), (300.0, 324.0, 279.0)
    assert verdict_on(blocks=3, rates=near).n == verdict_on(blocks=3, rates=far).n > 2
    assert verdict_on(blocks=3, rates=(100.0, 120.0, 83.0)).n > verdict_on(blocks=3, rates=near).n


def test_at_least_five_blocks_are_asked_for() -> None:
    assert verdict_on(blocks=3, rates=(100.0, 100.1, 99.9)).n == 2


def test_a_choice_asks_for_blocks_too() -> None:
    """The base of a file that varies only an option is the leading cell itself: its ratio is that of the option."""
    trials = [
        {**AXES, **_trial(cell, block, rate)}
        for block, speed in enumerate((100.0, 120.0, 83.0, 105.0))
        for cell, rate in (("a", 100.0), ("b", speed))
    ]
    pair = {**AXES, "cell_id": "b", "other_id": "a"}
    asked = {}
    for axis in ("ddp.bucket_cap_mb", "devices"):
        given = {
            "trials": trials,
            "versus": [{**pair, "axis": axis}],
            "scaling": [{**AXES, "cell_id": "a", "base_id": "a"}],
        }
        tables = Tables({name: READ[name].frame(rows) for name, rows in given.items()})
        (statement,) = trust(tables, [Record({**LEADER, "blocks": 4})])
        asked[axis] = statement.n or 0
    assert asked["devices"] == 1 and asked["ddp.bucket_cap_mb"] > 10


def test_a_cell_that_is_compared_with_none_asks_by_the_spread_of_its_own_throughput() -> None:
    def asked(*speeds: float) -> int | None:
        trials = [{**AXES, **_trial("a", block, speed)} for block, speed in enumerate(speeds)]
        given = {"trials": trials, "scaling": [{**AXES, "cell_id": "a", "base_id": "a"}]}
        tables = Tables({name: READ[name].frame(rows) for name, rows in given.items()})
        (statement,) = trust(tables, [Record({**LEADER, "blocks": len(speeds)})])
        return statement.n

    assert asked(100.0, 100.1, 99.9) == 2
    assert asked(234.0, 273.0, 213.0) == verdict_on(blocks=3, rates=(234.0, 273.0, 213.0)).n


def test_it_says_whether_blocks_can_be_added() -> None:
    assert verdict_on(blocks=2).subject == "fixed"
    assert verdict_on(blocks=2, fixed=False).subject == "rule"


def trust_in_two(noises: dict[str, tuple[float, float]], rates: dict[str, tuple[float, ...]]) -> list[Statement]:
    """Return the statements on a leading cell of each of two models, ``a`` and ``b``, each with a base of its own."""
    models = {"a": "resnet8", "b": "resnet14"}
    axes = {cell: {**AXES, "model": model} for cell, model in models.items()}
    given: dict[str, list[dict[str, Any]]] = {
        "scaling": [
            {**axes[cell], "cell_id": cell, "base_id": f"base {cell}", "equivalence": "equivalent"} for cell in models
        ],
        "noise": [
            {**axes[cell], "cell_id": f"base {cell}", "low": low, "high": high, "excludes_one": False}
            for cell, (low, high) in noises.items()
        ],
        "trials": [
            {**axes[cell], **_trial(name, block, rate)}
            for cell, speeds in rates.items()
            for block, speed in enumerate(speeds)
            for name, rate in ((cell, speed), (f"base {cell}", 100.0))
        ],
    }
    tables = Tables({name: READ[name].frame(rows) for name, rows in given.items()})
    return trust(tables, [Record({**LEADER, **axes[cell], "cell_id": cell, "blocks": 3}) for cell in models])


def test_a_noisy_base_lowers_the_trust_in_its_own_model_alone() -> None:
    quiet, noisy = trust_in_two({"a": (0.97, 1.03), "b": (0.70, 1.30)}, {})
    assert (quiet.cell_id, quiet.code, quiet.reasons) == ("a", "medium", ("blocks",))
    assert (noisy.cell_id, noisy.code, noisy.reasons) == ("b", "low", ("noise",))
    assert quiet.value == pytest.approx(0.03) and noisy.value == pytest.approx(0.30)


def test_a_base_without_an_a_a_test_has_none_of_another_model() -> None:
    known, unknown = trust_in_two({"a": (0.97, 1.03)}, {})
    assert known.value is not None and unknown.value is None and unknown.reasons == ("no A/A test", "blocks")


def test_cells_with_the_same_trust_are_one_statement() -> None:
    (both,) = trust_in_two({"a": (0.97, 1.03), "b": (0.96, 1.01)}, {})
    assert (both.cell_id, both.others) == ("a", ("b",)) and both.value == pytest.approx(0.04)


def test_blocks_are_asked_for_once_by_the_cell_that_needs_most() -> None:
    rates = {"a": (100.0, 108.0, 93.0), "b": (100.0, 120.0, 83.0)}
    first, second = trust_in_two({"a": (0.97, 1.03), "b": (0.70, 1.30)}, rates)
    assert first.n == 0 and second.n is not None and second.n > 2


def test_without_a_leading_cell_there_is_nothing_to_trust() -> None:
    assert trust(Tables({}), []) == []
