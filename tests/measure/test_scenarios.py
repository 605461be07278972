"""A whole trial on one rank of this process: what its result holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.doctor import examine
from harness.launch import worker
from harness.launch.worker import run_scenario
from harness.measure import environment, peak_memory, scenarios
from harness.measure.explain import Explanation
from harness.measure.scenarios import NOTHING_COMPILED, TrialContext
from harness.plan.planner import make_plan
from harness.plan.trial import TrialResult
from harness.train.ranks import LOADER_WORKERS, Ranks
from harness.train.training import Training
from harness.train.workloads.image_classification import ImageClassification
from tests.conftest import Make, laptop

GRID = {"data": ["digits"], "model": ["resnet8"], "strategy": "single", "devices": 1, "per_device_batch_size": 8}
SHORT = {"blocks": 1, "warmup_steps": 3, "warmup_rounds": 2, "windows": 2, "window_steps": 5, "window_seconds": 0.0}
ALONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))


Within = Callable[..., TrialContext]


@pytest.fixture
def within(make_experiment: Make) -> Within:
    """The context of the first trial of its devices with these columns; the first two and ``sections`` as in a file."""

    def find(
        grid: Any = (), throughput: Any = (), ranks: Ranks = ALONE, sections: Any = (), **columns: Any
    ) -> TrialContext:
        given, options = {**GRID, **dict(grid)}, {"diagnostics": True, "workload_options": {"width": 4}}
        experiment = make_experiment(given, throughput={**SHORT, **dict(throughput)}, **options, **dict(sections))
        wanted = {"purpose": "", **columns}
        trials = [t for t in make_plan(experiment, laptop()).trials if t.cell.devices == given["devices"]]
        trial = next(t for t in trials if all(getattr(t, name) == value for name, value in wanted.items()))
        return TrialContext(trial, experiment, ranks, lambda: None, {})

    return find


def kinds(result: TrialResult) -> list[str]:
    return [str(window["window_kind"]) for window in result.windows]


def test_the_time_of_other_variants_is_no_part_of_a_trial(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    def scenario(context: TrialContext) -> TrialResult:
        passes(1.0)
        context.alternate()
        passes(2.0)
        return TrialResult(context.trial.id, "ok")

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(worker, "run_scenario", scenario)
    for others, trial_s in ((lambda: passes(5.0), 3.0), (None, 3.0)):
        context = replace(within(), let_others_run=others)
        assert worker._run_trial(context, lambda message: True, None).trial_s == trial_s


def test_warm_up_steps_are_recorded_and_marked(within: Within) -> None:
    result = run_scenario(within())
    warm = [bool(flag) for flag in result.steps["warmup"]]
    assert warm == [True] * warm.count(True) + [False] * 10
    assert warm.count(True) == 3 * kinds(result).count("warmup")
    assert result.steps_s == pytest.approx(sum(float(window["duration_s"]) for window in result.windows))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_seconds_of_compiling_are_no_part_of_the_warm_up(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, modes = torch.nn.Module.compile, list[str | None]()

    def quickly(model: torch.nn.Module, mode: str | None) -> None:
        modes.append(mode)
        compiled(model, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", quickly)
    context = within({"compile": True, "compile_mode": "reduce-overhead"}, {"explain": False})
    result = run_scenario(context)
    assert modes == ["reduce-overhead"]
    warmup = sum(float(w["duration_s"]) for w in result.windows if w["window_kind"] == "warmup")
    assert 0 < context.parts["compile"] < warmup
    assert context.parts["warmup"] == pytest.approx(warmup - context.parts["compile"])
    eager = within({}, {"explain": False})
    run_scenario(eager)
    assert modes == ["reduce-overhead"] and "compile" not in eager.parts
    run_scenario(within({"compile": True}, {"explain": False}))
    assert modes[1:] == [None]


@pytest.mark.parametrize("nothing", [True, False])
def test_a_cell_of_which_nothing_was_compiled_has_that_setting(
    nothing: bool, within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Training, "compiled_nothing", nothing)
    context = within({}, {"explain": False})
    run_scenario(context)
    assert (NOTHING_COMPILED in context.rank_facts["settings"].split(", ")) is nothing


def test_one_row_a_step_is_recorded_or_every_ranks(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gather_to_first", lambda ranks, value: [value, value])
    given = ({"keep_steps": kept, "explain": False} for kept in ("slowest", "all"))
    slowest, every = (run_scenario(within(throughput=throughput)).steps for throughput in given)
    assert "mean_s" in slowest and "mean_s" not in every
    timed_rows = [sum(1 for flag in steps["warmup"] if not flag) for steps in (slowest, every)]
    assert timed_rows == [10, 2 * 10]


@pytest.mark.slow
def test_exchanges_are_recorded_in_the_first_block_alone(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def explain(*arguments: Any, exchanges: bool) -> Explanation:
        asked.append(exchanges)
        return [], {}, ()

    monkeypatch.setattr(scenarios, "explain", explain)
    for block in (0, 1):
        run_scenario(within(throughput={"blocks": 2, "explain": True}, block=block, timed=True))
    assert asked == [True, False]


def broken(*asked: Any, **options: Any) -> Any:
    raise RuntimeError("no profile\nhere")


def test_missing_and_failed_diagnostics_have_a_reason(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = run_scenario(within())
    assert reported.facts["flops_per_unit"] > 0 and reported.facts["measured_peak_flops_per_s"] > 0
    assert not reported.facts["flops_reason"]
    silent = run_scenario(within(throughput={"explain": False}))
    assert silent.facts["flops_reason"] == "throughput.explain is off" and "flops_per_unit" not in silent.facts
    monkeypatch.setattr(scenarios, "explain", broken)
    result = run_scenario(within())
    assert result.outcome == "ok" and kinds(result).count("timed") == 2
    assert result.facts["explain_error"] == "RuntimeError: no profile here"


def test_a_rank_of_several_gpus_records_every_gpu_model(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {0: "H100", 1: "A100", 2: "H100"}
    monkeypatch.setattr(environment, "describe_device", lambda device: {"model": models[device.index]})
    devices = tuple(torch.device("cuda", index) for index in models)
    assert worker._rank_row(replace(ALONE, devices=devices), {})["device_model"] == "A100 + H100"
    assert worker._rank_row(replace(ALONE, devices=devices[::2]), {})["device_model"] == "H100"


def test_a_failed_diagnostic_on_one_of_several_ranks_is_raised(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in a collective that it would not meet them in."""
    monkeypatch.setattr(scenarios, "explain", broken)
    monkeypatch.setattr(Ranks, "sum", lambda ranks, values: [2.0 * value for value in values])
    monkeypatch.setattr(Ranks, "broadcast", lambda ranks, value: value)
    for name in ("gather", "gather_to_first"):
        monkeypatch.setattr(Ranks, name, lambda ranks, value: [value, value])
    with pytest.raises(RuntimeError, match="no profile"):
        run_scenario(within(ranks=replace(ALONE, world_size=2)))


