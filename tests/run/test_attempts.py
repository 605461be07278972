"""How often a trial is attempted."""

from __future__ import annotations

import pytest

from harness.plan.rows import Outcome
from harness.run.execution import Attempts


def test_attempts_are_numbered_over_all_invocations() -> None:
    attempts = Attempts({"a": 2}, most=2)
    assert (attempts.next_number("a"), attempts.next_number("b"), attempts.total) == (3, 1, 2)
    attempts.add("b", "lost")
    assert (attempts.next_number("b"), attempts.total) == (2, 3)


FINAL: tuple[Outcome, ...] = ("ok", "oom", "diverged", "error", "timeout", "skipped")


@pytest.mark.parametrize(
    ("outcomes", "settled"),
    [*(([final], True) for final in FINAL), (["lost"], False), (["lost", "lost"], True), (["lost", "ok"], True)],
)
def test_every_outcome_but_lost_is_final_and_lost_has_its_attempts_in_each_invocation(
    outcomes: list[Outcome], settled: bool
) -> None:
    attempts = Attempts({"a": 5}, most=3 if outcomes[-1] == "ok" else 2)
    assert not attempts.is_settled("a")
    for outcome in outcomes:
        attempts.add("a", outcome)
    assert attempts.is_settled("a") == settled and not attempts.is_settled("b")
