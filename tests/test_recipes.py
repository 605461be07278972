"""The recipes that ship as experiment files, on data that is always there."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

import harness
from harness.config import load as config
from harness.config.known_hardware import KNOWN_DEVICES
from harness.plan.inventory import Inventory
from harness.plan.planner import make_plan
from harness.report.html import write_report
from harness.train.strategies import make_strategy
from tests.conftest import FEW_STEPS, ROOT, experiment_of, gpu_cluster
from tests.forked_launch import command_here
from tests.run_folders import run_inline

CIFAR10, AUGMENTED, SCALED = (
    ROOT / "experiments" / f"resnet34_cifar10{name}.yaml" for name in ("", "_augmented", "_scaled_lr")
)
SAMPLES = 50_000


@pytest.mark.parametrize(("recipe", "devices"), [(CIFAR10, 2), (AUGMENTED, 8)])
def test_the_recipe_takes_391_steps_an_epoch_at_any_number_of_devices(recipe: Path, devices: int) -> None:
    plan = make_plan(config.load_experiment(recipe), gpu_cluster())
    trained = [trial.cell for trial in plan.trials if trial.kind == "convergence"]
    assert {(cell.strategy, cell.devices) for cell in trained} == {("single", 1), ("dp", devices), ("ddp", devices)}
    assert {-(-SAMPLES // cell.global_batch_size) for cell in trained} == {391}
    assert {cell.lr_factor for cell in trained} == {1.0}


def test_the_scaled_recipe_scales_the_rate_with_the_devices() -> None:
    plan = make_plan(config.load_experiment(SCALED), gpu_cluster())
    trained = [trial.cell for trial in plan.trials if trial.kind == "convergence"]
    found = {(cell.devices, cell.per_device_batch_size, cell.lr_factor) for cell in trained}
    assert found == {(1, 128, 1.0), (8, 128, 8.0)}


@pytest.mark.slow
def test_in_a_sweep_the_rates_that_diverge_are_rows(tmp_path: Path) -> None:
    sections = {"workload": "tests.equivalence:Regression", "optimizer": {"name": "SGD", "lr": [0.01, 1e4]}}
    training = {"lr_scaling": ["none", "sqrt"], "lr_base_batch_size": 4}
    more: dict[str, Any] = {"training": training, "throughput": None, "convergence": {"epochs": 6, "seeds": 0}}
    folder = run_inline(experiment_of({"global_batch_size": 16}, **sections, **more), tmp_path)
    trials = write_report(folder.path).trials
    assert "lr_scaling none, sqrt; lr_base_batch_size 4" in folder.report.read_text()
    found = sorted(zip(trials["effective_lr"], trials["outcome"], strict=True))
    assert found == [(0.01, "ok"), (0.02, "ok"), (1e4, "diverged"), (2e4, "diverged")]


def cells_of(name: str, inventory: Inventory) -> set[tuple[object, ...]]:
    plan = make_plan(config.load_experiment(ROOT / "experiments" / name), inventory)
    assert not plan.skips
    cells = [trial.cell for trial in plan.trials if trial.kind == "throughput" and not trial.added]
    return {(cell.strategy, cell.devices, cell.device_ids, *map(cell.axis, VARIED[name])) for cell in cells}


VARIED = {
    "conv_stack_random.yaml": ("per_device_batch_size", "workload.targets", "optimizer.name", "optimizer.lr"),
    "mlp_150m_8xgpu.yaml": ("global_batch_size", "workload.width", "workload.layers", "optimizer.name"),
    "gpu_pairs_8xgpu.yaml": ("global_batch_size", "data", "precision", "optimizer.lr"),
    "segmentation.yaml": ("per_device_batch_size", "model"),
}
"""The files named for what was studied, each with the axes and options that the study names."""


def test_the_studies_are_planned_on_their_hardware() -> None:
    node = Inventory.assume(1, 8)
    several = {("single", 1), *((strategy, n) for strategy in ("dp", "ddp") for n in (2, 4, 8)), ("ddp", 1)}
    stack = cells_of("conv_stack_random.yaml", node)
    assert stack == {(*placed, (), 4, "random", "Adam", 0.001) for placed in several}
    sharded = several | {("fsdp", n) for n in (2, 4, 8)}
    mlp = cells_of("mlp_150m_8xgpu.yaml", node)
    assert mlp == {(*placed, (), 16, w, 3, "Adam") for placed in sharded for w in (1_250, 2_500, 5_000)}
    pairs = cells_of("gpu_pairs_8xgpu.yaml", node)
    chosen = product(("dp", "ddp"), ((6, 7), (5, 6), (0, 4)), (0.1, 0.05, 0.001))
    assert pairs == {(strategy, 2, ids, 128, "cifar10", "fp32", lr) for strategy, ids, lr in chosen}
    segmentation = cells_of("segmentation.yaml", Inventory.assume(1, 0, 8))
    assert segmentation == {(*placed, (), 16, model) for placed in sharded for model in ("small", "medium")}


@pytest.mark.parametrize(
    ("name", "gpus", "compiled"), [("resnet50_8xgpu", 8, {False, True}), ("gpu_pairs_4xgpu", 4, {False, True})]
)
def test_files_for_gpus_are_fast_and_compare_like_with_like(name: str, gpus: int, compiled: set[bool]) -> None:
    """Slow computing flatters every efficiency; fsdp's policy computes in other dtypes than its base."""
    node = Inventory.assume(1, gpus, device=KNOWN_DEVICES["H100-80GB"])
    plan = make_plan(config.load_experiment(ROOT / "experiments" / f"{name}.yaml"), node)
    assert not plan.skips
    cells = [trial.cell for trial in plan.trials if trial.kind == "throughput"]
    assert {cell.precision for cell in cells} == {"bf16"} and {cell.compile for cell in cells} == compiled
    assert all(cell.training.get("channels_last") and cell.training.get("cudnn_benchmark") for cell in cells)
    sharded = [make_strategy("fsdp").autocasts(cell.strategy_options) for cell in cells if cell.strategy == "fsdp"]
    assert sharded and all(sharded)


