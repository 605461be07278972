"""The stream of batches behind a training's steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.errors import WorkloadError
from harness.measure.stepper import Seconds, Stepper, TrainingData, of_all_ranks, step_seconds, window_rows
from harness.measure.window import Window
from harness.plan.cell import Cell
from harness.plan.rows import WindowRow
from harness.train.ranks import Ranks
from harness.train.training import Training
from tests.equivalence import Regression

ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
BATCH, PARTS = 6, 3
CELL = Cell("w", None, None, "single", "cpu", 1, 1, "weak", BATCH, BATCH, optimizer={"name": "SGD", "lr": 0.1})


class Counted(Regression):
    """Notes the samples of each forward pass."""

    def __init__(self) -> None:
        super().__init__("samples")
        self.sizes: list[int] = []

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append(len(batch[0]))
        return super().loss(model, batch)


@pytest.mark.parametrize(("tokens", "whole"), [(1, "24"), (4, "96"), (None, None)])
def test_a_weight_other_than_the_workload_declares_ends_the_trial(tokens: int | None, whole: str | None) -> None:
    """Loss returns 2 tokens a sample; a number that is not declared may be any."""
    workload = Regression("tokens" if tokens != 1 else "samples")
    loss = workload.loss
    workload.loss = lambda model, batch: (loss(model, batch)[0], torch.tensor(2 * len(batch[0])))  # type: ignore[method-assign]
    workload.tokens_per_sample = tokens  # type: ignore[attr-defined]
    training = Training(CELL, workload, 0, ONE)
    stepper = Stepper(training, TrainingData(CELL, 0, ONE, *workload.datasets(), workload), lambda: None)
    if whole is None:
        assert stepper.window("timed", 4).weight == 48
    else:
        with pytest.raises(WorkloadError, match=f"weight of 48 for 4 batches of 6 samples, in all {whole}; "):
            stepper.window("timed", 4)


@pytest.mark.parametrize("data", [None, "synthetic_device"])
def test_with_accumulation_every_step_takes_its_own_micro_batches(data: str | None) -> None:
    cell = replace(CELL, data=data, training={"accumulation": PARTS})
    workload = Counted()
    training, data_of_rank = (
        Training(cell, workload, 0, ONE),
        TrainingData(cell, 0, ONE, *workload.datasets(), workload),
    )
    stepper = Stepper(training, data_of_rank, lambda: None)
    source, taken = stepper.fetch, []
    stepper.fetch = (taken.append(batch) or batch for batch in source)  # type: ignore[func-returns-value]
    stepper.step()
    batch: Any = stepper.one_batch()
    assert len(taken) == 2 * PARTS, "the next step begins with its first micro-batch"
    assert len(batch[0]) == BATCH // PARTS
    window = stepper.window("timed", 2)
    assert workload.sizes == [BATCH // PARTS] * 3 * PARTS
    assert window.weight == 2 * BATCH and window.steps == 2


def alone(step_s: list[float], *, wait_s: float = 0.0, on_gpu: bool = False) -> Window:
    host = {"wait": 1.0} if on_gpu else {}
    waits = [wait_s] * len(step_s)
    return Window("alone", sum(step_s), step_s, waits, {}, host, 1.0)


def of_rank(rank: int, windows: list[Window], first: int) -> tuple[list[WindowRow], list[Seconds]]:
    return window_rows(rank, windows, first), step_seconds(windows)


@pytest.mark.parametrize(
    ("ranks", "in_turn_s"),
    [
        (([1.0, 9.0, 1.0], [9.0, 1.0, 1.0]), 19.0 - 11.0),  # slow in turn
        (([1.0, 1.0, 1.0], [9.0, 9.0, 9.0]), 0.0),  # one is always the slower
        (([2.0, 2.0, 2.0], [2.0, 2.0, 2.0]), 0.0),
        (([1.0, 5.0], [1.0, 1.0], [5.0, 1.0]), 10.0 - 6.0),
    ],
)
def test_ranks_slow_in_turn_lose_more_than_the_slowest(ranks: tuple[list[float], ...], in_turn_s: float) -> None:
    sent = [of_rank(rank, [alone(seconds)], 7) for rank, seconds in enumerate(ranks)]
    rows = of_all_ranks(sent)
    assert [(row["rank"], row["window"]) for row in rows] == [(rank, 7) for rank in range(len(ranks))]
    assert [row["in_turn_s"] for row in rows] == pytest.approx([in_turn_s] * len(ranks))


def test_the_wait_for_data_is_no_work_of_a_rank_and_other_windows_have_no_slowest() -> None:
    waiting = [of_rank(rank, [alone(seconds, wait_s=1.0)], 0) for rank, seconds in enumerate(([2.0, 4.0], [4.0, 2.0]))]
    assert of_all_ranks(waiting)[0]["in_turn_s"] == pytest.approx(6.0 - 4.0)
    on_gpu = of_rank(0, [alone([2.0, 4.0], wait_s=9.0, on_gpu=True)], 0)  # its clock is the host's, not the stream's
    assert on_gpu[1][0].tolist() == [2.0, 4.0]
    together = replace(alone([1.0]), kind="together")
    assert "in_turn_s" not in of_all_ranks([of_rank(0, [together], 0)])[0] and of_all_ranks([of_rank(0, [], 0)]) == []
