"""The evaluation that the doctor rehearses: its passes are made, its values are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.doctor.real_steps import observe
from harness.doctor.subject import Subject
from tests.doctor.faulty_steps import ValidatesApart
from tests.doctor.ranks import cell_for, ranks_for, subject_of
from tests.worlds import fork_ranks


class OfMissingClass(ValidatesApart):
    """A metric over the samples of a class that the last batches lack."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {"recall": (torch.zeros(()), torch.zeros(()))}


class Raises(ValidatesApart):
    def __init__(self, error: Exception) -> None:
        self.error, self.models = error, list[nn.Module]()

    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, float]:
        self.models.append(model)
        raise self.error


class RaisesOnTheFirst(ValidatesApart):
    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, float]:
        if torch.distributed.get_rank() == 0:
            raise ValueError("only one class")
        return {"area": 1.0}


def test_a_metric_without_weight_in_the_last_batches_is_no_error() -> None:
    assert observe(subject_of(OfMissingClass(), epochs=True)).losses


def test_an_error_of_evaluate_is_passed_over_and_the_model_trains_on() -> None:
    workload = Raises(ValueError("only one class"))
    observe(subject_of(workload, epochs=True))
    assert [model.training for model in workload.models] == [True]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("CUDA error: illegal access")])
def test_a_full_or_broken_device_is_not_passed_over(error: Exception) -> None:
    with pytest.raises(type(error)):
        observe(subject_of(Raises(error), epochs=True))


def rehearsed(rank: int, world_size: int, out: Path) -> None:
    devices, ranks = ranks_for("ddp", rank, world_size)
    workload = RaisesOnTheFirst()
    subject = Subject(cell_for("ddp", devices), workload, workload.datasets(), 0, ranks, epochs=True)
    observe(subject)
    if rank == 0:
        out.write_text("done")


@pytest.mark.slow
def test_an_error_of_evaluate_on_one_rank_keeps_no_other_waiting(tmp_path: Path) -> None:
    assert fork_ranks(rehearsed, 2, tmp_path, within_s=60.0).read_text() == "done"
