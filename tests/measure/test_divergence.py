"""Where a training stopped being finite."""

from __future__ import annotations

import math

import pytest

from harness.measure.losses import Divergence, earliest, first_in, outcome_columns

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([1.0, 2.0], None),
        ([], None),
        ([3.0, 2.0, INF, 1.0, NAN], Divergence(1, 13, INF, (3.0, 2.0))),
        ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, -INF], Divergence(1, 17, -INF, (7.0, 6.0, 5.0, 4.0, 3.0))),
    ],
)
def test_the_first_loss_that_is_not_finite_and_the_last_ones_that_are(
    losses: list[float], found: Divergence | None
) -> None:
    assert first_in(losses, rank=1, steps_before=10) == found


def test_the_rank_that_stopped_first_is_reported() -> None:
    first = Divergence(1, 7, INF, (2.0, 3.0))
    assert earliest([Divergence(0, 8), first, None, Divergence(2, 7)]) is first
    assert earliest([None, None]) is None
    assert earliest([Divergence(0), Divergence(1, 9)]) == Divergence(1, 9)
    result = outcome_columns(first, {"steady": True})
    assert result["reason"] == "the loss became inf on rank 1 in step 7"
    assert result["facts"] == {"steady": True, "diverged_step": 7} and result["error_rank"] == 1
    assert result["detail"].endswith("\nstep 5: 2\nstep 6: 3")


def test_a_non_finite_parameter_has_no_step_number() -> None:
    result = outcome_columns(Divergence(0), {})
    assert (result["outcome"], result["reason"]) == ("diverged", "a parameter stopped being finite, no loss did")
    assert result["facts"] == {"diverged_step": None} and outcome_columns(None, {}) == {"outcome": "ok", "facts": {}}
