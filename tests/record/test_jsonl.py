"""Upgrade of lines of older schema versions to the current one."""

from __future__ import annotations

import pytest

from harness.record.reading import _skip_code


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("single trains on one device", "strategy_devices"),
        ("two trains on 2 devices at most", "strategy_devices"),
        ("dp drives its devices from one process and cannot span nodes", "strategy_nodes"),
        ("torchrun, the control, runs on one node, not on 2", "launcher_nodes"),
        ("torchrun, the control, runs on this machine alone, not in a cluster", "launcher_cluster"),
        ("3 devices do not split evenly over 2 nodes", "uneven_nodes"),
        ("device_ids names GPUs; CPU slots have no numbers", "device_ids_on_cpu"),
        ("a worker group with device_ids takes every GPU of its node, and 3 GPUs do not split", "device_ids_uneven"),
        ("too few devices: needs 4 on one node, has 2 CPU slots", "too_few_devices"),
        ("global batch 33 does not divide by 2 devices", "batch_indivisible"),
        ("per-device batch 8 does not divide into 3 micro-batches (training.accumulation)", "micro_batch_indivisible"),
        ("static_graph does not go with training.accumulation: DDP fails at a backward pass", "static_graph"),
        ("compile does not apply to dp: its replicas are rebuilt at every step", "strategy_compile"),
        ("compile needs a C++ compiler on every node", "no_compiler"),
        ("tf32 is a mode of CUDA devices", "needs_cuda"),
        ("sync_batch_norm is a CUDA operator", "needs_cuda"),
        ("time is up: limits.wall was reached", "time_up"),
        ("precise enough: 3 blocks suffice for 10 %", "precise"),
        ("a batch of 8 per device of the same cell ran out of memory (limits.prune_oom)", "out_of_memory"),
        ("preflight: memory: a batch of 64 per device needs about 9 GiB", "doctor_memory"),
        ("preflight: shapes survive: 2 devices are asked for", "doctor"),
        ("global batch 128 exceeds the 100 training samples", "too_few_samples"),
        ("the check's global batch 8 exceeds the 4 training samples", "too_few_samples"),
        (
            "loss or model draw random numbers even when the model only evaluates: no two runs are alike",
            "random_evaluation",
        ),
        ("time is up: limits.cost was reached (10 USD of the whole run; raise it to go on)", None),  # has its code
        ("something that no version wrote", None),
    ],
)
def test_reasons_of_older_folders_have_codes(reason: str, code: str | None) -> None:
    assert _skip_code({"outcome": "skipped", "reason": reason}) == code
    assert _skip_code({"outcome": "error", "reason": reason}) is None
