"""The plan as text."""

from __future__ import annotations

from typing import Any

import pytest

from harness.plan.inventory import Inventory
from harness.plan.planner import make_plan
from harness.run.plan_text import plan_lines
from tests.conftest import Make, gpu_cluster, laptop, plan_of


@pytest.mark.parametrize(("devices", "warned"), [(32, ""), (512, "Largest group: 512 processes on 64 nodes import")])
def test_a_plan_of_many_nodes_says_that_all_of_them_import_at_once(
    make_experiment: Make, devices: int, warned: str
) -> None:
    experiment = make_experiment({"strategy": "ddp", "devices": [1, devices], "per_device_batch_size": 8})
    lines = plan_lines(make_plan(experiment, Inventory.assume(64, 8)))
    assert [line for line in lines if "import" in line and line.startswith(warned)] == lines[-1:] * bool(warned)


def test_on_gpus_the_loader_workers_that_the_file_leaves_open_are_named() -> None:
    def lines(
        inventory: Inventory, workload: str = "image_classification", doctor: bool = False, **grid: object
    ) -> list[str]:
        axes = {"data": ["/images", "digits"], "strategy": ["single", "ddp"], "per_device_batch_size": 8, **grid}
        plan = plan_of(axes, inventory, workload=workload, preflight=doctor)
        return [line for line in plan_lines(plan) if line.startswith("Loader: ")]

    (line,) = lines(gpu_cluster())
    assert line.startswith("Loader: 2 cells on GPUs have 7 loader workers a device, its cores less one, if their data")
    assert "loader.workers: [0, 7] in the grid compares" in line
    (line,) = lines(gpu_cluster(), doctor=True)
    assert line.startswith("Loader: the doctor decides how many loader workers of 2 cells on GPUs") and "most 7" in line
    assert lines(laptop()) == lines(gpu_cluster(), data="digits") == lines(gpu_cluster(), **{"loader.workers": 2}) == []
    assert lines(gpu_cluster(), "language_model", data="/texts") == []
    assert lines(gpu_cluster(), "mine:Own", data="x")


@pytest.mark.parametrize(
    ("effort", "timed", "said"),
    [
        ("quick", {"blocks": 3, "window_seconds": 0.4}, "effort: quick, but for what throughput has: blocks: 3."),
        ("quick", {}, None),
        ("normal", {"blocks": 3}, None),
        ("careful", {"windows": 2}, "effort: careful, but for what throughput has: windows: 2."),
    ],
)
def test_what_a_file_sets_beside_its_effort_is_named(effort: str, timed: dict[str, Any], said: str | None) -> None:
    plan = plan_of({"strategy": "single", "per_device_batch_size": 8}, laptop(), effort=effort, throughput=timed)
    assert next((line for line in plan_lines(plan) if line.startswith("effort")), None) == said


def test_a_rule_that_excludes_nothing_is_named() -> None:
    grid = {"strategy": ["single", "ddp"], "per_device_batch_size": 8}
    rules = [{"strategy": "dpp"}, {"strategy": "single"}]
    found = [line for line in plan_lines(plan_of(grid, laptop(), exclude=rules)) if line.startswith("exclude")]
    assert found == ['exclude: no cell matches {"strategy": "dpp"}.']


def test_the_cells_that_share_a_worker_group_are_named_and_why_others_do_not() -> None:
    def lines(inventory: Inventory, grid: dict[str, Any], **sections: Any) -> list[str]:
        said = plan_lines(plan_of({"per_device_batch_size": [8, 16], **grid}, inventory, **sections))
        return [line for line in said if line.startswith(("Shared: ", "In groups of their own"))]

    grid: dict[str, Any] = {"strategy": ["single", "ddp"], "devices": [1, 2]}
    timed = {"blocks": 3, "twin": True, "explain": False}
    (said,) = lines(laptop(), grid, throughput=timed)
    assert said == (
        "Shared: ddp x2 (2 cells), ddp x1 (2 cells), single x1 (2 cells), A/A tests, in 3 groups of 2 workers with 1 "
        "device each; each trial runs on the ranks that it needs."
    )
    (said,) = lines(gpu_cluster(), grid, throughput=timed)
    assert said == (
        "In groups of their own, as NCCL connects once a process: A/A tests; ddp x1 (2 cells), single x1 (2 cells); "
        "ddp x2 (2 cells)."
    )
    (said,) = lines(laptop(), {"strategy": "single"}, throughput=timed)
    assert said == "In groups of their own, as an A/A test is across processes: A/A tests; single x1 (2 cells)."
    assert lines(laptop(), {"strategy": "single"}, throughput={**timed, "twin": False}) == []
    many = {"strategy": ["ddp", "single"], "devices": [1, 2, 4, 8, 16, 32, 64], "env.A": [1, 2]}
    assert [line.count("(2 cells)") for line in lines(Inventory.assume(8, 8), many)] == [
        2 * 2 + 6
    ]  # of 8 groups, 2 with both strategies
    assert "; 6 more." in lines(Inventory.assume(8, 8), many)[0]
