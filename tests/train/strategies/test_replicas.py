"""Our DataParallel for CPU slots: the same result as one device, by the same five steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.train.strategies.dp import ReplicatedModule, gather, replicate, scatter


class Net(nn.Module):
    """Shared weights, a buffer that is written to, a module that is None, keyword arguments, a dict output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4)
        self.tied = self.second
        self.nothing = None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        self.seen += len(x)
        return {"out": self.tied(torch.tanh(self.second(self.first(x)))) * scale}


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x, scale=2.0)["out"].square().sum().backward()
    core = model.module if isinstance(model, ReplicatedModule) else model
    return {name: p.grad.clone() for name, p in core.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_outputs_and_gradients_are_those_of_one_device(replicas: int, batch: int) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(batch, 3)
    expected_out, expected = net(x, scale=2.0)["out"], gradients(net, x)
    model = ReplicatedModule(net, replicas)
    torch.testing.assert_close(model(x, scale=2.0)["out"], expected_out)
    found = gradients(model, x)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_replicas_are_copies_but_the_original_keeps_its_parameters_and_the_first_one_s_buffers() -> None:
    net = Net()
    ReplicatedModule(net, 2)(torch.randn(5, 3))
    assert float(net.seen) == 3.0  # chunks of 3 and 2
    copies = replicate(net, 2)
    assert next(iter(net.parameters())).is_leaf
    assert copies[0].first.weight is not net.first.weight
    assert copies[0].tied is copies[0].second


def test_evaluation_mode_reaches_the_replicas() -> None:
    model = ReplicatedModule(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)), 2).eval()
    x = torch.randn(6, 2)
    torch.testing.assert_close(model(x), model.module(x))
    with torch.no_grad():
        assert not model(x).requires_grad


def test_an_error_in_a_replica_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ReplicatedModule(nn.Linear(2, 2), 2)(torch.randn(4, 3))


@pytest.mark.parametrize("inputs", [(1, "a"), {"k": 3}, ()])
def test_values_other_than_tensors_are_shared(inputs: Any) -> None:
    assert scatter(inputs, 2) == [inputs, inputs]


def test_scatter_and_gather_are_inverse_and_scalars_become_a_vector() -> None:
    batch = (torch.arange(10).reshape(5, 2), {"y": torch.arange(5)})
    parts = scatter(batch, 3)
    assert [len(part[0]) for part in parts] == [2, 2, 1]
    joined = gather(parts)
    torch.testing.assert_close(joined[0], batch[0])
    torch.testing.assert_close(joined[1]["y"], batch[1]["y"])
    assert gather([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]
