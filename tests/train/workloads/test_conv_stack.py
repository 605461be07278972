"""Noise out of images: the model, its data, that it learns, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from harness.train.workloads.conv_stack import CHANNELS, ConvStack


def test_an_image_becomes_an_image() -> None:
    for model in CHANNELS:
        assert ConvStack(model=model).build_model()(torch.zeros(2, 3, 9, 9)).shape == (2, 3, 9, 9)


def test_the_noise_has_its_spread() -> None:
    train, validation = ConvStack(noise=0.3).datasets()
    assert (len(train), len(validation)) == (1437, 360)  # type: ignore[arg-type]
    noise = torch.stack([noisy - clean for noisy, clean in (train[i] for i in range(200))])  # type: ignore[misc]
    assert float(noise.std()) == pytest.approx(0.3, abs=0.01) and noise.shape[1:] == (3, 16, 16)


def test_random_targets_have_the_channels_of_the_last_layer() -> None:
    workload = ConvStack(data="synthetic", image_size=8, samples=20, targets="random")
    image, target = workload.datasets()[0][3]  # type: ignore[misc]
    model = workload.build_model()
    widths = [layer.out_channels for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert (widths, model(image[None])[0].shape, target.shape) == ([16, 32], (32, 8, 8), (32, 8, 8))
    assert workload.derived({"loss": 1.0}) == {}


def test_the_loss_is_the_mean_squared_error_of_a_pixel_and_psnr_follows_from_it() -> None:
    batch = (torch.zeros(4, 3, 5, 5), torch.full((4, 3, 5, 5), 0.1))
    total, weight = ConvStack().loss(torch.nn.Identity(), batch)
    assert (float(total / weight), float(weight)) == (pytest.approx(0.01), 4)
    for error, psnr in ((0.01, 20.0), (1.0, 0.0), (0.0, math.inf)):
        assert ConvStack().derived({"loss": error}) == {"psnr": pytest.approx(psnr)}
