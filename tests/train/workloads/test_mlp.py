"""The wide net with layers by hand: sizes, data, that it learns, what it refuses."""

from __future__ import annotations

import torch

from harness.train.workloads.mlp import Dense, Mlp
from tests.train.workloads.learning import count


def test_a_dense_layer_by_hand_is_torchs() -> None:
    layer, rows = Dense(5, 3), torch.randn(4, 5)
    torch.testing.assert_close(layer(rows), torch.nn.functional.linear(rows, layer.weight.T, layer.bias))


def test_digits_are_enlarged_to_the_inputs_of_the_model() -> None:
    train, validation = Mlp(model="small").datasets()
    assert (len(train), len(validation)) == (1437, 360)  # type: ignore[arg-type]
    rows, label = train[0]
    assert rows.shape == (400,) and 0 <= int(label) <= 9


def test_every_layer_with_parameters_is_a_shard_unit() -> None:
    workload = Mlp(model="small")
    model = workload.build_model()
    assert sum(map(count, workload.shard_units(model))) == count(model)
    assert len(workload.shard_units(model)) == 3


def test_a_reconstruction_with_three_hidden_layers() -> None:
    for width, parameters in ((1_250, 28_138_750), (2_500, 62_517_500), (5_000, 150_025_000)):
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
