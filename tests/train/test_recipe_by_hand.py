"""The file resnet34_cifar10.yaml beside the usual loop, written by hand: the same losses, step by step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.data import Subset
from torchvision import transforms
from torchvision.datasets import CIFAR10

from harness.config.load import load_experiment
from harness.config.sections import Convergence
from harness.measure.convergence import Epochs
from harness.measure.stepper import TrainingData
from harness.plan.planner import make_plan
from harness.train import workloads
from harness.train.loader import epoch_order
from harness.train.ranks import Ranks
from harness.train.training import Training
from tests.conftest import laptop
from tests.train.workloads.test_image_classification import make_cifar

FILE = Path(__file__).parents[2] / "experiments" / "resnet34_cifar10.yaml"
SEED, EPOCHS, IMAGES, BATCH = 1, 6, 8, 4  # 12 steps; the rate drops after the fifth epoch


def by_hand(folder: Path, initial: dict[str, torch.Tensor]) -> tuple[list[float], list[float]]:
    """The losses and the learning rates of the loop, on the same images in the same order."""
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    whole = CIFAR10(str(folder), train=True, transform=transforms.Compose([transforms.ToTensor(), normalize]))
    data = Subset(whole, range(IMAGES))
    model = torchvision.models.resnet34(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=2, padding=1, bias=False)
    model.maxpool = nn.Identity()
    model.load_state_dict(initial)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.1)
    losses, rates = [], []
    for epoch in range(EPOCHS):
        for indices in epoch_order(len(data), SEED, epoch).split(BATCH):
            images, labels = zip(*(data[int(index)] for index in indices), strict=True)
            optimizer.zero_grad()
            loss = criterion(model(torch.stack(images)), torch.tensor(labels))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return losses, rates


@pytest.mark.slow
@pytest.mark.usefixtures("no_group")
def test_the_recipe_is_the_loop_written_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device; that dp trains as one device does: tests/train/test_equivalence.py."""
    make_cifar(tmp_path, monkeypatch)
    plan = make_plan(load_experiment(FILE), laptop())
    planned = next(one.cell for one in plan.trials if one.cell.strategy == "single")
    options = {**planned.workload_options, "data_folder": str(tmp_path)}
    cell = replace(planned, workload_options=options, loader={}).at_global_batch_size(BATCH)
    workload, ranks = workloads.build(cell), Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))
    training = Training(cell, workload, SEED, ranks)
    initial = {name: value.clone() for name, value in training.unwrapped.state_dict().items()}
    train, validation = workload.datasets()
    data = TrainingData(cell, SEED, ranks, Subset(train, range(IMAGES)), validation, workload)
    run = Epochs(training, data, Convergence(epochs=EPOCHS), lambda: None)
    run.run()
    losses, rates = by_hand(tmp_path, initial)
    assert run.steps.columns["loss"] == pytest.approx(losses, rel=1e-5)
    assert run.steps.columns["learning_rate"] == pytest.approx(rates)
    assert rates == pytest.approx([0.1] * 10 + [0.01] * 2)
