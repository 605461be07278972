"""Synthetic data: what is validated on is not what is trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from harness.train.workloads.conv_stack import ConvStack
from harness.train.workloads.image_classification import ImageClassification
from harness.train.workloads.language_model import LanguageModel
from harness.train.workloads.mlp import Mlp
from harness.train.workloads.padded_sequences import PaddedSequences

WORKLOADS = {
    "image_classification": lambda: ImageClassification(data="synthetic", model="resnet8", samples=40),
    "conv_stack": lambda: ConvStack(data="synthetic", samples=40),
    "mlp": lambda: Mlp(data="synthetic", samples=40),
    "padded_sequences": lambda: PaddedSequences(data="synthetic", samples=40),
    "language_model": lambda: LanguageModel(data="synthetic", samples=40),
}


def drawn(sample: Any) -> torch.Tensor:
    """The first of its tensors."""
    return next(leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_validation_sample_is_none_of_training(name: str) -> None:
    train, validation = WORKLOADS[name]().datasets()  # type: ignore[no-untyped-call]
    assert (len(train), len(validation)) == (40, 4)
    known = [drawn(train[index]) for index in range(40)]
    for index in range(4):
        mine = drawn(validation[index])
        assert torch.equal(mine, drawn(validation[index]))
        assert not any(mine.shape == other.shape and torch.equal(mine, other) for other in known)
