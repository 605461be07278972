"""Where a training stopped being finite; fp16's loss scale, its warm-up and its skipped updates."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.measure import stepper
from harness.measure.stepper import Divergence, ScaleDiverged, earliest, first_in, outcome_columns
from harness.train.precision import LossScale
from harness.train.ranks import Ranks

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
def test_the_first_loss_that_is_not_finite_and_those_before_it(losses: list[float], found: Divergence | None) -> None:
    assert first_in(losses, rank=1, steps_before=10) == found


def test_the_rank_that_stopped_first_is_reported_and_a_parameter_has_no_step_number() -> None:
    first = Divergence(1, 7, INF, (2.0, 3.0))
    assert earliest([Divergence(0, 8), first, None, Divergence(2, 7)]) is first
    assert earliest([None, None]) is None
    assert earliest([Divergence(0), Divergence(1, 9)]) == Divergence(1, 9)
    result = outcome_columns(first, {"steady": True})
    assert result["reason"] == "the loss became inf on rank 1 in step 7"
    assert result["facts"] == {"steady": True, "diverged_step": 7} and result["error_rank"] == 1
    assert result["detail"].endswith("\nstep 5: 2\nstep 6: 3")
    result = outcome_columns(Divergence(0), {})
    assert (result["outcome"], result["reason"]) == ("diverged", "a parameter stopped being finite, no loss did")
    assert result["facts"] == {"diverged_step": None} and outcome_columns(None, {}) == {"outcome": "ok", "facts": {}}


class Steps:
    """A stepper whose scale is as given before each round, the last one from then on."""

    def __init__(self, *scales: LossScale | None) -> None:
        self.ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
        self.training = SimpleNamespace(loss_scale=self._next)
        self.rounds, self._scales = list[tuple[str, int]](), list(scales)

    def _next(self) -> LossScale | None:
        return self._scales.pop(0) if len(self._scales) > 1 else self._scales[0]

    def window(self, kind: str, steps: int) -> Any:
        self.rounds.append((kind, steps))
        return len(self.rounds)


def scale(value: float, unskipped: int) -> LossScale:
    return LossScale(value, unskipped, 2000)


def test_the_warm_up_goes_on_until_twenty_updates_in_a_row_or_two_hundred_steps() -> None:
    steps: Any = Steps(scale(2.0**14, 3), scale(2.0**13, 8), scale(2.0**13, 19), scale(2.0**13, 20))
    assert len(stepper.rounds_until_unskipped(steps, 7, 20)) == 3
    assert steps.rounds == [("warmup", 7)] * 3
    steps = Steps(scale(0.5, 0))
    with pytest.raises(ScaleDiverged, match=r"after 200 warm-up steps: .* at a loss scale of 0.5$"):
        stepper.rounds_until_unskipped(steps, 20, 100)
    assert len(steps.rounds) == 5


def test_other_precisions_take_no_further_round_and_have_no_columns_of_a_scale() -> None:
    steps: Any = Steps(None)
    assert stepper.rounds_until_unskipped(steps, 5, 5) == [] and stepper.scale_columns(None, None, 10) == {}


@pytest.mark.parametrize(
    ("before", "after", "steps", "skipped"),
    [
        (scale(1024, 30), scale(1024, 80), 50, 0),
        (scale(1024, 1990), scale(2048, 40), 50, 0),  # doubled after 10 updates, 40 since
        (scale(1024, 30), scale(512, 49), 50, 1),
        (scale(1024, 30), scale(256, 10), 50, 2),
        (scale(1024, 1990), scale(1024, 39), 50, 1),  # doubled, then halved: one skip explains it
        (scale(1024, 0), scale(4096, 5), 4005, 0),
        (scale(2.0**-149, 0), scale(0, 0), 50, 50),  # below the smallest float32
        (scale(0, 0), scale(0, 0), 50, 50),
    ],
)
def test_skips_follow_from_the_two_scales(before: LossScale, after: LossScale, steps: int, skipped: int) -> None:
    assert stepper.scale_columns(before, after, steps) == {"loss_scale": after.scale, "skipped_updates": skipped}
