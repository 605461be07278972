"""GPUs by cell: NVML readings, memory of each, published peak FLOP/s, and measured links and collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import pandas as pd

from harness.analysis.common import KEYS, Lines, Row, Values, columns_of, measured, order, rows_of, trial_key
from harness.analysis.phases import timings
from harness.analysis.stats import geometric_mean
from harness.plan.rows import LinkOperation
from harness.record.schema import COLLECTIVES, DESCRIPTION, DEVICE_MEMORY, GPUS, LINKS

STATES = ["gpu_utilisation", "power_w", "sm_clock_fraction", "temperature_c", "throttled"]
ENERGY = ["energy_j", "samples_per_joule"]


def gpus(trials: pd.DataFrame, ranks: pd.DataFrame, windows: pd.DataFrame, lines: Lines) -> pd.DataFrame:
    """Return one row a cell whose GPUs gave any reading, or were profiled; no rows without GPUs."""
    busy = _busy(trials, windows, lines)
    readings = ranks[[*KEYS, *STATES, *ENERGY]]
    known = readings[readings[[*STATES, *ENERGY]].notna().any(axis=1)][KEYS].drop_duplicates()
    kept = measured(trials)[[*KEYS, "cell_id", *DESCRIPTION]]
    kept = kept.merge(known, on=KEYS, how="left", indicator=True)
    kept = kept[(kept.pop("_merge") == "both") | kept["cell_id"].isin(list(busy))]
    groups = readings.merge(kept, on=KEYS).groupby("cell_id", sort=False)
    rows = [{**_row(group), **busy.get(str(cell_id), {})} for cell_id, group in groups]
    return GPUS.frame(sorted(rows, key=order))


def _busy(trials: pd.DataFrame, windows: pd.DataFrame, lines: Lines) -> dict[str, Values]:
    """Return by cell the busy seconds of its profiles, the mean over blocks, and their share of its timed step.

    Profiled steps are longer than timed ones by what the profiler costs the host; kernels are not.
    """
    profiled: dict[str, list[float]] = {}
    for line in {line["trial_id"]: line for line in lines if line["outcome"] == "ok"}.values():
        if (seconds := line["facts"].get("busy_s")) is not None:
            profiled.setdefault(line["cell_id"], []).append(seconds)
    if not profiled:
        return {}
    timed, steps = timings(windows), dict[str, list[float]]()
    for row in rows_of(measured(trials)):
        if timing := timed.get(trial_key(row)):
            steps.setdefault(row.cell_id, []).append(timing.step_mean_s)
    return {
        cell_id: {"busy_s": fmean(each), "busy": min(1.0, fmean(each) / fmean(steps[cell_id]))}
        for cell_id, each in profiled.items()
        if cell_id in steps
    }


def _row(ranks: pd.DataFrame) -> Values:
    (first,) = rows_of(ranks.head(1))
    held = {why for text in ranks["throttled"].dropna() for why in text.split(", ") if why}
    efficiencies = [_samples_per_joule(trial) for _, trial in ranks.groupby(KEYS, sort=False)]
    known = [value for value in efficiencies if value is not None]
    return {
        **columns_of(first, "cell_id", *DESCRIPTION),
        "blocks": len(efficiencies),
        "gpu_utilisation": ranks["gpu_utilisation"].mean(),
        "power_w": ranks["power_w"].mean(),
        "sm_clock_fraction": ranks["sm_clock_fraction"].min(),
        "temperature_c": ranks["temperature_c"].max(),
        "throttled": ", ".join(sorted(held)) if held or ranks["throttled"].notna().all() else None,
        "samples_per_joule": geometric_mean(known).value if len(known) == len(efficiencies) else None,
    }


def _samples_per_joule(trial: pd.DataFrame) -> float | None:
    """Return all ranks' samples over all GPUs' energy; None if the energy of a rank is not known."""
    known = trial[ENERGY].astype("Float64")
    if known.isna().any(axis=None):
        return None
    return float((known["energy_j"] * known["samples_per_joule"]).sum() / known["energy_j"].sum())


OF_GPUS = {"name": "devices", "allocated_bytes": "allocated_by_device", "reserved_bytes": "reserved_by_device"}
"""Columns of a GPU, and of its rank, which has the values of all of its GPUs as text: '1024, 512'."""
PEAKS = ["allocated_bytes", "reserved_bytes"]


def device_memory(trials: pd.DataFrame, ranks: pd.DataFrame) -> pd.DataFrame:
    """Return one row a GPU of each cell, with its largest peak over the blocks; no rows without GPUs.

    The GPUs of a trial are numbered from 0 in the order of ranks and of each rank's devices.
    """
    known = ranks[ranks["allocated_by_device"].notna()].sort_values([*KEYS, "rank"])
    if known.empty:
        return DEVICE_MEMORY.frame([])
    texts = {of_gpu: known[of_rank].str.split(", ") for of_gpu, of_rank in OF_GPUS.items()}
    gpus = known[[*KEYS, "rank"]].assign(**texts).explode([*OF_GPUS], ignore_index=True)
    gpus["gpu"] = gpus.groupby(KEYS).cumcount()
    gpus[PEAKS] = gpus[PEAKS].astype("int64")
    found = gpus.merge(measured(trials)[[*KEYS, "cell_id", *DESCRIPTION]], on=KEYS)
    found[PEAKS] = found.groupby(["cell_id", "gpu"])[PEAKS].transform("max")
    rows = [vars(row) for row in rows_of(found.drop_duplicates(["cell_id", "gpu"])[DEVICE_MEMORY.names])]
    return DEVICE_MEMORY.frame(sorted(rows, key=lambda row: (*order(row), row["cell_id"], row["gpu"])))


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
_L40S = f"NVIDIA L40S, {_ML_ENGINEERING}"
_A10 = f"NVIDIA A10 datasheet, {_LIGHTNING}"
_H20 = "NVIDIA H20, read in Hugging Face, https://huggingface.co/hardware/h20"
_B300 = "NVIDIA HGX B300, read in Glenn K. Lockwood, https://glennklockwood.com/garden/processors/B300"
_MI300X = f"AMD Instinct MI300X data sheet, {_PYTORCH}"


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
    "NVIDIA B300 SXM6 AC": (_B300, {"fp32": 75e12, "tf32": 1125e12, "bf16": 2250e12}),
    "NVIDIA H20": (_H20, {"bf16": 148e12}),
    "NVIDIA L40S": (_L40S, {"fp32": 91.6e12, "tf32": 183e12, "bf16": 362e12}),
    # not the A10G, for which sources give 62.5 and 125 TFLOP/s in 16 bits
    "NVIDIA A10": (_A10, {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12}),
    "AMD Instinct MI300X": (_MI300X, {"fp32": 163.4e12, "tf32": 653.7e12, "bf16": 1307.4e12}),
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


PLACEMENT = ("trial_id", "device", "device_ids", "devices", "nodes")
TRANSFERS: tuple[LinkOperation, ...] = ("copy", "send_receive")


def bus_factor(operation: LinkOperation, devices: int) -> float:
    """Return the bus bandwidth over the algorithm bandwidth, as nccl-tests defines it (doc/PERFORMANCE.md there).

    All-reduce of n devices: 2(n-1)/n; all-gather and reduce-scatter: (n-1)/n; from one device to another: 1.
    """
    factors: Mapping[LinkOperation, float] = {
        "all_reduce": 2 * (devices - 1) / devices,
        "all_gather": (devices - 1) / devices,
        "reduce_scatter": (devices - 1) / devices,
    }
    return factors.get(operation, 1.0)


def links(lines: Lines) -> pd.DataFrame:
    """Return one row a pair of devices and size, of each placement."""
    return LINKS.frame(row for row in _measured(lines) if row["operation"] in TRANSFERS)


def collectives(lines: Lines) -> pd.DataFrame:
    """Return one row a collective and size, of each placement."""
    return COLLECTIVES.frame(
        {name: value for name, value in row.items() if name not in ("source", "target", "link")}
        for row in _measured(lines)
        if row["operation"] not in TRANSFERS
    )


def _measured(lines: Lines) -> Iterator[Row]:
    """Yield the rows of the latest measurement of each placement, with the placement and the bandwidths."""
    latest = {line["trial_id"]: line for line in lines if line.get("links")}
    for line in latest.values():
        placement = {name: line.get(name) for name in PLACEMENT}
        model = line["ranks"][0].get("device_model") if line["ranks"] else None
        for row in line["links"]:
            bandwidth = row["size_bytes"] / row["time_s"] if row["time_s"] > 0 else None
            factor = bus_factor(row["operation"], line["devices"])
            yield {
                **placement,
                "device_model": model,
                **row,
                "algorithm_bytes_per_s": bandwidth,
                "bus_bytes_per_s": None if bandwidth is None else factor * bandwidth,
            }
