"""The times of recorded runs, and which run is the newest with the cells of a plan."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.analysis.durations import earlier_run, newest_with
from harness.analysis.preview import estimate_of, total_seconds
from harness.errors import RunFolderError
from harness.plan.inventory import Inventory
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "results" / "example" / "scaling-2-cpu-cores"


def test_the_plan_of_a_run_is_estimated_to_take_what_it_took() -> None:
    folder = RunFolder.open(EXAMPLE)
    earlier = earlier_run(folder)
    plan = make_plan(folder.experiment(), Inventory.assume(1, 0, 2))
    (invocation,) = folder.environment()["invocations"]
    took_s = invocation["wall_s"] + invocation["report_s"]
    assert total_seconds(estimate_of(plan, earlier)) == pytest.approx(took_s, rel=0.001)
    assert earlier.hardware == (folder.environment()["groups"][0]["nodes"][0]["cpu"],)
    assert earlier.report_s == invocation["report_s"]


def cells_of(path: Path) -> set[str]:
    lines = RunFolder.open(path).lines()
    return {line["cell_id"] for line in lines if line["outcome"] == "ok" and line["kind"] == "throughput"}


def test_the_newest_run_with_all_cells_counts_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    for name in ("20260101-a", "20260102-b", "20260103-c"):
        shutil.copytree(EXAMPLE, tmp_path / "scaling" / name)
    (tmp_path / "scaling" / "20260103-c" / "trials.jsonl").write_text("")
    wanted = cells_of(EXAMPLE)
    found = newest_with(wanted, tmp_path)
    assert found and found.path.name == "20260102-b"
    damaged = tmp_path / "scaling" / "20260102-b" / "environment.jsonl"
    with damaged.open("a") as file:
        file.write('{"invocation": 0, "facts": {"wall_s": "soon"}}\n')
    with pytest.raises(RunFolderError, match="is damaged or incomplete"):
        earlier_run(RunFolder.open(damaged.parent))
    found = newest_with(wanted, tmp_path)
    assert found and found.path.name == "20260101-a"
    (tmp_path / "scaling" / "20260101-a" / "trials.jsonl").write_text("nonsense\n")
    assert newest_with({*wanted}, tmp_path) is None


def test_without_a_run_of_any_cell_there_is_none(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "scaling" / "20260103-c")
    assert newest_with({"0123456789ab"}, tmp_path) is None
    assert newest_with({"0123456789ab"}, tmp_path / "nowhere") is None


def test_a_run_with_most_of_the_cells_is_better_than_none(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "scaling" / "20260101-a")
    found = newest_with({*cells_of(EXAMPLE), "0123456789ab"}, tmp_path)
    assert found and found.path.name == "20260101-a"
