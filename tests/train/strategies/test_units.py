"""Which parts fsdp shards one by one."""

from __future__ import annotations

from torch import nn

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.train.strategies import STRATEGIES
from harness.train.strategies.base import default_units
from harness.train.workloads.image_classification import SmallResNet


def test_the_children_of_lists_and_sequentials_inner_ones_first() -> None:
    inner = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    outer = nn.Sequential(inner, nn.Linear(1, 1))
    assert default_units(outer) == [inner[0], inner[1], outer[0], outer[1]]


def test_a_resnets_blocks() -> None:
    model = SmallResNet(1, width=4, channels=3, classes=10)
    assert default_units(model) == list(model.stages)


def test_a_model_without_lists_is_one_unit() -> None:
    assert default_units(nn.Linear(1, 1)) == []


def test_every_strategy_of_the_file_is_there() -> None:
    assert list(STRATEGIES)[:3] == list(BUILTIN_TRAITS)[:3] == ["single", "dp", "ddp"]
    assert all(STRATEGIES[name].traits is traits for name, traits in BUILTIN_TRAITS.items())
