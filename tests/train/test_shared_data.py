"""Which data sets later trials use again, what a trial's own workload has, and digests of samples and of objects."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from harness.train import loader
from harness.train.loader import NoDigest, SharedData, pickle_digest, value_digest
from harness.train.workloads import Workload
from tests.doctor.ranks import cell_for


class Counting(Dataset[Any]):
    """Counts the samples that were read, if asked to."""

    def __init__(self, *, counts: bool) -> None:
        self.values, self.tensor, self.counts, self.read = np.arange(8.0), torch.arange(8.0), counts, 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.read += self.counts
        return self.values[index]


class Own:
    unit = "samples"

    def __init__(self, data: Any) -> None:
        self.data, self.history = data, [1]

    def datasets(self) -> Any:
        self.vocabulary = ["a", "b"]
        return self.data, self.data


def shared(data: Any) -> SharedData:
    workload: Any = Own(data)
    return SharedData.of(cell_for("single", 1), workload)


@pytest.mark.parametrize(
    ("data", "reused"),
    [(Counting(counts=False), True), (Counting(counts=True), False), (TensorDataset(torch.zeros(3)), True)],
)
def test_data_is_used_again_if_it_is_as_it_was_built(data: Any, reused: bool) -> None:
    found = shared(data)
    assert found.is_unchanged
    data[0]
    assert found.is_unchanged == reused


def test_changed_values_of_arrays_and_tensors_are_noticed_and_what_cannot_be_pickled_is_built_again() -> None:
    for name in ("values", "tensor"):
        data = Counting(counts=False)
        found = shared(data)
        getattr(data, name)[3] += 1
        assert not found.is_unchanged
    data.lock = threading.Lock()  # type: ignore[attr-defined]
    assert pickle_digest(data) is None and not shared(data).is_unchanged


@pytest.mark.parametrize("wrap", [lambda data: Subset(data, [0]), lambda data: ConcatDataset([data])])
def test_torch_s_own_types_are_not_read_and_an_own_one_inside_them_is(wrap: Any) -> None:
    assert shared(wrap(TensorDataset(torch.zeros(3)))).digest == ""
    assert shared(wrap(Counting(counts=False))).digest


def test_a_new_workload_has_what_datasets_set_and_nothing_of_an_earlier_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.workloads, "build", lambda cell: Own(None))
    found = shared(TensorDataset(torch.zeros(3)))
    first: Workload = found.new_workload(cell_for("single", 1))
    first.history.append(2)  # type: ignore[attr-defined]
    second: Any = found.new_workload(cell_for("single", 1))
    assert second is not first and second.history == [1] and second.vocabulary == ["a", "b"]


class Filling(Own):
    """Fills attributes of its __init__ in datasets()."""

    def __init__(self, held: Any) -> None:
        super().__init__(None)
        self.index: dict[str, int] = {}
        self.words: list[str] = []
        self.held = held

    def datasets(self) -> Any:
        self.index["a"] = 1
        self.words.append("a")
        return TensorDataset(torch.zeros(3)), TensorDataset(torch.zeros(3))


def held_by(values: list[int]) -> Any:
    return lambda: values


@pytest.mark.parametrize(
    ("held", "reused"), [(None, True), (held_by([1]), True), ([lambda: 1], True), (threading.Lock(), False)]
)
def test_attributes_that_datasets_fills_are_kept(held: Any, reused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.workloads, "build", lambda cell: Filling(held))
    workload: Any = Filling(held)
    found = SharedData.of(cell_for("single", 1), workload)
    assert found.is_unchanged == reused
    later: Any = found.new_workload(cell_for("single", 1))
    assert (later.index, later.words, later.history) == ({"a": 1}, ["a"], [1])


def test_what_an_inner_function_holds_is_part_of_the_digest() -> None:
    values = [1]
    function = held_by(values)
    before = pickle_digest(function)
    values.append(2)
    assert before is not None and pickle_digest(function) != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2), torch.zeros(2)),
        (np.ones(2), np.zeros(2)),
        (Image.new("L", (2, 2), 1), Image.new("L", (2, 2), 0)),
        ({"x": [np.float32(1.0)]}, {"x": [np.float32(2.0)]}),
        ("a", "b"),
        (None, 0),
    ],
    ids=["tensors", "arrays", "images", "numbers of NumPy", "texts", "nothing"],
)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert value_digest(one) != value_digest(other)
    assert value_digest(one) == value_digest(one) and len(value_digest(one)) == 12


class Graph:
    """A sample of a class that nothing else knows, in a cycle as PyG's Data is."""

    def __init__(self, value: float, **more: Any) -> None:
        self.store, self.owner = {"x": torch.full((2,), value), **more}, self


