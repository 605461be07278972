"""What is computed of hardware, from hand-made records: bandwidths, FLOP/s, GPU readings, memory by GPU."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis import trials as trial_tables
from harness.analysis.hardware import bus_factor, collectives, device_memory, gpus, links
from harness.config.known_hardware import KNOWN_DEVICES, peak_flops
from harness.report.tables.cost import device_memory_table, gpu_table
from tests.records import line, link_row, links_line, steps_of, trials_of

TERA, GIB = 1e12, 2**30


def cells_of(lines: list[dict[str, Any]], **own: Any) -> pd.DataFrame:
    return trial_tables.cells(trials_of(lines), steps_of(lines), **own)


def test_the_longest_compilation_of_a_cell_stands_beside_its_flops() -> None:
    """Later blocks find compiled code in torch's cache."""
    lines = [line("ddp2", rates=(1.0,), block=block) | {"parts": {"compile": 9.0 / (1 + block)}} for block in (0, 1)]
    lines += [line("single", rates=(1.0,)) | {"parts": {"warmup": 1.0}}]
    lines += [line("ddp2", purpose="profile", kind="diagnostic", block=2) | {"parts": {"compile": 99.0}}]
    found = trial_tables.compile_seconds(lines)  # type: ignore[arg-type]
    assert found == {"ddp2": 9.0}
    cells = trial_tables.cells(trials_of(lines), steps_of(lines), compiling=found).set_index("cell_id")["compile_s"]
    assert cells["ddp2"] == 9.0 and pd.isna(cells["single"])


# -- links and collectives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "devices", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("send_receive", 8, 1.0),
        ("copy", 8, 1.0),
    ],
)
def test_the_bus_bandwidth_is_that_of_nccl_tests(operation: Any, devices: int, factor: float) -> None:
    assert bus_factor(operation, devices) == factor


def test_a_collective_has_both_bandwidths_and_a_pair_its_link_of_the_latest_measurement() -> None:
    line = links_line(link_row("all_reduce", size_bytes=4096, time_s=1e-3), devices=4, nodes=2)
    (row,) = collectives([line]).to_dict("records")
    assert row["algorithm_bytes_per_s"] == pytest.approx(4.096e6)
    assert row["bus_bytes_per_s"] == pytest.approx(1.5 * 4.096e6)
    assert (row["devices"], row["nodes"], row["device_model"], row["tier"]) == (4, 2, "a processor", "inside a node")
    assert links([line]).empty
    line = links_line(link_row("send_receive", source=0, target=3, link="NV12"), link_row("all_gather"))
    (row,) = links([line]).to_dict("records")
    assert (row["source"], row["target"], row["link"]) == (0, 3, "NV12")
    assert row["bus_bytes_per_s"] == row["algorithm_bytes_per_s"]
    assert collectives([line])["operation"].tolist() == ["all_gather"]
    first, second = (links_line(link_row("all_reduce", time_s=seconds)) for seconds in (2.0, 1.0))
    failed = {**links_line(), "outcome": "error", "links": None}
    other = links_line(link_row("all_reduce", time_s=3.0), cell="fsdp")
    found = collectives([first, second, failed, other])
    assert dict(zip(found["trial_id"], found["time_s"], strict=True)) == {"ddp-b0l": 1.0, "fsdp-b0l": 3.0}
    old = {name: value for name, value in first.items() if name != "links"}
    assert collectives([old]).empty and links([old]).empty


# -- published peaks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("Tesla V100-SXM2-16GB", {"fp32": 15.7}),
        ("Tesla V100-PCIE-32GB", {"fp32": 14}),
        ("Tesla V100-PCIE-16GB", {"fp16": 112}),
        ("Tesla T4", {"fp32": 8.1, "fp16": 65}),
        ("NVIDIA A100-SXM4-40GB", {"fp32": 19.5}),
        ("NVIDIA A100 80GB PCIe", {"tf32": 156}),
        ("NVIDIA L4", {"bf16": 121, "fp16": 121}),
        ("NVIDIA H100 80GB HBM3", {"bf16": 989.5}),
        ("NVIDIA H100 PCIe", {"bf16": 756}),
        ("NVIDIA H100 NVL", {"fp32": 60, "tf32": 417.5, "bf16": 835}),
        ("NVIDIA GeForce RTX 4090", {"bf16": 165.2}),
        ("NVIDIA H200", {"tf32": 494.5}),
        ("NVIDIA B200", {"bf16": 2250}),
        ("NVIDIA GB200", {"tf32": 1250}),
        ("NVIDIA B300 SXM6 AC", {"fp32": 75, "tf32": 1125, "fp16": 2250}),
        ("NVIDIA H20", {"bf16": 148}),
        ("NVIDIA L40S", {"fp32": 91.6, "tf32": 183, "bf16": 362}),
        ("NVIDIA A10", {"tf32": 62.5}),
        ("AMD Instinct MI300X", {"bf16": 1307.4}),
    ],
)
def test_known_peaks(device: str, tflops: dict[str, float]) -> None:
    peaks = {precision: peak_flops(device, precision) for precision in tflops}
    assert {precision: peak and peak.flops_per_s / TERA for precision, peak in peaks.items()} == tflops


