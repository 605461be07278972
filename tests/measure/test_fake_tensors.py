"""Fake tensors in place of a model's."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from harness.train.model import faked


class Tied(nn.Module):
    """A layer twice, one weight in two places, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(3, 3, bias=False)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.first.weight
        self.other.bias.requires_grad_(False)
        self.nothing = nn.Linear(2, 2, bias=False)
        self.register_buffer("count", torch.zeros(5, dtype=torch.int64))


def test_a_model_of_any_device_has_fake_parameters_on_the_cpu_and_shared_ones_stay_shared() -> None:
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = Tied()
        before = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
        made = faked(model, FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"))
        tensors = [*made.parameters(), *made.buffers()]
        assert made is model and len(list(made.parameters())) == 3
        assert all(isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" for tensor in tensors)
        assert made.other.weight is made.first.weight
        assert [made.first.weight.requires_grad, made.other.bias.requires_grad] == [True, False]
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in made.state_dict().items()} == before
