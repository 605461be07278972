"""Digests of samples and of objects."""

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

from harness.train.loader import NoDigest, pickle_digest, value_digest


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
    code = (
        "from types import SimpleNamespace\n"
        "from harness.train.loader import value_digest\n"
        "print(value_digest(SimpleNamespace(tags={*'abcdefgh'}, more=[frozenset(map(str, range(9)))])))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "123"
    }
    assert len(found) == 1
    assert value_digest(SimpleNamespace(tags={"a"})) != value_digest(SimpleNamespace(tags={"b"}))