def array_of(*items: object) -> Any:
    found = np.empty(len(items), dtype=object)
    found[:] = items
    return found


@pytest.mark.parametrize(
    "made",
    [
        Graph,
        lambda value: [Graph(value), 1],
        lambda value: array_of(Graph(value)),
        lambda value: torch.tensor([0.0, value]).to_sparse(),
        lambda value: {str(value), "b", "c"},
    ],
    ids=["an object", "in a list", "in an array", "sparse", "a set"],
)
def test_other_objects_count_by_what_they_hold(made: Any) -> None:
    assert value_digest(made(1.0)) == value_digest(made(1.0)) != value_digest(made(2.0))


def test_objects_count_by_their_type_if_that_is_asked_for_and_what_pickle_refuses_is_named() -> None:
    assert value_digest(Graph(1.0), objects=False) == value_digest(Graph(2.0), objects=False)
    with pytest.raises(NoDigest, match="values of the type Graph cannot be compared: pickle refuses them"):
        value_digest([torch.ones(2), Graph(1.0, lock=threading.Lock())])


def test_a_pickle_is_digested_whole_and_what_cannot_be_pickled_has_none() -> None:
    assert pickle_digest([torch.ones(2)]) == pickle_digest([torch.ones(2)]) != pickle_digest([torch.zeros(2)])
    assert pickle_digest(iter([1])) != pickle_digest(iter([2]))
    assert pickle_digest(open) is not None
    with open(__file__) as file:
        assert pickle_digest(file) is None


@pytest.mark.slow
def test_the_order_of_a_set_is_no_content_of_the_object_that_holds_it() -> None:
    """It differs between processes, whose texts have other hashes."""
    code = "from types import SimpleNamespace; from harness.train.loader import value_digest; "
    code += "print(value_digest(SimpleNamespace(tags={*'abcdefgh'}, more=[frozenset(map(str, range(9)))])))"
    command, environments = [sys.executable, "-c", code], [{**os.environ, "PYTHONHASHSEED": seed} for seed in "123"]
    assert len({subprocess.check_output(command, env=environment) for environment in environments}) == 1
    assert value_digest(SimpleNamespace(tags={"a"})) != value_digest(SimpleNamespace(tags={"b"}))


class Picture(torch.Tensor):
    """A tensor of a class of its own, whose pickle holds an address."""


def test_tensors_of_any_class_and_views_count_by_their_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    pictures = [SimpleNamespace(image=torch.full((2,), float(number)).as_subclass(Picture)) for number in (1, 1, 2)]
    one, same, other = map(value_digest, pictures)
    assert one == same != other
    assert value_digest(values.conj()) == value_digest(values.conj().resolve_conj()) != value_digest(values)
    assert value_digest(SimpleNamespace(x=values.conj())) != value_digest(SimpleNamespace(x=values))


class Scaled(torch.Tensor):
    """A tensor without values of its own: what it wraps has them."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a tensor that is only kept")


def test_tensors_that_wrap_others_are_compared_by_these() -> None:
    one, other = (Scaled(torch.full((2,), value)) for value in (1.0, 2.0))
    assert value_digest([one]) == value_digest([Scaled(torch.ones(2))]) != value_digest([other])
