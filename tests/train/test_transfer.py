"""Batches of every type reach the device; the meta device stands for a GPU."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from harness.errors import WorkloadError
from harness.train.transfer import copier, to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])


def on_meta(*tensors: torch.Tensor) -> bool:
    return all(tensor.device == META for tensor in tensors)


def test_mappings_and_sequences_are_searched_and_keep_their_types() -> None:
    batch = {"x": torch.ones(2), "rest": (torch.zeros(1), ["text", torch.ones(1)])}
    moved: Any = to_device(batch, META)
    assert on_meta(moved["x"], moved["rest"][0], moved["rest"][1][1])
    assert type(moved) is dict and moved["rest"][1][0] == "text"
    named: Any = to_device(Pair(torch.ones(2), [torch.ones(1)]), META)
    assert type(named) is Pair and on_meta(named.x, named.y[0])
    packed: Any = to_device(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), META)
    assert type(packed) is PackedSequence and on_meta(packed.data)
    assert packed.batch_sizes.device.type == "cpu", "lengths stay on the host"


class Encoding(UserDict[str, torch.Tensor]):
    """A mapping with attributes, without a method to()."""

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in self.__dict__.get("data", {}):
            raise AttributeError(name)
        return self.data[name]


@pytest.mark.parametrize("kind", [Encoding, OrderedDict, UserDict])
def test_a_mapping_keeps_its_type(kind: Any) -> None:
    batch = kind({"ids": torch.ones(2)})
    moved: Any = to_device(batch, META)
    assert type(moved) is kind and on_meta(moved["ids"])
    assert batch["ids"].device.type == "cpu", "the batch itself is left as it is"
    assert kind is not Encoding or on_meta(moved.ids)
    grouped: Any = to_device(defaultdict(list, x=[torch.ones(1)]), META)
    assert grouped["new"] == [] and on_meta(grouped["x"][0])
    read_only: Any = to_device(MappingProxyType({"x": torch.ones(1)}), META)
    assert on_meta(read_only["x"])


class Graph:
    """As PyTorch Geometric's batches: an object with to()."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


class PinnedGraph(Graph):
    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        moved = PinnedGraph(self.x.to(device))
        moved.non_blocking = non_blocking  # type: ignore[attr-defined]
        return moved


def test_an_object_with_a_method_to_is_moved_by_it() -> None:
    moved: Any = to_device({"graph": Graph(torch.ones(1))}, META, non_blocking=True)
    assert on_meta(moved["graph"].x)
    pinned: Any = to_device(PinnedGraph(torch.ones(1)), META, non_blocking=True)
    assert on_meta(pinned.x) and pinned.non_blocking


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    names: list[str]
    nested: Pair
    count: int = field(init=False, default=3)


def test_a_dataclass_keeps_its_type_though_it_is_frozen() -> None:
    moved: Any = to_device(Example(torch.ones(1), ["a"], Pair(torch.ones(1), 2)), META)
    assert type(moved) is Example and on_meta(moved.x, moved.nested.x)
    assert (moved.names, moved.nested.y, moved.count) == (["a"], 2, 3)


class Opaque:
    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize("held", [torch.ones(1), [torch.ones(1)], {"x": (torch.ones(1),)}])
def test_an_object_whose_tensors_cannot_be_moved_is_an_error(held: Any) -> None:
    with pytest.raises(WorkloadError) as raised:
        to_device([Opaque(held)], META)
    assert str(raised.value) == (
        "batch: got an object of tests.train.test_transfer.Opaque with tensors in 'held', which cannot be moved to "
        "meta; allowed: tensors, objects with a method to(device), and lists, tuples, mappings and dataclasses of "
        "them; give Opaque a method to(device) that returns it with its tensors on the device"
    )


@pytest.mark.parametrize("leaf", [None, 3, "text", b"bytes", np.ones(2), Opaque("no tensor"), Opaque])
def test_without_a_tensor_an_object_is_left_as_it_is(leaf: object) -> None:
    assert to_device([leaf], META) == [leaf]
    assert copier(torch.device("cpu"), {})(leaf) is leaf, "on a CPU nothing is copied"
