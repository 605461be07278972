"""Why a cell cannot run, in words and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.plan.cell import Cell
from harness.plan.feasibility import IMPOSSIBLE, reason_of_impossibility, reason_to_skip
from harness.plan.inventory import Machine

CELL = Cell("image_classification", "digits", "resnet18", "ddp", "cpu", 2, 1, "weak", 8, 16)
LAPTOP = Machine("cpu", 1, (2,), compiler=True)
TWO_NODES = Machine("cuda", 8, (8, 8), compiler=True)


@pytest.mark.parametrize(
    ("change", "machine", "reason"),
    [
        ({}, LAPTOP, None),
        ({"devices": 4}, LAPTOP, "too_few_devices: too few devices: needs 4 on one node, has 2 CPU slots"),
        ({"strategy": "single"}, LAPTOP, "strategy_devices: single runs on at most one device"),
        ({"strategy": "single", "devices": 1}, LAPTOP, None),
        ({"strategy": "dp"}, LAPTOP, None),
        (
            {"strategy": "dp", "nodes": 2},
            TWO_NODES,
            "strategy_nodes: dp runs on one node only: one process uses all its devices",
        ),
        (
            {"strategy": "dp", "devices": 16},
            TWO_NODES,
            "too_few_devices: too few devices: needs 16 on one node, has 8 + 8 GPUs",
        ),
        ({"devices": 16, "nodes": 2}, TWO_NODES, None),
        ({"launcher": "torchrun"}, LAPTOP, None),
        ({"launcher": "torchrun", "devices": 4, "oversubscribed": True}, LAPTOP, None),
        (
            {"launcher": "torchrun", "devices": 16, "nodes": 2},
            TWO_NODES,
            "launcher_nodes: launcher torchrun runs on one node only, not on 2",
        ),
        (
            {"launcher": "torchrun"},
            replace(LAPTOP, single_machine=False),
            "launcher_cluster: launcher torchrun runs on this machine only, not in a cluster",
        ),
        ({"devices": 3, "nodes": 2}, TWO_NODES, "uneven_nodes: 3 devices do not split evenly over 2 nodes"),
        (
            {"devices": 18, "nodes": 2},
            TWO_NODES,
            "too_few_devices: too few devices: needs 9 devices on each of 2 nodes, has 8 + 8 GPUs",
        ),
        ({"nodes": 2}, LAPTOP, "too_few_devices: too few devices: needs 1 devices on each of 2 nodes, has 2 CPU slots"),
        ({"devices": 4, "oversubscribed": True}, LAPTOP, None),
        (
            {"scaling": "strong", "per_device_batch_size": None, "global_batch_size": 33},
            LAPTOP,
            "batch_indivisible: global batch 33 does not divide by 2 devices",
        ),
        ({"training": {"accumulation": 4}}, LAPTOP, None),
        (
            {"training": {"accumulation": 3}},
            LAPTOP,
            "micro_batch_indivisible: per-device batch 8 does not divide into 3 micro-batches (training.accumulation)",
        ),
        (
            {"training": {"accumulation": 16}},
            LAPTOP,
            "micro_batch_indivisible: per-device batch 8 does not divide into 16 micro-batches (training.accumulation)",
        ),
        (
            {"training": {"accumulation": 2}, "strategy_options": {"static_graph": True}},
            LAPTOP,
            "static_graph: static_graph is incompatible with training.accumulation: DDP fails in a backward pass "
            "without gradient synchronisation",
        ),
        ({"compile": True}, LAPTOP, None),
        ({"compile": True}, replace(LAPTOP, compiler=False), "no_compiler: compile needs a C++ compiler on every node"),
        (
            {"compile": True, "strategy": "dp"},
            LAPTOP,
            "strategy_compile: compile does not apply to dp: its replicas are rebuilt at every step",
        ),
        ({"precision": "tf32"}, LAPTOP, "needs_cuda: tf32 is a mode of CUDA devices"),
        ({"precision": "tf32"}, TWO_NODES, None),
        ({"precision": "bf16"}, LAPTOP, None),
        ({"strategy_options": {"sync_batch_norm": True}}, LAPTOP, "needs_cuda: sync_batch_norm is a CUDA operator"),
        ({"strategy_options": {"sync_batch_norm": True}}, TWO_NODES, None),
        (
            {"strategy_options": {"backend": "nccl"}},
            LAPTOP,
            "needs_cuda: ddp.backend nccl connects GPUs; CPU slots use gloo",
        ),
        ({"strategy_options": {"backend": "nccl"}}, TWO_NODES, None),
        ({"strategy_options": {"backend": "gloo"}}, LAPTOP, None),
        (
            {"strategy_options": {"backend": "nccl"}, "oversubscribed": True},
            TWO_NODES,
            "shared_device: ddp.backend nccl rejects ranks that share a GPU",
        ),
        (
            {"strategy": "fsdp", "strategy_options": {"mesh": "hybrid"}},
            TWO_NODES,
            "one_node: fsdp.mesh hybrid shards inside nodes and replicates between them: one is flat",
        ),
        ({"strategy": "fsdp", "strategy_options": {"mesh": "hybrid"}, "nodes": 2}, TWO_NODES, None),
        ({"strategy": "fsdp", "strategy_options": {"mesh": "hybrid"}, "devices": 1}, TWO_NODES, None),
    ],
)
def test_reasons_of_infeasible_cells(change: dict[str, Any], machine: Machine, reason: str | None) -> None:
    found = reason_to_skip(replace(CELL, **change), machine)
    assert (found and f"{found.code}: {found.text}") == reason


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"strategy": "single"}, "strategy_devices"),
        ({"strategy": "dp", "nodes": 2}, "strategy_nodes"),
        ({"devices": 3, "nodes": 2}, "uneven_nodes"),
        ({"per_device_batch_size": None, "global_batch_size": 33}, "batch_indivisible"),
        ({"training": {"accumulation": 3}}, "micro_batch_indivisible"),
        ({"training": {"accumulation": 2}, "strategy_options": {"static_graph": True}}, "static_graph"),
        ({"compile": True, "strategy": "dp"}, "strategy_compile"),
    ],
)
def test_what_no_machine_can_run_needs_no_machine_to_know(change: dict[str, Any], code: str) -> None:
    found = reason_of_impossibility(replace(CELL, **change))
    assert found and found.code == code and code in IMPOSSIBLE


def test_what_a_larger_machine_runs_is_not_impossible() -> None:
    for change in ({"devices": 64}, {"precision": "tf32"}, {"compile": True}, {"device_ids": (0, 1)}):
        assert reason_of_impossibility(replace(CELL, **change)) is None
