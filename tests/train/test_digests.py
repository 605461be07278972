"""Digests of samples and of objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness.train.digests import pickle_digest, value_digest


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


def test_an_array_of_objects_counts_by_its_shape() -> None:
    one, other = (np.array([object(), object()]) for _ in range(2))
    assert value_digest(one) == value_digest(other)


def test_a_pickle_is_digested_whole_and_what_cannot_be_pickled_has_none() -> None:
    assert pickle_digest([torch.ones(2)]) == pickle_digest([torch.ones(2)]) != pickle_digest([torch.zeros(2)])
    assert pickle_digest(iter([1])) != pickle_digest(iter([2]))
    assert pickle_digest(open) is not None
    with open(__file__) as file:
        assert pickle_digest(file) is None
