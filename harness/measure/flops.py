"""Model FLOPs per sample or token, the numerator of MFU, and the measured matmul peak of a device."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from harness.measure.window import Clock, elapsed_s
from harness.train.model import build_model, faked, too_large
from harness.train.workloads import Workload

Formula = Callable[..., int]

_NATIVE = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")
"""Namespaces whose operators are free unless ``_PRODUCTS`` knows them; an operator of any other may cost anything."""

_PRODUCTS = re.compile(
    r"rnn|lstm$|gru$|conv(?!ert)|mm(_|$)|\.(add)?mv_?$|matmul|linear(_backward\w*)?$|attention|multi_head"
    r"|transformer_encoder|trilinear$|cdist|euclidean|_fft_|linalg_(?!vector_norm|_powsum|cross|diagonal)|cholesky"
)
"""Names of operators that are no mere pass over their elements: counted by a formula, or missing from the count."""

_ATEN = torch.ops.aten
_ON_CPU: Mapping[object, Formula] = {  # torch 2.11 lacks these; the arguments are those of the GPU's kernel
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CUDA_ROWS = {"fp32": 4096, "tf32": 8192, "bf16": 8192, "fp16": 8192}
"""A product takes a few ms: with a shorter one the launch overhead would show."""
FEWEST_ROWS, MOST_ROWS, LONG_S = 256, 4096, 0.005
"""On a CPU the first is doubled until a product takes ``LONG_S`` or has the second."""
WARMUP, LEAST = 3, 5
"""Products before the first that counts, and the fewest that count."""


@dataclass(frozen=True)
class Flops:
    """Model FLOPs of forward and backward for one sample or token, a multiply-add being 2; None has its reason."""

    per_unit: float | None
    reason: str = ""


def count_flops(workload: Workload, batch: object, device: torch.device, *, sharded: bool = False) -> Flops:
    """Count the FLOPs of one ``workload.loss`` and its backward on a new, unwrapped, eager model, per unit of weight.

    Counted are matrix products, convolutions and attention; causal attention counts as full, as in MFU (Chowdhery et
    al. 2022, appendix B, arXiv 2204.02311). The second forward pass of activation checkpointing is no model FLOP: this
    model is without it, whatever the cell's axis is, so that it lowers MFU by its time. ``batch``: on the device; at
    least two samples, else batch normalisation may fail. Random generators and grad mode are restored. An exception of
    the workload, out of memory included, becomes the reason; KeyboardInterrupt and SystemExit pass. Work outside
    torch's operators, such as a Triton kernel started by hand, is not counted. All ranks call it, since loss() may have
    collectives. The parameters have shapes but no memory, which the training beside them may need. Only if that fails,
    as where loss() reads a value that depends on them, are they real, if the device has room for them; never those of
    a ``sharded`` model.
    """
    on_gpu = device.type == "cuda"
    try:
        with torch.random.fork_rng([device] if on_gpu else []), torch.inference_mode(False), torch.enable_grad():
            try:
                return _count(workload, batch, device, without_memory=True)
            except Exception:
                if sharded:
                    raise
            return _count(workload, batch, device, without_memory=False)
    except Exception as error:
        return Flops(None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    finally:
        if on_gpu:
            torch.cuda.empty_cache()


def first_samples(batch: object, count: int) -> object:
    """Return the batch with its tensors cut to their first ``count`` rows; the whole batch if they differ in length.

    Looks into tuples, lists and mappings. A tensor without dimensions counts as one of another length.
    """
    lengths = {tuple(tensor.shape[:1]) for tensor in _tensors(batch)}
    return _cut(batch, count) if len(lengths) == 1 and () not in lengths else batch


def _count(workload: Workload, batch: object, device: torch.device, *, without_memory: bool) -> Flops:
    if without_memory:
        workload = copy.copy(workload)  # build_model() may keep tensors in it, which are fakes here
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # operators on fake tensors compute shapes alone
            model = faked(workload.build_model(), mode, device)
    else:
        model = build_model(workload)
        if reason := too_large(model, device):
            return Flops(None, reason)
        model = model.to(device)
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        # some batches run step by step, in products that are counted; others of the same model do not
        return Flops(None, "a recurrent layer, whose kernel depends on the batch and may have no formula")
    # the audit is the outer mode: it sees operators after the counter has decomposed composite ones
    with _CountAudit() as audit, FlopCounterMode(display=False, custom_mapping=_own_formulas()) as counter:
        loss, weight = workload.loss(model, batch)
        audit.in_backward = True
        loss.backward()
    total, units = counter.get_total_flops(), float(weight)
    if audit.uncounted:
        return Flops(None, f"torch's FLOP counter has no formula for {', '.join(sorted(audit.uncounted))}")
    if audit.repeated:
        return Flops(None, "backward repeats forward work (activation checkpointing), which is no model FLOP")
    if total == 0:
        return Flops(None, "no matrix product, convolution or attention was seen")
    if not 0 < units < math.inf:
        return Flops(None, f"loss() gave a weight of {units:g}")
    return Flops(total / units)


class _CountAudit(TorchDispatchMode):
    """Records what makes a count wrong: operators without a formula, and forward work repeated in backward."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uncounted: set[str] = set()
        self.in_backward = self.repeated = False

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        packet = getattr(func, "overloadpacket", func)  # a higher-order operator has no overloads
        if packet in flop_registry or packet in _ON_CPU:
            # backward itself runs without grad mode; forward work that it repeats runs with it
            self.repeated |= self.in_backward and torch.is_grad_enabled()
        elif getattr(func, "namespace", None) not in _NATIVE or _PRODUCTS.search(str(packet)):
            self.uncounted.add(str(packet))
        return func(*args, **(kwargs or {}))


