"""The wide net with layers by hand: sizes, data, that it learns, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.errors import WorkloadError
from harness.train.workloads.mlp import SIZES, Dense, Mlp
from tests.train.workloads.learning import count, learn


@pytest.mark.parametrize(("model", "parameters"), [("small", 122_410), ("medium", 4_702_510), ("large", 75_060_010)])
def test_model_sizes_are_as_documented(model: str, parameters: int) -> None:
    with torch.device("meta"):
        assert count(Mlp(model=model).build_model()) == parameters


def test_the_largest_has_ten_thousand_inputs_and_five_thousand_hidden_units() -> None:
    side, hidden = SIZES["large"]
    assert (side**2, hidden) == (10_000, 5_000)


def test_a_dense_layer_by_hand_is_torchs() -> None:
    layer, rows = Dense(5, 3), torch.randn(4, 5)
    torch.testing.assert_close(layer(rows), torch.nn.functional.linear(rows, layer.weight.T, layer.bias))


def test_digits_are_enlarged_to_the_inputs_of_the_model() -> None:
    train, validation = Mlp(model="small").datasets()
    assert (len(train), len(validation)) == (1437, 360)  # type: ignore[arg-type]
    rows, label = train[0]
    assert rows.shape == (400,) and 0 <= int(label) <= 9


def test_synthetic_numbers_come_from_their_index() -> None:
    train, validation = Mlp(data="synthetic", model="medium", samples=30).datasets()
    assert (len(train), len(validation)) == (30, 3)  # type: ignore[arg-type]
    assert torch.equal(train[12][0], train[12][0]) and not torch.equal(train[12][0], train[13][0])
    assert train[12][0].shape == (2_500,) and train[12][1] == 2


def test_every_layer_with_parameters_is_a_shard_unit() -> None:
    workload = Mlp(model="small")
    model = workload.build_model()
    assert sum(map(count, workload.shard_units(model))) == count(model)
    assert len(workload.shard_units(model)) == 3


@pytest.mark.parametrize(("width", "parameters"), [(1_250, 28_138_750), (2_500, 62_517_500), (5_000, 150_025_000)])
def test_a_reconstruction_with_three_hidden_layers(width: int, parameters: int) -> None:
    with torch.device("meta"):
        model = Mlp(model="large", layers=3, width=width, targets="inputs").build_model()
    assert count(model) == parameters
    shapes = [tuple(layer.weight.shape) for layer in model.modules() if isinstance(layer, Dense)]
    assert shapes == [(10_000, width), (width, width), (width, width), (width, 10_000)]


def test_a_reconstructions_loss_is_the_mean_squared_error_of_its_inputs() -> None:
    workload, rows = Mlp(model="small", targets="inputs"), torch.full((3, 400), 2.0)
    total, weight = workload.loss(torch.nn.ReLU(), (rows - 3, torch.zeros(3)))
    assert (float(total), float(weight)) == (3.0, 3)
    assert workload.metrics(torch.nn.ReLU(), (rows, torch.zeros(3))) == {}


def test_it_learns() -> None:
    rows = learn("mlp", "small", {"name": "SGD", "lr": 0.01, "momentum": 0.9}, 2)
    assert rows[-1]["val_accuracy"] > 0.85
    assert rows[1]["train_loss"] < rows[0]["train_loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "wide"}, "grid.model: got 'wide'"),
        ({"data": "cifar10"}, "grid.data: got 'cifar10'"),
        ({"targets": "outputs"}, "workload_options.targets: got 'outputs'; allowed: classes, inputs"),
        ({"width": 0}, "workload_options.width: got 0; allowed: a whole number from 1 to"),
        ({"layers": 0}, "workload_options.layers: got 0; allowed: a whole number from 1 to"),
        ({"samples": 1.5}, "workload_options.samples: got 1.5; allowed: a whole number from 1 to"),
    ],
)
def test_invalid_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Mlp(**arguments)
    assert str(caught.value).startswith(message)
