"""Published peaks: the right variant and precision, or None."""

from __future__ import annotations

import pytest

from harness.analysis import hardware as peaks
from harness.analysis.hardware import peak_flops

TERA = 1e12


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-PCIE-32GB", "fp32", 14),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L4", "fp16", 121),
        ("Tesla T4", "fp16", 65),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp32", 60),
        ("NVIDIA H100 NVL", "tf32", 417.5),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA H200", "tf32", 494.5),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "tf32", 1250),
    ],
)
def test_known_peaks(device: str, precision: str, tflops: float) -> None:
    peak = peak_flops(device, precision)
    assert peak is not None and peak.flops_per_s == tflops * TERA


@pytest.mark.parametrize(
    "device",
    [
        "",
        "cpu",
        "AMD EPYC 7763 64-Core Processor",
        "NVIDIA A10G",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H100",
        "NVIDIA H200 NVL",
        "NVIDIA L40S",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_another_device_has_no_peak(device: str) -> None:
    assert [peak_flops(device, precision) for precision in ("fp32", "tf32", "bf16")] == [None] * 3


@pytest.mark.parametrize("device", ["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB", "Tesla T4"])
def test_a_unit_that_a_gpu_lacks_has_no_peak(device: str) -> None:
    assert peak_flops(device, "tf32") is None and peak_flops(device, "bf16") is None


def test_a_figure_that_was_not_read_is_absent() -> None:
    assert peak_flops("NVIDIA B200", "fp32") is None


def test_every_peak_has_a_source_and_a_plausible_value() -> None:
    for device, (source, figures) in peaks._TABLE.items():
        assert "NVIDIA" in source and "https://" in source
        assert min(figures.values()) >= 8 * TERA and max(figures.values()) <= 2500 * TERA, device
        assert list(figures.values()) == sorted(figures.values()), f"{device}: a lower precision is no slower"
