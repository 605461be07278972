"""ResNets on images: torchvision's resnet18 to 152, and a small CIFAR-style family that a CPU can train."""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from harness.errors import WorkloadError
from harness.train.workloads import Datasets, datasets
from harness.train.workloads.datasets import whole_number

DEPTHS = {f"resnet{6 * n + 2}": n for n in (1, 2, 3, 5, 7, 9)}
"""resnet8, 14, 20, 32, 44 and 56: the number of blocks in each of the three stages."""
NORMS = ("batch", "group")
TORCHVISION = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
SMALL_IMAGE = 64
"""Up to this side in pixels, torchvision's models get the stem of He et al.'s CIFAR networks by default."""
STEM_STRIDES = {"cifar": 1, "cifar_stride2": 2}
STEMS = (*STEM_STRIDES, "imagenet")
"""First layers of torchvision's models: a 3x3 convolution of stride 1 or 2 without pooling, or torchvision's own."""
IMAGE_SIZES = {"digits": 16, "cifar10": 32}
CLASSES = {"digits": 10, "cifar10": 10}


def make_norm(kind: str, channels: int) -> nn.Module:
    """Return batch normalisation, or group normalisation in four groups, which has no batch statistics."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(math.gcd(4, channels), channels)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make_norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = make_norm(norm, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(self.conv1(images)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class SmallResNet(nn.Module):
    """Three stages of ``blocks`` blocks with ``width``, 2 ``width`` and 4 ``width`` channels.

    Images of shape (batch, channels, height, width) -> logits of shape (batch, classes).
    """

    def __init__(self, blocks: int, *, width: int, channels: int, classes: int, norm: str = "batch") -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = make_norm(norm, width)
        shapes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.stages = nn.ModuleList(
            Block(inputs if i == 0 else outputs, outputs, stride if i == 0 else 1, norm)
            for inputs, outputs, stride in shapes
            for i in range(blocks)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.stem(images)))
        for block in self.stages:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean(dim=(2, 3)))
        return logits


class ImageClassification:
    """A ResNet with cross-entropy loss.

    ``data``: digits, cifar10, synthetic, synthetic_device or a folder with train/ and val/. ``model``: one of
    DEPTHS or TORCHVISION. ``width``: channels of the small family's first stage; ``norm``: its normalisation, batch or
    group. ``stem``: one of STEMS, for torchvision's models; by default cifar for small images. ``image_size``: side in
    pixels, by default 16 for digits, 32 for cifar10 and 224 else. ``augment``: random crops and flips of training
    images, for cifar10 and folders. ``samples``: the size of a synthetic set.
    """

    unit = "samples"
    metric_names = ("accuracy",)

    def __init__(
        self,
        data: str = "digits",
        model: str = "resnet18",
        width: int = 16,
        norm: str = "batch",
        stem: str | None = None,
        augment: bool = True,
        image_size: int | None = None,
        classes: int | None = None,
        samples: int = 50_000,
        data_folder: str | None = None,
        download: bool = False,
    ) -> None:
        if data == "cifar10" and not data_folder:
            raise WorkloadError(f"workload_options.data_folder: cifar10 needs one. {datasets.CIFAR10_HINT}")
        if norm not in NORMS or (norm != "batch" and model in TORCHVISION):
            allowed = "batch or, in the small family, group"
            raise WorkloadError(f"workload_options.norm: got {norm!r} for {model}; allowed: {allowed}")
        if stem is not None and (stem not in STEMS or model not in TORCHVISION):
            allowed = f"{', '.join(STEMS)}, for {', '.join(TORCHVISION)}"
            raise WorkloadError(f"workload_options.stem: got {stem!r} for {model}; allowed: {allowed}")
        if not isinstance(augment, bool):
            raise WorkloadError(f"workload_options.augment: got {augment!r}; allowed: true, false")
        self.norm = norm
        if model in TORCHVISION:
            try:
                importlib.import_module("torchvision")
            except (ImportError, RuntimeError, OSError) as error:
                raise WorkloadError(
                    f"torch and torchvision do not fit each other: {type(error).__name__}: {error}. Install the pair "
                    "of one release, for example with 'pip install --upgrade torch torchvision' from one index"
                ) from error
        self.data, self.model, self.width = data, model, whole_number("width", width, 4096)
        side = whole_number("image_size", image_size or IMAGE_SIZES.get(data, 224), 4096)
        classes = classes or CLASSES.get(data) or datasets.count_classes(data)
        classes = whole_number("classes", classes, 1_000_000)
        samples = whole_number("samples", samples, 2**40)
        self.source = datasets.Source(side, classes, samples, data_folder, download, augment)
        self.stem = stem or ("cifar" if side <= SMALL_IMAGE else "imagenet")

    def build_model(self) -> nn.Module:
        if self.model in DEPTHS:
            blocks, classes = DEPTHS[self.model], self.source.classes
            return SmallResNet(blocks, width=self.width, channels=3, classes=classes, norm=self.norm)
        import torchvision

        model: nn.Module = getattr(torchvision.models, self.model)(weights=None, num_classes=self.source.classes)
        if stride := STEM_STRIDES.get(self.stem):
            model.conv1 = nn.Conv2d(3, 64, 3, stride=stride, padding=1, bias=False)
            nn.init.normal_(model.conv1.weight, std=math.sqrt(2 / (64 * 3 * 3)))
            model.maxpool = nn.Identity()
        return model

    def datasets(self) -> Datasets:
        return datasets.load(self.data, self.source)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = model(images)
        total = cross_entropy(logits, labels, reduction="sum")
        return total, torch.full((), len(labels), device=total.device)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
        images, labels = batch
        correct = (model(images).argmax(dim=1) == labels).sum()
        return {"accuracy": (correct, len(labels))}
