"""The byte-level GPT: its sizes, its data, that it sees no future, that it learns, what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from harness.errors import WorkloadError
from harness.train.strategies.base import default_units
from harness.train.workloads.language_model import SHAPES, LanguageModel


def test_no_token_sees_those_after_it() -> None:
    torch.manual_seed(0)
    model = LanguageModel().build_model()
    tokens = torch.randint(256, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] += 1
    before, after = model(tokens), model(changed.clamp(max=255))
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_fsdp_shards_block_by_block_and_heads_divide_the_width() -> None:
    model = LanguageModel(model="micro").build_model()
    assert default_units(model) == list(model.blocks)  # type: ignore[arg-type]
    assert all(shape.width % shape.heads == 0 for shape in SHAPES.values())


def test_a_text_is_cut_into_windows_with_the_byte_that_follows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    train, validation = LanguageModel(data=str(tmp_path), context=4).datasets()
    assert (len(train), len(validation)) == (22, 2)  # type: ignore[arg-type]  # of 90 bytes and of 10
    assert train[0].tolist() == [1, 2, 3, 4, 5] and train[1].tolist() == [5, 6, 7, 8, 9]
    assert validation[0].tolist() == [91, 92, 93, 94, 95]
    assert len(list(train)) == 22


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    for loss, perplexity in ((0.0, 1.0), (math.log(256), 256.0), (1e4, math.inf)):
        assert LanguageModel().derived({"loss": loss}) == {"perplexity": pytest.approx(perplexity)}


def test_a_text_shorter_than_the_context(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 200)
    with pytest.raises(WorkloadError) as caught:
        LanguageModel(data=str(tmp_path), context=64).datasets()
    assert str(caught.value) == (
        f"data {tmp_path}: 20 bytes of validation text are too few for a context of 64; give more text, "
        "or a smaller workload_options.context"
    )
