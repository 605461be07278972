"""Published dense peak FLOP/s of GPUs, the denominator of MFU. An unknown peak is absent, never estimated."""

from __future__ import annotations

from dataclasses import dataclass

_LIGHTNING = (
    "read in Lightning Fabric, "
    "https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/fabric/utilities/throughput.py"
)
_ML_ENGINEERING = (
    "read in Stas Bekman, Machine Learning Engineering, "
    "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md"
)
_PYTORCH = "read in PyTorch, https://github.com/pytorch/pytorch/blob/main/torch/_inductor/analysis/device_info.py"
_TORCHTITAN = "read in torchtitan, https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py"

_V100 = f"NVIDIA V100 datasheet (1165301-r5), {_LIGHTNING}"
_T4 = f"NVIDIA T4 datasheet (951643), {_LIGHTNING}"
_A100 = f"NVIDIA A100 datasheet (1758950-r4), {_LIGHTNING}"
_ADA = f"NVIDIA Ada GPU architecture whitepaper (v2.1), {_LIGHTNING}"
_H100_PCIE = f"NVIDIA H100 whitepaper, https://resources.nvidia.com/en-us-tensor-core, {_LIGHTNING}"
_H100 = f"NVIDIA, https://www.nvidia.com/en-us/data-center/h100/, {_PYTORCH}"
_H100_NVL = f"NVIDIA, https://www.nvidia.com/en-us/data-center/h100/, {_TORCHTITAN}"
_H200 = f"NVIDIA, https://www.nvidia.com/en-us/data-center/h200/, {_ML_ENGINEERING}"
_B200 = f"NVIDIA, https://www.nvidia.com/en-us/data-center/hgx/, {_PYTORCH}"
_GB200 = f"NVIDIA GB200, one of its two GPUs, {_ML_ENGINEERING}"


@dataclass(frozen=True)
class Peak:
    """Dense FLOP/s of one GPU at its published boost clock and full power limit, and the source of the figure."""

    flops_per_s: float
    source: str


_A100_FIGURES = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}

_TABLE: dict[str, tuple[str, dict[str, float]]] = {
    "Tesla V100-SXM2-16GB": (_V100, {"fp32": 15.7e12, "fp16": 125e12}),
    "Tesla V100-SXM2-32GB": (_V100, {"fp32": 15.7e12, "fp16": 125e12}),
    "Tesla V100-PCIE-16GB": (_V100, {"fp32": 14e12, "fp16": 112e12}),
    "Tesla V100-PCIE-32GB": (_V100, {"fp32": 14e12, "fp16": 112e12}),
    "Tesla T4": (_T4, {"fp32": 8.1e12, "fp16": 65e12}),
    "NVIDIA A100-SXM4-40GB": (_A100, _A100_FIGURES),
    "NVIDIA A100-SXM4-80GB": (_A100, _A100_FIGURES),
    "NVIDIA A100-PCIE-40GB": (_A100, _A100_FIGURES),
    "NVIDIA A100 80GB PCIe": (_A100, _A100_FIGURES),
    "NVIDIA L4": (_ADA, {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12}),
    # bf16: dense with fp32 accumulation, from the whitepaper's table of the RTX 4090 (fp16 accumulation is no training)
    "NVIDIA GeForce RTX 4090": (_ADA, {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12}),
    "NVIDIA H100 80GB HBM3": (_H100, {"fp32": 67e12, "tf32": 494.5e12, "bf16": 989.5e12}),
    "NVIDIA H100 PCIe": (_H100_PCIE, {"fp32": 51.2e12, "tf32": 378e12, "bf16": 756e12}),
    # one of the two cards: 60 TFLOP/s in fp32, and 835 in tf32 with sparsity, by NVIDIA's page
    "NVIDIA H100 NVL": (_H100_NVL, {"fp32": 60e12, "tf32": 417.5e12, "bf16": 835e12}),
    "NVIDIA H200": (_H200, {"fp32": 67e12, "tf32": 494.5e12, "bf16": 989.5e12}),
    # fp32: sources disagree, 80 TFLOP/s and 75
    "NVIDIA B200": (_B200, {"tf32": 1125e12, "bf16": 2250e12}),
    "NVIDIA GB200": (_GB200, {"fp32": 80e12, "tf32": 1250e12, "bf16": 2500e12}),
}
"""By the driver's full device name: a MIG slice, a laptop GPU or another board is another device.

From the H100 on, NVIDIA publishes tensor-core figures with sparsity; here they are halved.
"""


def peak_flops(device_model: str, precision: str) -> Peak | None:
    """Return the dense peak of a GPU in "fp32" (TF32 off), "tf32", "bf16" or "fp16"; None if it is unknown.

    ``device_model``: ``torch.cuda.get_device_properties().name``. None also if the GPU has no such unit: bf16 and
    TF32 on a V100 or a T4.
    """
    source, figures = _TABLE.get(device_model, ("", {}))
    # from the A100 on, the sources give one figure for both dtypes of 16 bits
    named = "bf16" if precision == "fp16" and "fp16" not in figures else precision
    return Peak(figures[named], source) if named in figures else None
