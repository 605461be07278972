"""Which metrics are means over samples, and how much their rounding may differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from harness.doctor import validation
from tests.doctor.healthy import Healthy
from tests.doctor.ranks import subject_of


class Measures(Healthy):
    """A metric whose sum has a dtype; ``grows``: by the batch, as no mean does."""

    def __init__(self, dtype: torch.dtype, *, scale: float = 1.0, grows: bool = False) -> None:
        self.dtype, self.scale, self.grows = dtype, scale, grows

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        total = self.scale * batch[0].abs().mean(dim=1).sum()
        total = total * len(batch[0]) if self.grows else total
        return {"size": (total.to(self.dtype), torch.tensor(float(len(batch[0]))))}


@pytest.mark.parametrize(
    ("workload", "apart"),
    [
        (Measures(torch.float32), False),
        *((Measures(torch.bfloat16, scale=scale), False) for scale in (1.0, 1.1, 1.21, 1.33)),  # 0.4 % a rounding
        (Measures(torch.float32, grows=True), True),
        (Measures(torch.bfloat16, grows=True), True),
    ],
)
def test_a_metric_that_is_no_mean_is_told_from_one_of_16_bits(workload: Measures, apart: bool) -> None:
    found = validation.observe_metrics(replace(subject_of(workload), epochs=True))
    assert found is not None and bool(found.apart) is apart, found
