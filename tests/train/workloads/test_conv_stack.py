"""Noise out of images: the model, its data, that it learns, what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from harness.errors import WorkloadError
from harness.train.loader import SeededDataset
from harness.train.workloads.conv_stack import CHANNELS, ConvStack
from tests.train.workloads.learning import count, learn


def test_model_sizes_are_as_documented() -> None:
    found = {name: count(ConvStack(model=name).build_model()) for name in CHANNELS}
    assert found == {"small": 5_955, "medium": 79_107, "large": 895_747}


@pytest.mark.parametrize("model", CHANNELS)
def test_an_image_becomes_an_image(model: str) -> None:
    assert ConvStack(model=model).build_model()(torch.zeros(2, 3, 9, 9)).shape == (2, 3, 9, 9)


def test_noise_of_the_training_set_is_new_each_epoch_and_that_of_the_validation_set_is_not() -> None:
    train, validation = ConvStack(noise=0.3).datasets()
    assert (len(train), len(validation)) == (1437, 360)  # type: ignore[arg-type]

    def drawn(dataset: Any, seed: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return SeededDataset(dataset, seed).__getitems__([(epoch, 5)])[0]  # type: ignore[no-any-return]

    first, again, later = drawn(train, 1, 0), drawn(train, 1, 0), drawn(train, 1, 1)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], later[1])
    assert not torch.equal(first[0], later[0])
    assert torch.equal(drawn(validation, 1, 0)[0], drawn(validation, 2, 3)[0])
    noise = torch.stack([noisy - clean for noisy, clean in (train[i] for i in range(200))])
    assert float(noise.std()) == pytest.approx(0.3, abs=0.01)
    assert first[0].shape == (3, 16, 16)


def test_synthetic_images_come_from_their_index() -> None:
    train, validation = ConvStack(data="synthetic", image_size=8, samples=50).datasets()
    assert (len(train), len(validation)) == (50, 5)  # type: ignore[arg-type]
    assert torch.equal(train[3][0], train[3][0]) and not torch.equal(train[3][0], train[4][0])


def test_random_targets_have_the_channels_of_the_last_layer() -> None:
    workload = ConvStack(data="synthetic", image_size=8, samples=20, targets="random")
    image, target = workload.datasets()[0][3]  # type: ignore[misc]
    model = workload.build_model()
    widths = [layer.out_channels for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert (widths, model(image[None])[0].shape, target.shape) == ([16, 32], (32, 8, 8), (32, 8, 8))
    assert workload.derived({"loss": 1.0}) == {}


def test_the_loss_is_the_mean_squared_error_of_a_pixel() -> None:
    batch = (torch.zeros(4, 3, 5, 5), torch.full((4, 3, 5, 5), 0.1))
    total, weight = ConvStack().loss(torch.nn.Identity(), batch)
    assert (float(total / weight), float(weight)) == (pytest.approx(0.01), 4)


@pytest.mark.parametrize(("error", "psnr"), [(0.01, 20.0), (1.0, 0.0), (0.0, math.inf)])
def test_psnr_of_a_reconstruction(error: float, psnr: float) -> None:
    assert ConvStack().derived({"loss": error}) == {"psnr": pytest.approx(psnr)}


@pytest.mark.slow
def test_it_learns_to_take_most_of_the_noise_away() -> None:
    untouched = -20 * math.log10(0.3)
    rows = learn("conv_stack", "small", {"name": "Adam", "lr": 3e-3}, 2)
    assert rows[-1]["val_psnr"] > untouched + 10
    assert rows[-1]["val_psnr"] == pytest.approx(-10 * math.log10(rows[-1]["val_loss"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "smal"}, "grid.model: got 'smal'; did you mean 'small'?"),
        ({"data": "digit"}, "grid.data: got 'digit'; did you mean 'digits'?"),
        ({"data": "./folder"}, "grid.data: got './folder'"),
        ({"image_size": -3}, "workload_options.image_size: got -3; allowed: a whole number from 1 to 4096"),
        ({"samples": 0}, "workload_options.samples: got 0"),
        ({"noise": 0}, "workload_options.noise: got 0; allowed: a number above 0, at most 10"),
        ({"targets": "none"}, "workload_options.targets: got 'none' with data digits; allowed: image or, with data"),
        (
            {"targets": "random"},
            "workload_options.targets: got 'random' with data digits; allowed: image or, with data",
        ),
        ({"noise": "much"}, "workload_options.noise: got 'much'"),
    ],
)
def test_invalid_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        ConvStack(**arguments)
    assert str(caught.value).startswith(message)
