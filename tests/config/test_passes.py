"""Every mistake of a file in one pass: wrong values, values that do not fit together, and nothing that follows."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from harness.config import load as config
from harness.errors import ExperimentError


def problems_of(text: str) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        config.parse_experiment(yaml.safe_load(text), source="f")
    return [problem.partition(" (allowed")[0] for problem in caught.value.problems]


def test_wrong_values_do_not_hide_what_does_not_fit_together() -> None:
    text = (
        "name: 3\n"
        "grid: {devices: many, per_device_batch_size: 8, ddp.bucket: 1, loader.workers: -1}\n"
        "checkpoint: {every: 0}\n"
        "schedule: {T_max: 3}\n"
        "training: {warmup_epochs: 1, clip_grad_norm: 1.0, clip_grad_value: 1.0, acumulation: 2}\n"
        "limts: {}\n"
    )
    assert problems_of(text) == [
        "name: got 3; allowed: text (in quotes, if it looks like another type)",
        "grid.devices[0]: got 'many'; allowed: an integer",
        "training.acumulation: unknown key; did you mean 'accumulation'?",
        "checkpoint.every: got 0; it should be greater than or equal to 1",
        "limts: unknown key; did you mean 'limits'?",
        "training: warmup_epochs: needs lr_scaling linear or sqrt; it rises from the optimizer's lr to the scaled one",
        "training: clip_grad_norm: not together with clip_grad_value; to compare them, give each a grid of its own",
        "schedule: needs a name, a class of torch.optim.lr_scheduler such as StepLR; or the axis schedule.name in each "
        "grid",
        "grid, loader.workers[0]: got -1; it should be greater than or equal to 0",
        "grid, ddp.bucket: unknown key; did you mean 'bucket_cap_mb'?",
    ]
    lacking = problems_of("grid: {global_batch_size: 8}\ntraining: {lr_scaling: lineer, warmup_epochs: 2}\n")
    assert lacking == ["name: is missing", "training.lr_scaling[0]: got 'lineer'; did you mean 'linear'?"]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("grid: {per_device_batch_size: no}", ["grid.per_device_batch_size[0]: got False"]),
        ("grid: {batch_size: 8}", ["grid.batch_size: unknown key"]),
        (
            "grid: {global_batch_size: 8}\nconvergence: {epoch: 3}\ncheckpoint: {}",
            ["convergence.epoch: unknown key; did you mean 'epochs'?"],
        ),
        ("grid: {model: small, per_device_batch_size: 8}\nworkload: mpl", ["workload: got 'mpl'"]),
        ("cells: [{devices: 0, per_device_batch_size: 8}]", ["cells[0].devices[0]: got 0"]),
        ("grid: {global_batch_size: 8}\nthroughput: null\nconvergence: {epochs: 0}", ["convergence.epochs: got 0"]),
    ],
)
def test_nothing_that_only_follows_from_a_mistake_is_reported(text: str, problems: list[str]) -> None:
    found = problems_of(f"name: x\n{text}\n")
    assert len(found) == len(problems), found
    assert all(one.startswith(start) for one, start in zip(found, problems, strict=True)), found


BATCHES = "grid.global_batch_size or grid.per_device_batch_size"


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ({"devices": [1, 2]}, "devices: unknown key; did you mean grid.devices?"),
        ({"blocks": 3}, "blocks: unknown key; did you mean throughput.blocks?"),
        ({"epochs": 3}, "epochs: unknown key; did you mean convergence.epochs?"),
        ({"batch_size": 3}, f"batch_size: unknown key; did you mean {BATCHES}"),
        ({"Seed": 3}, "Seed: unknown key; did you mean 'seed'?"),
        ({"throughput": {"devices": 3}}, "throughput.devices: unknown key; did you mean grid.devices?"),
        ({"throughput": {"Blocks": 3}}, "throughput.Blocks: unknown key; did you mean 'blocks'?"),
    ],
)
def test_a_key_in_the_wrong_section_is_shown_its_place(content: dict[str, Any], hint: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        config.parse_experiment({"name": "x", "grid": {"per_device_batch_size": 8}, **content}, source="f")
    assert [problem.startswith(hint) for problem in caught.value.problems] == [True], caught.value.problems


def test_a_batch_size_offers_both_kinds() -> None:
    hint = "did you mean 'global_batch_size' or 'per_device_batch_size'?"
    explained = "global: fixed over device counts (strong scaling), per device: fixed on each (weak scaling)"
    (problem,) = problems_of("name: x\ngrid: {batch: 8}\n")
    assert hint in problem
    for text in ("exclude: [{Batch_Size: 8}]", "convergence: {epochs: 1, only: {batchsize: 8}}"):
        with pytest.raises(ExperimentError) as caught:
            content = yaml.safe_load(f"name: x\ngrid: {{per_device_batch_size: 8}}\n{text}\n")
            config.parse_experiment(content, source="f")
        (problem,) = caught.value.problems
        assert hint in problem and problem.endswith(explained)


def test_a_key_that_appears_twice_is_one_of_the_problems(tmp_path: Any) -> None:
    twice = "line 3: the key 'seed' appears twice; keep one of them"
    for devices, more in (("0", ("grid.devices[0]: got 0; it should be greater than or equal to 1",)), ("1", ())):
        text = f"name: x\nseed: 1\nseed: 2\ngrid: {{devices: {devices}, per_device_batch_size: 8}}\n"
        (tmp_path / "e.yaml").write_text(text)
        with pytest.raises(ExperimentError) as caught:
            config.load_experiment(tmp_path / "e.yaml")
        assert caught.value.problems == (twice, *more)


def test_the_names_of_data_and_models_of_a_built_in_workload_are_checked_with_the_rest() -> None:
    text = (
        "name: x\ngrid: {model: [resnet19, resnet8], data: [mnist, digits, ./mine], devices: 0, global_batch_size: 8}\n"
        "cells: [{model: Resnet18, per_device_batch_size: 8}]\n"
    )
    assert problems_of(text) == [
        "grid.devices[0]: got 0; it should be greater than or equal to 1",
        "grid.model: got 'resnet19'; did you mean 'resnet18'?",
        "grid.data: got 'mnist'; allowed: cifar10, digits, synthetic, synthetic_device, or a folder's path, "
        "with a slash",
        "cells[0].model: got 'Resnet18'; did you mean 'resnet18'?",
    ]
    assert problems_of("name: x\nworkload: mlp\ngrid: {data: ./mine, global_batch_size: 8}\n") == [
        "grid.data: got './mine'; allowed: digits, synthetic, synthetic_device"
    ]
