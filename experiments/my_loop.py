"""A training function for Ray Train's TorchTrainer, as it is."""

from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_loop_per_worker(config: dict[str, Any]) -> None:
    x = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=config["batch_size"], shuffle=True, drop_last=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    width = config["width"]
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"epoch": epoch, "loss": loss.item()})
