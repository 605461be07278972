"""Options of ddp that DistributedDataParallel has under other names, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

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


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize("given", [25, 2])
def test_buckets_are_those_of_distributed_data_parallel_without_the_argument_or_as_given(given: int) -> None:
    def sizes(wrap: Callable[[nn.Module, Callable[[int], None]], nn.Module]) -> list[int]:
        exchanged: list[int] = []
        layers = (nn.Linear(512, 512, bias=False) for _ in range(5))  # of 1 MiB each
        model = wrap(nn.Sequential(*layers), exchanged.append)
        model(torch.ones(1, 512)).sum().backward()
        exchanged.clear()  # buckets are in the order of the first backward pass from the second on
        model(torch.ones(1, 512)).sum().backward()
        return exchanged

    def by_hand(model: nn.Module, report: Callable[[int], None]) -> nn.Module:
        def run(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            report(bucket.buffer().nbytes)
            return default_hooks.allreduce_hook(group, bucket)

        wrapped = DistributedDataParallel(model, **({} if given == 25 else {"bucket_cap_mb": given}))
        wrapped.register_comm_hook(None, lambda group, bucket: run(group, bucket))
        return wrapped

    def of_harness(model: nn.Module, report: Callable[[int], None]) -> nn.Module:
        options: dict[str, Any] = {"bucket_cap_mb": given}
        context = WrapContext((torch.device("cpu"),), options, lambda model: [], Precision("fp32", "cpu"), 1)
        return Ddp().observed(model, context, lambda point: report(point.reduce_bytes))

    found = sizes(of_harness)
    assert found == sizes(by_hand) and len(found) > 1
