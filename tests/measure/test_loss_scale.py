"""fp16's loss scale: a warm-up until updates are not skipped, divergence with the scale, skips of the windows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from harness.measure.losses import ScaleDiverged, rounds_until_unskipped, scale_columns
from harness.measure.stepper import Stepper
from harness.train.precision import LossScale
from harness.train.ranks import Ranks

ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))


class Steps:
    """A stepper whose scale is as given before each round, the last one from then on."""

    def __init__(self, *scales: LossScale | None) -> None:
        self.ranks, self.rounds, self._scales = ONE, [], list(scales)
        self.training = SimpleNamespace(loss_scale=self._next)
        self.rounds: list[tuple[str, int]]

    def _next(self) -> LossScale | None:
        return self._scales.pop(0) if len(self._scales) > 1 else self._scales[0]

    def window(self, kind: str, steps: int) -> Any:
        self.rounds.append((kind, steps))
        return len(self.rounds)


def scale(value: float, unskipped: int) -> LossScale:
    return LossScale(value, unskipped, 2000)


def test_the_warm_up_goes_on_until_twenty_updates_in_a_row() -> None:
    steps = Steps(scale(2.0**14, 3), scale(2.0**13, 8), scale(2.0**13, 19), scale(2.0**13, 20))
    assert len(rounds_until_unskipped(cast(Stepper, steps), 7, 20)) == 3
    assert steps.rounds == [("warmup", 7)] * 3


def test_other_precisions_take_no_further_round() -> None:
    assert rounds_until_unskipped(cast(Stepper, Steps(None)), 5, 5) == []


def test_after_two_hundred_steps_the_training_counts_as_diverged_with_its_scale() -> None:
    steps = Steps(scale(0.5, 0))
    with pytest.raises(ScaleDiverged, match=r"after 200 warm-up steps: .* at a loss scale of 0.5$"):
        rounds_until_unskipped(cast(Stepper, steps), 20, 100)
    assert len(steps.rounds) == 5


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
def test_skips_follow_from_the_scale_before_and_after(
    before: LossScale, after: LossScale, steps: int, skipped: int
) -> None:
    assert scale_columns(before, after, steps) == {"loss_scale": after.scale, "skipped_updates": skipped}


def test_other_precisions_have_no_columns_of_a_scale() -> None:
    assert scale_columns(None, None, 10) == {}
