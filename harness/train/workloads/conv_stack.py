"""Stacked convolutions that denoise an image: the usual first model on several GPUs.

Image-to-image regression with the mean squared error, or regression on random targets. Few parameters and much
arithmetic on images that keep their size: the forward and backward passes dominate, not the exchange, and a strategy
that does not scale here will not scale elsewhere. It has no batch statistics and no dropout.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.config.builtin_workloads import SYNTHETIC
from harness.errors import WorkloadError
from harness.train.workloads import Datasets, datasets

CHANNELS = {"small": (16, 32), "medium": (64, 128), "large": (128, 256, 256)}
"""Channels of the layers between the 3 of input and output: 5,955, 79,107 and 895,747 parameters."""
SIDES = {"digits": 16}
NOISE = 0.3
"""Standard deviation of the noise on pixels from 0 to 1: without denoising a loss of 0.09 and a PSNR of 10.5 dB."""
TARGETS = ("image", "random")


class ConvStack:
    """3x3 convolutions with ReLU between them, from a noisy image to the clean one.

    ``data``: digits, scikit-learn's with noise that is new in every epoch, or synthetic images. ``model``: small
    (3-16-32-3 channels), medium or large. ``image_size``: side in pixels, by default 16 for digits and 64 else.
    ``noise``: its standard deviation. ``samples``: the size of a synthetic set. Reports the PSNR in dB.
    ``targets``: random, with synthetic data, for standard normal images and targets, which no model can learn: the
    layers end at their last width (small: 3-16-32 channels), and no PSNR is reported.
    """

    unit = "samples"
    metric_names = ("psnr",)

    def __init__(
        self,
        data: str = "digits",
        model: str = "small",
        image_size: int | None = None,
        noise: float = NOISE,
        samples: int = 50_000,
        targets: str = "image",
    ) -> None:
        self.channels = CHANNELS[model]
        self.data = data
        self.image_size = datasets.whole_number("image_size", image_size or SIDES.get(data, 64), 4096)
        self.samples = datasets.whole_number("samples", samples, 2**40)
        if not isinstance(noise, int | float) or isinstance(noise, bool) or not 0 < noise <= 10:
            raise WorkloadError(f"workload_options.noise: got {noise!r}; allowed: a number above 0, at most 10")
        self.noise = float(noise)
        if targets not in TARGETS or (targets == "random" and data not in SYNTHETIC):
            allowed = f"image or, with data {' or '.join(SYNTHETIC)}, random"
            raise WorkloadError(f"workload_options.targets: got {targets!r} with data {data}; allowed: {allowed}")
        self.random = targets == "random"

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((3, *self.channels, *(() if self.random else (3,)))):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def datasets(self) -> Datasets:
        if self.data == "digits":
            train, validation = (images.repeat(1, 3, 1, 1) for images, _ in datasets.read_digits(self.image_size))
            return Noisy(train, self.noise), Noisy(validation, self.noise, fixed=True)
        return datasets.synthetic_datasets(self.draw, self.samples)

    def draw(self, index: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return an image of random pixels with noise on it, and the image; or a random image and target."""
        shape = (3, self.image_size, self.image_size)
        if self.random:
            image = torch.randn(shape, generator=generator)
            return image, torch.randn((self.channels[-1], *shape[1:]), generator=generator)
        clean = torch.rand(shape, generator=generator)
        return clean + self.noise * torch.randn(shape, generator=generator), clean

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return each image's mean squared error over pixels and channels, summed over the batch, and its samples."""
        noisy, clean = batch
        total = (model(noisy) - clean).square().mean(dim=(1, 2, 3)).sum()
        return total, torch.full((), len(clean), device=total.device)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Return the peak signal-to-noise ratio in dB of pixels from 0 to 1, from the mean squared error."""
        if self.random:
            return {}
        error = means["loss"]
        return {"psnr": -10.0 * math.log10(error) if error > 0 else math.inf}


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Noisy and clean images. The noise is new in every epoch or, if ``fixed``, depends on the index only."""

    def __init__(self, images: Tensor, noise: float, *, fixed: bool = False) -> None:
        self.images, self.noise, self.fixed = images, noise, fixed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        clean = self.images[index]
        # None: torch's default generator, which the harness seeds from (seed, epoch, index)
        generator = torch.Generator().manual_seed(index) if self.fixed else None
        return clean + self.noise * torch.randn(clean.shape, generator=generator), clean
