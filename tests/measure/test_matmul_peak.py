"""The measured ceiling: its formula with a fake clock, its settings put back, and one real product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest
import torch

from harness.measure import flops
from harness.measure.flops import measured_peak

CPU = torch.device("cpu")
Settings = tuple[str, str, str, bool]


def settings() -> Settings:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.backends.cudnn.allow_tf32,
    )


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.dtype, str]]:
    """Rows, dtype and float32 setting of each product that is done."""
    seen: list[tuple[int, torch.dtype, str]] = []

    def product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        assert left.shape == right.shape == out.shape and left.dtype == right.dtype == out.dtype
        seen.append((len(left), left.dtype, torch.get_float32_matmul_precision()))

    monkeypatch.setattr(torch, "mm", product)
    return seen


def clock_of(products: list[Any], durations: Iterator[float]) -> Callable[[], float]:
    """Time passes only in products: one duration for each."""
    state = {"now": 100.0, "done": 0}

    def clock() -> float:
        while state["done"] < len(products):
            state["done"] += 1
            state["now"] += next(durations)
        return state["now"]

    return clock


def test_the_peak_is_of_the_fastest_product_after_the_warm_up_within_the_seconds(products: list[Any]) -> None:
    # two to find the size, three to warm up (one of them faster than all that count), then 0.5, 0.25, 0.5 ...
    durations = chain([1.0, 1.0, 0.5, 0.125, 0.5, 0.5, 0.25], repeat(0.5))
    peak = measured_peak(CPU, "fp32", seconds=0.0, clock=clock_of(products, durations))
    assert peak == 2 * 256**3 / 0.25
    assert len(products) == 2 + 3 + 5
    products.clear()
    measured_peak(CPU, "fp32", seconds=4.0, clock=clock_of(products, repeat(0.5)))
    assert len(products) == 2 + 3 + 8


def test_matrices_grow_until_a_product_is_long_or_they_are_largest(
    products: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, long = 2**-10, 2**-7  # about 1 ms and 8 ms
    durations = chain([quick] * 4, repeat(long))
    peak = measured_peak(CPU, "fp32", seconds=0.0, clock=clock_of(products, durations))
    assert [rows for rows, _, _ in products][:6] == [256, 256, 512, 512, 1024, 1024]
    assert peak == 2 * 1024**3 / long
    products.clear()
    monkeypatch.setattr(flops, "MOST_ROWS", 512)
    measured_peak(CPU, "fp32", seconds=0.0, clock=clock_of(products, repeat(quick)))
    assert max(rows for rows, _, _ in products) == 512


@pytest.mark.parametrize(
    ("precision", "dtype", "setting"),
    [
        ("fp32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
        ("bf16", torch.bfloat16, "highest"),
        ("fp16", torch.float16, "highest"),
    ],
)
@pytest.mark.parametrize("before", ["highest", "high"])
def test_each_precision_sets_and_restores_its_backend_flags(
    products: list[Any], precision: str, dtype: torch.dtype, setting: str, before: str
) -> None:
    untouched = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    kept, random = settings(), torch.get_rng_state()
    try:
        measured_peak(CPU, precision, seconds=0.0, clock=clock_of(products, repeat(1.0)))
        assert {seen[1:] for seen in products} == {(dtype, setting)}
        assert settings() == kept
        assert torch.equal(torch.get_rng_state(), random)
    finally:
        torch.set_float32_matmul_precision(untouched)


def test_settings_are_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    kept = settings()
    monkeypatch.setattr(torch, "mm", fail)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        measured_peak(CPU, "tf32")
    assert settings() == kept


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        measured_peak(CPU, "fp23")
    assert str(caught.value) == "precision: got 'fp23'; did you mean 'fp32'? (allowed: bf16, fp16, fp32, tf32)"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_real_product_has_a_rate(precision: str) -> None:
    assert measured_peak(CPU, precision, seconds=0.0) > 0
