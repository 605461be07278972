"""Strategies of the user's own: how they are named, imported, planned and refused."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import harness
from harness.config.experiment import Experiment
from harness.config.load import parse_experiment
from harness.config.strategy_traits import BUILTIN_TRAITS, NoOptions
from harness.errors import Collected, ExperimentError, WorkloadError
from harness.plan.cell import Cell, place
from harness.plan.planner import Plan, make_plan
from harness.run.request import check_no_user_code
from harness.run.variants import own_traits
from harness.train.strategies import load_strategy_class
from tests.conftest import laptop
from tests.forked_launch import command_here
from tests.own_strategy import Zero1
from tests.processes import ROOT

ZERO1 = "tests.own_strategy:Zero1"
CONTENT = {
    "name": "own",
    "workload": "mlp",
    "grid": {"strategy": ["single", "ddp", ZERO1], "devices": [1, 2], "per_device_batch_size": 8},
    "strategy_options": {ZERO1: {"bucket_cap_mb": [1, 25]}},
}


@pytest.fixture
def experiment() -> Experiment:
    return parse_experiment(CONTENT, source="f")


@pytest.fixture
def plan(experiment: Experiment) -> Plan:
    return make_plan(experiment, laptop(), own_traits(experiment, Collected()))


def cells_of(plan: Plan, strategy: str) -> set[Cell]:
    return {trial.cell for trial in plan.trials if trial.cell.strategy == strategy and trial.kind == "throughput"}


def test_the_planner_gets_its_traits_which_are_no_part_of_a_cell_s_id(plan: Plan, experiment: Experiment) -> None:
    cells = cells_of(plan, ZERO1)
    found = {(cell.devices, cell.strategy_options["bucket_cap_mb"]) for cell in cells}
    assert found == {(1, 1), (1, 25), (2, 1), (2, 25)}
    assert all(cell.traits.calls_wrapper and cell.traits.options is NoOptions for cell in cells)
    assert {place(cell).workers for cell in cells} == {1, 2}
    other = make_plan(experiment, laptop(), {ZERO1: Zero1.traits.__class__(calls_wrapper=False)})
    assert {cell.id for cell in cells_of(plan, ZERO1)} == {cell.id for cell in cells_of(other, ZERO1)}


def test_it_is_checked_for_equivalence_like_any_other(plan: Plan) -> None:
    checks = {trial.cell.strategy for trial in plan.trials if trial.purpose == "equivalence"}
    assert checks == {"single", "ddp", ZERO1}
    assert all(t.check_id for t in plan.trials if t.kind == "throughput" and t.cell.strategy == ZERO1)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tests.own_strategy:Zero2", "has no class 'Zero2'; did you mean 'Zero1'?"),
        ("tests.no_such_module:A", "importing tests.no_such_module failed with ModuleNotFoundError"),
        (
            "tests.own_strategy:NoStrategy",
            "the class lacks unwrap, make_optimizer, gradient_sync, optimizer_state, load_optimizer_state",
        ),
        ("tests.own_strategy:WithoutWrap", "the class lacks wrap; derive it from"),
        ("tests.own_strategy:WithoutTraits", "traits: got NoneType; allowed: a StrategyTraits"),
    ],
)
def test_an_invalid_strategy_class_is_one_error(name: str, problem: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        load_strategy_class(name)
    assert str(caught.value).startswith(f"strategy {name!r}: ") and problem in str(caught.value)


def test_no_user_code_refuses_it(experiment: Experiment) -> None:
    with pytest.raises(ExperimentError) as caught:
        check_no_user_code(experiment, Path("f.yaml"))
    allowed = f"--no-user-code allows built-in strategies only: {', '.join(BUILTIN_TRAITS)}"
    assert caught.value.problems == (f"grid.strategy: got {ZERO1!r}; {allowed}",)


FILE = """
name: own
workload: mlp
grid: {model: [small], strategy: [single, "own_strategy:Zero1", "own_strategy:Unsynchronised"], devices: [1, 2],
       per_device_batch_size: [8]}
exclude: [{strategy: single, devices: 2}]
optimizer: {name: Adam, lr: 0.001}
throughput: {blocks: 1, warmup_steps: 2, warmup_rounds: 2, windows: 1, window_steps: 2, window_seconds: 0, twin: false,
  explain: false}
preflight: false
launcher: torchrun
"""


@pytest.mark.slow
def test_it_trains_on_several_ranks_and_one_that_trains_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None
) -> None:
    (tmp_path / "own.yaml").write_text(FILE)
    (tmp_path / "own_strategy.py").write_text((ROOT / "tests" / "own_strategy.py").read_text())
    command_here(monkeypatch, "run", tmp_path / "own.yaml", "--output", tmp_path / "out")
    (folder,) = (tmp_path / "out" / "own").iterdir()
    results = harness.load(folder)
    assert set(results.trials["outcome"]) == {"ok"}
    equivalent = results.equivalence.set_index(["strategy", "devices"])["equivalent"]
    assert equivalent["own_strategy:Zero1", 2] and not equivalent["own_strategy:Unsynchronised", 2]
    rows = results.scaling.set_index(["strategy", "devices"])
    assert (rows["speedup"] > 0).all() and pd.isna(rows["excluded"]["own_strategy:Zero1", 2])
    assert rows["equivalence"]["own_strategy:Unsynchronised", 2] == "not equivalent"
    assert results.folder.report.is_file()