OTHER_DEVICES = (
    *("", "cpu", "AMD EPYC 7763 64-Core Processor", "NVIDIA A10G", "NVIDIA L40", "NVIDIA A100-SXM-64GB"),
    *("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA H100", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU"),
)
LACKED = ("Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB", "Tesla T4")
"""GPUs without units for these two precisions."""


@pytest.mark.parametrize(
    ("device", "precisions"),
    [
        *((device, ("fp32", "tf32", "bf16")) for device in OTHER_DEVICES),
        *((device, ("tf32", "bf16")) for device in LACKED),
        *((device, ("fp32",)) for device in ("NVIDIA B200", "NVIDIA H20")),  # figures on which sources disagree
    ],
)
def test_another_device_or_a_unit_that_it_lacks_has_no_peak(device: str, precisions: tuple[str, ...]) -> None:
    assert not any(peak_flops(device, precision) for precision in precisions)


def test_every_peak_has_a_source_and_a_plausible_value() -> None:
    known = [device for device in KNOWN_DEVICES.values() if device.peaks]
    assert len(known) >= 20
    for device in known:
        assert ("AMD" if device.name.startswith("MI") else "NVIDIA") in device.peak_source
        assert "https://" in device.peak_source, device.name
        figures = list(device.peaks.values())
        assert min(figures) >= 8 and max(figures) <= 2500, device.name
        assert figures == sorted(figures), f"{device.name}: a lower precision is no slower"


# -- achieved FLOP/s ------------------------------------------------------------------------------------------------

H100 = "NVIDIA H100 80GB HBM3"
COUNTED = {"steady": True, "flops_per_unit": 3e9, "flops_reason": ""}


def counted(name: str = "single", peak: float | None = None, model: str = "some CPU", **columns: Any) -> dict[str, Any]:
    """Return a trial whose operations were counted, beside the measured peak of its device."""
    facts = columns.pop("facts", COUNTED) | ({"measured_peak_flops_per_s": peak} if peak else {})
    one = line(name, facts=facts, **{"rates": (100.0,), **columns})
    return one | {"ranks": [{**rank, "device_model": model} for rank in one["ranks"]]}


def cell_of(*lines: dict[str, Any]) -> dict[str, Any]:
    (row,) = cells_of([*lines]).to_dict("records")
    return {str(name): value for name, value in row.items()}


def test_achieved_is_flops_of_a_sample_times_the_samples_of_one_device_or_has_a_reason() -> None:
    for one in (counted(), counted("ddp2", rates=(100.0, 100.0))):
        assert cell_of(one)["achieved_flops_per_s"] == pytest.approx(3e11)
    row = cell_of(counted(facts={"steady": True, "flops_reason": "an LSTM is not counted"}))
    assert pd.isna(row["achieved_flops_per_s"]) and row["flops_reason"] == "an LSTM is not counted"


@pytest.mark.parametrize(("precision", "peak"), [("fp32", 67e12), ("bf16", 989.4e12)])
def test_mfu_is_achieved_over_the_published_peak_of_the_precision_in_effect(precision: str, peak: float) -> None:
    row, known = cell_of(counted(model=H100, precision=precision)), peak_flops(H100, precision)
    assert known and known.flops_per_s == pytest.approx(peak, rel=0.01)
    assert row["mfu"] == pytest.approx(3e11 / known.flops_per_s) and row["peak_source"] == known.source


def test_the_peak_of_the_experiment_file_goes_before_the_published_one() -> None:
    for model in ("some CPU", H100):
        (row,) = cells_of([counted(model=model)], own_peaks={"fp32": 6e11}).to_dict("records")
        assert row["mfu"] == pytest.approx(0.5) and "hardware.peak_flops" in row["peak_source"]
        (row,) = cells_of([counted(model=model)], own_peaks={"bf16": 6e11}).to_dict("records")
        assert pd.isna(row["mfu"]) is (model != H100)
        (row,) = cells_of([counted(model=model, precision="fp16")], own_peaks={"bf16": 6e11}).to_dict("records")
        assert row["mfu"] == pytest.approx(0.5), "one figure for both dtypes of 16 bits"


@pytest.mark.parametrize(
    ("columns", "missing"),
    [
        ({"model": "some CPU"}, ("mfu", "peak_source", "of_measured_peak")),
        ({"model": f"{H100} + NVIDIA A100-SXM4-80GB"}, ("mfu", "peak_source")),
        ({"model": H100, "peak": 6e11, "rates": (100.0,) * 2, "oversubscribed": True}, ("mfu", "of_measured_peak")),
    ],
    ids=["no known peak", "two models", "ranks that share a device"],
)
def test_what_has_no_peak_has_no_share_of_it(columns: dict[str, Any], missing: tuple[str, ...]) -> None:
    row = cell_of(counted("ddp2", **columns))
    assert row["achieved_flops_per_s"] > 0 and all(pd.isna(row[name]) for name in missing)


def test_the_measured_peak_is_the_best_that_any_block_saw_and_all_cells_of_a_kind_of_device_have_it() -> None:
    row = cell_of(*(counted(block=block, peak=peak) for block, peak in enumerate((4e11, 6e11, 5e11))))
    assert row["of_measured_peak"] == pytest.approx(0.5)
    lines = [counted(peak=6e11, model="A"), counted("ddp2", peak=4e11, model="A", rates=(100.0, 100.0))]
    lines.append(lines[1] | {"cell_id": "ddp2t", "trial_id": "ddp2t-b0"})
    for one, threads in zip(lines, (1, 1, 2), strict=True):
        one["ranks"] = [{**rank, "threads": threads} for rank in one["ranks"]]
    of_peak = cells_of(lines).set_index("cell_id")["of_measured_peak"].to_dict()
    assert of_peak == pytest.approx({"single": 0.5, "ddp2": 0.5, "ddp2t": 0.75})


# -- GPU readings ---------------------------------------------------------------------------------------------------

READINGS = {
    "gpu_utilisation": 0.9,
    "power_w": 300.0,
    "sm_clock_fraction": 1.0,
    "temperature_c": 60.0,
    "throttled": "",
    "energy_j": 1000.0,
    "samples_per_joule": 2.0,
}
WASTEFUL = {"energy_j": 3000.0, "samples_per_joule": 1.0}


def read(cell: str, *ranks: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """Return a trial with these GPU readings of its ranks."""
    made = line(cell, rates=(100.0,) * len(ranks), **columns)
    return made | {"ranks": [{"rank": rank, **READINGS, **more} for rank, more in enumerate(ranks)]}


def gpus_of(*lines: dict[str, Any]) -> pd.DataFrame:
    tables = trial_tables.ranks([*lines]), trial_tables.windows([*lines])
    return gpus(trials_of([*lines]), *tables, [*lines])


def test_cell_values_are_means_over_ranks_or_the_worst_rank_for_limits() -> None:
    hot = {"temperature_c": 80.0, "power_w": 100.0, "sm_clock_fraction": 0.5, "gpu_utilisation": 0.5}
    (row,) = gpus_of(read("ddp2", {}, hot, block=0), read("ddp2", {}, {}, block=1)).to_dict("records")
    assert (row["strategy"], row["devices"], row["blocks"]) == ("ddp", 2, 2)
    assert row["power_w"] == pytest.approx(250.0) and row["gpu_utilisation"] == pytest.approx(0.8)
    assert (row["sm_clock_fraction"], row["temperature_c"]) == (0.5, 80.0)


def test_the_busy_part_of_a_step_is_that_of_profiles_over_the_timed_step() -> None:
    """10 samples at 100 samples/s: a step of 0.1 s, of which kernels ran in 0.04 and 0.06."""
    timed = [line(name, rates=(100.0,), block=block) for name in ("ddp2", "single") for block in (0, 1)]
    of_profile = {"kind": "diagnostic", "purpose": "profile"}
    profiled = [
        line("ddp2", block=block, **of_profile) | {"trial_id": f"p{block}", "facts": {"busy_s": seconds}}
        for block, seconds in enumerate((0.04, 0.06))
    ]
    (row,) = gpus_of(*timed, *profiled).to_dict("records")
    assert (row["cell_id"], row["busy_s"], row["busy"]) == ("ddp2", pytest.approx(0.05), pytest.approx(0.5))
    assert pd.isna(row["power_w"]) and pd.isna(row["throttled"])
    shown = gpu_table(gpus_of(*timed, *profiled))
    assert "50 %" in str(shown.rows[0]).replace("\N{NO-BREAK SPACE}", " ")
    longer = {**profiled[0], "facts": {"busy_s": 0.3}}
    assert gpus_of(*timed, longer)["busy"].tolist() == [1.0]
    assert gpus_of(*timed).empty


@pytest.mark.parametrize("others", [{}, dict.fromkeys(READINGS)], ids=["", "energy alone"])
def test_samples_per_joule_are_all_samples_over_all_energy(others: dict[str, Any]) -> None:
    """2,000 samples of one rank, 3,000 of the other."""
    frugal = {"energy_j": 1000.0, "samples_per_joule": 2.0}
    found = gpus_of(read("ddp2", {**others, **frugal}, {**others, **WASTEFUL}))
    assert found["samples_per_joule"].tolist() == pytest.approx([5000 / 4000])


@pytest.mark.parametrize("unknown", [{"energy_j": None, "samples_per_joule": None}, dict.fromkeys(READINGS)])
def test_a_rank_without_an_energy_reading_leaves_the_cell_without_energy(unknown: dict[str, Any]) -> None:
    found = gpus_of(read("ddp2", {}, {}, block=0), read("ddp2", {}, unknown, block=1))
    assert found["samples_per_joule"].isna().all() and found["power_w"].tolist() == [300.0]
    assert "samples per joule" not in [heading.title for heading in gpu_table(found).columns]  # it would be empty


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("", "", "no"),
        ("held by heat", "", "held by heat"),
        (None, "", "not known"),
        (None, "held by heat", "held by heat"),
        ("held by heat", "sw power cap, held by heat", "held by heat, sw power cap"),
    ],
)
def test_throttle_reasons_are_the_union_over_ranks(first: str | None, second: str, shown: str) -> None:
    (row,) = gpu_table(gpus_of(read("ddp2", {"throttled": first}, {"throttled": second}))).rows
    assert row.cells[6] == shown