def test_the_file_of_a_gpt_varies_what_changes_its_speed_and_memory() -> None:
    node = Inventory.assume(1, 8, device=KNOWN_DEVICES["H100-80GB"])
    plan = make_plan(config.load_experiment(ROOT / "experiments" / "gpt2_8xgpu.yaml"), node)
    assert not plan.skips
    cells = {trial.cell for trial in plan.trials if trial.kind == "throughput"}
    assert {(cell.compile, cell.activation_checkpointing) for cell in cells} == {
        *product((False, True), ("none", "full"))
    }
    algorithms = ("allreduce:ring", "allreduce:tree")  # of broadcasts NCCL has no tree
    assert {cell.env.get("NCCL_ALGO") for cell in cells if cell.strategy == "ddp" and cell.devices == 8} == {
        *algorithms,
        None,
    }
    whole = [cell for cell in cells if cell.strategy == "ddp" and cell.devices == 8 and not cell.compile]
    compared = [cell for cell in whole if cell.activation_checkpointing == "none"]
    assert len(compared) == 3, "no process is measured twice"
    assert {cell.options["env.NCCL_ALGO"] for cell in compared} == {None, *algorithms}, "an axis with three values"
    groups = {group.variables for group in plan.groups}
    assert groups == {(), *((("NCCL_ALGO", name),) for name in algorithms)}
    assert all(make_strategy("fsdp").autocasts(cell.strategy_options) for cell in cells if cell.strategy == "fsdp")


