"""The measured matmul peak of a device, GPU or CPU: an upper bound that anyone can check."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.errors import nearest
from harness.measure.window import Clock, synchronize

Matrices = tuple[Tensor, Tensor, Tensor]
"""Two square factors and the output of their product."""

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CUDA_ROWS = {"fp32": 4096, "tf32": 8192, "bf16": 8192, "fp16": 8192}
"""A product takes a few ms: with a shorter one the launch overhead would show."""
FEWEST_ROWS, MOST_ROWS, LONG_S = 256, 4096, 0.005
"""On a CPU the first is doubled until a product takes ``LONG_S`` or has the second."""
WARMUP, LEAST = 3, 5
"""Products before the first that counts, and the fewest that count."""


def measured_peak(
    device: torch.device, precision: str, *, seconds: float = 0.2, clock: Clock = time.perf_counter
) -> float:
    """Return FLOP/s of a square matrix product: 2 n^3 over the shortest time of those done in ``seconds``.

    fp32 has TF32 off, tf32 on; the setting is restored. Raises ValueError for another precision,
    torch.OutOfMemoryError if the device is full.
    """
    if precision not in DTYPES:
        raise ValueError(f"precision: got {precision!r}; {nearest(precision, DTYPES)}")
    try:
        with torch.inference_mode(), _float32_products("high" if precision == "tf32" else "highest"):
            rows, shortest_s = _shortest(device, precision, seconds, clock)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 2.0 * rows**3 / shortest_s


def _shortest(device: torch.device, precision: str, seconds: float, clock: Clock) -> tuple[int, float]:
    """Return the rows of the matrices, and the seconds of their fastest product."""
    if device.type == "cuda":
        matrices = _matrices(CUDA_ROWS[precision], precision, device)
    else:
        matrices = _long_enough(precision, device, clock)
    for _ in range(WARMUP):
        _product_s(matrices, device, clock)
    times: list[float] = []
    began = clock()
    while len(times) < LEAST or clock() - began < seconds:
        times.append(_product_s(matrices, device, clock))
    return len(matrices[0]), min(times)


def _long_enough(precision: str, device: torch.device, clock: Clock) -> Matrices:
    rows = FEWEST_ROWS
    while True:
        matrices = _matrices(rows, precision, device)
        # of two, since the first also initialises the library
        took_s = min(_product_s(matrices, device, clock) for _ in range(2))
        if took_s >= LONG_S or rows >= MOST_ROWS:
            return matrices
        rows *= 2


def _matrices(rows: int, precision: str, device: torch.device) -> Matrices:
    """Return random factors: on zeros a GPU draws less power and may clock higher than in training."""
    generator, dtype = torch.Generator(device).manual_seed(0), DTYPES[precision]
    left, right = (torch.randn(rows, rows, generator=generator, device=device, dtype=dtype) for _ in range(2))
    return left, right, torch.empty_like(left)


def _product_s(matrices: Matrices, device: torch.device, clock: Clock) -> float:
    left, right, product = matrices
    synchronize([device])
    start = clock()
    torch.mm(left, right, out=product)
    synchronize([device])
    return clock() - start


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Set torch's precision of float32 products for a block; restore it and those of the backends."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before, before_each = torch.get_float32_matmul_precision(), [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, value in zip(backends, before_each, strict=True):
            backend.fp32_precision = value
