"""Workloads after public questions: six faults that faulty.py lacks in this form, and two that are correct."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.doctor.healthy import Healthy

FEATURES, WIDTH, CLASSES = 32, 768, 8
VOCABULARY, STEPS = 64, 24


def _points(samples: int, seed: int) -> TensorDataset:
    """Points, labelled by which of their first coordinates is largest."""
    x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :CLASSES].argmax(dim=1))


def _series(samples: int, seed: int) -> TensorDataset:
    """Series of shape (time, features), labelled by the largest mean over time."""
    x = torch.randn(samples, STEPS, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.mean(dim=1)[:, :CLASSES].argmax(dim=1))


def _texts(samples: int, seed: int) -> TensorDataset:
    """Token sequences that count upwards from a random start."""
    start = torch.randint(VOCABULARY, (samples, 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset((start + torch.arange(STEPS + 1)) % VOCABULARY)


def _body() -> list[nn.Module]:
    return [nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]


class Script(Healthy):
    """Points, a net of three layers and a summed loss."""

    strategy = "ddp"
    data = staticmethod(_points)

    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*_body(), nn.Linear(WIDTH, CLASSES))

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        return self.data(256, 0), self.data(128, 1)


class TextScript(Script):
    """Next tokens."""

    unit = "tokens"
    data = staticmethod(_texts)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        (tokens,) = batch
        target = tokens[:, 1:]
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), torch.tensor(target.numel())


class PlainListOfLayers(Script):
    """Forum "my layers are not in model.parameters()": blocks in a Python list are never moved, synced or trained."""

    strategy = "single"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inlet = nn.Linear(FEATURES, WIDTH)
            self.blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.inlet(x))
            for block in self.blocks:
                x = F.relu(block(x))
            return self.head(x)


class HiddenStatePassedIn(Script):
    """Forum "Expected hidden[0] size ... got ..." with DataParallel: (layers, batch, h) is split along the layers."""

    strategy = "dp"
    data = staticmethod(_series)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(FEATURES, 96, num_layers=2, batch_first=True)
            self.head = nn.Linear(96, CLASSES)

        def forward(self, x: Tensor, h0: Tensor, c0: Tensor) -> Tensor:
            out, _ = self.lstm(x, (h0, c0))
            return self.head(out[:, -1])

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        h0, c0 = x.new_zeros(2, x.size(0), 96), x.new_zeros(2, x.size(0), 96)
        return F.cross_entropy(model(x, h0, c0), y, reduction="sum"), torch.tensor(len(y))


class LossComputedInModel(Script):
    """Forum "gather along dimension 0, but all input tensors were scalars": dp returns a loss a device, not summed."""

    strategy = "dp"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.criterion = Script.Net(), nn.CrossEntropyLoss(reduction="sum")

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.criterion(self.net(x), y)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return model(x, y), torch.tensor(len(y))


class CallsThroughModule(Script):
    """SO "'DistributedDataParallel' object has no attribute 'encode'": .module is called, past DDP's own forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.classifier = nn.Sequential(*_body()), nn.Linear(WIDTH, CLASSES)

        def encode(self, x: Tensor) -> Tensor:
            return F.normalize(self.encoder(x), dim=1) * WIDTH**0.5

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.encode(x))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        net: Any = model.module if hasattr(model, "module") else model
        logits = net.classifier(net.encode(x))
        return F.cross_entropy(logits, y, reduction="sum"), torch.tensor(len(y))


class LossMadeAnew(Script):
    """SO "element 0 of tensors does not require grad": cured by a new tensor with requires_grad, so nothing learns."""

    strategy = "single"

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        total = torch.tensor(float(losses.sum().item()), requires_grad=True, device=x.device)
        return total, torch.tensor(len(y))


class HeadMadeInForward(Script):
    """SO "how to get the input size of the linear layer after conv": it is made in forward, new random ones a step."""

    strategy = "single"
    data = staticmethod(_series)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(FEATURES, 96, 3, padding=1), nn.ReLU(), nn.Conv1d(96, 96, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            features = F.relu(self.conv(x.transpose(1, 2))).flatten(1)
            head = nn.Linear(features.size(1), CLASSES).to(features.device)
            return head(features)


class TiedWeights(TextScript):
    """The output layer shares the embedding's weight, the question "how to tie weights"."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 96)
            self.gru = nn.GRU(96, 96, batch_first=True)
            self.head = nn.Linear(96, VOCABULARY, bias=False)
            nn.init.normal_(self.embedding.weight, std=0.1)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.gru(self.embedding(tokens))[0])


class DictOfOutputs(Script):
    """Forward takes a keyword and returns a dict of tensors, both heads of which are used."""

    strategy = "dp"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*_body())
            self.heads = nn.ModuleDict({"label": nn.Linear(WIDTH, CLASSES), "again": nn.Linear(WIDTH, FEATURES)})

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.body(x)
            return {name: head(hidden) for name, head in self.heads.items()}

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        out = model(x=batch["x"])
        label = F.cross_entropy(out["label"], batch["y"], reduction="sum")
        again = (out["again"] - batch["x"]).square().mean(dim=1).sum()
        return label + 0.1 * again, torch.tensor(len(batch["y"]))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        right = (model(x=batch["x"])["label"].argmax(dim=1) == batch["y"]).sum()
        return {"accuracy": (right, torch.tensor(len(batch["y"])))}


SCRIPT_FAULTS: dict[type[Script], str] = {
    **dict.fromkeys((PlainListOfLayers, LossMadeAnew, HeadMadeInForward), "parameter updates"),
    **dict.fromkeys((HiddenStatePassedIn, LossComputedInModel), "output shapes"),
    CallsThroughModule: "wrapper use",
}
"""The check that is to name what is wrong with a script."""
SCRIPTS = [*SCRIPT_FAULTS, TiedWeights, DictOfOutputs]
