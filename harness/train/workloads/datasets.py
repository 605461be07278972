"""The data sets of the built-in workloads: images, text, synthetic samples; and the checks of their options."""

from __future__ import annotations

import importlib.util
import math
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from harness.config.builtin_workloads import SYNTHETIC
from harness.errors import WorkloadError
from harness.train.workloads import Datasets

T = TypeVar("T", covariant=True)
Draw = Callable[[int, torch.Generator], T]
"""(index, generator seeded with it) -> sample. With worker processes that are not forked it must be picklable."""
DIGITS, DIGITS_VALIDATION = 1797, 360
CIFAR10_HINT = (
    "Unpack cifar-10-python.tar.gz (from https://www.cs.toronto.edu/~kriz/cifar.html) into the folder that "
    "workload_options.data_folder names, or set workload_options.download to true on a machine with a network"
)
NOISE_STARTS, NOISE_STRIDE = 2**20, 0x9E3779B1
"""Number of starts of synthetic images in the noise; the stride is odd, so that as many images differ."""
CIFAR10_FOLDER = "cifar-10-batches-py"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STDLIB = "stdlib"
HELD_OUT = 10
"""One byte in HELD_OUT is for validation: whole files or, if they are less than half of that, the end of each file."""
SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages", "dist-packages")
LOOKED_AT = 4096
"""Bytes at the start of a file; a zero among them means that the file is not text."""
Texts = tuple[tuple[bytes, ...], tuple[bytes, ...]]


def whole_number(name: str, value: object, most: int) -> int:
    """Return the workload option of this name; raise WorkloadError if it is no whole number from 1 to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise WorkloadError(f"workload_options.{name}: got {value!r}; allowed: a whole number from 1 to {most}")
    return value


class Synthetic(Dataset[T], Generic[T]):
    """The samples of a range of indices."""

    def __init__(self, draw: Draw[T], indices: range) -> None:
        self._draw, self._indices = draw, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> T:
        index = self._indices[place]
        return self._draw(index, torch.Generator().manual_seed(index))


def synthetic_datasets(draw: Draw[T], samples: int) -> tuple[Synthetic[T], Synthetic[T]]:
    """Return a training set, and a validation set of a tenth as many other samples."""
    held_out = max(1, samples // 10)
    return Synthetic(draw, range(samples)), Synthetic(draw, range(samples, samples + held_out))


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


def load(name: str, source: Source) -> Datasets:
    """Return training and validation data by name, or from a folder with train/ and val/; raise WorkloadError."""
    if name in SYNTHETIC:
        return synthetic_datasets(source.draw, source.synthetic_samples)
    if name == "digits":
        digits = read_digits(source.image_size, standardised=True)
        train, validation = (TensorDataset(images.repeat(1, 3, 1, 1), labels) for images, labels in digits)
        return train, validation
    return _cifar10(source) if name == "cifar10" else _folder(Path(name), source)


@lru_cache(maxsize=4)
def read_digits(side: int, *, standardised: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Return scikit-learn's 1,797 real 8x8 digits for training, and for validation, always the same 360 of them.

    Images resized to (n, 1, side, side), from 0 to 1 or standardised over all digits, and labels.
    """
    table = np.loadtxt(sklearn_datasets() / "data" / "digits.csv.gz", delimiter=",")  # 64 pixels and the label
    images = torch.tensor(table[:, :64], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    labels = torch.tensor(table[:, 64], dtype=torch.int64)
    images = torch.nn.functional.interpolate(images, size=side, mode="bilinear", align_corners=False)
    if standardised:
        images = (images - images.mean()) / images.std()
    order = torch.randperm(DIGITS, generator=torch.Generator().manual_seed(0))
    return [(images[part], labels[part]) for part in (order[DIGITS_VALIDATION:], order[:DIGITS_VALIDATION])]


def sklearn_datasets() -> Path:
    """Return the folder of scikit-learn's data sets; raise WorkloadError without it.

    Its import would take over a second in every worker process.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise WorkloadError("grid.data: digits ships with scikit-learn, which is not installed")
    return Path(found.submodule_search_locations[0]) / "datasets"


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


@lru_cache(maxsize=4)
def read_texts(data: str, most_bytes: int) -> Texts:
    """Return training and validation texts: the standard library's Python files, or a folder's text files.

    In the order of their paths, without hidden ones, until there are ``most_bytes``: the same on every machine with
    the same files. Raises WorkloadError if there is nothing to read.
    """
    root = Path(sysconfig.get_path("stdlib") if data == STDLIB else data)
    if not root.is_dir():
        raise WorkloadError(f"data {data}: {root} is no folder on this node; give a folder of text files")
    suffix = ".py" if data == STDLIB else ""
    texts, left = [], most_bytes
    try:
        for path in _paths(root, suffix):
            with path.open("rb") as file:
                text = file.read(left)
            if text and b"\0" not in text[:LOOKED_AT]:
                texts.append(text)
                left -= len(text)
            if not left:
                break
    except OSError as error:
        raise WorkloadError(f"data {data}: {type(error).__name__}: {error}") from error
    if not texts:
        raise WorkloadError(f"data {data}: no file with text in {root}{' ends in ' + suffix if suffix else ''}")
    return _split(texts)


def _paths(root: Path, suffix: str) -> Iterator[Path]:
    """Yield the files below a folder by name, a folder's own files before those of its subfolders."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def _split(texts: list[bytes]) -> Texts:
    """Hold out a file if, with it, no more than one byte in HELD_OUT so far is held out."""
    train: list[bytes] = []
    held: list[bytes] = []
    seen = held_bytes = 0
    for text in texts:
        seen += len(text)
        if (held_bytes + len(text)) * HELD_OUT <= seen:
            held.append(text)
            held_bytes += len(text)
        else:
            train.append(text)
    if 2 * held_bytes * HELD_OUT >= seen:
        return tuple(train), tuple(held)
    parts = [(text, len(text) - len(text) // HELD_OUT) for text in texts]
    return tuple(text[:cut] for text, cut in parts), tuple(text[cut:] for text, cut in parts)
