"""Options of ddp that DistributedDataParallel has under other names, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.config.strategy_traits import DdpOptions
from harness.train.precision import Precision
from harness.train.strategies.base import WrapContext
from harness.train.strategies.ddp import WITHOUT_BROADCASTS, Ddp


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("options", "broadcasts"), [({}, True), ({"broadcast_buffers": False}, False)])
def test_buffers_are_broadcast_unless_the_file_says_no_and_no_name_is_deprecated(
    _group: None, options: dict[str, Any], broadcasts: bool
) -> None:
    defaults = {name: field.default[0] for name, field in DdpOptions.model_fields.items() if name != "sync_batch_norm"}
    context = WrapContext(
        (torch.device("cpu"),), {**defaults, **options}, lambda model: [], Precision("fp32", "cpu"), 1
    )
    wrapped = Ddp().wrap(nn.BatchNorm1d(4), context)  # with warnings as errors
    assert getattr(wrapped, WITHOUT_BROADCASTS) is broadcasts
