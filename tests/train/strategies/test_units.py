"""Which parts fsdp shards one by one."""

from __future__ import annotations

import torchvision
from torch import nn

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.train.strategies import STRATEGIES
from harness.train.strategies.base import default_units
from harness.train.workloads.image_classification import SmallResNet


def test_the_children_of_lists_and_sequentials_in_their_order() -> None:
    inner = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    outer = nn.Sequential(inner, nn.Linear(1, 1))
    assert default_units(outer) == [inner[0], inner[1], outer[1]]
    lists = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), nn.Linear(1, 1)])
    assert default_units(lists) == [lists[0][0], lists[1]]  # type: ignore[index]


def test_a_list_inside_a_block_is_part_of_the_block_and_a_model_without_lists_is_one_unit() -> None:
    """The downsampling branch of torchvision's residual blocks: a Sequential of a convolution and a BatchNorm."""
    model = torchvision.models.resnet50(weights=None)
    units = default_units(model)
    assert len(units) == 16 and {type(unit).__name__ for unit in units} == {"Bottleneck"}

    small = SmallResNet(1, width=4, channels=3, classes=10)
    assert default_units(small) == list(small.stages)
    assert default_units(nn.Linear(1, 1)) == []


def test_every_strategy_of_the_file_is_there() -> None:
    assert list(STRATEGIES)[:3] == list(BUILTIN_TRAITS)[:3] == ["single", "dp", "ddp"]
    assert all(STRATEGIES[name].traits is traits for name, traits in BUILTIN_TRAITS.items())
