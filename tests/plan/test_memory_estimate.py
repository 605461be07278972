"""The estimate of a cell's peak memory, with sizes that a reader can add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.config.values import GIB
from harness.plan import memory_forecast as memory
from harness.plan.cell import Cell
from harness.plan.rows import ActivationBytes, MemoryFacts


def kept(per_sample: int, fixed: int = 0) -> ActivationBytes:
    return {"fixed": fixed, "per_sample": per_sample}


def sizes(**more: Any) -> MemoryFacts:
    """A model of 1 GiB of parameters: three units of 1/4 GiB, and 1/4 GiB in no unit."""
    made: MemoryFacts = {
        "parameter_bytes": GIB,
        "trainable_bytes": GIB,
        "buffer_bytes": 0,
        "unit_bytes": GIB // 4,
        "root_bytes": GIB // 4,
        "on_meta": False,
        "activations": {"fp32": kept(GIB // 8), "bf16": kept(GIB // 16, GIB // 2)},
        "process_bytes": 0,
        "device_bytes": 80 * GIB,
        "host_bytes": 80 * GIB,
    }
    return MemoryFacts(**{**made, **more})  # type: ignore[typeddict-item]


def cell(strategy: str = "ddp", device: str = "cuda", devices: int = 2, batch: int = 32, **more: Any) -> Cell:
    made = Cell("w", None, None, strategy, device, devices, 1, "weak", batch, batch * devices)
    return replace(made, **{"optimizer": {"name": "SGD"}, **more})


@pytest.mark.parametrize(
    ("examined", "gib"),
    [
        # parameters, gradients, 32 samples at 1/8 GiB
        (cell("single", devices=1), 1 + 1 + 4),
        (cell("single", devices=1, optimizer={"name": "SGD", "momentum": 0.9}), 1 + 1 + 1 + 4),
        (cell("single", devices=1, optimizer={"name": "AdamW"}), 1 + 1 + 2 + 4),
        (cell("single", devices=1, batch=1, optimizer={"name": "AdamW"}), 1 + 1 + 2 + 1),  # the update, not 1/8
        (cell("single", devices=1, batch=1, optimizer={"name": "AdamW", "fused": True}), 1 + 1 + 2 + 0.125),
        # buckets
        (cell("ddp"), 1 + 1 + 1 + 4),
        (cell("ddp", strategy_options={"gradient_as_bucket_view": True}), 1 + 1 + 4),
        (cell("ddp", precision="bf16"), 1 + 1 + 1 + 0.5 + 2),
        (cell("ddp", training={"accumulation": 4}), 1 + 1 + 1 + 1),
        # the gradients of the first replica; in the emulation parameters, gradients and activations of both
        (cell("dp"), 1 + 1 + 1 + 4),
        (cell("dp", device="cpu"), 1 + 1 + 2 * (1 + 1 + 4)),
        (cell("dp", devices=1), 1 + 1 + 4),
        # shards of parameters and gradients; the rest and two units gathered; gradients of a unit twice
        (cell("fsdp"), 1 + 0.75 + 0.5 + 4),
        (cell("fsdp", devices=4), 0.5 + 0.75 + 0.5 + 4),
        (cell("fsdp", devices=4, nodes=2, strategy_options={"mesh": "hybrid"}), 1 + 0.75 + 0.5 + 4),
        (cell("fsdp", strategy_options={"reshard_after_forward": False}), 1 + 1 + 0.5 + 4),
        (cell("fsdp", training={"accumulation": 4}), 1 + 0.75 + 0.5 + 1 + 1),
        (cell("fsdp", precision="bf16"), 1 + 0.375 + 0.375 + 2),
        (cell("fsdp", precision="bf16", strategy_options={"mixed_precision": "autocast"}), 1 + 0.75 + 0.5 + 0.5 + 2),
        (cell("fsdp", devices=1), 1 + 1 + 4),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_the_estimate_of_a_cell(examined: Cell, gib: float) -> None:
    assert memory.estimate(sizes(), examined) == gib * GIB


def test_a_unit_has_no_more_gradients_than_are_trained() -> None:
    """Shards of parameters and of 1/8 GiB of gradients; the rest and two units gathered; those gradients twice."""
    assert memory.estimate(sizes(trainable_bytes=GIB // 8), cell("fsdp")) == (0.5 + 0.0625 + 0.75 + 0.25 + 4) * GIB


def test_an_estimate_needs_the_activations_of_its_precision_and_compilation() -> None:
    assert memory.estimate(sizes(), cell(compile=True)) is None
    model = sizes(activations={"fp32 compiled": kept(GIB // 16)})
    assert memory.estimate(model, cell(compile=True)) == 5 * GIB
    assert memory.estimate(model, cell(compile=True, compile_mode="reduce-overhead")) is None, "graphs have pools"
    assert memory.judge(sizes(activations={}, device_bytes=GIB), cell()) == []


@pytest.mark.parametrize(("available", "severity"), [(8.0, None), (7.5, "warning"), (5.0, "warning"), (4.6, "error")])
def test_thresholds_of_warning_and_refusal(available: float, severity: str | None) -> None:
    found = memory.judge(sizes(device_bytes=int(available * GIB)), cell())  # 7 GiB
    assert [finding.severity for finding in found] == ([severity] if severity else [])


def test_a_finding_has_estimate_available_memory_and_a_batch_that_fits() -> None:
    (finding,) = memory.judge(sizes(device_bytes=5 * GIB), cell(training={"accumulation": 2}, batch=64))
    assert "for a device: 7.0 GiB at a micro-batch of 32 per device (128.00 MiB of activations a" in finding.seen
    assert "available: 5.0 GiB" in finding.seen
    assert "a batch of 24," in finding.advice  # two micro-batches of (0.9 x 5 - 3) / (1/8)
    (finding,) = memory.judge(sizes(device_bytes=2 * GIB), cell())
    assert "smaller model" in finding.advice


def test_ranks_on_a_cpu_share_the_memory_of_their_node() -> None:
    model = sizes(process_bytes=GIB, host_bytes=20 * GIB)  # 8 GiB a rank
    assert memory.judge(model, cell(device="cpu")) == []
    (finding,) = memory.judge(model, cell(device="cpu", devices=3))
    assert "for a node: 24.0 GiB" in finding.seen
    assert memory.judge(model, cell(device="cpu", devices=4, nodes=2)) == []


def test_the_ranks_of_a_node_build_the_model_on_its_host() -> None:
    (finding,) = memory.judge(sizes(host_bytes=4 * GIB), cell("fsdp", devices=8))
    assert finding.severity == "error" and "the host memory of a node: 8.0 GiB" in finding.seen
    assert "init_weights" in finding.advice
    assert memory.judge(sizes(host_bytes=4 * GIB, on_meta=True), cell("fsdp", devices=8)) == []
    assert memory.judge(sizes(host_bytes=4 * GIB), cell("dp", devices=8)) == []  # one process
    assert memory.judge(sizes(host_bytes=4 * GIB, on_meta=True), cell("ddp", devices=8))  # initialised on the host


def test_the_batch_of_an_examination_is_divided_until_it_fits() -> None:
    assert memory.affordable_divisor(sizes(), cell()) == 1
    assert memory.affordable_divisor(sizes(device_bytes=5 * GIB), cell()) == 4  # 3 GiB and 8 samples
    assert memory.affordable_divisor(sizes(device_bytes=2 * GIB), cell()) is None


@pytest.mark.parametrize("batch", [1, 3, 6, 12, 96])
@pytest.mark.parametrize("available", [3.5, 4.0, 4.5, 6.0])
def test_a_divided_batch_fits_and_has_at_least_one_sample_per_device(batch: int, available: float) -> None:
    model, examined = sizes(device_bytes=int(available * GIB)), cell(batch=batch)
    divisor = memory.affordable_divisor(model, examined)
    assert divisor  # parameters, gradients, buckets and one sample: 3.125 GiB
    smaller = memory.at_smaller_batch(examined, divisor)
    assert smaller.per_device_batch_size and smaller.global_batch_size == 2 * smaller.per_device_batch_size
    assert all(need.ratio <= memory.WARN for need in memory.needs(model, smaller))


def test_a_batch_that_is_not_divided_evenly_is_estimated_as_it_is_examined() -> None:
    uneven = replace(cell(devices=4), per_device_batch_size=None, global_batch_size=10)
    model = sizes(device_bytes=int(3.2 / memory.WARN * GIB))  # one sample per device; 5 samples have two on the first
    divisor = memory.affordable_divisor(model, uneven)
    assert divisor == 4 and memory.at_smaller_batch(uneven, divisor).global_batch_size == 2


def test_a_strategy_of_the_users_own_is_never_refused() -> None:
    own = replace(cell("package.module:Sharded"), own_traits=BUILTIN_TRAITS["ddp"])
    (finding,) = memory.judge(sizes(device_bytes=2 * GIB), own)
    assert finding.severity == "warning" and "unless the strategy needs less memory" in finding.means
    (finding,) = memory.judge(sizes(device_bytes=2 * GIB), cell())
    assert finding.severity == "error"