SMALL_IMAGES = {"workload.image_size": 8, "workload.samples": 16}
SMALLER: dict[str, dict[str, Any]] = {
    "conv_stack_random.yaml": {**SMALL_IMAGES, "workload.samples": 64},
    "mlp_150m_8xgpu.yaml": {"model": ["small"], "workload.width": [20, 30], "workload.samples": 64},
    "gpu_pairs_8xgpu.yaml": {"data": ["synthetic"], "global_batch_size": 8, **SMALL_IMAGES},
    "segmentation.yaml": {"model": ["small"]},
}
"""What replaces axes of these files on a CPU: less of everything, and data that is always there."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_the_studies_run_scaled_down_on_a_cpu(name: str, tmp_path: Path) -> None:
    content: dict[str, Any] = yaml.safe_load((ROOT / "experiments" / name).read_text())
    grid = content["grid"]
    grid |= {"strategy": ["single", "dp"], "devices": [1, 2], **SMALLER[name]}
    grid.pop("device_ids", None)
    content.pop("published", None)  # of the cells of its hardware
    content |= {"device": "cpu", "loader": {"workers": 0}, "throughput": FEW_STEPS, "exclude": [], "preflight": False}
    content |= {"convergence": content.get("convergence") and {"epochs": 1, "seeds": 0, "only": {"devices": 1}}}
    if name == "gpu_pairs_8xgpu.yaml":
        grid["optimizer.lr"], content["equivalence"] = [0.001], False
    folder = run_inline(config.parse_experiment(content, source=name, home=tmp_path), tmp_path)
    trials = harness.load(folder.path).trials
    assert set(trials["outcome"]) == {"ok"}, trials["reason"].tolist()
    kinds = {"throughput", "convergence"} if content["convergence"] else {"throughput"}
    assert {*trials["kind"]} - {"diagnostic"} == kinds
    assert {("single", 1), ("dp", 2)} <= {*zip(trials["strategy"], trials["devices"], strict=True)}


@pytest.mark.slow
def test_the_recipe_trains_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None) -> None:
    content: dict[str, Any] = yaml.safe_load(CIFAR10.read_text())
    # real digits as 16x16 RGB in place of CIFAR-10, and a small net; the rest is the recipe, whose steps on images of
    # its shape tests/train/test_recipe_by_hand.py compares
    content["grid"] |= {"data": ["digits"], "model": ["resnet8"], "strategy": ["single", "dp"], "devices": [1, 2]}
    content |= {"workload_options": {"image_size": 16, "width": 4}, "loader": {"workers": 0}, "device": "cpu"}
    content |= {"throughput": None, "equivalence": False, "limits": {"trial": "3m"}}
    content["convergence"]["seeds"], content["launcher"] = 0, "torchrun"
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(content))
    command_here(monkeypatch, "run", file, "--output", tmp_path / "out", "--no-preflight")
    results = harness.load(next((tmp_path / "out").glob("*/*")))
    ok = results.trials[(results.trials["outcome"] == "ok") & (results.trials["kind"] == "convergence")]
    assert sorted(zip(ok["strategy"], ok["devices"], strict=True)) == [("dp", 2), ("single", 1)]
    assert ok["effective_lr"].tolist() == [0.1] * 2
    for _, curve in results.epochs.groupby("trial_id"):
        assert curve["learning_rate"].tolist() == pytest.approx([0.1] * 5 + [0.01] * 5 + [0.001] * 5)
        assert curve["train_loss"].iloc[-1] < curve["train_loss"].iloc[0]
        assert curve["val_accuracy"].iloc[-1] > 0.8 and curve["train_accuracy"].iloc[-1] > 0.8
    compared = results.published.set_index(["metric", "epoch"])
    assert (compared["n"] == 1).all() and compared["other_hardware"].all() and len(compared) == 16
    assert compared["difference"]["val_accuracy"].iloc[0] > 0  # the digits are easier
    for trial_id in ok["trial_id"]:
        kept = results.folder.path / "checkpoints" / trial_id
        assert sorted(path.name for path in kept.iterdir()) == ["epoch-12", "epoch-15"]
