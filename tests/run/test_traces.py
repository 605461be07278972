"""Traces of the best cell and its base: which cells, how large, and that a failure costs nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.results import load
from harness.config.load import parse_experiment
from harness.errors import ClusterError, ClusterLostError, WriteError
from harness.launch.protocol import Message
from harness.plan.planner import Plan, make_plan
from harness.plan.trial import Trial, TrialResult, WorkerGroup
from harness.record.folder import RunFolder
from harness.report.html import trace_links
from harness.run.events import Event, Note
from harness.run.pipeline import MOST_BYTES, keep_traces
from tests.conftest import laptop
from tests.run_folders import make_run

GRID = {"strategy": ["single", "ddp"], "devices": [1, 2], "per_device_batch_size": [16, 64]}
ASKED: dict[str, Any] = {"name": "traced", "grid": GRID, "equivalence": False, "preflight": False}
Answer = Callable[[Trial], TrialResult]


class Launcher:
    """Answers each trial as ``answer`` does. ``launched``: the trials of all groups."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.launched = answer, list[Trial]()

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        self.launched += group.trials
        yield from map(self.answer, group.trials)

    def busy_cores(self) -> dict[str, float]:
        return {}


def traced(trial: Trial) -> TrialResult:
    return TrialResult(trial.id, "ok", traces=tuple(f"rank {rank}".encode() for rank in range(trial.cell.devices)))


def run(place: Path, grid: Any = GRID, **throughput: Any) -> tuple[Plan, RunFolder]:
    """A run in which ddp on two devices at a batch of 64 is the fastest."""
    content = {**ASKED, "grid": grid, "throughput": {"blocks": 3, **throughput}}
    experiment = parse_experiment(content, source="test")
    path = make_run(place, experiment, lambda cell, block: (cell.global_batch_size or 0) * 10.0 + block)
    return make_plan(experiment, laptop()), RunFolder.open(path)


def kept(
    plan: Plan, folder: RunFolder, answer: Answer = traced, deadline: float | None = None
) -> tuple[Any, list[str]]:
    """The launcher, and what was said."""
    launcher, events = Launcher(answer), list[Event]()
    keep_traces(plan, folder, launcher, deadline, events.append)
    return launcher, [event.text for event in events if isinstance(event, Note)]


def test_the_best_cell_and_its_base_are_profiled_once_and_each_rank_has_its_file(tmp_path: Path) -> None:
    plan, folder = run(tmp_path)
    launcher, _ = kept(plan, folder)
    asked = {(trial.cell.strategy, trial.cell.devices, trial.cell.per_device_batch_size) for trial in launcher.launched}
    assert asked == {("single", 1, 64), ("ddp", 2, 64)}
    assert {trial.trace_bytes for trial in launcher.launched} == {MOST_BYTES // 3}  # of three ranks
    assert not {trial.id for trial in launcher.launched} & {trial.id for trial in plan.trials}
    cells = {trial.cell.strategy: trial.cell.id for trial in launcher.launched}
    one, two = cells["single"], cells["ddp"]
    files = [f"traces/{two}-rank{rank}.json.gz" for rank in (0, 1)]
    assert folder.traces() == {one: {0: f"traces/{one}-rank0.json.gz"}, two: dict(enumerate(files))}
    assert (folder.path / files[1]).read_bytes() == b"rank 1"
    assert len(folder.lines()) == len(plan.trials) + len(plan.skips)  # they are no trials
    again, said = kept(plan, folder)
    assert again.launched == [] and said == []
    (folder.path / files[0]).unlink()
    links = dict(trace_links(load(folder.path)))
    assert links.pop(files[1]).endswith(", rank 1")  # by the name of its file
    assert not any("rank" in text for text in links.values())
    folder.keep_traces({one: [b"x"] * 11}, instead=True)
    (kept_files,) = folder.traces().values()
    assert [*kept_files.items()] == [(rank, f"traces/{one}-rank{rank}.json.gz") for rank in range(11)]


@pytest.mark.parametrize("throughput", [{"traces": False}, {"explain": False}])
def test_an_option_and_an_experiment_that_explains_nothing_keep_none(tmp_path: Path, throughput: Any) -> None:
    plan, folder = run(tmp_path, **throughput)
    assert kept(plan, folder)[0].launched == [] and folder.traces() == {}


def test_after_a_limit_and_without_a_cell_that_has_a_base_beside_it_none_are_kept(tmp_path: Path) -> None:
    plan, folder = run(tmp_path)
    assert kept(plan, folder, deadline=time.time() - 1)[0].launched == []
    plan, folder = run(tmp_path, grid={"per_device_batch_size": [16, 64]})
    assert kept(plan, folder)[0].launched == []


def fails_with(error: Exception) -> Answer:
    def fails(trial: Trial) -> TrialResult:
        if trial.cell.devices == 2:
            raise error
        return TrialResult(trial.id, "ok", traces=(b"",))

    return fails


def test_a_failure_is_a_message_and_replaces_no_earlier_traces(tmp_path: Path) -> None:
    plan, folder = run(tmp_path)
    folder.keep_traces({"other": [b"earlier"]}, instead=True)
    _, said = kept(plan, folder, fails_with(ClusterError("the cluster is gone")))
    assert said[-1] == "No traces: the cluster is gone"
    _, said = kept(plan, folder, fails_with(RuntimeError("no profiler")))
    assert said[-1] == "No traces: RuntimeError: no profiler"
    _, said = kept(plan, folder, lambda trial: TrialResult(trial.id, "oom", "no memory"))
    assert said[-1] == "No trace of each rank: no memory" and {*folder.traces()} == {"other"}
    kept(plan, folder, lambda trial: TrialResult(trial.id, "oom") if trial.cell.devices == 2 else traced(trial))
    assert len(folder.traces()) == 2 and "other" in folder.traces()


@pytest.mark.parametrize("error", [ClusterLostError("lost"), WriteError("disk full")])
def test_a_lost_cluster_and_a_full_disk_end_the_run(tmp_path: Path, error: Exception) -> None:
    plan, folder = run(tmp_path)
    with pytest.raises(type(error)):
        kept(plan, folder, fails_with(error))


def test_cells_whose_traces_are_all_too_large_are_not_profiled_again(tmp_path: Path) -> None:
    plan, folder = run(tmp_path)
    _, said = kept(plan, folder, lambda trial: TrialResult(trial.id, "ok", traces=(b"",)))
    assert said[-1] == "No trace of each rank: those of some ranks exceed their share of 20 MB"
    assert kept(plan, folder)[0].launched == [] and not any(folder.traces().values())
