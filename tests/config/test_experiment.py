"""The experiment file: what is accepted, and what each mistake is answered with."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from harness.config import load as config
from harness.config.known_hardware import KNOWN_LINKS
from harness.config.sections import Throughput
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.errors import ExperimentError


def problems_of(content: dict[str, Any]) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        config.parse_experiment(content, source="file.yaml")
    count = len(caught.value.problems)
    assert str(caught.value).splitlines()[0] == f"file.yaml: {count} problem{'s' * (count > 1)}"
    return list(caught.value.problems)


def grid(**axes: Any) -> dict[str, Any]:
    return {"name": "x", "grid": {"per_device_batch_size": 8, **axes}}


def having(**sections: Any) -> dict[str, Any]:
    return {"name": "x", "grid": {"per_device_batch_size": 8}, **sections}


def test_a_grid_has_axes_a_scalar_is_one_value_and_a_dotted_key_an_option() -> None:
    options = {"optimizer.lr": [0.1, 0.2], "ddp.bucket_cap_mb": [0.5, 25.0]}
    content = grid(strategy="ddp", devices=2, **options) | {"convergence": {"epochs": 1, "seeds": [3]}}
    experiment = config.parse_experiment(content, source="f")
    assert experiment.grid is not None
    assert (experiment.grid.strategy, experiment.grid.devices) == (("ddp",), (2,))
    assert experiment.grid.options == options
    assert config.parse_experiment(experiment.model_dump(mode="json"), source="f") == experiment
    with pytest.raises(Exception, match="frozen"):
        experiment.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "seconds"), [(90, 90.0), (1.5, 1.5), ("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("1.5h", 5400.0)]
)
def test_durations_are_parsed(text: object, seconds: float) -> None:
    content = having(limits={"wall": float(text) if isinstance(text, int) else text})
    assert config.parse_experiment(content, source="f").limits.wall == seconds


def test_all_problems_are_reported_at_once() -> None:
    content = {
        "name": "../x",
        "grid": {"strategy": ["dpp"], "devices": [0, "x"], "per_device_batch_size": 8},
        "limts": {},
    }
    assert problems_of(content) == [
        "name: got '../x'; allowed: 1 to 64 letters, digits, '.', '_' and '-', not starting with a dot",
        f"grid.strategy[0]: got 'dpp'; did you mean 'dp'? (allowed: {', '.join(sorted(BUILTIN_TRAITS))}), "
        "or package.module:ClassName of your own",
        "grid.devices[0]: got 0; it should be greater than or equal to 1",
        "grid.devices[1]: got 'x'; allowed: an integer",
        "limts: unknown key; did you mean 'limits'? (allowed: allow, cells, checkpoint, cluster, convergence, cost, "
        "device, effort, env, equivalence, exclude, grid, hardware, improve, launcher, limits, loader, name, "
        "optimizer, oversubscribe, preflight, published, schedule, seed, strategy_options, throughput, training, "
        "variants, workload, workload_options)",
    ]


OWN = having(workload="own:Own")
ADAM_IN_ONE = {**grid(**{"optimizer.name": "Adam"}), "cells": [{"per_device_batch_size": 4}]}
LINEER = having(training={"lr_scaling": "lineer", "lr_base_batch_size": 8})
BASE_BATCH = "needs lr_base_batch_size, the global batch size that the optimizer's lr was chosen for"
TWICE = {"epochs": 1, "seeds": [1, 1]}
NO_OPTIMIZER = "needs a name, a class of torch.optim such as SGD; or the axis optimizer.name in each grid"
BLOCKS = "allowed: a number, decide, or {at_least, at_most, halfwidth}"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"grid": {"per_device_batch_size": 8}}, "name: is missing"),
    (having(env={"LOCAL_RANK": 0}), "env.LOCAL_RANK: is set by harness: the launcher connects the ranks by it; leave"),
    (having(env={"MASTER_PORT": [1, 2]}), "env.MASTER_PORT: is set by harness"),
    (
        having(env={"CACHE": "$HOME/x"}),
        "env.CACHE: got a value with '$'; Ray would put a variable's value in its place",
    ),
    (having(env={"X-Y": 1}), "env: got 'X-Y'; allowed: names of letters, digits and '_'"),
    (
        grid(**{"env.CUDA_VISIBLE_DEVICES": "0"}),
        "grid, env.CUDA_VISIBLE_DEVICES: is set by harness",
    ),
    (grid(env={"NCCL_P2P_DISABLE": True}), 'grid, env.NCCL_P2P_DISABLE: got True; allowed: a text such as "1", a num'),
    (having(name=3), "name: got 3; allowed: text (in quotes, if it looks like another type)"),
    (having(name=""), "name: got ''; allowed: 1 to 64 letters"),
    (having(name="x" * 65), "name: got"),
    ({"name": "x"}, "give a grid, or a list of cells, or both: there is nothing to measure"),
    (
        {"name": "x", "grid": [1]},
        "grid: got [1]; allowed: a mapping with keys such as precision, compile, compile_mode",
    ),
    ({"name": "x", "grid": {}}, "grid: give exactly one of per_device_batch_size (weak) and global_batch_size"),
    (grid(strategy="fsdpp"), "grid.strategy[0]: got 'fsdpp'; did you mean 'fsdp'?"),
    (grid(strategy=None), "grid.strategy[0]: got None"),
    (grid(devices=[]), "grid.devices: got []; allowed: at least one value"),
    (having(optimizer="SGD"), "optimizer: got 'SGD'; allowed: a mapping, {key: value}"),
    (having(exclude={"strategy": "ddp"}), "exclude: got {'strategy': 'ddp'}; allowed: a list"),
    (grid(**{"optimzer.lr": 0.1}), "grid.optimzer.lr: unknown key; did you mean 'optimizer.lr'? (allowed: options"),
    (grid(devices=2.5), "grid.devices[0]: got 2.5; allowed: an integer"),
    (grid(devices=True), "grid.devices[0]: got True; allowed: an integer"),
    (grid(devices=10**9), "grid.devices[0]: got 1000000000; it should be less than or equal to 65536"),
    (grid(nodes=0), "grid.nodes[0]: got 0"),
    (grid(per_device_batch_size=0), "grid.per_device_batch_size[0]: got 0"),
    (grid(per_device_batch_size=10**12), "grid.per_device_batch_size[0]: got 1000000000000"),
    (grid(compile=1), "grid.compile[0]: got 1; allowed: true or false"),
    (grid(precision="fp17"), "grid.precision[0]: got 'fp17'; did you mean 'fp16'?"),
    (grid(number=3), "grid.number: unknown key"),
    (having(rule=3), "rule: unknown key"),
    (grid(**{"ddp.bucket_cap_mb": "x"}), "grid, ddp.bucket_cap_mb[0]: got 'x'"),
    (having(workload="image_clasification"), "workload: got 'image_clasification'; did you mean"),
    (having(workload=7), "workload: got 7; allowed: text (in quotes, if it looks like another type)"),
    (having(cells=[{"devices": 1}]), "cells[0]: give exactly one of per_device_batch_size"),
    (having(cells={"devices": 1}), "cells: got {'devices': 1}"),
    (having(exclude=[{"stratgy": "ddp"}]), "exclude[0]: unknown axis 'stratgy'; did you mean 'strategy'?"),
    (having(strategy_options={"zero 1:A": {"x": 1}}), "strategy_options.zero 1:A: unknown key"),
    (having(strategy_options={"ddq": {}}), "strategy_options.ddq: unknown key; did you mean 'ddp'?"),
    (having(strategy_options={"ddp": {"bucket_cap_mb": -1}}), "strategy_options.ddp.bucket_cap_mb[0]: got -1"),
    (having(strategy_options={"ddp": {"bucket_cap_mb": 0}}), "strategy_options.ddp.bucket_cap_mb[0]: got 0"),
    (having(strategy_options={"dp": {"x": 1}}), "strategy_options.dp.x: unknown key; nothing is allowed here"),
    (having(workload_options=[1]), "workload_options: got [1]"),
    (having(workload_options={"width": float("inf")}), "workload_options.width: got inf"),
    (having(workload_options={"width": {"a": 1}}), "workload_options.width: got a mapping"),
    (having(workload_options={"width": [[1, [float("nan")]]]}), "workload_options.width: got [[1, [nan]]]"),
    (having(workload_options={"width": 2**63}), "workload_options.width: got an integer of more than 63"),
    (having(workload_options={"day": date(2026, 1, 1)}), "workload_options.day: got a date, datetime.date(2026"),
    (having(workload_options={"blob": [b"x"]}), "workload_options.blob: got a bytes, b'x'; allowed: text,"),
    (having(workload_options={f"o{n}": 1 for n in range(101)}), "workload_options: got {'o0': 1, 'o1': 1"),
    (having(exclude=[{"model": {"a": 1}}]), "exclude[0].model: got a mapping"),
    (having(workload="own:Class\n"), "workload: got 'own:Class\\n'"),
    (grid(options=3, **{"optimizer.lr": 1}), "grid: options: got 3; write optimizer.lr and the like"),
    (grid(options={"x.y": 1}), "grid: options: unknown axis 'x.y'"),
    (having(optimizer={"name": "SGD", "lr": float("nan")}), "optimizer.lr: got nan; allowed: finite numbers"),
    (grid(**{"schedule.T_max": [3, 4]}), "schedule: needs a name"),
    (ADAM_IN_ONE, f"optimizer: {NO_OPTIMIZER}"),
    (having(loader={"workers": 1000}), "loader.workers[0]: got 1000"),
    (having(training={"accumulation": 0}), "training.accumulation[0]: got 0"),
    (having(training={"clip_grad_norm": 0.0}), "training.clip_grad_norm[0]: got 0.0"),
    (having(training={"clip_grad_norm": float("inf")}), "training.clip_grad_norm[0]: got inf"),
    (LINEER, "training.lr_scaling[0]: got 'lineer'; did you mean 'linear'? (allowed: linear, none, sqrt)"),
    (having(training={"lr_scaling": ["none", "sqrt"]}), f"training: lr_scaling: {BASE_BATCH}"),
    (grid(**{"training.lr_scaling": ["none", "linear"]}), "grid, training.lr_scaling: needs lr_base_batch_size"),
    (grid(**{"training.accumulation": [1, "2"]}), "grid, training.accumulation[1]: got '2'"),
    (having(checkpoint={"every": 1}), "checkpoint: needs a convergence section; only its trials have epochs"),
    (having(throughput={"blocks": 0}), "throughput.blocks: got 0"),
    (having(throughput={"blocks": "many"}), f"throughput.blocks: got 'many'; {BLOCKS}"),
    (having(throughput={"window_seconds": -1}), "throughput.window_seconds: got -1"),
    (having(throughput=None), "throughput and convergence are both off"),
    (having(convergence={}), "convergence.epochs: is missing"),
    (having(convergence=TWICE), "convergence: seeds: got [1, 1]; each seed may appear only once"),
    (having(convergence={"epochs": 1, "seeds": [-1]}), "convergence.seeds[0]: got -1"),
    (having(convergence={"epochs": 1, "target": {"metric": "a"}}), "convergence.target: give exactly one of"),
    (having(convergence={"epochs": 1, "target": {"at_least": 1.0}}), "convergence.target.metric: is missing"),
    (having(convergence={"epochs": 1, "only": {"modle": "x"}}), "convergence.only: unknown axis 'modle'"),
    (having(limits={"wall": "2 hours"}), "limits.wall: got '2 hours'; allowed: a number of seconds"),
    (having(limits={"wall": "0s"}), "limits.wall: got '0s'"),
    (having(throughput={"wait_for_quiet": True}), "throughput.wait_for_quiet: got True; allowed: a number of seconds"),
    (having(throughput={"wait_for_quiet": math.inf}), "throughput.wait_for_quiet: got inf; it should be less than"),
    (having(limits={"attempts": 0}), "limits.attempts: got 0"),
    (having(cluster={"wait_for": "10 minutes"}), "cluster.wait_for: got '10 minutes'; allowed: a number of seconds"),
    (having(cluster={"wait_for": 0}), "cluster.wait_for: got 0"),
    (having(cluster={}), "cluster.wait_for: "),
    (having(limits={"device_hours": 0}), "limits.device_hours: got 0"),
    (having(limits={"device_hours": float("nan")}), "limits.device_hours: got nan"),
    (having(limits={"cost": -1.0}), "limits.cost: got -1.0"),
    (having(limits={"cost": 1}), "limits.cost: needs the price of a device, as cost: {per_device_hour: 2.5"),
    (having(cost={"per_device_hour": -2.5, "currency": "USD"}), "cost.per_device_hour: got -2.5"),
    (having(cost={"per_device_hour": float("inf"), "currency": "USD"}), "cost.per_device_hour: got inf"),
    (having(cost={"per_device_hour": 2.5, "currency": False}), "cost.currency: got False"),
    (having(cost={"per_device_hour": 2.5}), "cost.currency: "),
    (having(device="gpu"), "device: got 'gpu'; did you mean 'cuda'? (allowed: auto, cpu, cuda)"),
    (having(seed=-1), "seed: got -1"),
    (having(variants={"a": ".", "b": "x"}), "variants: needs a workload or a strategy of your own, "),
    (OWN | {"variants": {"a": "."}}, "variants: got a alone; allowed: at least two, to compare"),
    (OWN | {"variants": {"a/b": ".", "c": "."}}, "variants.a/b"),
    (OWN | {"variants": {"a": "", "c": "."}}, "variants.a: got ''"),
    (OWN | {"variants": ["a", "b"]}, "variants: got ['a', 'b']"),
    (having(allow=["copy"]), "allow[0]: got 'copy'; did you mean 'copies'?"),
]


@pytest.mark.parametrize(("content", "start"), WRONG, ids=[start[:60] for _, start in WRONG])
def test_each_mistake_has_one_clear_answer(content: dict[str, Any], start: str) -> None:
    problems = problems_of(content)
    assert len(problems) == 1
    assert problems[0].startswith(start)


def test_relative_paths_of_data_and_checkpoints_resolve_from_the_file(tmp_path: Path) -> None:
    text = "name: x\ngrid: {data: [./images, digits], per_device_batch_size: 8}\nconvergence: {epochs: 2}\n"
    (tmp_path / "e.yaml").write_text(f"{text}checkpoint: {{every: 2, folder: kept}}\n")
    experiment = config.load_experiment(tmp_path / "e.yaml")
    assert experiment.grid and experiment.checkpoint
    assert experiment.grid.data == (str(tmp_path / "images"), "digits")
    assert (experiment.checkpoint.every, experiment.checkpoint.folder) == (2, str(tmp_path / "kept"))


@pytest.mark.parametrize(
    ("sections", "axes"),
    [
        ({}, {"optimizer.name": ["SGD", "Adam"]}),
        ({"optimizer": {"lr": 0.01}}, {"optimizer.name": ["SGD", "Adam"]}),
        ({"schedule": {"gamma": 0.9}}, {"schedule.name": ["ExponentialLR", "StepLR"], "schedule.step_size": 2}),
        ({}, {"schedule.name": ["ExponentialLR"], "schedule.gamma": [0.9, 0.99]}),
    ],
)
def test_the_name_of_an_optimizer_or_schedule_may_be_an_axis(sections: Any, axes: Any) -> None:
    experiment = config.parse_experiment({**grid(**axes), **sections}, source="f")
    resolved = experiment.model_dump(mode="json")
    assert config.parse_experiment(resolved, source="f") == experiment
    if "optimizer.name" in axes:  # SGD's default rate and momentum are no other optimizer's
        assert experiment.optimizer == sections.get("optimizer", {})
    else:
        assert experiment.optimizer == {"name": "SGD", "lr": 0.1, "momentum": 0.9}


def test_only_the_first_of_many_problems_are_listed() -> None:
    problems = problems_of({"name": "x", "grid": {"per_device_batch_size": ["x" * 1000] * 3000}})
    assert len(problems) == 51 and problems[-1] == "and 2950 more"
    assert max(map(len, problems)) <= 500


def test_variants_are_named_folders_relative_to_the_file() -> None:
    content = OWN | {"variants": {"before": "../main", "after": "."}}
    experiment = config.parse_experiment(content, source="f", home=Path("/here/work"))
    assert experiment.variants == {"before": "/here/work/../main", "after": "/here/work"}
    assert list(experiment.variants) == ["before", "after"]
    assert experiment.own_modules == ("own",)


def test_checks_that_are_allowed_are_named_by_their_files() -> None:
    for given, allowed in (({}, ()), ({"allow": ["copies", "divergence"]}, ("copies", "divergence"))):
        assert config.parse_experiment(grid() | given, source="f").allow == allowed
    assert config.parse_experiment(having(allow="copies"), source="f").allow == ("copies",)


def test_an_effort_sets_what_the_file_does_not_give() -> None:
    grid = {"name": "x", "grid": {"per_device_batch_size": 8}}

    def throughput(**more: Any) -> Throughput:
        found = config.parse_experiment({**grid, **more}, source="x").throughput
        assert found
        return found

    assert throughput() == throughput(effort="normal") == Throughput()
    quick = throughput(effort="quick")
    assert quick.blocks == 5 and quick.windows * quick.window_seconds < Throughput().window_seconds
    assert throughput(effort="quick", throughput={"blocks": 9}) == quick.model_copy(update={"blocks": 9})
    assert throughput(effort="careful", throughput={"blocks": "decide"}).most_blocks == 8
    assert throughput(effort="careful").most_blocks > Throughput().most_blocks
    without = {"effort": "quick", "throughput": None, "convergence": {"epochs": 1}}
    assert config.parse_experiment({**grid, **without}, source="x").throughput is None
    again = config.parse_experiment(
        config.parse_experiment({**grid, "effort": "quick"}, source="x").model_dump(mode="json"), source="x"
    )
    assert again.throughput == quick
    assert problems_of({**grid, "effort": ["quick"]}) and problems_of({**grid, "effort": "fast"})


def test_links_are_named_with_the_ports_of_a_node_or_given_by_figures() -> None:
    named = {"inside_a_node": "NVLink-4", "between_nodes": "8x infiniband-ndr"}
    hardware = config.parse_experiment(having(hardware=named), source="f").hardware
    assert hardware.inside_a_node and hardware.between_nodes
    assert (hardware.inside_a_node.gb_per_s, hardware.between_nodes.gb_per_s) == (450, 400)
    assert hardware.between_nodes.latency_us == KNOWN_LINKS["infiniband-ndr"].latency_us
    own = {"between_nodes": {"gb_per_s": 3, "latency_us": 50}, "memory_gb": 40, "peak_flops": {"bf16": 1e12}}
    hardware = config.parse_experiment(having(hardware=own), source="f").hardware
    assert hardware.between_nodes and hardware.between_nodes.gb_per_s == 3
    assert config.parse_experiment(having(hardware=hardware.model_dump(mode="json")), source="f").hardware == hardware


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"between_nodes": "infiniband-nrd"}, "did you mean 'infiniband-ndr'"),
        ({"between_nodes": "0x infiniband-ndr"}, "got the link '0x infiniband-ndr'"),
        ({"between_nodes": {"gb_per_s": 3}}, "latency_us"),
        ({"peak_flops": {"int4": 1}}, "int4"),
        ({"memory_gb": 0}, "memory_gb"),
    ],
)
def test_a_wrong_section_hardware_is_one_problem(section: dict[str, Any], message: str) -> None:
    (problem,) = problems_of(having(hardware=section))
    assert problem.startswith("hardware.") and message in problem


def test_the_data_of_a_filter_are_found_from_the_file_as_those_of_the_grid_are(tmp_path: Path) -> None:
    grid = {"data": ["digits", "./images"], "strategy": "single", "devices": 1, "per_device_batch_size": 8}
    filters = {
        "exclude": [{"data": "./images"}],
        "convergence": {"epochs": 1, "only": {"data": ["./images", "digits"]}},
    }
    found = config.parse_experiment({"name": "x", "grid": grid, **filters}, source="x", home=tmp_path)
    images = str(tmp_path / "images")
    assert found.grid and found.grid.data == ("digits", images)
    assert found.exclude == ({"data": images},)
    assert found.convergence and found.convergence.only == {"data": [images, "digits"]}


def test_a_target_that_nothing_can_reach_is_refused() -> None:
    target = {"metric": "val_loss", "at_most": float("nan")}
    (problem,) = problems_of(having(convergence={"epochs": 1, "target": target}))
    assert problem.startswith("convergence.target.at_most")
