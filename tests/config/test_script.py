"""Experiments with ``script:``: axes that its arguments name, what counts as a step, and what each mistake gets."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.axes import OWN_PRECISION
from harness.config.load import parse_experiment
from harness.config.script import ScriptExperiment, evaluate
from harness.errors import ExperimentError
from harness.plan.grid import expand
from harness.plan.inventory import resolve
from harness.plan.planner import SCRIPT_START_S, make_plan
from tests.conftest import laptop

GRID = {"devices": [1, 2], "per_device_batch_size": [16, 32], "lr": [0.1, 0.2]}


def having(**sections: Any) -> dict[str, Any]:
    arguments = "--lr {lr} --batch {per_device_batch_size} --name 'a b' {flag}"
    grid = {**GRID, "flag": ["", "--amp"]}
    return {"name": "x", "script": "train.py", "arguments": arguments, "grid": grid} | sections


def script(**sections: Any) -> ScriptExperiment:
    experiment = parse_experiment(having(**sections), source="f")
    assert isinstance(experiment, ScriptExperiment)
    return experiment


def problems_of(**sections: Any) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        parse_experiment(having(**sections), source="f")
    return list(caught.value.problems)


def test_every_name_that_arguments_use_is_an_axis() -> None:
    experiment = script()
    cells = expand(experiment, resolve(laptop(2), request="cpu", device_counts=(1, 2))).asked
    assert len(cells) == len({cell.id for cell in cells}) == 16
    assert {cell.options["workload.lr"] for cell in cells} == {0.1, 0.2}
    assert {(cell.workload, cell.strategy, cell.precision) for cell in cells} == {("train.py", "script", OWN_PRECISION)}
    assert parse_experiment(experiment.model_dump(mode="json"), source="f") == experiment


@pytest.mark.parametrize("name", ["compile_mode", "activation_checkpointing"])
def test_what_a_program_calls_like_a_later_axis_is_its_own(name: str) -> None:
    experiment = script(
        arguments=f"--x {{{name}}}", grid={"devices": 1, "per_device_batch_size": 8, name: ["default", "a"]}
    )
    cells = expand(experiment, resolve(laptop(2), request="cpu", device_counts=(1, 2))).asked
    assert [cell.options.get(f"workload.{name}", "default") for cell in cells] == ["default", "a"]
    assert not make_plan(experiment, laptop()).skips
    assert parse_experiment(experiment.model_dump(mode="json"), source="f") == experiment
    (problem,) = problems_of(arguments="--x", grid={"devices": 1, "per_device_batch_size": 8, name: "full"})
    assert f"{name}: unknown axis, and arguments do not use it as {{{name}}}" in problem


def test_variables_of_the_environment_are_no_names_of_arguments() -> None:
    plan = make_plan(
        script(env={"OWN": 1}, grid={**GRID, "flag": "", "env": {"NCCL_ALGO": ["Ring", "Tree"]}}), laptop()
    )
    found = {(trial.cell.env["NCCL_ALGO"], *group.variables) for group in plan.groups for trial in group.trials}
    assert found == {(name, ("NCCL_ALGO", name), ("OWN", "1")) for name in ("Ring", "Tree")}


def test_an_argument_has_the_cell_s_value_and_is_left_out_if_it_is_empty() -> None:
    values = {"lr": 0.1, "per_device_batch_size": 16, "flag": ""}
    assert script().command(values) == ["--lr", "0.1", "--batch", "16", "--name", "a b"]
    assert script().command({**values, "flag": "--amp"})[-1] == "--amp"
    listed = script(arguments=["{lr}", "{per_device_batch_size}", "{flag}", "x y", 3])
    assert listed.command({**values, "lr": True, "flag": None}) == ["True", "16", "x y", "3"]
    assert script(arguments="{lr} {flag} '{\"a\": 1}' {folder}").command({**values, "folder": "/f"})[1:] == [
        '{"a": 1}',
        "/f",
    ]


def test_the_base_is_the_script_itself_on_one_device_and_no_other_trials_than_its_own_are_planned() -> None:
    plan = make_plan(script(throughput={"blocks": 3}), laptop(2))
    assert {trial.purpose for trial in plan.trials} == {"", "twin", "threads"}
    assert len([trial for trial in plan.trials if trial.purpose == "threads"]) == 3  # of the first base alone
    twins = {trial.cell for trial in plan.trials if trial.purpose == "twin"}
    assert {(cell.devices, cell.strategy) for cell in twins} == {(1, "script")} and len(twins) == 8
    windowed = make_plan(script(throughput={"blocks": 3, "windows": 2, "window_seconds": 3.0}), laptop(2))
    assert {*map(windowed.least_trial_seconds, windowed.trials)} == {SCRIPT_START_S + 6.0}
    own = {trial.check_id == trial.cell.id for trial in plan.trials if trial.cell.devices == 2}
    assert own == {True} and {trial.check_id for trial in plan.trials if trial.cell.devices == 1} == {None}


def test_the_waterfall_of_strong_scaling_needs_the_script_on_one_device_at_the_smaller_batch() -> None:
    grid = {"devices": [1, 2], "global_batch_size": [8], "lr": [0.1], "flag": ["x"]}
    purposes = {
        (trial.purpose, trial.cell.devices, trial.cell.global_batch_size)
        for trial in make_plan(script(grid=grid, throughput={"twin": False}), laptop(2)).trials
    }
    assert purposes == {("", 1, 8), ("", 2, 8), ("explain", 1, 4)}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"arguments": "--lr {lrr} {flag} {lr}"}, "arguments: {lrr} is no axis of grid; did you mean 'lr'?"),
        ({"arguments": "--lr {lr}"}, "grid.flag: unknown axis, and arguments do not use it as {flag}"),
        (
            {"grid": {**GRID, "flag": "", "compile_mode": "a"}},
            "grid.compile_mode: unknown axis, and arguments do not use it as {compile_mode}; did you mean 'compile'?",
        ),
        ({"arguments": "'"}, "arguments: No closing quotation"),
        ({"arguments": 3}, "arguments: got 3; allowed: a list"),
        ({"step": {"samples": "{lr} ** 2"}}, "step.samples: got '{lr} ** 2'; allowed: numbers, placeholders"),
        ({"step": {"samples": -1}}, "step.samples: got '-1'; allowed: numbers"),
        ({"step": {"samples": "{other}"}}, "arguments: {other} is no axis of grid"),
        ({"step": {"pause": "always"}}, "step.pause: got 'always'"),
        ({"optimizer": {"name": "Adam"}}, "optimizer: has no meaning beside script: the script has its own"),
        ({"convergence": {"epochs": 1}}, "convergence.epochs: has no meaning here: the script trains to its own end"),
        ({"convergence": {"uneven": True}}, "convergence.uneven: has no meaning here: the script has its own batches"),
        ({"convergence": {"steps": 9, "seconds": 9}}, "convergence: give steps or seconds, not both"),
        ({"convergence": {}}, "convergence.seeds: got 0, 1, 2, and arguments have no {seed}: all would train alike"),
        ({"throughput": None}, "throughput and convergence are both off: there is nothing to measure"),
        ({"workload": "mlp"}, "workload: has no meaning beside script"),
        ({"grid": {**GRID, "flag": "", "seed": [1, 2]}}, "grid.seed: is set by harness; name the axis otherwise"),
        ({"arguments": "{lr} {flag} {precision}"}, "arguments: {precision} is used, and grid has no precision"),
        ({"arguments": "{lr} {flag} {model}"}, "arguments: {model} is used, and grid has no model"),
        ({"step": {"samples": "{flag} * 2"}}, "step.samples: got '{flag} * 2'"),
        ({"oversubscribe": True}, "oversubscribe: has no meaning beside script"),
        ({"equivalence": True}, "equivalence: cannot be checked of a script"),
        ({"script": 3}, "script: got 3"),
        ({"datasets": {"train": "mine:data"}}, "datasets: has no meaning beside script: it belongs to loop"),
        ({"grid": {**GRID, "flag": "", "global_batch_size": 3}}, "grid: give exactly one of per_device_batch_size"),
    ],
)
def test_a_mistake_is_named_with_its_place(sections: dict[str, Any], problem: str) -> None:
    found = problems_of(**sections)
    assert any(each.startswith(problem) for each in found), found


def test_the_arguments_before_values_are_put_in_and_the_step_are_part_of_a_cell() -> None:
    plain, *others = (
        script(),
        script(arguments="--rate {lr} --batch {per_device_batch_size} {flag}"),
        script(step={"samples": 3}),
        script(one_rank="python"),
        script(name="other"),
    )
    machine = resolve(laptop(2), request="cpu", device_counts=(1, 2))
    ids = [{cell.id for cell in expand(each, machine).asked} for each in (plain, *others)]
    assert all(not ids[0] & each for each in ids[1:])


@pytest.mark.parametrize(
    ("expression", "value"),
    [("{n} * 40", 640.0), ("({n} + 2) // 4", 4.0), ("{n} / 32", 0.5), ("12", 12.0), ("{n} - 1", 15.0)],
)
def test_arithmetic_of_samples(expression: str, value: float) -> None:
    assert evaluate(expression, {"n": 16}) == value


@pytest.mark.parametrize(
    "expression", ["{n} ** 9", "__import__('os')", "{n}()", "1 / 0", "", "n", "1e999", "9" * 400, "-{n}", "0"]
)
def test_other_expressions_are_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"^got "):
        evaluate(expression, {"n": 16})


LOOP: dict[str, Any] = {
    "name": "x",
    "loop": "mine:train",
    "grid": {"devices": [1, 2], "per_device_batch_size": [16], "lr": [0.1]},
}


def loop(**sections: Any) -> ScriptExperiment:
    experiment = parse_experiment({**LOOP, "config": {"lr": "{lr}"}, **sections}, source="f")
    assert isinstance(experiment, ScriptExperiment)
    return experiment


def test_a_loop_s_argument_has_the_values_themselves() -> None:
    config = {"lr": "{lr}", "path": "/d/{lr}", "sizes": ["{per_device_batch_size}", 3], "name": "x"}
    values = {"lr": 0.1, "per_device_batch_size": 16}
    assert loop(config=config).config_of(values) == {"lr": 0.1, "path": "/d/0.1", "sizes": [16, 3], "name": "x"}


def test_datasets_are_of_the_user_s_modules_and_part_of_a_cell() -> None:
    plain, own, other = (loop(datasets=each) for each in ({}, {"train": "data:a"}, {"train": "data:b"}))
    assert own.own_modules == ("mine", "data") and plain.own_modules == ("mine",)
    assert parse_experiment(own.model_dump(mode="json"), source="f") == own
    assert len({each.command_code for each in (plain, own, other)}) == 3


MODES = {"datasets": {"train": "data:a"}, "grid": {**LOOP["grid"], "mode": ["train", "ingest"]}}


def test_cells_of_the_ingest_do_not_train_and_a_mode_that_config_uses_is_the_user_s_own() -> None:
    experiment = loop(**MODES, convergence={"seeds": 0})
    trials = make_plan(experiment, laptop(2)).trials
    timed = {(trial.cell.options["workload.mode"], trial.cell.traits.trains) for trial in trials if trial.timed}
    assert timed == {("train", True), ("ingest", False)}
    assert {trial.cell.options["workload.mode"] for trial in trials if trial.kind == "convergence"} == {"train"}
    own = loop(**MODES, config={"lr": "{lr}", "mode": "{mode}"})
    assert {trial.cell.traits.trains for trial in make_plan(own, laptop(2)).trials} == {True}


def test_a_loop_is_the_user_s_module_and_its_cells_share_no_worker_group() -> None:
    experiment = loop(throughput={"blocks": 1, "twin": False})
    assert experiment.own_modules == ("mine",) and experiment.programs == ()
    assert parse_experiment(experiment.model_dump(mode="json"), source="f") == experiment
    plan = make_plan(experiment, laptop(2))
    assert [len(group.trials) for group in plan.groups] == [1, 1]
    assert {(trial.cell.workload, trial.cell.strategy) for trial in plan.trials} == {("mine:train", "loop")}
    shared = make_plan(script(throughput={"blocks": 1, "twin": False}), laptop(2))
    assert [len(group.trials) for group in shared.groups] == [16]


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"loop": "mine.py"}, "loop: got 'mine.py'; allowed: package.module:function"),
        ({"script": "train.py"}, "give script or loop, not both"),
        ({"arguments": "--lr {lr}"}, "arguments: has no meaning beside loop: it belongs to script"),
        ({"workload": "mlp"}, "workload: has no meaning beside loop: the loop has its own model and data"),
        (
            {"throughput": None, "convergence": {"epochs": 3}},
            "convergence.epochs: has no meaning here: the loop trains to its own end",
        ),
        ({"launcher": ["ray", "torchrun"]}, "launcher: a loop runs under Ray Train; allowed: ray"),
        ({"config": {"a": 1}}, "grid.lr: unknown axis"),
        ({"config": {"lr": "{rate}"}}, "arguments: {rate} is no axis of grid"),
        ({"datasets": "mine:data"}, "datasets: got 'mine:data'; allowed: a mapping"),
        ({"datasets": {"train": "data.csv"}}, "datasets.train: got 'data.csv'; allowed: package.module:function"),
        ({"grid": {**LOOP["grid"], "mode": "ingest"}}, "grid.mode: belongs to a loop with datasets"),
        (
            {"datasets": {"train": "data:a"}, "grid": {**LOOP["grid"], "mode": ["train", "read"]}},
            "grid.mode: got ['read']; allowed: train, ingest",
        ),
    ],
)
def test_a_mistake_about_a_loop_is_named(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        parse_experiment({**LOOP, "config": {"lr": "{lr}"}, **sections}, source="f")
    assert any(each.startswith(problem) for each in caught.value.problems), caught.value.problems


def test_a_training_has_each_seed_on_the_most_devices_and_the_base_and_its_target_names_a_column() -> None:
    target = {"metric": "eval/acc", "at_least": 0.9}
    experiment = script(
        arguments="{lr} {per_device_batch_size} {flag} {seed}",
        convergence={"seeds": [3, 4], "target": target, "only": {"workload.lr": 0.1, "workload.flag": ""}},
        throughput=None,
    )
    settings = experiment.convergence
    assert settings and settings.target and settings.target.metric == "val_accuracy"
    assert parse_experiment(experiment.model_dump(mode="json"), source="f") == experiment
    trials = make_plan(experiment, laptop(2)).trials
    found = sorted((trial.cell.devices, trial.cell.per_device_batch_size, trial.seed, trial.kind) for trial in trials)
    assert found == [(devices, 16, seed, "convergence") for devices in (1, 2) for seed in (3, 4)]
    assert {trial.check_id == trial.cell.id for trial in trials if trial.cell.devices == 2} == {True}


@pytest.mark.parametrize(
    ("length", "words"),
    [({}, "to the program's own end"), ({"steps": 9}, "at most 9 steps"), ({"seconds": "2m"}, "at most 120 s")],
)
def test_how_long_a_script_trains_is_said(length: dict[str, Any], words: str) -> None:
    settings = script(convergence={"seeds": 0, **length}).convergence
    assert settings and settings.length == words and "contains evaluation" in settings.clock
