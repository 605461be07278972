"""The built-in workload: its models, its data, what it refuses."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from harness.errors import WorkloadError
from harness.train.workloads import datasets
from harness.train.workloads.image_classification import ImageClassification
from tests.train.workloads.learning import count


@pytest.mark.parametrize("model", ["resnet8", "resnet14", "resnet20"])
def test_the_small_family_classifies_any_small_image(model: str) -> None:
    for size in (8, 16, 32):
        workload = ImageClassification(model=model, image_size=size, width=4)
        assert workload.build_model()(torch.zeros(2, 3, size, size)).shape == (2, 10)


def test_torchvisions_models_get_the_small_stem_where_images_are_small() -> None:
    small = ImageClassification(model="resnet18", data="digits").build_model()
    large = ImageClassification(model="resnet18", data="synthetic").build_model()
    assert small.conv1.kernel_size == (3, 3) and isinstance(small.maxpool, torch.nn.Identity)
    assert large.conv1.kernel_size == (7, 7) and isinstance(large.maxpool, torch.nn.MaxPool2d)
    assert count(large) == 11_689_512


@pytest.mark.parametrize(("stem", "side"), [("cifar", 32), ("cifar_stride2", 16), ("imagenet", 8)])
def test_the_stem_is_an_option_of_torchvisions_models(stem: str, side: int) -> None:
    """The side of the images in the first stage: 32 pixels by the strides of convolution and pooling."""
    model = ImageClassification(model="resnet18", data="digits", image_size=32, stem=stem).build_model()
    assert model.maxpool(model.conv1(torch.zeros(1, 3, 32, 32))).shape == (1, 64, side, side)


def test_the_loss_is_a_sum_with_its_weight_and_accuracy_counts_right_answers() -> None:
    workload = ImageClassification(model="resnet8", width=4)
    model = workload.build_model().eval()
    images, labels = torch.randn(6, 3, 16, 16), torch.arange(6)
    total, weight = workload.loss(model, (images, labels))
    assert float(weight) == 6.0
    halves = [workload.loss(model, (images[i : i + 3], labels[i : i + 3]))[0] for i in (0, 3)]
    assert total.item() == pytest.approx((halves[0] + halves[1]).item(), rel=1e-5)
    answers = torch.eye(10)[torch.tensor([1, 2, 3])]
    correct, among = workload.metrics(torch.nn.Identity(), (answers, torch.tensor([1, 2, 9])))["accuracy"]
    assert (int(correct), among) == (2, 3)


def test_digits_are_real_split_and_the_same_every_time() -> None:
    train, validation = ImageClassification(data="digits", image_size=8).datasets()
    assert (len(train), len(validation)) == (1437, 360)  # type: ignore[arg-type]
    image, label = train[0]
    assert image.shape == (3, 8, 8) and 0 <= label <= 9
    rows = {tuple(image.flatten().tolist()) for image, _ in (train[i] for i in range(1437))}
    held = {tuple(image.flatten().tolist()) for image, _ in (validation[i] for i in range(360))}
    assert not rows & held
    assert {int(validation[i][1]) for i in range(360)} == set(range(10))


def test_synthetic_images_differ_though_their_noise_is_drawn_once() -> None:
    data = ImageClassification(data="synthetic", image_size=8, samples=100).datasets()
    images = [part[index][0] for part in data for index in range(len(part))]  # type: ignore[arg-type]
    assert len({image.untyped_storage().data_ptr() for image in images}) == 1
    assert len({tuple(image.flatten().tolist()) for image in images}) == 110
    far = ImageClassification(data="synthetic", image_size=8, samples=2**40).datasets()[0]
    assert far[2**40 - 1][0].shape == (3, 8, 8)
    assert abs(float(torch.stack(images).std()) - 1.0) < 0.05


def test_missing_cifar10_is_an_error_with_file_and_place(tmp_path: Path) -> None:
    workload = ImageClassification(data="cifar10", model="resnet8", data_folder=str(tmp_path))
    with pytest.raises(WorkloadError) as caught:
        workload.datasets()
    message = str(caught.value)
    assert str(tmp_path / "cifar-10-batches-py") in message
    assert "cifar-10-python.tar.gz" in message and "workload_options.data_folder" in message
    assert "download to true" in message


def make_cifar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10's own file format, with a few images of noise, whose check sums torchvision is not to compare."""
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    target = folder / datasets.CIFAR10_FOLDER
    target.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        pixels = torch.randint(0, 256, (4, 3072), dtype=torch.uint8, generator=generator).numpy()
        (target / name).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 1, 2, 3]}))
    (target / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))


def test_cifar10_is_read_by_the_loader_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar(tmp_path, monkeypatch)
    workload = ImageClassification(data="cifar10", model="resnet8", data_folder=str(tmp_path))
    train, validation = workload.datasets()
    assert (len(train), len(validation)) == (20, 4)  # type: ignore[arg-type]
    assert train[0][0].shape == (3, 32, 32)
    torch.testing.assert_close(validation[0][0], validation[0][0])
    draws = {augment: set() for augment in (True, False)}
    for augment, seen in draws.items():
        plain = ImageClassification(data="cifar10", model="resnet8", data_folder=str(tmp_path), augment=augment)
        torch.manual_seed(0)
        seen |= {tuple(plain.datasets()[0][0][0].flatten().tolist()) for _ in range(8)}
    assert len(draws[False]) == 1 < len(draws[True])  # crops and flips are drawn anew for each access


def test_a_folder_of_images(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (20, 10), color=(10, 200, 30)).save(tmp_path / split / name / "1.png")
    workload = ImageClassification(data=str(tmp_path), model="resnet8", image_size=16)
    train, validation = workload.datasets()
    assert (len(train), len(validation)) == (2, 2)  # type: ignore[arg-type]
    assert train[0][0].shape == (3, 16, 16)
    assert workload.build_model().head.out_features == 2  # type: ignore[union-attr]
    without = ImageClassification(data=str(tmp_path / "train"), model="resnet8", image_size=16)
    with pytest.raises(WorkloadError, match="needs train/ and val/"):
        without.datasets()
