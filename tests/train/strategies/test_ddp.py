"""Options of ddp that DistributedDataParallel has under other names, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.config.strategy_traits import DdpOptions
from harness.train.precision import Precision
from harness.train.strategies.base import ExchangePoint, WrapContext
from harness.train.strategies.ddp import WITHOUT_BROADCASTS, Ddp


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(("options", "broadcasts"), [({}, True), ({"broadcast_buffers": False}, False)])
def test_buffers_are_broadcast_unless_the_file_says_no(options: dict[str, Any], broadcasts: bool) -> None:
    defaults = {name: field.default[0] for name, field in DdpOptions.model_fields.items() if name != "sync_batch_norm"}
    precision, options = Precision("fp32", "cpu"), {**defaults, **options}
    context = WrapContext((torch.device("cpu"),), options, lambda model: [], precision, 1)
    wrapped = Ddp().wrap(nn.BatchNorm1d(4), context)  # warnings are errors: no name is deprecated
    assert getattr(wrapped, WITHOUT_BROADCASTS) is broadcasts


@pytest.mark.usefixtures("no_group")
def test_a_sparse_gradient_is_as_large_as_the_distinct_rows_that_it_has() -> None:
    reported: list[ExchangePoint] = []
    context = WrapContext((torch.device("cpu"),), {}, lambda model: [], Precision("fp32", "cpu"), 1)
    table = nn.Sequential(nn.Embedding(1000, 8, sparse=True), nn.Flatten(), nn.Linear(24, 1))
    model = Ddp().observed(table, context, reported.append)
    model(torch.tensor([[1, 2, 3], [3, 2, 1]])).sum().backward()
    dense, rows = sorted(reported, key=lambda point: point.kind)
    assert dense == ExchangePoint("bucket", reduce_bytes=4 * 25)  # weights and bias
    assert rows == ExchangePoint("rows", gather_bytes=3 * (8 + 4 * 8))  # three row numbers and rows, of one rank
