"""Segmentation: which pixels of an image belong to a digit that was pasted on a part of a photograph.

A network with a contracting and an expanding half and a skip connection, one output a pixel, trained with the binary
cross-entropy. It has no batch statistics and no dropout.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate
from torch.utils.data import Dataset

from harness.errors import WorkloadError
from harness.train.workloads import Datasets, datasets

WIDTHS = {"small": 8, "medium": 16, "large": 32}
"""Channels of the first layer: 5,457, 21,281 and 84,033 parameters."""
PHOTOGRAPHS = ("china.jpg", "flower.jpg")
FOREGROUND = 4 / 16
"""Pixels of a digit above 4 of 16 are its foreground."""
DIGIT = 8
"""Side of scikit-learn's digits in pixels."""
MOST_SIDE = 256


class UNet(nn.Module):
    """Images of shape (batch, 3, side, side), side even -> logits of shape (batch, side, side)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = torch.relu(self.enter(images))
        coarse = torch.relu(self.middle(torch.relu(self.down(fine))))
        both = torch.cat([fine, interpolate(coarse, scale_factor=2.0, mode="nearest")], dim=1)
        logits: Tensor = self.head(torch.relu(self.up(both))).squeeze(1)
        return logits


class Segmentation:
    """A small U-Net with the binary cross-entropy of a pixel.

    ``data``: digits for scikit-learn's digits on parts of its two photographs, or synthetic numbers. ``model``: small,
    medium or large. ``image_size``: side in pixels, an even number, by default 32. ``samples``: the size of a synthetic
    set. Reports the intersection over union of the foreground, over all validation pixels.
    """

    unit = "samples"
    metric_names = ("iou",)

    def __init__(self, data: str = "digits", model: str = "small", image_size: int = 32, samples: int = 50_000) -> None:
        self.width = WIDTHS[model]
        self.data = data
        self.image_size = datasets.whole_number("image_size", image_size, MOST_SIDE)
        if self.image_size % 2 or self.image_size < DIGIT:
            allowed = f"an even number from {DIGIT} to {MOST_SIDE}"
            raise WorkloadError(f"workload_options.image_size: got {image_size!r}; allowed: {allowed}")
        self.samples = datasets.whole_number("samples", samples, 2**40)

    def build_model(self) -> nn.Module:
        return UNet(self.width)

    def datasets(self) -> Datasets:
        if self.data == "digits":
            photographs, ((train, _), (validation, _)) = read_photographs(), datasets.read_digits(DIGIT)
            pasted = Pasted(photographs, train, self.image_size)
            return pasted, Pasted(photographs, validation, self.image_size, fixed=True)
        return datasets.synthetic_datasets(self.draw, self.samples)

    def draw(self, index: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return an image of random numbers, and a mask of random pixels."""
        side = (self.image_size, self.image_size)
        return torch.randn((3, *side), generator=generator), torch.rand(side, generator=generator).round()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return each image's mean cross-entropy over its pixels, summed over the batch, and its samples."""
        images, masks = batch
        losses = binary_cross_entropy_with_logits(model(images), masks, reduction="none")
        total = losses.mean(dim=(1, 2)).sum()
        return total, torch.full((), len(masks), device=total.device)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        images, masks = batch
        found, wanted = model(images) > 0, masks > 0.5
        return {"iou": ((found & wanted).sum(), (found | wanted).sum())}


class Pasted(Dataset[tuple[Tensor, Tensor]]):
    """Digits, enlarged, on parts of photographs: an image from -1 to 1, and a mask that is 1 where the digit is.

    The place and the digit's brightness are new in every epoch or, if ``fixed``, depend on the index only.
    """

    def __init__(self, photographs: Tensor, digits: Tensor, side: int, *, fixed: bool = False) -> None:
        self.photographs, self.side, self.fixed = photographs, side, fixed
        size = side // 2 // DIGIT * DIGIT or DIGIT
        self.digits = interpolate(digits, size=size, mode="nearest")[:, 0]

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # None: torch's default generator, which the harness seeds from (seed, epoch, index)
        generator = torch.Generator().manual_seed(index) if self.fixed else None
        digit, side = self.digits[index], self.side
        draws = torch.rand(6, generator=generator).tolist()
        photograph = self.photographs[int(draws[0] * len(self.photographs))]
        image = _part(photograph, draws[1:3], side).clone()
        mask = torch.zeros(side, side)
        _part(mask, draws[3:5], len(digit)).copy_(digit > FOREGROUND)
        image = torch.where(mask.bool(), 0.5 + 0.5 * draws[5], image)
        return 2 * image - 1, mask


def _part(image: Tensor, place: list[float], side: int) -> Tensor:
    """Return a square view of an image; ``place``: of its upper left corner, as shares of the room that there is."""
    rows, columns = (int(share * (size - side + 1)) for share, size in zip(place, image.shape[-2:], strict=True))
    return image[..., rows : rows + side, columns : columns + side]


@lru_cache(maxsize=1)
def read_photographs() -> Tensor:
    """Return scikit-learn's two photographs, shape (2, 3, 427, 640), from 0 to 1; raise WorkloadError without them."""
    from PIL import Image

    folder = datasets.sklearn_datasets() / "images"
    try:
        images = [np.asarray(Image.open(folder / name).convert("RGB")) for name in PHOTOGRAPHS]
    except OSError as error:
        raise WorkloadError(f"grid.data: digits needs scikit-learn's photographs in {folder}: {error}") from error
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
