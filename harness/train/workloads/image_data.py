"""Data sets of image classification: scikit-learn's digits, CIFAR-10, folders of images, synthetic images."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset

from harness.errors import WorkloadError
from harness.train.workloads import Datasets
from harness.train.workloads.synthetic import synthetic_datasets

NAMES = ("digits", "cifar10", "synthetic", "synthetic_device")
DIGITS, DIGITS_VALIDATION = 1797, 360
CIFAR10_HINT = (
    "Unpack cifar-10-python.tar.gz (from https://www.cs.toronto.edu/~kriz/cifar.html) into the folder that "
    "workload_options.data_folder names, or set workload_options.download to true on a machine with a network"
)
NOISE_STARTS, NOISE_STRIDE = 2**20, 0x9E3779B1
"""Number of starts of synthetic images in the noise; the stride is odd, so that as many images differ."""
CIFAR10_FOLDER = "cifar-10-batches-py"


@dataclass(frozen=True)
class Source:
    """The images: side in pixels, number of classes, size of a synthetic set, folder of CIFAR-10.

    ``augment``: training images of CIFAR-10 and of folders are cropped and flipped at random.
    """

    image_size: int
    classes: int
    synthetic_samples: int = 0
    folder: str | None = None
    download: bool = False
    augment: bool = True

    def draw(self, index: int, generator: torch.Generator) -> tuple[Tensor, int]:
        """Return an image of noise, a part of the process's own, and a label.

        Nothing is drawn for a sample: the loader of a fast GPU would be limited by that.
        """
        shape = (3, self.image_size, self.image_size)
        start = index * NOISE_STRIDE % NOISE_STARTS
        return _noise(math.prod(shape))[start : start + math.prod(shape)].view(shape), index % self.classes


@lru_cache(maxsize=2)
def _noise(pixels: int) -> Tensor:
    """Return standard normal numbers, the same in every process, with room for an image from every start."""
    return torch.randn(NOISE_STARTS + pixels, generator=torch.Generator().manual_seed(0))


class Images(Dataset[tuple[Tensor, int]]):
    """Images of shape (n, 3, side, side) in memory, with their labels."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


def load(name: str, source: Source) -> Datasets:
    """Return training and validation data by name, or from a folder with train/ and val/; raise WorkloadError."""
    loaders: dict[str, Callable[[Source], Datasets]] = {
        "digits": lambda s: _digits(s.image_size),
        "cifar10": _cifar10,
        "synthetic": _synthetic,
        "synthetic_device": _synthetic,
    }
    return loaders[name](source) if name in loaders else _folder(Path(name), source)


@lru_cache(maxsize=4)
def _digits(image_size: int) -> Datasets:
    """Return scikit-learn's digits in three equal channels, standardised."""
    images, labels = read_digits(image_size)
    images = ((images - images.mean()) / images.std()).expand(-1, 3, -1, -1).contiguous()
    kept, held = split_digits()
    return Images(images[kept], labels[kept]), Images(images[held], labels[held])


def read_digits(image_size: int) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 real 8x8 digits, resized to (1797, 1, side, side), from 0 to 1, and their labels."""
    table = _digits_table()
    images = torch.tensor(table[:, :64], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    labels = torch.tensor(table[:, 64], dtype=torch.int64)
    return torch.nn.functional.interpolate(images, size=image_size, mode="bilinear", align_corners=False), labels


def split_digits() -> tuple[Tensor, Tensor]:
    """Return the indices for training and for validation: the same 360 digits are always held out."""
    order = torch.randperm(DIGITS, generator=torch.Generator().manual_seed(0))
    return order[DIGITS_VALIDATION:], order[:DIGITS_VALIDATION]


def _digits_table() -> np.ndarray:
    """Return 64 pixels and the label of each digit, shape (1797, 65).

    Reads scikit-learn's file without importing it, which takes over a second in every worker process.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise WorkloadError("grid.data: digits ships with scikit-learn, which is not installed")
    file = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # another version may have another path

    return np.column_stack(load_digits(return_X_y=True))


def _synthetic(source: Source) -> Datasets:
    return synthetic_datasets(source.draw, source.synthetic_samples)


def _cifar10(source: Source) -> Datasets:
    """Return torchvision's CIFAR-10 from ``data_folder``; download it only with ``download: true``."""
    from torchvision.datasets import CIFAR10

    folder = Path(source.folder or ".").expanduser()
    present = (folder / CIFAR10_FOLDER).is_dir()
    if not present and not source.download:
        raise WorkloadError(f"data cifar10: {folder / CIFAR10_FOLDER} does not exist on this node. {CIFAR10_HINT}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # one process per node downloads, the others wait and find the files
        with FileLock(folder / ".cifar10.lock"):
            train = CIFAR10(str(folder), train=True, download=not present, transform=_transform(source, source.augment))
            validation = CIFAR10(str(folder), train=False, transform=_transform(source))
    except (OSError, RuntimeError) as error:
        raise WorkloadError(f"data cifar10: {folder}: {type(error).__name__}: {error}. {CIFAR10_HINT}") from error
    return train, validation


def count_classes(data: str) -> int:
    """Return the number of classes of a folder with train/; 1,000, as in ImageNet, if there are none to count."""
    train = Path(data) / "train"
    folders = [entry for entry in train.iterdir() if entry.is_dir()] if train.is_dir() else []
    return len(folders) or 1000


def _folder(path: Path, source: Source) -> Datasets:
    """Return train/ and val/ with one folder of images per class, read by torchvision's ImageFolder."""
    from torchvision.datasets import ImageFolder

    try:
        train = ImageFolder(str(path / "train"), transform=_transform(source, source.augment))
        validation = ImageFolder(str(path / "val"), transform=_transform(source))
    except OSError as error:
        raise WorkloadError(f"data {path}: needs train/ and val/, one folder of images a class: {error}") from error
    return train, validation


_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _transform(source: Source, augment: bool = False) -> Callable[[object], Tensor]:
    """Return what makes a standardised tensor of an image; ``augment``: with a random crop and flip before.

    The harness seeds both from (seed, epoch, sample).
    """
    from torchvision import transforms

    side = (source.image_size, source.image_size)
    crop = transforms.RandomCrop(source.image_size, padding=max(1, source.image_size // 8))
    drawn = [crop, transforms.RandomHorizontalFlip()] if augment else []
    steps = [transforms.Resize(side), *drawn, transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)]
    return transforms.Compose(steps)  # type: ignore[no-any-return]
