"""What a model is made of, and what its steps change in it beside the optimizer: read from outside."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.doctor.unregistered import OWN
from harness.measure.equivalence import acts_by_mode
from harness.train.digests import value_digest
from harness.train.token_weights import local_part

AGAINST = 0.5
"""A parameter was moved as a step of training does if the cosine to its negative gradient exceeds this.

What keeps weights in bounds, such as a norm or a clamp, moves them in other directions.
"""


def moved_by_hand(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters that moved against the gradient they have; called before the optimizer steps.

    ``before``: this rank's values at the start of the step.
    """
    return [
        name
        for name, parameter in model.named_parameters()
        if name in before and parameter.grad is not None
        if _cosine(local_part(parameter).detach() - before[name], local_part(parameter.grad)) < -AGAINST
    ]


def _cosine(a: Tensor, b: Tensor) -> float:
    lengths = float(a.double().norm() * b.double().norm())
    return float((a.double() * b.double()).sum()) / lengths if lengths > 0 else 0.0


def digests_of_state(model: nn.Module) -> Mapping[str, str]:
    """Return digests of buffers and plain attributes by name, without batch statistics, which differ by design."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        buffers = {} if isinstance(module, _BatchNorm) else dict(module.named_buffers(recurse=False))
        attributes = {name: value for name, value in vars(module).items() if name not in OWN}
        for name, value in {**buffers, **attributes}.items():
            with suppress(Exception):  # a tensor without a digest, such as one of the meta device, is not compared
                found[prefix + name] = value_digest(value, objects=name in buffers)
    return found


def layers_by_mode(model: nn.Module) -> list[str]:
    """Return the layers that act differently in train mode: dropout and batch statistics."""
    return [path or "the model" for path, module in model.named_modules() if acts_by_mode(module)]


def batch_norms(model: nn.Module) -> list[str]:
    """Return the layers that use the statistics of one device's part of the batch."""
    return [
        path or "the model"
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training and not isinstance(module, nn.SyncBatchNorm)
    ]


def share_of_biases(model: nn.Module) -> float | None:
    """Return the share of the model's values that train, if all of these are biases or scales; None if not.

    What trains has one dimension at most, as biases have, and something that is frozen has more.
    """
    parameters = list(model.parameters())
    trains = [parameter for parameter in parameters if parameter.requires_grad]
    if not trains or any(p.ndim > 1 for p in trains) or all(p.ndim <= 1 for p in parameters):
        return None
    return sum(p.numel() for p in trains) / sum(p.numel() for p in parameters)
