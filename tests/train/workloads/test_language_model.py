"""The byte-level GPT: its sizes, its data, that it sees no future, that it learns, what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import WorkloadError
from harness.train.strategies.base import default_units
from harness.train.workloads.language_model import SHAPES, LanguageModel
from tests.train.workloads.learning import count, learn


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("nano", 120_576),
        ("micro", 842_496),
        ("mini", 10_844_160),
        ("small", 86_039_040),
        ("gpt2", 124_439_808),  # as Hugging Face's gpt2 counts: Radford et al. 2019's smallest
    ],
)
def test_model_sizes_are_as_documented(model: str, parameters: int) -> None:
    with torch.device("meta"):
        assert count(LanguageModel(model=model).build_model()) == parameters


def test_the_start_is_the_loss_of_guessing() -> None:
    torch.manual_seed(0)
    workload = LanguageModel()
    total, weight = workload.loss(workload.build_model(), torch.randint(256, (8, 65)))
    assert float(weight) == 8 * 64
    assert (total / weight).item() == pytest.approx(math.log(256), abs=0.1)


def test_no_token_sees_those_after_it() -> None:
    torch.manual_seed(0)
    model = LanguageModel().build_model()
    tokens = torch.randint(256, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] += 1
    before, after = model(tokens), model(changed.clamp(max=255))
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_fsdp_shards_block_by_block() -> None:
    model = LanguageModel(model="micro").build_model()
    assert default_units(model) == list(model.blocks)  # type: ignore[arg-type]


def test_a_text_is_cut_into_windows_with_the_byte_that_follows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    train, validation = LanguageModel(data=str(tmp_path), context=4).datasets()
    assert (len(train), len(validation)) == (22, 2)  # type: ignore[arg-type]  # of 90 bytes and of 10
    assert train[0].tolist() == [1, 2, 3, 4, 5] and train[1].tolist() == [5, 6, 7, 8, 9]
    assert validation[0].tolist() == [91, 92, 93, 94, 95]
    assert len(list(train)) == 22


def test_the_standard_library_is_the_default() -> None:
    train, validation = LanguageModel().datasets()
    assert len(train) * 64 > 1_700_000 and len(validation) * 64 > 90_000  # type: ignore[arg-type]
    text = b"".join(bytes(train[i][:-1].tolist()) for i in range(2000))
    assert text.count(b"def ") > 50


def test_synthetic_bytes_come_from_their_index() -> None:
    train, validation = LanguageModel(data="synthetic", context=10, samples=30).datasets()
    assert (len(train), len(validation)) == (30, 3)  # type: ignore[arg-type]
    assert torch.equal(train[3], train[3]) and not torch.equal(train[3], train[4])
    assert train[3].shape == (11,)


@pytest.mark.parametrize(("loss", "perplexity"), [(0.0, 1.0), (math.log(256), 256.0), (1e4, math.inf)])
def test_perplexity_is_the_exponential_of_the_loss(loss: float, perplexity: float) -> None:
    assert LanguageModel().derived({"loss": loss}) == {"perplexity": pytest.approx(perplexity)}


@pytest.mark.slow
def test_it_learns() -> None:
    rows = learn("language_model", "nano", {"name": "AdamW", "lr": 3e-3}, 2, text_bytes=60_000)
    assert rows[-1]["val_perplexity"] < 30  # of 256; the letters' own frequencies give about 25
    assert rows[-1]["val_perplexity"] == pytest.approx(math.exp(rows[-1]["val_loss"]))


def test_every_size_has_heads_that_divide_its_width() -> None:
    assert all(shape.width % shape.heads == 0 for shape in SHAPES.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "gpt3"}, "grid.model: got 'gpt3'; did you mean 'gpt2'?"),
        ({"data": "texts"}, "grid.data: got 'texts'"),
        ({"context": -1}, "workload_options.context: got -1; allowed: a whole number from 1 to 1048576"),
        ({"text_bytes": True}, "workload_options.text_bytes: got True"),
        ({"samples": 0}, "workload_options.samples: got 0"),
    ],
)
def test_invalid_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        LanguageModel(**arguments)
    assert str(caught.value).startswith(message)


def test_a_text_shorter_than_the_context(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 200)
    with pytest.raises(WorkloadError) as caught:
        LanguageModel(data=str(tmp_path), context=64).datasets()
    assert str(caught.value) == (
        f"data {tmp_path}: 20 bytes of validation text are too few for a context of 64; give more text, "
        "or a smaller workload_options.context"
    )
