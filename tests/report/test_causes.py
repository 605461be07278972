"""Why not better, what to try against the largest cause alone, and that every proposal is a file that runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml

from harness.analysis.verdict.rules import HOST
from harness.analysis.waterfall import PARTS
from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.config.strategy_traits import EXCHANGE_CPU, OWN_COLLECTIVES
from harness.plan.cell import Cell
from harness.plan.grid import expand
from harness.plan.inventory import Inventory, resolve
from harness.report.candidates import best_cell
from harness.report.causes import (
    ADVICE,
    BUCKETS,
    COMPILE,
    GRAPHS,
    MACHINE,
    Option,
    applicable,
    next_experiment,
    options_in,
    varied_options,
)
from harness.report.row import Row
from harness.report.tables.text import NO_BREAK
from tests.report.test_verdict import CELL, RATIO, sentences_on, verdict_of

TRIAL = {**CELL, "trial_id": "a", "cell_id": "a"}
BUCKET_SIZES = {BUCKETS.axis: list(BUCKETS.values)}
DDP = "ddp.bucket_cap_mb: [1, 25, 100]; training.accumulation: [1, 4]; ddp.comm_hook: [none, bf16_compress]"


def cause(subject: str, value: float, low: float | None = None, **columns: Any) -> dict[str, Any]:
    code = "no interval" if low is None else "clear" if low > 0 else "unclear"
    ends = {"low": low, "high": None if low is None else 2 * value - low, "n": 3}
    return {"topic": "loss", "code": code, "cell_id": "a", "subject": subject, "value": value, **ends, **columns}


def text_of(*causes: dict[str, Any], **given: Any) -> str:
    (sentence,) = sentences_on("loss", *causes, **given)
    return sentence.text.replace(NO_BREAK, " ")


def test_every_cause_is_listed_and_the_advice_is_against_the_largest_alone() -> None:
    waits, exchange = cause("waiting for data", 0.81, 0.73), cause("exposed communication", 0.07, 0.01)
    slowest = cause("slowest rank", 0.01, 0.001)
    assert text_of(waits, exchange, cause("wrapper", 0.02, -0.04), slowest) == (
        "81 % (73 to 89 %) of the step: waiting for data; 7 % (1 to 13 %) exposed communication; "
        "1 % (0 to 2 %) waiting for the slowest rank. Not significant (95 % interval includes 0): "
        "2 % wrapper overhead. Against waiting for data, try loader.workers: [0, 2, 4]."
    )
    assert any(f"against exposed communication: {DDP}." in line for line in verdict_of(waits, exchange).others)


def test_against_an_idle_gpu_the_model_is_compiled_or_its_batch_larger() -> None:
    text = text_of(cause("slowest rank", 0.01, 0.001), cause(HOST, 0.35))
    listed = f"1 % (0 to 2 %) of the step: waiting for the slowest rank; 35 % {HOST}."
    assert text.startswith(f"{listed} Against"), "no blocks would give it an interval"
    assert text.endswith(f"Against {HOST}, try compile: [false, true]; per_device_batch_size: [32, 64].")


def test_the_best_cell_loses_most_by_measured_parts() -> None:
    """What is estimated from one profile may be part of them."""
    lost = {"a": [("wrapper", 0.2)], "b": [("wrapper", 0.1), (HOST, 0.5)]}
    causes = {
        cell_id: [SimpleNamespace(subject=subject, facts=SimpleNamespace(share=share)) for subject, share in parts]
        for cell_id, parts in lost.items()
    }
    leading = [SimpleNamespace(cell_id=cell_id) for cell_id in lost]
    context: Any = SimpleNamespace(stated=lambda topic: leading, causes=causes)
    assert best_cell(context) == "a"


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({}, [COMPILE]),
        ({"compile": True}, [GRAPHS]),
        ({"compile": True, "device": "cpu"}, []),
        ({"compile": True, "compile_mode": "max-autotune"}, []),
        ({"strategy": "dp"}, []),
    ],
)
def test_cuda_graphs_are_for_models_that_are_compiled_already(change: dict[str, Any], allowed: list[Option]) -> None:
    assert applicable(ADVICE[HOST], Row(LEADING, **{"device": "cuda", **change}), experiment()) == allowed


def test_what_is_saved_is_named_so_that_shares_add_up() -> None:
    lost, saved = cause("exposed communication", 0.6, 0.5), cause("wrapper", -0.1, -0.12, code="saved")
    unclear = cause("side by side", -0.02, -0.05)
    assert text_of(lost, unclear, saved) == (
        "60 % (50 to 70 %) of the step: exposed communication. Saved, compared with one device: 10 % (8 to 12 %) "
        "wrapper overhead. Not significant (95 % interval includes 0): -2 % contention between devices. "
        f"Against exposed communication, try {DDP}."
    )
    assert "one device: 10 % wrapper overhead" in text_of(lost, cause("wrapper", -0.1, code="saved"))


def test_without_intervals_or_a_wait_for_data_the_exchange_is_what_to_try_against_if_it_is_certain() -> None:
    found = text_of(cause("exposed communication", 0.2, 0.1))
    assert found == f"20 % (10 to 30 %) of the step: exposed communication. Against exposed communication, try {DDP}."
    waits = text_of(cause("waiting for data", 0.4, n=2), cause("exposed communication", 0.2, n=2))
    assert "No interval: measured in 2 blocks, 3 are needed. Against waiting for data, try" in waits
    assert "Against" not in text_of(cause("exposed communication", 0.2, n=2))


def test_nothing_is_proposed_against_a_cause_that_may_be_0() -> None:
    uncertain = "Not significant (95 % interval includes 0): 20 % wrapper overhead."
    assert text_of(cause("wrapper", 0.2, -0.1)) == f"no bottleneck is significant. {uncertain}"
    both = text_of(cause("wrapper", 0.2, -0.1), cause("exposed communication", 0.1, -0.1))
    assert both.endswith("includes 0): 20 % wrapper overhead, 10 % exposed communication.")
    known = text_of(cause("wrapper", 0.2, -0.1), cause("rest", 0.1, 0.05))
    assert known.startswith("10 % (5 to 15 %) of the step: unexplained. Not significant")
    cells = sentences_on("loss", *(cause("wrapper", 0.2, -0.1, cell_id=cell_id) for cell_id in ("a", "b")))
    assert all(one.text.startswith("no bottleneck is significant.") for one in cells)


def test_a_wait_for_data_is_beside_that_of_one_device_and_lets_nothing_of_ddp_before_it() -> None:
    waits = cause("waiting for data", 0.81, 0.73, evidence="figure-phases")
    tables = {"scaling": [{**RATIO, "base_id": "one"}], "phases": [{"cell_id": "one", "waits": 0.91}]}
    text = text_of(waits, **tables)
    assert "% of the step: waiting for data (91 % on 1 device)." in text.replace("%) of", "% of")
    text = text_of(cause("waiting for data", 0.05, 0.01), **tables)  # more than on one device
    assert "on 1 device" not in text
    varied = {"experiment": {"loader": {"workers": [0, 2]}}}
    text = text_of(cause("waiting for data", 0.5, 0.4), cause("exposed communication", 0.2, 0.1), **varied)
    assert "Against" not in text


def test_what_no_option_changes_says_so_or_gives_way_to_what_one_may() -> None:
    shared = cause("side by side", 0.3, 0.2)
    assert text_of(shared).endswith(
        "contention between devices. Devices that work at once share memory "
        "bandwidth, caches or power; no option changes that."
    )
    assert "Against exposed communication, try" in text_of(shared, cause("exposed communication", 0.1, 0.05))


def test_the_workloads_own_collectives_are_named_with_their_bytes() -> None:
    trials = [
        {**TRIAL, "exchange_bytes": None},
        {**TRIAL, "attempt": 2, "exchange_bytes": {"buffer broadcast": 64e6, "allgather": 16384.0, "allreduce": 4.0}},
    ]
    said = text_of(cause("own collectives", 0.3, 0.2), trials=trials)
    assert said.endswith(
        "exchanges allgather of 16,384 bytes, allreduce of 4 bytes in each step: exchange less, or less often."
    )
    buffers = cause("buffer broadcast", 0.1, 0.05)
    assert "Against broadcast of buffers, try ddp.broadcast_buffers: [true, false]." in text_of(buffers)
    named = "Against broadcast of buffers (64,000,000 bytes), try ddp.broadcast_buffers: [true, false]."
    assert named in text_of(buffers, trials=trials)
    both = text_of(cause("own collectives", 0.3, 0.2), buffers, trials=trials)
    assert "less often" in both and "Against" not in both


def test_ranks_that_are_slow_in_turn_are_no_slow_rank_and_those_on_the_same_processors_share_more_than_memory() -> None:
    assert "One rank is slower" in text_of(cause("slowest rank", 0.3, 0.2))
    assert "similar length together" in text_of(cause("unequal steps", 0.3, 0.2))
    shared = cause("side by side", 0.3, 0.2)
    pinned = ("settings of the process: processors 0 shared by ranks",)
    for doubts, words in ((pinned, "pinned to the same processors"), ((), "share memory bandwidth")):
        assert words in text_of(shared, trials=[{**TRIAL, "doubts": doubts}])


def test_a_small_gradient_has_no_buckets_to_divide_though_the_first_trial_is_an_examination() -> None:
    for parameters, offered in ((44_000, False), (11_000_000, True)):
        trials = [{**TRIAL, "trial_id": "doctor"}, {**TRIAL, "parameters": parameters}]
        text = text_of(cause("exposed communication", 0.3, 0.2), trials=trials)
        assert ("ddp.bucket_cap_mb" in text) == offered and "training.accumulation" in text


def test_what_is_not_explained_says_why_and_a_zero_has_no_sign() -> None:
    rest = cause("rest", 0.91, 0.9, reasons=("exposed communication would be 31 ms",))
    why = "unexplained (exposed communication would be 31 ms"
    assert text_of(rest).startswith(f"91 % (90 to 92 %) of the step: {why}")
    assert "1 % (0 to 3 %)" in text_of(cause("slowest rank", 0.01, -0.004, high=0.03, code="clear"))


def test_the_same_advice_is_given_once() -> None:
    both = [cause("waiting for data", 0.2, 0.1, cell_id=cell_id) for cell_id in ("a", "b")]
    first, second = sentences_on("loss", *both)
    assert "Against waiting for data" in first.text and "Against" not in second.text
    exchange = [cause("exposed communication", 0.2, 0.1, cell_id=cell_id) for cell_id in ("a", "b")]
    assert all("Against" in one.text for one in sentences_on("loss", *exchange))  # fsdp has other options


def test_every_part_of_a_step_has_words_and_an_answer() -> None:
    assert {name for name, part in PARTS.items() if part.words} | set(ADVICE) == {*PARTS, HOST}
    assert set(PARTS) - {"rest", OWN_COLLECTIVES} == set(ADVICE) - {HOST} | set(MACHINE)


# -- proposals --------------------------------------------------------------------------------------------------------


AXES: dict[str, Any] = {"data": "digits", "model": "resnet8", "strategy": "ddp", "devices": 2, "device_ids": None}
BATCHES: dict[str, Any] = {"scaling": "weak", "per_device_batch_size": 32, "global_batch_size": 64}
LEADING = Row(**AXES, **BATCHES, nodes=1, precision="fp32", compile=False)
GRID = {"data": ["digits"], "model": ["resnet8"], "strategy": ["ddp"], "devices": [2], "per_device_batch_size": [32]}


def experiment(**content: Any) -> Experiment:
    return parse_experiment({"name": "study", "grid": GRID, "device": "cpu", **content}, source="test")


def cells_of(study: Experiment) -> tuple[Cell, ...]:
    return expand(study, resolve(Inventory.assume(1, 0), request="cpu", device_counts=(2,))).asked


@pytest.mark.parametrize("part", ADVICE)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_proposal_is_an_experiment_file_that_compares_its_values(part: str, strategy: str) -> None:
    cell = Row(LEADING, strategy=strategy)
    for option in applicable(ADVICE[part], cell, experiment()):
        text = next_experiment(experiment(), cell, {option.axis: list(option.values)})
        found = parse_experiment(yaml.safe_load(text), source="next")
        cells = cells_of(found)
        assert len({str(cell.axis(option.axis)) for cell in cells}) == len(option.values)
        assert {cell.devices for cell in cells} == {2}


def test_options_of_another_strategy_and_of_a_batch_that_does_not_divide_are_not_proposed() -> None:
    found = applicable(ADVICE["exposed communication"], Row(LEADING, strategy="fsdp"), experiment())
    assert [str(option) for option in found] == ["training.accumulation: [1, 4]"]
    uneven = Row(LEADING, strategy="fsdp", per_device_batch_size=6)
    assert applicable(ADVICE["reduce-scatter"], uneven, experiment()) == []


def test_an_axis_that_the_file_varies_is_not_proposed_again() -> None:
    in_section = {"strategy_options": {"ddp": {"bucket_cap_mb": [1, 25]}}}
    contents: list[dict[str, Any]] = [{}, in_section, {"grid": {**GRID, "ddp.bucket_cap_mb": [1, 25]}}]
    found = [applicable(ADVICE["exposed communication"], LEADING, experiment(**content)) for content in contents]
    assert [BUCKETS in options for options in found] == [True, False, False]


@pytest.mark.parametrize(("parameters", "offered"), [(19_000, False), (262_144, False), (262_145, True), (None, True)])
def test_buckets_and_compression_are_not_for_a_gradient_that_the_first_bucket_holds(
    parameters: int | None, offered: bool
) -> None:
    copied = applicable(ADVICE[EXCHANGE_CPU], Row(LEADING, parameters=parameters), experiment())
    views = ["ddp.gradient_as_bucket_view"] * offered
    assert [option.axis for option in copied] == [*views, "training.accumulation"]
    found = applicable(ADVICE["exposed communication"], Row(LEADING, parameters=parameters), experiment())
    assert [option.axis for option in found if option.axis.startswith("ddp.")] == (
        ["ddp.bucket_cap_mb", "ddp.comm_hook"] if offered else []
    )


def test_larger_buckets_are_for_a_small_gradient_that_is_split_all_the_same() -> None:
    split = Row(LEADING, parameters=19_000, options={"ddp.bucket_cap_mb": 0.01})
    found = applicable(ADVICE["exposed communication"], split, experiment())
    assert "ddp.bucket_cap_mb" in [option.axis for option in found]


@pytest.mark.parametrize(("cores", "values"), [(1, None), (2, (0, 1)), (4, (0, 2)), (6, (0, 2, 3)), (64, (0, 2, 4))])
def test_a_node_has_cores_for_the_loader_workers_of_its_devices(cores: int, values: tuple[int, ...] | None) -> None:
    found = applicable(ADVICE["waiting for data"], LEADING, experiment(), cores)
    assert [option.values for option in found] == ([values] if values else [])


@pytest.mark.parametrize(
    ("used", "workers", "values"),
    [(0.9, 0, (0, 1)), (0.4, 0, (0, 2, 4)), (0.9, 1, None), (0.4, 1, (1, 2, 4)), (0.4, 8, (8, 16))],
)
def test_more_workers_than_cores_are_tried_if_ranks_and_workers_leave_their_cores_unused(
    used: float, workers: int, values: tuple[int, ...] | None
) -> None:
    tables = {
        "trials": pd.DataFrame({"trial_id": ["t", "u"], "cell_id": ["a", "b"], "parameters": [1, 1]}),
        "ranks": pd.DataFrame({"trial_id": ["t", "u"], "own_cpu_s": [used, 9.0], "watched_s": [1.0, 1.0]}),
    }
    results = SimpleNamespace(environment={"groups": [{"nodes": [{"cores": 2}]}]}, experiment=experiment())
    cells = {"a": Row(LEADING, cell_id="a", options={"loader.workers": workers})}
    context: Any = SimpleNamespace(cells=cells, results=results, table=tables.__getitem__)
    found = options_in(ADVICE["waiting for data"], "a", context)
    assert [option.values for option in found] == ([values] if values else [])


def test_the_next_file_holds_the_cells_other_options_and_settings_and_named_gpus() -> None:
    sgd = {"name": "SGD", "lr": [0.1, 0.2]}
    study = experiment(optimizer=sgd, throughput={"blocks": 4}, workload_options={"width": 8})
    text = next_experiment(study, Row(LEADING, options={"optimizer.lr": 0.2}), BUCKET_SIZES)
    found = parse_experiment(yaml.safe_load(text), source="next")
    assert varied_options(study) == ["optimizer.lr"]
    assert found.throughput is not None and found.throughput.blocks == 4
    assert found.convergence is None and found.name == "study-next"
    cells = cells_of(found)
    assert {(cell.optimizer["lr"], cell.workload_options["width"]) for cell in cells} == {(0.2, 8)}
    cell = Row(LEADING, device_ids="0,4")
    grid = yaml.safe_load(next_experiment(experiment(), cell, BUCKET_SIZES))["grid"]
    assert grid["device_ids"] == [[0, 4]] and "devices" not in grid
    both = experiment(launcher=["ray", "torchrun"])
    assert (
        yaml.safe_load(next_experiment(both, Row(LEADING, launcher="torchrun"), BUCKET_SIZES))["launcher"] == "torchrun"
    )


def test_no_run_is_proposed_against_less_than_a_twentieth_of_the_step() -> None:
    for share, proposed in ((0.049, False), (0.05, True)):
        text = text_of(cause("exposed communication", share, 0.01))
        assert ("Against exposed communication, try" in text) == proposed
