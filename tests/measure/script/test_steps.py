"""What is made of a script's counted steps: its windows, its findings; and the folder and environment that it gets."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.script import SCRIPT_TRAITS
from harness.config.sections import Throughput
from harness.measure.script.batches import size_of
from harness.measure.script.child import own_copy
from harness.measure.script.counting import digests
from harness.measure.script.following import values_of
from harness.measure.script.judging import Seen, judge, together
from harness.measure.script.messages import Facts, Finished, Schedule, Steps
from harness.measure.script.parent import (
    ScriptFailed,
    environment_of,
    home_of,
    lay_out,
    link_tree,
    unused,
    visible_gpus,
)
from harness.measure.script.profiling import ProfiledSteps
from harness.measure.script.windows import windows_of
from harness.plan.cell import Cell
from harness.train.ranks import Ranks

SHARED = [((2, 3), "1.0"), ((3,), "0.5")]
FACTS = Facts(["SGD"], 0, 2, SHARED, [], 1, 0, {})
RANKS = Ranks(1, 2, 1, 0, "n", "127.0.0.1", (torch.device("cpu"),))
SETTINGS = Throughput(warmup_steps=4)
CELL = Cell("train.py", None, None, "script", "cpu", 2, 1, "weak", 32, 64, own_traits=SCRIPT_TRAITS)


def finished(ended: list[float], edges: list[tuple[int, float]], **steps: Any) -> Finished:
    count = len(ended)
    given = {"wait_s": [0.1] * count, "samples": [32.0] * count, "pause_s": [0.0] * count, **steps}
    return Finished(Steps(ended, edges=edges, **given), FACTS, by_itself=not edges)


def test_windows_are_between_their_edges_and_the_warm_up_begins_after_the_first_step() -> None:
    end = finished([1.0, 2.0, 3.0, 4.5, 6.0, 7.0, 8.0], [(3, 3.1), (5, 6.2), (7, 8.1)])
    found = windows_of(end, SETTINGS, None)
    assert [each.kind for each in found] == ["warmup", "timed", "timed"]
    assert {(each.steps, each.weight) for each in found} == {(2, 64.0)}
    assert [each.duration_s for each in found] == pytest.approx([2.0, 3.1, 1.9])
    assert list(found[1].step_s) == pytest.approx([1.4, 1.5])  # from the edge, when the device is done
    assert list(found[1].wait_s) == [0.1, 0.1]


def test_stated_samples_take_the_place_of_counted_ones_and_pauses_are_no_time_of_a_window() -> None:
    end = finished([1.0, 2.0, 3.0, 7.0, 8.0], [(2, 2.0), (5, 8.0)], pause_s=[0.0, 0.0, 0.0, 3.0, 0.0])
    _, timed = windows_of(end, SETTINGS, 5.0)
    assert timed.weight == 15.0 and timed.duration_s == pytest.approx(3.0)
    assert list(timed.step_s) == pytest.approx([1.0, 1.0, 1.0])


def test_steps_are_timed_by_the_gpu_where_it_has() -> None:
    end = finished([1.0, 2.0, 3.0, 4.0], [(2, 2.0), (4, 4.0)], device_s=[0.9, 1.1])
    assert list(windows_of(end, SETTINGS, None)[-1].step_s) == [0.9, 1.1]


@pytest.mark.parametrize(("count", "warm_up", "timed"), [(12, 3, 8), (5, 1, 3), (3, 0, 2)])
def test_of_a_script_that_ends_early_what_is_there_counts(count: int, warm_up: int, timed: int) -> None:
    found = windows_of(finished([float(i) for i in range(count)], []), SETTINGS, None)
    steps = {each.kind: each.steps for each in found}
    assert (steps.get("warmup", 0), steps["timed"]) == (warm_up, timed)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_steps_are_a_failure(count: int) -> None:
    with pytest.raises(ScriptFailed, match=f"after {count} steps of an optimizer; at least 3 are needed"):
        windows_of(finished([float(i) for i in range(count)], []), SETTINGS, None)


def test_the_edges_of_a_schedule_are_its_windows() -> None:
    assert Schedule(start=10, steps=4, windows=2).edges == (10, 14, 18)


three_steps = partial(finished, [1.0, 2.0, 3.0], [(1, 1.0), (3, 3.0)])
HEALTHY = three_steps()


def having(**facts: Any) -> Finished:
    return replace(HEALTHY, facts=replace(FACTS, **facts))


@pytest.mark.parametrize(
    ("end", "stated", "seen"),
    [
        (HEALTHY, None, []),
        (having(connected=0), None, ["2 ranks with no process group"]),
        (having(connected=1), None, ["2 ranks with a process group of 1 ranks"]),
        (having(evaluations=3), None, ["evaluations in the timed windows: 3"]),
        (having(optimizers=["Adam", "SGD"]), None, ["optimizers in the order of their first steps: Adam, SGD"]),
        (replace(HEALTHY, by_itself=True), None, ["the script ended by itself after 3 steps"]),
        (three_steps(samples=[0.0] * 3), None, ["3 steps, and no batch from a torch DataLoader"]),
        (three_steps(samples=[0.0] * 3), 4.0, []),
        (
            three_steps(samples=[0.0, 64.0, 64.0]),
            None,
            ["samples of a step on a rank: 64 by the DataLoader, 32 by the file"],
        ),
        (
            replace(three_steps(samples=[64.0] * 3), facts=replace(FACTS, passes=2, batches=2)),
            None,
            ["2 backward passes a step, with 32 samples each"],
        ),
        (
            replace(three_steps(samples=[64.0] * 3), facts=replace(FACTS, passes=2)),  # as of two losses of a batch
            None,
            ["samples of a step on a rank: 64 by the DataLoader, 32 by the file"],
        ),
        (replace(HEALTHY, facts=replace(FACTS, passes=2)), None, []),  # as of two losses
        (
            replace(three_steps(samples=[64.0] * 3), facts=replace(FACTS, passes=3)),
            None,
            ["samples of a step on a rank: 64 by the DataLoader, 32 by the file"],
        ),
    ],
)
def test_findings_follow_from_what_was_counted(end: Finished, stated: float | None, seen: list[str]) -> None:
    assert [finding.seen for finding in judge([Seen.of(end)] * 2, CELL, stated)] == seen


def seen_of(end: Finished, cell: Cell = CELL, processors: int = 2, **how: Any) -> list[str]:
    """What is seen on two ranks of a node that took the same steps."""
    return [finding.seen for finding in judge([Seen.of(end, 0, processors)] * 2, cell, None, **how)]


def test_an_examination_names_a_wait_for_data_and_a_run_has_it_in_its_tables() -> None:
    waiting = three_steps(wait_s=[0.0, 0.5, 0.25])  # of two steps of 1 s
    assert seen_of(waiting, examined=True) == ["part of a step in which it waits for data: 38 %"]
    assert seen_of(waiting) == seen_of(three_steps(wait_s=[9.0, 0.1, 0.1]), examined=True) == []


def test_more_threads_and_loader_workers_than_processors_are_a_finding() -> None:
    assert seen_of(having(threads=2), processors=4) == []
    many = ["4 computing threads on a node with 2 processors (2 threads in the first of its 2 ranks)"]
    assert seen_of(having(threads=2)) == many
    (workers,) = seen_of(having(workers=3), processors=7)
    assert workers.startswith("2 computing threads and 6 loader workers on a node with 7 processors")
    assert seen_of(having(threads=2), replace(CELL, oversubscribed=True)) == []
    on_gpus = replace(CELL, device="cuda", oversubscribed=False)
    each = [Seen.of(having(threads=8, workers=3, gpus=[gpu]), 0, 6) for gpu in ("GPU-a", "GPU-b")]
    assert not [*judge(each, on_gpus, None)], "threads beside a GPU hardly compute"
    (crowded,) = judge([replace(one, processors=5) for one in each], on_gpus, None)
    assert crowded.seen == "6 loader workers on a node with 5 processors"


def test_an_oversubscribed_node_that_waits_for_data_is_not_told_to_have_more_workers() -> None:
    end = three_steps(wait_s=[0.0, 0.5, 0.25])
    waiting = replace(end, facts=replace(FACTS, workers=3))
    crowded, data = judge([Seen.of(waiting, 0, 7)] * 2, CELL, None, examined=True)
    assert crowded.advice == "reduce num_workers" and "workers" not in data.advice
    (data,) = judge([Seen.of(waiting, 0, 8)] * 2, CELL, None, examined=True)
    assert "more workers" in data.advice


def test_ranks_that_share_a_gpu_or_use_none_are_an_error() -> None:
    on_gpus = replace(CELL, device="cuda")
    assert seen_of(HEALTHY, on_gpus) == ["ranks whose parameters are on no GPU: 0, 1"]
    assert not seen_of(having(gpus=["GPU-a"]), replace(on_gpus, oversubscribed=True))
    assert seen_of(having(gpus=["GPU-a"]), on_gpus) == ["GPUs with the parameters of several ranks: GPU-a"]
    own = [Seen.of(having(gpus=[name])) for name in ("GPU-a", "GPU-b")]
    assert not [*judge(own, on_gpus, None)]
    other_node = [Seen.of(having(gpus=["GPU-a"]), node) for node in (0, 1)]
    assert not [*judge(other_node, on_gpus, None)]


@pytest.mark.parametrize(
    ("idle_s", "wait_s", "share"),
    [((0.5, 0.3), 0.0, ["30 %"]), ((0.5, 0.3), 0.25, []), ((0.5, 0.1), 0.0, []), ((None, None), 0.0, [])],
)
def test_gpus_that_run_no_kernel_and_wait_for_no_data_are_bound_by_the_host(
    idle_s: tuple[float | None, ...], wait_s: float, share: list[str]
) -> None:
    profiles = [ProfiledSteps(1.0, wait_s, 0.0, 0.0, each) for each in idle_s]
    found = [*judge([Seen.of(HEALTHY)] * 2, CELL, None, profiles)]
    assert [finding.seen.rpartition(": ")[2] for finding in found] == share
    assert all("bound by the host" in finding.means for finding in found)


def test_independent_copies_are_an_error_and_one_device_is_none() -> None:
    (found,) = judge([Seen.of(having(connected=0))] * 2, CELL, None)
    assert (found.severity, found.stops) == ("error", False)
    assert not [*judge([Seen.of(having(connected=0))], replace(CELL, devices=1, global_batch_size=32), None)]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(4, 9)], 4),
        ({"name": "x", "ids": torch.zeros(5, 2)}, 5),
        (("text", [1, 2]), 0),
        (torch.tensor(1.0), 1),
    ],
)
def test_the_size_of_a_batch_is_that_of_its_first_tensor(batch: object, size: int) -> None:
    assert size_of(batch) == size


OTHER = [((2, 3), "1.5"), ((3,), "0.6")]


@pytest.mark.parametrize(
    ("own", "others", "count"),
    [
        (SHARED, SHARED, 2),
        (SHARED, OTHER, 1),
        (SHARED, [OTHER[0], SHARED[1]], 2),  # as in a model whose layers are split over ranks
        (SHARED, [((4, 3), "1.5"), ((3,), "0.6")], 2),
        ([], [], 2),
    ],
)
def test_ranks_train_together_unless_all_of_their_parameters_differ(own: Any, others: Any, count: int) -> None:
    assert together([replace(FACTS, parameters=own), replace(FACTS, parameters=others)]) == count


def test_copies_in_one_process_group_are_an_error_too() -> None:
    (found,) = judge([Seen.of(HEALTHY), Seen.of(having(parameters=OTHER))], CELL, None)
    assert (found.severity, found.seen) == ("error", "2 ranks whose parameters all differ after 3 steps")
    (without,) = judge([Seen.of(having(connected=0))] * 2, CELL, None)
    assert "init_process_group" not in found.advice and "init_process_group" in without.advice


@pytest.mark.parametrize("pauses", [True, False])
def test_an_evaluation_that_the_option_does_not_know_is_not_advised_to_it(pauses: bool) -> None:
    (found,) = judge([Seen.of(having(evaluations=4))] * 2, CELL, None, pauses=pauses)
    assert ("does not know its batches" in found.advice) is pauses and "probe.pause()" in found.advice


def test_an_epoch_s_last_batch_and_the_other_ranks_are_no_reason_to_call_the_batch_wrong() -> None:
    end = finished([1.0, 2.0, 3.0, 4.0], [(1, 1.0), (4, 4.0)], samples=[32.0, 32.0, 8.0, 32.0])
    assert not [*judge([Seen.of(end)] * 2, CELL, None)]
    other = finished([1.0, 2.0, 3.0, 4.0], [(1, 1.0), (4, 4.0)], samples=[64.0] * 4)
    (found,) = judge([Seen.of(end), Seen.of(other)], CELL, None)
    assert found.seen == "samples of a step on a rank: 64 by the DataLoader, 32 by the file"


def test_parameters_that_may_be_shards_are_not_compared() -> None:
    whole, flat = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(6))
    assert digests(torch.optim.SGD([whole, flat])) == [((2, 3), "6.0"), ((6,), "6.0")]
    assert digests(torch.optim.SGD([flat])) == digests(None) == []


def test_the_folder_has_the_script_s_files_and_keeps_new_ones(tmp_path: Path) -> None:
    source = tmp_path / "source"
    names = ("train.py", "data/train.bin", ".env", ".git/config", "__pycache__/a.pyc", "venv/pyvenv.cfg", "../beside/x")
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target = lay_out(source, tmp_path / "scratch")
    assert (target / "data/train.bin").read_text() == "data/train.bin"
    assert (target / "../beside/x").read_text() == "../beside/x" and (target / ".env").read_text() == ".env"
    assert not (target / ".git").exists() and not (target / "__pycache__").exists()
    assert (target / "venv").is_symlink() and not (target / "data").is_symlink()
    before = sorted(source.rglob("*"))
    (target / "checkpoint.pt").write_text("x")
    (target / "data/cache").mkdir()
    assert sorted(source.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "packages", "home", "module"),
    [
        ("import model", (), "a/b", None),
        ("def f(:", (), "a/b", None),
        ("try:\n    from .model import x\nexcept ImportError:\n    from model import x", (), "a/b", None),
        ("from .model import x", (), "a", "b.train"),
        ("from . import model", ("a", "a/b"), ".", "a.b.train"),
        ("from ..model import x", (), ".", "a.b.train"),
    ],
)
def test_a_script_with_relative_imports_is_a_module(
    tmp_path: Path, text: str, packages: tuple[str, ...], home: str, module: str | None
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    for package in packages:
        (tmp_path / package / "__init__.py").touch()
    script = tmp_path / "a/b/train.py"
    script.write_text(text)
    assert home_of(script) == (tmp_path / home, module)


def test_a_folder_below_the_script_s_own_is_not_linked_into_itself_and_links_are_few(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x")
    for number in range(3):
        (tmp_path / "many" / str(number)).mkdir(parents=True)
        (tmp_path / "many" / str(number) / "x").write_text("x")
    sizes = []
    for _ in range(3):
        target = lay_out(tmp_path, unused(tmp_path / "results" / "files" / "trial"))
        sizes.append(len([*target.rglob("*")]))
        assert not (target / "train.py").is_symlink() and not (target / "results").exists()
    names = sorted(path.name for path in (tmp_path / "results/files").iterdir())
    assert len({*sizes}) == 1 and names == ["trial", "trial-2", "trial-3"]
    few = tmp_path / "few"
    few.mkdir()
    assert link_tree(tmp_path, few, left=2) < 0 and (few / "train.py").exists()


@pytest.mark.parametrize(("named", "seen"), [(None, "2,3"), ("7,5,3,1", "3,1")])
def test_a_script_sees_its_node_s_gpus_in_order(monkeypatch: pytest.MonkeyPatch, named: str | None, seen: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    own = (torch.device("cuda", 2),)
    others = [(0, 1, [3]), (0, 0, [2]), (1, 0, [0])]
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: others)
    assert visible_gpus(replace(RANKS, rank=0, local_rank=0, devices=own)) == seen
    assert visible_gpus(RANKS) is None


@pytest.mark.parametrize(("whole", "content"), [(True, "theirs, ours"), (False, ", ours")])
def test_a_linked_file_becomes_a_copy_before_it_is_written_to(tmp_path: Path, whole: bool, content: str) -> None:
    (tmp_path / "source").mkdir()
    theirs = tmp_path / "source" / "log.txt"
    theirs.write_text("theirs")
    target = lay_out(tmp_path / "source", tmp_path / "scratch")
    own_copy(str(target), target / "log.txt", whole=whole)
    with (target / "log.txt").open("a") as log:
        log.write(", ours")
    assert theirs.read_text() == "theirs" and (target / "log.txt").read_text() == content
    own_copy(str(target), theirs, whole=False)  # one outside of the trial's folder is the script's own affair
    own_copy(str(target), 3, whole=False)
    assert theirs.exists()


def test_a_rank_has_torchrun_s_variables_and_not_those_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MINE", "1")
    found = environment_of(RANKS, CELL, ("10.0.0.1", 1234))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "MINE")
    assert [found[name] for name in names] == ["1", "1", "2", "2", "0", "10.0.0.1", "1234", "1"]
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found
    monkeypatch.setenv("RANK", "3")
    assert "RANK" not in environment_of(RANKS, CELL, ("10.0.0.1", 1234), plain=True)
    assert any((Path(folder) / "harness/probe.py").exists() for folder in found["PYTHONPATH"].split(os.pathsep))


def test_a_program_s_own_value_takes_the_place_of_a_later_axis(tmp_path: Path) -> None:
    for options, value in (({}, "default"), ({"compile_mode": "a"}, "a")):
        assert values_of(replace(CELL, workload_options=options), 0, tmp_path, 0)["compile_mode"] == value


def test_placeholders_are_the_cell_s_axes_its_own_names_the_seed_and_the_folder(tmp_path: Path) -> None:
    cell = replace(CELL, workload_options={"lr": 0.1})
    expected = {"lr": 0.1, "devices": 2, "global_batch_size": 64, "seed": 3, "folder": str(tmp_path), "local_rank": 1}
    assert values_of(cell, 3, tmp_path, 1).items() >= expected.items()
