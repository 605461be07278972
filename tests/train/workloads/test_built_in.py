"""Every built-in workload: its sizes, its synthetic data, that it learns, what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from harness.errors import WorkloadError
from harness.plan.cell import Cell
from harness.train import workloads
from harness.train.loader import SeededDataset
from tests.train.workloads.learning import count, learn

SIZES = {
    "image_classification": {"resnet20": 272_282},  # He et al. 2016, table 6: 0.27 M
    "conv_stack": {"small": 5_955, "medium": 79_107, "large": 895_747},
    "emulated_compute": {"small": 2**18, "medium": 2**20, "large": 5 * 2**20},
    # gpt2 as Hugging Face counts it: Radford et al. 2019's smallest
    "language_model": {"nano": 120_576, "micro": 842_496, "mini": 10_844_160, "small": 86_039_040, "gpt2": 124_439_808},
    "mlp": {"small": 122_410, "medium": 4_702_510, "large": 75_060_010},
    "padded_sequences": {"small": 33_735, "medium": 956_167, "large": 14_834_695},
    "segmentation": {"small": 5_457, "medium": 21_281, "large": 84_033},
}


@pytest.mark.parametrize("name", SIZES)
def test_model_sizes_are_as_documented(name: str) -> None:
    with torch.device("meta"):
        found = {model: count(workloads.load_class(name)(model=model).build_model()) for model in SIZES[name]}
    assert found == SIZES[name]


SYNTHETIC: dict[str, tuple[dict[str, Any], tuple[int, ...] | None]] = {
    "image_classification": ({"model": "resnet8", "image_size": 8, "classes": 5}, (3, 8, 8)),
    "conv_stack": ({"image_size": 8}, (3, 8, 8)),
    "language_model": ({"context": 10}, (11,)),
    "mlp": ({"model": "medium"}, (2_500,)),
    "padded_sequences": ({}, None),
    "segmentation": ({"image_size": 8}, (3, 8, 8)),
}
"""Options of each workload, and the shape of a sample."""


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_samples_come_from_their_index_and_those_of_validation_are_others(name: str) -> None:
    options, shape = SYNTHETIC[name]
    train, validation = workloads.load_class(name)(data="synthetic", samples=40, **options).datasets()
    assert (len(train), len(validation)) == (40, 4)

    def drawn(sample: Any) -> torch.Tensor:
        return next(leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor))

    known = [drawn(train[index]) for index in range(40)]
    assert torch.equal(known[3], drawn(train[3])) and not torch.equal(known[3], known[4])
    assert shape in (None, tuple(known[3].shape))
    if name in ("image_classification", "mlp"):
        assert train[12][1] == 2
    for index in range(4):
        mine = drawn(validation[index])
        assert torch.equal(mine, drawn(validation[index]))
        assert not any(mine.shape == other.shape and torch.equal(mine, other) for other in known)


@pytest.mark.parametrize(("name", "options"), [("conv_stack", {"noise": 0.3}), ("segmentation", {"image_size": 16})])
def test_what_is_drawn_for_training_is_new_each_epoch_and_for_validation_not(name: str, options: Any) -> None:
    train, validation = workloads.load_class(name)(**options).datasets()

    def drawn(dataset: Any, seed: int, epoch: int) -> torch.Tensor:
        return SeededDataset(dataset, seed).__getitems__([(epoch, 5)])[0][0]  # type: ignore[index, no-any-return]

    assert torch.equal(drawn(train, 1, 0), drawn(train, 1, 0))
    assert not torch.equal(drawn(train, 1, 0), drawn(train, 1, 1))
    assert torch.equal(drawn(validation, 1, 0), drawn(validation, 2, 3))


@pytest.mark.parametrize(
    ("name", "options", "classes", "within"),
    [("language_model", {"context": 64}, 256, 0.1), ("image_classification", {"model": "resnet8"}, 10, 0.6)],
)
def test_the_start_is_the_loss_of_guessing(name: str, options: Any, classes: int, within: float) -> None:
    torch.manual_seed(0)
    workload = workloads.load_class(name)(**options)
    train, _ = workload.datasets()
    batch = default_collate([train[index] for index in range(64)])
    with torch.no_grad():
        total, weight = workload.loss(workload.build_model(), batch)
    assert float(weight) == (64 * 64 if name == "language_model" else 64)
    assert float(total / weight) == pytest.approx(math.log(classes), abs=within)


Rows = dict[str, float]
Learned = Callable[[Rows, Rows], bool]


def accurate(least: float, loss: float) -> Learned:
    """Whether the accuracy is above ``least``, and the training's loss below this part of that of the first epoch."""
    return lambda first, last: last["val_accuracy"] > least and last["train_loss"] < loss * first["train_loss"]


