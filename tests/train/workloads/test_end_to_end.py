"""Built-in workloads from experiment file to tables, in this process; image_classification is all over the tests."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.results import load
from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.launch.inline import InlineLauncher
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder
from harness.report.tables.scaling import convergence_table
from harness.run.execution import Execution
from harness.run.prepare import check_code, check_optimizers, check_target
from harness.train import workloads
from tests import equivalence
from tests.conftest import FEW_STEPS, Make, laptop
from tests.doctor import ranks

EMULATED = {"workload.mebibytes": 0.01, "workload.step_ms": 1.0, "workload.samples": 400}
SMALL: dict[str, tuple[dict[str, Any], str, str]] = {
    "conv_stack": ({"workload.image_size": 8}, "val_psnr", "PSNR"),
    "mlp": ({"model": "small"}, "val_accuracy", "accuracy"),
    "segmentation": ({"workload.image_size": 16}, "val_iou", "IoU"),
    "padded_sequences": ({"workload.longest": 32, "workload.text_bytes": 20_000}, "val_accuracy", "accuracy"),
    "language_model": ({"workload.context": 16, "workload.text_bytes": 20_000}, "val_perplexity", "perplexity"),
    "emulated_compute": (EMULATED, "val_loss", "validation loss"),
}
"""Axes of a small grid, a metric, and its title."""
WITHOUT_FLOPS = {"padded_sequences", "emulated_compute"}


def test_every_workload_is_trained_here_and_compared_and_examined_somewhere() -> None:
    """Each is trained under every strategy, and by the doctor, on real ranks."""
    wanted = BUILTIN_WORKLOADS.keys() - {"image_classification"}
    assert wanted == SMALL.keys(), f"SMALL in {__file__} needs {sorted(wanted)}"
    places = {
        "WORKLOADS in tests/equivalence.py": equivalence.WORKLOADS,
        "SIZES in tests/doctor/ranks.py": dict(ranks.BUILTIN),
    }
    missing = {place: sorted(BUILTIN_WORKLOADS.keys() - names) for place, names in places.items()}
    assert not any(missing.values()), missing


def test_every_workload_class_has_its_line() -> None:
    found = set()
    for module_info in pkgutil.iter_modules(workloads.__path__, "harness.train.workloads."):
        module = importlib.import_module(module_info.name)
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        own = [value for value in classes if value.__module__ == module.__name__ and hasattr(value, "build_model")]
        found |= {f"{module.__name__}:{value.__name__}" for value in own}
    named = {builtin.location for builtin in BUILTIN_WORKLOADS.values()}
    assert found == named, "BUILTIN_WORKLOADS in harness/config/builtin_workloads.py names other classes"


def test_the_names_and_defaults_that_are_known_without_torch_are_those_of_the_classes() -> None:
    tables = ("DEPTHS", "TORCHVISION", "CHANNELS", "WIDTHS", "SHAPES", "SIZES")
    for name, builtin in BUILTIN_WORKLOADS.items():
        parameters = inspect.signature(workloads.load_class(name)).parameters
        assert (parameters["data"].default, parameters["model"].default) == (builtin.data, builtin.model)
        module = importlib.import_module(builtin.location.partition(":")[0])
        assert list(builtin.models) == [model for table in tables for model in getattr(module, table, ())]


@pytest.mark.slow
@pytest.mark.parametrize("workload", SMALL)
def test_from_the_file_to_the_tables(workload: str, make_experiment: Make, tmp_path: Path) -> None:
    axes, metric, title = SMALL[workload]
    experiment = make_experiment(
        {"strategy": ["single", "dp"], "devices": [1, 2], "per_device_batch_size": 8, **axes},
        exclude=[{"strategy": "dp", "devices": 1}],
        workload=workload,
        equivalence=True,
        optimizer={"name": "SGD", "lr": 0.01},
        throughput={**FEW_STEPS, "warmup_steps": 1, "window_steps": 3, "explain": True},
        convergence={"epochs": 1, "seeds": 0, "target": {"metric": metric, "at_least": 0}, "train_metrics": True},
    )
    plan = make_plan(experiment, laptop())
    check_code(plan)
    check_optimizers(plan)
    check_target(experiment)
    folder = RunFolder.create(tmp_path, experiment, plan, "test.yaml")
    Execution(plan, folder, InlineLauncher(experiment), lambda event: None).run()
    results = load(folder.path)
    trials = results.trials
    assert set(trials[trials["outcome"] != "skipped"]["outcome"]) == {"ok"}, trials["reason"].tolist()
    assert set(trials["strategy"]) >= {"single", "dp"}
    assert results.equivalence["equivalent"].tolist() == [True]
    timed = trials[(trials["kind"] == "throughput") & (trials["outcome"] == "ok")]
    assert (timed["flops_per_unit"].isna() == (workload in WITHOUT_FLOPS)).all()
    assert (timed["flops_reason"] == "").all() == (workload not in WITHOUT_FLOPS)
    assert results.epochs[metric].notna().all() and results.convergence[metric].notna().all()
    assert results.convergence["reached"].all()
    trained = results.convergence["training_samples"]
    assert (trained > 0).all() and results.training_steps["loss"].notna().all()
    taken = results.training_steps.groupby("trial_id").size()
    batches = results.convergence.set_index("trial_id")["global_batch_size"]
    assert sorted(taken.items()) == sorted((-(-trained.iloc[0] // batches)).items())
    assert results.epochs["train_accuracy"].notna().all() == (metric == "val_accuracy")
    assert title in [column.title for column in convergence_table(results.convergence).columns]
