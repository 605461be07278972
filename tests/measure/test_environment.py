"""Which variables of a process are recorded."""

from __future__ import annotations

import pytest
import torch

from harness.measure.environment import capture_environment


@pytest.mark.parametrize(
    "name",
    [
        *("CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG"),
        *("CUBLASLT_WORKSPACE_SIZE", "TORCHINDUCTOR_MAX_AUTOTUNE", "FI_PROVIDER", "UCX_TLS", "KMP_AFFINITY"),
        *("TORCH_DISTRIBUTED_DEBUG", "NCCL_IB_DISABLE", "OMP_PROC_BIND", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ],
)
def test_a_variable_that_changes_speed_is_recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert capture_environment("n", [torch.device("cpu")])["variables"][name] == "1"


@pytest.mark.parametrize("name", ["CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "KMP_INIT_AT_FORK"])
def test_a_variable_of_the_installation_or_of_one_launch_is_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Those of a launch differ between worker groups: a doubt for every pair."""
    monkeypatch.setenv(name, "1")
    assert name not in capture_environment("n", [torch.device("cpu")])["variables"]
