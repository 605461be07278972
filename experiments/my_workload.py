"""A workload of one's own: a regression on made-up data. Run it with experiments/my_workload.yaml."""

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset


class Regression:
    unit = "samples"  # what throughput counts; or "tokens"

    def __init__(self, width: int = 64):
        self.width = width

    def build_model(self):
        return nn.Sequential(nn.Linear(8, self.width), nn.ReLU(), nn.Linear(self.width, 1))

    def datasets(self):  # training and validation, indexed by integers
        x = torch.randn(5000, 8, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
        return Subset(data, range(4500)), Subset(data, range(4500, 5000))

    def loss(self, model, batch):  # the sum over the batch, and the number of samples or tokens in it
        x, y = batch
        return (model(x) - y).square().sum(), torch.tensor(len(x))