def _own_formulas() -> dict[object, Formula]:
    """Return formulas that replace torch's where those count more than model FLOPs."""
    attention = {
        packet: _without_scores(formula, query=1 if str(packet).startswith("aten.") else 0)
        for packet, formula in {**_ON_CPU, **flop_registry}.items()
        if re.match(r"(aten\.|flex_)\w*attention\w*_backward", str(packet))
    }
    own = {packet: _raw(formula) for packet, formula in _ON_CPU.items()}
    return {**own, _ATEN.convolution_backward: _convolution_backward, **attention}


def _convolution_backward(
    grad: Sequence[int], images: Sequence[int], weight: Sequence[int], *options: Any, **_: object
) -> int:
    """Return the FLOPs of the forward pass for each gradient that is needed, of input and weight.

    torch (2.15) ignores ``groups`` in the weight's gradient: for a depthwise convolution it counts it once a channel.
    """
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, needed = options
    positions = math.prod((images if transposed else grad)[2:])
    return int(2 * images[0] * positions * math.prod(weight) * (needed[0] + needed[1]))


def _without_scores(formula: Formula, *, query: int) -> Formula:
    """Return attention's backward without the product that fused kernels recompute: every kernel counts the same.

    ``query``: its place among the arguments; key and value follow. Of five products three have the size of a
    query head (scores again, gradients of query and key), two that of a value head.
    """

    def counted(*args: Tensor, **kwargs: object) -> int:
        query_size, value_size = args[query].shape[-1], args[query + 2].shape[-1]
        kept, all_five = 2 * query_size + 2 * value_size, 3 * query_size + 2 * value_size
        return formula(*args, **kwargs) * kept // all_five

    return _raw(counted)


def _raw(formula: Formula) -> Formula:
    """Return a formula that is given tensors, not their shapes, marked as torch marks its own."""

    def counted(*args: object, **kwargs: object) -> int:
        return formula(*args, **kwargs)

    counted._get_raw = True  # type: ignore[attr-defined]
    return counted


def _tensors(batch: object) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def _cut(batch: object, count: int) -> object:
    if isinstance(batch, Tensor):
        return batch[:count]
    if isinstance(batch, Mapping):
        return {key: _cut(value, count) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [_cut(value, count) for value in batch]
        make = getattr(batch, "_make", type(batch))  # _make: of a named tuple
        return make(values)
    return batch


def measured_peak(
    device: torch.device, precision: str, *, seconds: float = 0.2, clock: Clock = time.perf_counter
) -> float:
    """Return FLOP/s of a square matrix product: 2 n^3 over the shortest time of those done in ``seconds``.

    fp32 has TF32 off, tf32 on; the setting is restored. Raises torch.OutOfMemoryError if the device is full.
    """
    try:
        with torch.inference_mode(), _float32_products("high" if precision == "tf32" else "highest"):
            rows, shortest_s = _shortest_product(device, precision, seconds, clock)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # once nothing refers to the matrices: else their memory stays this process's
    return 2.0 * rows**3 / shortest_s


def _shortest_product(device: torch.device, precision: str, seconds: float, clock: Clock) -> tuple[int, float]:
    """Return the rows of the matrices and the seconds of their shortest product."""
    on_gpu = device.type == "cuda"
    rows = CUDA_ROWS[precision] if on_gpu else FEWEST_ROWS
    product_s = _timed_product(rows, precision, device, clock)
    # the shorter of two products, since the first also initialises the library
    while not on_gpu and min(product_s(), product_s()) < LONG_S and rows < MOST_ROWS:
        rows *= 2
        product_s = _timed_product(rows, precision, device, clock)
    for _ in range(WARMUP):
        product_s()
    times: list[float] = []
    began = clock()
    while len(times) < LEAST or clock() - began < seconds:
        times.append(product_s())
    return rows, min(times)


def _timed_product(rows: int, precision: str, device: torch.device, clock: Clock) -> Callable[[], float]:
    """Return what times a product of random factors: on zeros a GPU draws less power and may clock higher."""
    generator, dtype = torch.Generator(device).manual_seed(0), DTYPES[precision]
    left, right = (torch.randn(rows, rows, generator=generator, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: elapsed_s(lambda: torch.mm(left, right, out=product), [device], clock)


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
