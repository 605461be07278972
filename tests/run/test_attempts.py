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


@pytest.mark.parametrize("outcome", ["ok", "oom", "diverged", "error", "timeout", "skipped"])
def test_every_outcome_but_lost_is_final(outcome: Outcome) -> None:
    attempts = Attempts({}, most=3)
    assert not attempts.is_settled("a")
    attempts.add("a", outcome)
    assert attempts.is_settled("a") and not attempts.is_settled("b")


def test_a_lost_trial_has_the_configured_attempts_in_each_invocation() -> None:
    attempts = Attempts({"a": 5}, most=2)
    attempts.add("a", "lost")
    assert not attempts.is_settled("a")
    attempts.add("a", "lost")
    assert attempts.is_settled("a")


def test_a_lost_trial_that_is_measured_later_is_finished() -> None:
    attempts = Attempts({}, most=3)
    attempts.add("a", "lost")
    attempts.add("a", "ok")
    assert attempts.is_settled("a") and attempts.total == 2