ADAM, ADAMW, FAST_ADAM = {"name": "Adam", "lr": 3e-3}, {"name": "AdamW", "lr": 3e-3}, {"name": "Adam", "lr": 1e-2}
MOMENTUM, UNTOUCHED_PSNR = {"name": "SGD", "lr": 0.01, "momentum": 0.9}, -20 * math.log10(0.3)
LEARNING: dict[str, tuple[dict[str, Any], int, dict[str, Any], Learned]] = {
    "conv_stack": (ADAM, 2, {}, lambda first, last: last["val_psnr"] > UNTOUCHED_PSNR + 10),
    # perplexity: of 256; the letters' own frequencies give about 25
    "language_model": (ADAMW, 2, {"text_bytes": 60_000}, lambda first, last: last["val_perplexity"] < 30),
    "mlp": (MOMENTUM, 2, {}, accurate(0.85, 1.0)),
    "padded_sequences": (FAST_ADAM, 3, {"text_bytes": 60_000, "longest": 64}, accurate(0.55, 0.7)),
    "segmentation": (ADAM, 1, {"image_size": 16}, lambda first, last: last["val_iou"] > 0.4),
}
"""Optimizer, epochs, options, and what holds of the first and the last epoch."""


@pytest.mark.parametrize(
    "name", [name if name == "mlp" else pytest.param(name, marks=pytest.mark.slow) for name in LEARNING]
)
def test_it_learns(name: str) -> None:
    optimizer, epochs, options, learned = LEARNING[name]
    model = "nano" if name == "language_model" else "small"
    rows = learn(name, model, optimizer, epochs, **options)
    assert learned(rows[0], rows[-1]), rows
    derived = {"val_psnr": lambda loss: -10 * math.log10(loss), "val_perplexity": math.exp}
    for metric in derived.keys() & rows[-1].keys():
        assert rows[-1][metric] == pytest.approx(derived[metric](rows[-1]["val_loss"]))


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "conv_stack": [
        ({"model": "smal"}, "grid.model: got 'smal'; did you mean 'small'?"),
        ({"data": "digit"}, "grid.data: got 'digit'; did you mean 'digits'?"),
        ({"data": "./folder"}, "grid.data: got './folder'"),
        ({"image_size": -3}, "workload_options.image_size: got -3; allowed: a whole number from 1 to 4096"),
        ({"samples": 0}, "workload_options.samples: got 0"),
        ({"noise": 0}, "workload_options.noise: got 0; allowed: a number above 0, at most 10"),
        ({"targets": "none"}, "workload_options.targets: got 'none' with data digits; allowed: image or, with data"),
        ({"targets": "random"}, "workload_options.targets: got 'random' with data digits; allowed: image or, with "),
        ({"noise": "much"}, "workload_options.noise: got 'much'"),
    ],
    "emulated_compute": [
        ({"data": "digits"}, "grid.data: got 'digits'"),
        ({"model": "smal"}, "grid.model: got 'smal'; did you mean 'small'?"),
        ({"step_ms": -1}, "workload_options.step_ms: got -1; allowed: a number from 0 up to 1e+07"),
        ({"mebibytes": 0}, "workload_options.mebibytes: got 0; allowed: a number above 0"),
        ({"rank_spread": True}, "workload_options.rank_spread: got True"),
        ({"step_spread": float("nan")}, "workload_options.step_spread: got nan"),
        ({"layers": 0}, "workload_options.layers: got 0"),
        ({"seed": "x"}, "workload_options.seed: got 'x'; allowed: a whole number"),
    ],
    "image_classification": [
        ({"model": "resnet19"}, "grid.model: got 'resnet19'; did you mean 'resnet1"),
        ({"data": "digit"}, "grid.data: got 'digit'; did you mean 'digits'?"),
        ({"width": 0}, "workload_options.width: got 0; allowed: a whole number from 1 to 4096"),
        ({"width": "x"}, "workload_options.width: got 'x'"),
        ({"image_size": -3}, "workload_options.image_size: got -3"),
        ({"samples": 10**30}, "workload_options.samples: got"),
        ({"classes": True}, "workload_options.classes: got True"),
        ({"data": "cifar10"}, "workload_options.data_folder: cifar10 needs one"),
        ({"norm": "layer", "model": "resnet8"}, "workload_options.norm: got 'layer' for resnet8; allowed: batch"),
        ({"norm": "group", "model": "resnet18"}, "workload_options.norm: got 'group' for resnet18"),
        ({"stem": "small", "model": "resnet34"}, "workload_options.stem: got 'small' for resnet34; allowed: cifar, "),
        ({"stem": "cifar", "model": "resnet8"}, "workload_options.stem: got 'cifar' for resnet8; allowed: cifar, "),
        ({"augment": 0}, "workload_options.augment: got 0; allowed: true, false"),
    ],
    "language_model": [
        ({"model": "gpt3"}, "grid.model: got 'gpt3'; did you mean 'gpt2'?"),
        ({"data": "texts"}, "grid.data: got 'texts'"),
        ({"context": -1}, "workload_options.context: got -1; allowed: a whole number from 1 to 1048576"),
        ({"text_bytes": True}, "workload_options.text_bytes: got True"),
        ({"samples": 0}, "workload_options.samples: got 0"),
    ],
    "mlp": [
        ({"model": "wide"}, "grid.model: got 'wide'"),
        ({"data": "cifar10"}, "grid.data: got 'cifar10'"),
        ({"targets": "outputs"}, "workload_options.targets: got 'outputs'; allowed: classes, inputs"),
        ({"width": 0}, "workload_options.width: got 0; allowed: a whole number from 1 to"),
        ({"layers": 0}, "workload_options.layers: got 0; allowed: a whole number from 1 to"),
        ({"samples": 1.5}, "workload_options.samples: got 1.5; allowed: a whole number from 1 to"),
    ],
    "padded_sequences": [
        ({"model": "tiny"}, "grid.model: got 'tiny'"),
        ({"data": "stdlibs"}, "grid.data: got 'stdlibs'; did you mean 'stdlib'? (allowed: stdlib, synthetic, "),
        ({"longest": 0}, "workload_options.longest: got 0; allowed: a whole number from 1 to"),
        ({"text_bytes": "much"}, "workload_options.text_bytes: got 'much'"),
    ],
    "segmentation": [
        ({"model": "smal"}, "grid.model: got 'smal'; did you mean 'small'?"),
        ({"data": "cifar10"}, "grid.data: got 'cifar10'"),
        ({"image_size": 15}, "workload_options.image_size: got 15; allowed: an even number from 8 to 256"),
        ({"image_size": 6}, "workload_options.image_size: got 6; allowed: an even number from 8 to 256"),
        ({"samples": 0}, "workload_options.samples: got 0"),
    ],
}


@pytest.mark.parametrize(
    ("name", "arguments", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_invalid_options_are_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    base = Cell(name, None, None, "single", "cpu", 1, 1, "weak", 1, 1)
    with pytest.raises(WorkloadError) as caught:
        workloads.build(replace(base, workload_options=arguments))
    assert str(caught.value).startswith(message)
