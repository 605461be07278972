"""What loss() may return, and the error for anything else."""

from __future__ import annotations

import pytest
import torch

from harness.errors import WorkloadError
from harness.train.loss import as_loss


@pytest.mark.parametrize("weight", [torch.tensor(4.0), 4, 4.0, torch.tensor([4])])
def test_a_sum_and_a_weight_are_returned_as_they_are(weight: object) -> None:
    total = torch.tensor(2.0)
    assert as_loss((total, weight)) == (total, weight)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (torch.tensor(2.0), "a tensor without dimensions"),
        (torch.zeros(64), "a tensor of shape (64,)"),
        (2.0, "a float"),
        (None, "None"),
        ({"loss": 1}, "a dict"),
        ((torch.tensor(2.0),) * 3, "a tuple of 3 items"),
        ((torch.zeros(64), torch.tensor(64.0)), "(a tensor of shape (64,), a tensor without dimensions)"),
        ((2.0, 64), "(a float, an int)"),
        ((torch.tensor(2.0), None), "(a tensor without dimensions, None)"),
    ],
)
def test_anything_else_is_named(returned: object, got: str) -> None:
    with pytest.raises(WorkloadError) as error:
        as_loss(returned)
    assert str(error.value).startswith("loss() must return (sum, weight): ")
    assert str(error.value).endswith(f"; got {got}")