def test_the_gpu_table_has_readable_values_of_timed_trials_that_have_readings() -> None:
    (row,) = gpu_table(gpus_of(read("single", {}))).rows
    assert row.cells == ("single", "1", "90 %", "300", "100 %", "60", "no", "2", "1")
    twin = read("single", {}, purpose="twin", kind="diagnostic")
    for one in (line("single"), read("single", {}, outcome="oom"), twin):
        assert gpus_of(one).empty


# -- memory by GPU --------------------------------------------------------------------------------------------------


def filled(cell: str, *ranks: str, **columns: Any) -> dict[str, Any]:
    """Return a trial whose ranks have these devices, 'cuda:0 3, cuda:1 1' in GiB."""
    made = line(cell, rates=(100.0,) * len(ranks), device="cuda", emulated=False, **columns)
    rows = []
    for rank, text in enumerate(ranks):
        names, sizes = zip(*(part.split() for part in text.split(", ")), strict=True)
        peaks = ", ".join(str(int(size) * GIB) for size in sizes)
        known = {"devices": ", ".join(names), "allocated_by_device": peaks, "reserved_by_device": peaks}
        rows.append({"rank": rank, **known})
    return made | {"ranks": rows}


def memory_of(*lines: dict[str, Any]) -> pd.DataFrame:
    return device_memory(trials_of([*lines]), trial_tables.ranks([*lines]))


def test_gpus_are_numbered_by_rank_in_the_ranks_order_and_the_first_stands_beside_the_others() -> None:
    dp = (
        filled("dp2", text, devices=2, block=b) for b, text in enumerate(("cuda:0 3, cuda:1 1", "cuda:0 2, cuda:1 2"))
    )
    found = memory_of(*dp, filled("ddp2", "cuda:0 1", "cuda:1 2"))
    values = zip(found["cell_id"], found["rank"], found["gpu"], found["name"], found["allocated_bytes"], strict=True)
    assert list(values) == [
        ("dp2", 0, 0, "cuda:0", 3 * GIB),
        ("dp2", 0, 1, "cuda:1", 2 * GIB),
        ("ddp2", 0, 0, "cuda:0", 1 * GIB),
        ("ddp2", 1, 1, "cuda:1", 2 * GIB),
    ]
    assert memory_of(line("dp2", devices=2)).empty
    found = memory_of(filled("dp3", "cuda:0 3, cuda:1 1, cuda:2 2", devices=3), filled("single", "cuda:0 1"))
    assert [row.cells[-4:] for row in device_memory_table(found).rows] == [("3 GiB", "1 GiB", "2 GiB", "1.50")]