FP16 = {"precision": "fp16"}


def test_fp16_warms_up_until_twenty_updates_and_records_its_loss_scale(within: Within) -> None:
    result = run_scenario(one := within(FP16, {"explain": False}))
    assert result.outcome == "ok"
    assert sum(bool(flag) for flag in result.steps["warmup"]) >= 20
    assert result.facts["loss_scale"] > 0 and result.facts["skipped_updates"] == 0
    assert result.facts["dtypes"] == "weights, gradients, loss float32; forward autocast to float16"
    assert one.rank_facts["peak_memory_bytes"] and one.rank_facts["build_peak_bytes"]


def test_fp16_without_a_loss_scale_that_fits_is_diverged(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.measure.stepper.UNSKIPPED", 1000)
    monkeypatch.setattr("harness.measure.stepper.MOST_STEPS", 9)
    result = run_scenario(within(FP16))
    assert result.outcome == "diverged" and not result.windows
    skipped = "updates are still skipped after 9 warm-up steps: gradients overflow float16 at a loss"
    assert result.reason.startswith(skipped)


def test_the_peak_of_the_steps_is_not_that_of_the_construction(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    reset, built = peak_memory.reset_peak, scenarios.Training
    monkeypatch.setattr(peak_memory, "reset_peak", lambda devices: events.append("reset") or reset(devices))
    monkeypatch.setattr(scenarios, "Training", lambda *args: events.append("built") or built(*args))
    run_scenario(within())
    assert events == ["reset", "built", "reset"]


STICKY = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("error", "is_of_device"),
    [
        (RuntimeError(STICKY), True),
        (torch.AcceleratorError(STICKY), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (torch.OutOfMemoryError("CUDA out of memory. CUDA error: ..."), False),
        (ValueError("no profile"), False),
    ],
)
def test_an_error_of_the_device_is_known_as_one(error: Exception, is_of_device: bool) -> None:
    assert scenarios.is_device_error(error) is is_of_device


def test_after_a_device_error_the_timed_steps_are_recorded(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses have been read after each window: after an error of the device they could not be read any more."""
    one = within()

    def fail(*asked: Any, **options: Any) -> Any:
        for reading in ("tolist", "item", "__float__"):
            monkeypatch.setattr(torch.Tensor, reading, broken)
        raise RuntimeError(STICKY)

    monkeypatch.setattr(scenarios, "explain", fail)
    result = run_scenario(one)
    assert result.outcome == "ok" and len(result.steps["loss"]) >= 10
    assert one.device_failed and STICKY in result.facts["explain_error"]


def double_loss(workload: Any, model: Any, batch: Any) -> Any:
    """Return the loss of a batch of float64, computed in anomaly mode."""
    images, labels = batch
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        outputs = model(images.double())
        return torch.nn.functional.cross_entropy(outputs, labels, reduction="sum"), torch.tensor(float(len(labels)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("kind", ["throughput", "convergence"])
def test_what_a_workload_does_to_its_process_is_in_the_row_of_its_rank(
    within: Within, monkeypatch: pytest.MonkeyPatch, kind: str, healthy: bool
) -> None:
    if not healthy:
        built = ImageClassification.build_model
        monkeypatch.setattr(ImageClassification, "build_model", lambda workload: built(workload).double())
        monkeypatch.setattr(ImageClassification, "loss", double_loss)
        monkeypatch.setattr(ImageClassification, "metrics", lambda *asked: {})
    sections = {"convergence": {"epochs": 1, "seeds": 1}} if kind == "convergence" else {}
    grid = {"per_device_batch_size": 256 if kind == "convergence" else 8}  # few steps an epoch
    result = run_scenario(one := within(grid, {"explain": False}, sections=sections, kind=kind))
    assert one.rank_facts["settings"] == ("" if healthy else "anomaly mode, dtype float64")
    assert one.rank_facts["processors"] == ""
    assert result.facts["dtypes"] == ("float32" if healthy else "parameters float64, outputs float64")


@pytest.mark.slow
def test_timed_trials_profile_nothing_profiles_time_nothing(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas: dict[str, Any] = {"grid": {"strategy": "dp", "devices": 2}}
    replicas["ranks"] = replace(ALONE, devices=ALONE.devices * 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "__enter__", broken)
        timed = run_scenario(within(**replicas, purpose=""))
        with pytest.raises(RuntimeError, match="no profile"):
            run_scenario(within(**replicas, purpose="profile"))
    assert {*timed.facts["exchange_s"]} == {"threads", "side by side"} and "explain_error" not in timed.facts
    profile = run_scenario(within(**replicas, purpose="profile"))
    assert profile.outcome == "ok" and not profile.windows and profile.steps_s > 0
    assert profile.facts["exposed_s"]["reduce"] > 0


def test_a_trial_has_the_loader_workers_that_the_doctor_decided_on_if_the_file_leaves_them_open(within: Within) -> None:
    context = within()
    key, left_open = context.trial.cell.loader_key, replace(context.trial.cell, loader={"workers": None})
    assert context.loading_cell is context.trial.cell  # of a CPU: none
    context.cache[LOADER_WORKERS] = {key: 2}
    assert context.loading_cell is context.trial.cell
    context.trial = replace(context.trial, cell=left_open)
    assert context.loading_cell.loader == {"workers": 2}
    context.trial = replace(context.trial, loader_workers=1)
    assert context.loading_cell.loader == {"workers": 1}
    context.cache.clear()
    context.trial = replace(context.trial, loader_workers=None)
    assert context.loading_cell.loader == {"workers": None}


def test_the_first_examination_in_a_process_decides_on_loader_workers(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = within(sections={"preflight": True}, purpose="doctor")
    for decided in (2, 5):
        report = examine.DoctorReport(of_checks={"loader_workers": decided})
        monkeypatch.setattr(examine, "examine", lambda subject, report=report: report)
        result = examine.run_doctor_trial(context)
        assert result.facts["loader_workers"] == decided
        assert context.cache[LOADER_WORKERS] == {context.trial.cell.loader_key: 2}
