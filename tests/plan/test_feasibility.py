"""Why a trial is left out, in words and numbers: its cell cannot run, or a limit of the run is reached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.plan.cell import Cell
from harness.plan.feasibility import IMPOSSIBLE, end_of, reason_of_impossibility, reason_to_skip
from harness.plan.inventory import Machine
from harness.plan.run_environment import spent_device_seconds
from tests.conftest import experiment_of

CELL = Cell("image_classification", "digits", "resnet18", "ddp", "cpu", 2, 1, "weak", 8, 16)
LAPTOP = Machine("cpu", 1, (2,), compiler=True)
NODES = Machine("cuda", 8, (8, 8), compiler=True)
IN_CLUSTER = replace(LAPTOP, single_machine=False)
UNEVEN = {"scaling": "strong", "per_device_batch_size": None, "global_batch_size": 33}
STATIC = {"training": {"accumulation": 2}, "strategy_options": {"static_graph": True}}
NCCL = {"strategy_options": {"backend": "nccl"}}
HYBRID = {"strategy": "fsdp", "strategy_options": {"mesh": "hybrid"}}
TOO_FEW = "too_few_devices: too few devices"
ONE_NODE_LAUNCHER = "launcher_nodes: launcher torchrun runs on one node only, not on 2"
HERE_LAUNCHER = "launcher_cluster: launcher torchrun runs on this machine only, not in a cluster"
INDIVISIBLE = "micro_batch_indivisible: per-device batch 8 does not divide into"
DP_NODES = "strategy_nodes: dp runs on one node only: one process uses all its devices"
EAGER_MODE = "excluding: compile_mode max-autotune applies to compiled cells (compile: true)"
DP_COMPILED = "excluding: compile does not apply to dp: its replicas are rebuilt at every step"
STATIC_GRAPH = "excluding: static_graph is incompatible with training.accumulation: DDP fails in a backward pass "
STATIC_GRAPH += "without gradient synchronisation"
GLOO_SHARDS = "gloo_shards: fsdp needs NCCL: gloo crashes if it gathers shards of a GPU whole"


@pytest.mark.parametrize(
    ("change", "machine", "reason"),
    [
        ({}, LAPTOP, None),
        ({"devices": 4}, LAPTOP, "too_few_devices: too few devices: needs 4 on one node, has 2 CPU slots"),
        ({"strategy": "single"}, LAPTOP, "strategy_devices: single runs on at most one device"),
        ({"strategy": "single", "devices": 1}, LAPTOP, None),
        ({"strategy": "dp"}, LAPTOP, None),
        ({"strategy": "dp", "nodes": 2}, NODES, DP_NODES),
        ({"strategy": "dp", "devices": 16}, NODES, f"{TOO_FEW}: needs 16 on one node, has 8 + 8 GPUs"),
        ({"devices": 16, "nodes": 2}, NODES, None),
        ({"launcher": "torchrun"}, LAPTOP, None),
        ({"launcher": "torchrun", "devices": 4, "oversubscribed": True}, LAPTOP, None),
        ({"launcher": "torchrun", "devices": 16, "nodes": 2}, NODES, ONE_NODE_LAUNCHER),
        ({"launcher": "torchrun"}, IN_CLUSTER, HERE_LAUNCHER),
        ({"devices": 3, "nodes": 2}, NODES, "uneven_nodes: 3 devices do not split evenly over 2 nodes"),
        ({"devices": 18, "nodes": 2}, NODES, f"{TOO_FEW}: needs 9 devices on each of 2 nodes, has 8 + 8 GPUs"),
        ({"nodes": 2}, LAPTOP, f"{TOO_FEW}: needs 1 devices on each of 2 nodes, has 2 CPU slots"),
        ({"devices": 4, "oversubscribed": True}, LAPTOP, None),
        (UNEVEN, LAPTOP, "batch_indivisible: global batch 33 does not divide by 2 devices"),
        ({"training": {"accumulation": 4}}, LAPTOP, None),
        ({"training": {"accumulation": 3}}, LAPTOP, f"{INDIVISIBLE} 3 micro-batches (training.accumulation)"),
        ({"training": {"accumulation": 16}}, LAPTOP, f"{INDIVISIBLE} 16 micro-batches (training.accumulation)"),
        (STATIC, LAPTOP, STATIC_GRAPH),
        ({"compile": True}, LAPTOP, None),
        ({"compile": True}, replace(LAPTOP, compiler=False), "no_compiler: compile needs a C++ compiler on every node"),
        ({"compile": True, "strategy": "dp"}, LAPTOP, DP_COMPILED),
        ({"compile": True, "compile_mode": "max-autotune"}, LAPTOP, None),
        ({"compile_mode": "max-autotune"}, LAPTOP, EAGER_MODE),
        ({"precision": "tf32"}, LAPTOP, "needs_cuda: tf32 is a mode of CUDA devices"),
        ({"precision": "tf32"}, NODES, None),
        ({"precision": "bf16"}, LAPTOP, None),
        ({"strategy_options": {"sync_batch_norm": True}}, LAPTOP, "needs_cuda: sync_batch_norm is a CUDA operator"),
        ({"strategy_options": {"sync_batch_norm": True}}, NODES, None),
        (NCCL, LAPTOP, "needs_cuda: ddp.backend nccl connects GPUs; CPU slots use gloo"),
        (NCCL, NODES, None),
        ({"strategy_options": {"backend": "gloo"}}, LAPTOP, None),
        ({**NCCL, "oversubscribed": True}, NODES, "shared_device: ddp.backend nccl rejects ranks that share a GPU"),
        ({"strategy": "fsdp", "oversubscribed": True}, NODES, GLOO_SHARDS),
        ({"strategy": "fsdp", "strategy_options": {"backend": "gloo"}}, NODES, GLOO_SHARDS),
        ({"strategy": "fsdp", "strategy_options": {"backend": "gloo"}, "devices": 1}, NODES, None),
        ({"strategy": "fsdp", "oversubscribed": True}, LAPTOP, None),
        (HYBRID, NODES, "one_node: fsdp.mesh hybrid shards inside nodes and replicates between them: one is flat"),
        ({**HYBRID, "nodes": 2}, NODES, None),
        ({**HYBRID, "devices": 1}, NODES, None),
    ],
)
def test_reasons_of_infeasible_cells(change: dict[str, Any], machine: Machine, reason: str | None) -> None:
    cell = replace(CELL, **change)
    found = reason_to_skip(cell, machine)
    assert (found and f"{found.code}: {found.text}") == reason
    # no machine needs to be known for what none can run
    assert reason_of_impossibility(cell) == (found if found and found.code in IMPOSSIBLE else None)


PRICE = {"per_device_hour": 2.5, "currency": "USD"}


@pytest.mark.parametrize(
    ("limits", "spent_s", "name", "seconds"),
    [
        ({}, 0.0, None, None),
        ({"wall": 100.0}, 1e9, "limits.wall", 100.0),
        ({"device_hours": 4}, 0.0, "limits.device_hours", 1800.0),
        ({"device_hours": 4}, 3600.0, "limits.device_hours", 1350.0),
        ({"device_hours": 4}, 5 * 3600.0, "limits.device_hours", -450.0),
        ({"cost": 10}, 0.0, "limits.cost", 1800.0),
        ({"cost": 10, "device_hours": 2, "wall": "1h"}, 0.0, "limits.device_hours", 900.0),
        ({"cost": 1, "device_hours": 2, "wall": "1h"}, 0.0, "limits.cost", 180.0),
        ({"cost": 1, "device_hours": 2, "wall": "1m"}, 0.0, "limits.wall", 60.0),
    ],
)
def test_the_first_limit_ends_the_run_of_eight_devices(
    limits: dict[str, Any], spent_s: float, name: str | None, seconds: float | None
) -> None:
    found = end_of(experiment_of(limits=limits, cost=PRICE), 8, spent_s)
    assert (found and found.name, found and found.seconds) == (name, seconds)


def test_the_reason_names_the_limit_and_how_to_go_on() -> None:
    found = end_of(experiment_of(limits={"cost": 10}, cost=PRICE), 8)
    assert found
    assert found.reason == "time is up: limits.cost was reached (10 USD of the whole run; raise it to go on)"


def test_every_invocation_counts_with_its_own_devices_and_a_killed_one_until_its_last_record() -> None:
    group = {"invocation": 2, "started_at": 1000.0, "whole_s": 30.0}
    invocations: list[Any] = [{"started_at": 0.0, "wall_s": 100.0, "devices": 4}]
    invocations += [{"started_at": at} for at in (500.0, 990.0, 2000.0)]
    environment: Any = {"invocations": invocations, "groups": [group]}
    ends = {1: 520.0, 2: 1025.0}
    lines: Any = [{"invocation": i, "started_at": end - 5.0, "trial_s": 5.0} for i, end in ends.items()]
    assert spent_device_seconds(environment, lines, 2) == 100 * 4 + 20 * 2 + 40 * 2
