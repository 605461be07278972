"""A wide multilayer perceptron: many parameters, little arithmetic.

At a batch of 16 each weight is used 16 times in a step and then copied (dp), reduced (ddp) or gathered (fsdp) once:
communication dominates the step, and dp is slowest. Its layers are written by hand, with an nn.Parameter and a
matrix product, as in users' code: a strategy that works only with torch's own layers fails here.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from harness.errors import WorkloadError
from harness.train.workloads import Datasets, datasets

SIZES = {"small": (20, 200), "medium": (50, 1_250), "large": (100, 5_000)}
"""Side of the image, whose square is the number of inputs, and hidden units: 400 inputs and 200 units (122,410
parameters), 2,500 and 1,250 (4,702,510), 10,000 and 5,000 (75,060,010)."""
CLASSES = 10
TARGETS = ("classes", "inputs")


class Dense(nn.Module):
    """A dense layer by hand: ``weight`` of shape (inputs, outputs) and ``bias``, He-initialised."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * math.sqrt(2 / inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight + self.bias


class Mlp:
    """Hidden layers of equal width and a head of ten classes, with the cross-entropy.

    ``data``: digits, scikit-learn's, resized to as many pixels as the model has inputs; or synthetic numbers.
    ``model``: small, medium or large. ``samples``: the size of a synthetic set. ``layers``: the number of hidden
    layers. ``width``: their units, by default the model's. ``targets``: inputs for a network that reconstructs its
    inputs, with as many outputs and the mean squared error; it has no accuracy.
    """

    unit = "samples"
    metric_names = ("accuracy",)

    def __init__(
        self,
        data: str = "digits",
        model: str = "medium",
        samples: int = 50_000,
        layers: int = 2,
        width: int | None = None,
        targets: str = "classes",
    ) -> None:
        self.side, units = SIZES[model]
        self.data = data
        self.samples = datasets.whole_number("samples", samples, 2**40)
        self.hidden = [datasets.whole_number("width", units if width is None else width, 2**20)]
        self.hidden *= datasets.whole_number("layers", layers, 1000)
        if targets not in TARGETS:
            raise WorkloadError(f"workload_options.targets: got {targets!r}; allowed: {', '.join(TARGETS)}")
        self.reconstructs = targets == "inputs"

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        last = self.side**2 if self.reconstructs else CLASSES
        for inputs, outputs in pairwise((self.side**2, *self.hidden, last)):
            layers += [Dense(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def datasets(self) -> Datasets:
        if self.data == "digits":
            digits = datasets.read_digits(self.side, standardised=True)
            train, validation = (TensorDataset(images.flatten(1), labels) for images, labels in digits)
            return train, validation
        return datasets.synthetic_datasets(self.draw, self.samples)

    def draw(self, index: int, generator: torch.Generator) -> tuple[Tensor, int]:
        """Return random numbers and a label."""
        return torch.randn(self.side**2, generator=generator), index % CLASSES

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return [layer for layer in model.modules() if isinstance(layer, Dense)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum over the rows of the cross-entropy or, of a reconstruction, of the mean squared error."""
        rows, labels = batch
        if self.reconstructs:
            total = (model(rows) - rows).square().mean(dim=1).sum()
        else:
            total = cross_entropy(model(rows), labels, reduction="sum")
        return total, torch.full((), len(labels), device=total.device)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
        if self.reconstructs:
            return {}
        rows, labels = batch
        correct = (model(rows).argmax(dim=1) == labels).sum()
        return {"accuracy": (correct, len(labels))}
