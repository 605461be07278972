"""The forecast of a cell's peak memory, with sizes that a reader can add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.config.known_hardware import KNOWN_DEVICES
from harness.config.strategy_traits import StrategyTraits
from harness.config.values import GIB
from harness.plan.cell import Cell
from harness.plan.inventory import Inventory, Node
from harness.plan.memory_forecast import CUDA_ALLOWANCE, available, forecast, traced_cell
from harness.plan.rows import Examination

MOMENTUM = {"name": "SGD", "lr": 0.1, "momentum": 0.9}
ADAMW = {"name": "AdamW", "lr": 0.1}
VIEWS = {"gradient_as_bucket_view": True}


def cell(strategy: str = "single", devices: int = 1, device: str = "cuda", batch: int = 32, **more: Any) -> Cell:
    made = Cell("w", None, None, strategy, device, devices, 1, "weak", batch, batch * devices)
    return replace(made, **{"optimizer": MOMENTUM, **more})


def examined(**more: Any) -> Examination:
    """A model of 4 GiB, all of it trained: 8 GiB are there without gradients before the step, its peak is 20 GiB.

    Without gradients it is 18 GiB, at another moment.
    """
    made: Examination = {
        "sizes": {
            "parameter_bytes": 4 * GIB,
            "trainable_bytes": 4 * GIB,
            "buffer_bytes": 0,
            "unit_bytes": GIB,
            "root_bytes": GIB,
            "on_meta": True,
        },
        "process_bytes": GIB,
        "peak": {"peak_bytes": 20 * GIB, "without_gradients_bytes": 18 * GIB},
        "reason": "",
    }
    return Examination(**{**made, **more})  # type: ignore[typeddict-item]


def h100s(gpus: int = 8) -> Inventory:
    return Inventory.assume(1, gpus, device=KNOWN_DEVICES["H100-80GB"])


def node(memory: int | None = 64 * GIB, **more: Any) -> Inventory:
    return Inventory((Node("n", "127.0.0.1", "n", 8, memory_bytes=memory, **more),))


def test_the_memory_pools_of_cuda_graphs_are_not_known() -> None:
    """A trace runs without them; that a large model cannot fit is known."""
    graphs = cell(compile=True, compile_mode="reduce-overhead")
    found = forecast(graphs, examined(), h100s())
    assert (found.verdict, found.activations) == ("unknown", None) and "CUDA graphs" in found.reason
    assert forecast(replace(graphs, compile_mode="default"), examined(), h100s()).verdict == "fits"
    assert forecast(replace(graphs, device="cpu"), examined(), node()).verdict == "fits"
    large = {**(examined()["sizes"] or {}), "parameter_bytes": 90 * GIB, "trainable_bytes": 90 * GIB}
    assert forecast(graphs, examined(sizes=large), h100s()).verdict == "will not fit"


@pytest.mark.parametrize(
    ("planned", "parts"),
    [
        # parameters, gradients, optimizer, buckets, activations: 20 in sum, and DDP's buckets
        (cell(), (4, 4, 4, 0, 8)),
        (cell("ddp", 2), (4, 4, 4, 4, 8)),
        # the peak without gradients, and the gradients as buckets
        (cell("ddp", 2, strategy_options=VIEWS), (4, 0, 4, 4, 10)),
        # shards of 4 devices; the trace is that of a shard
        (cell("fsdp", 4), (1, 1, 1, 0, 17)),
        # traced at 8, where shards are 1.5: the rest is the same on 16
        (cell("fsdp", 16), (0.25, 0.25, 0.25, 0, 18.5)),
    ],
    ids=lambda value: getattr(value, "strategy", None),
)
def test_the_parts_of_a_traced_peak(planned: Cell, parts: tuple[int, ...]) -> None:
    found = forecast(planned, examined(), h100s())
    assert found.state is not None and found.activations is not None
    state = found.state
    shown = (state.parameters, state.gradients, state.optimizer, state.buckets, found.activations)
    assert [size / GIB for size in shown] == list(parts)
    assert found.peak == sum(parts) * GIB + CUDA_ALLOWANCE
    assert not found.counted


def test_dp_and_a_strategy_of_the_user_are_counted_with_the_activations_of_one_device() -> None:
    # 18 less parameters and optimizer: 10 of activations; parameters, gradients, optimizer, the replica's gradients
    of_dp = forecast(cell("dp", 2), examined(), h100s())
    assert (of_dp.counted, of_dp.peak) == (True, (12 + 4 + 10) * GIB + CUDA_ALLOWANCE)
    own = forecast(cell("mine:Own", 2, own_traits=StrategyTraits()), examined(), h100s())
    assert (own.counted, own.peak) == (True, (12 + 10) * GIB + CUDA_ALLOWANCE)


@pytest.mark.parametrize(
    ("peak", "verdict"),
    [(60, "fits"), (65.5, "fits"), (65.6, "may not fit"), (110.2, "may not fit"), (110.3, "will not fit")],
)
def test_the_verdict_compares_peak_and_allowance_with_the_device(peak: float, verdict: str) -> None:
    """An H100-80GB has 74.5 GiB: 0.9 of it are 67.06 and 1.5 are 111.76; the allowance is 1.5."""
    size = int(peak * GIB)
    found = forecast(cell(), examined(peak={"peak_bytes": size, "without_gradients_bytes": size}), h100s())
    assert found.verdict == verdict


def test_on_a_cpu_all_processes_of_a_node_share_its_memory() -> None:
    """A process has 1 GiB besides the tensors."""
    four = replace(cell("ddp", 4, device="cpu"), nodes=2)
    found = forecast(four, examined(), node())
    assert (found.peak, found.sharers, found.verdict) == (25 * GIB, 2, "fits")
    assert forecast(cell("ddp", 4, device="cpu"), examined(), node()).verdict == "will not fit"
    assert forecast(cell("dp", 4, device="cpu"), examined(), node(1000 * GIB)).sharers == 1


@pytest.mark.parametrize(("ranks", "nodes", "sharers"), [(2, 1, 1), (4, 1, 2), (5, 1, 3), (4, 2, 1)])
def test_ranks_that_share_a_gpu_share_its_memory(ranks: int, nodes: int, sharers: int) -> None:
    planned = replace(cell("ddp", ranks, oversubscribed=True), nodes=nodes)
    assert forecast(planned, examined(), h100s(2)).sharers == sharers
    assert forecast(replace(planned, oversubscribed=False), examined(), h100s(2)).sharers == 1


def test_an_unknown_peak_has_the_verdict_of_the_parts_that_are_known() -> None:
    found = forecast(cell(), examined(peak=None, reason="why"), h100s())
    assert (found.peak, found.activations, found.verdict, found.reason) == (None, None, "unknown", "why")
    assert found.state is not None and found.state.total == 12 * GIB
    small = Inventory.assume(1, 1, device=KNOWN_DEVICES["P100-12GB"])
    assert forecast(cell(), examined(peak=None), small).verdict == "may not fit"
    assert forecast(cell(optimizer=ADAMW), examined(peak=None), small).verdict == "will not fit"
    assert forecast(cell(), examined(sizes=None, peak=None), h100s()).verdict == "unknown"


def test_without_the_memory_of_the_device_there_is_no_verdict() -> None:
    assert forecast(cell(), examined(), Inventory.assume(1, 8)).verdict == "unknown"
    assert available(cell(device="cpu"), Inventory.assume(1, 0)) is None


def test_the_memory_that_is_there_is_the_smallest_of_the_devices() -> None:
    gpu = {"gpus": 1, "gpu_memory_bytes": 10 * GIB}
    two = Inventory((*node(**gpu).nodes, *h100s().nodes, *node(GIB).nodes))
    assert available(cell(), two) == 10 * GIB
    assert available(cell(), Inventory((*two.nodes, *node(gpus=1, gpu_model="Tesla T4").nodes))) is None
    assert available(cell(device="cpu"), node(GIB)) == GIB


def test_cells_of_equal_memory_share_a_trace() -> None:
    single = traced_cell(cell())
    assert single.strategy == "single" and single.devices == 1
    alike = [
        cell("ddp", 8),
        cell("ddp", 2, strategy_options=VIEWS),
        cell("dp", 4),
        cell(optimizer={**MOMENTUM, "lr": 0.2}, compile=True, launcher="torchrun", device_ids=(3,)),
        cell(precision="tf32", training={"channels_last": True}, loader={"workers": 2}),
        cell("mine:Own", 2, own_traits=StrategyTraits()),
        cell(workload_options={}),
    ]
    assert {traced_cell(each) for each in alike} == {single}
    assert traced_cell(cell(precision="fp16")) == traced_cell(cell(precision="bf16"))


@pytest.mark.parametrize(
    "other",
    [
        cell(batch=16),
        cell(precision="bf16"),
        cell(optimizer=ADAMW),
        cell(training={"accumulation": 2}),
        cell(activation_checkpointing="full"),
        cell(device="cpu"),
        cell(workload_options={"width": 2}),
        cell("fsdp", 2),
        cell("fsdp", 4),
    ],
    ids=str,
)
def test_cells_of_other_memory_have_a_trace_of_their_own(other: Cell) -> None:
    assert traced_cell(other) not in (traced_cell(cell()), traced_cell(cell("fsdp", 8)))


def test_a_trace_downloads_nothing_and_keeps_the_batch_of_a_device() -> None:
    strong = replace(cell("ddp", 4, workload_options={"download": True}), scaling="strong", per_device_batch_size=None)
    traced = traced_cell(replace(strong, global_batch_size=10))
    assert traced.workload_options == {"download": False}
    assert (traced.per_device_batch_size, traced.global_batch_size) == (3, 3)
    assert traced_cell(cell("fsdp", 16)).devices == 8
    sharded = traced_cell(cell("fsdp", 4, nodes=2, strategy_options={"backend": "nccl", "mesh": "hybrid"}))
    assert (sharded.devices, sharded.nodes, sharded.global_batch_size) == (4, 2, 128)
    assert sharded.strategy_options == {"mesh": "hybrid"}
