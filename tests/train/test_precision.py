"""The dtypes of a training's forward passes, whichever thread runs them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.train.precision import REDUCED, Precision
from harness.train.strategies import make_strategy
from harness.train.strategies.base import WrapContext, default_units

Seen = dict[str, Any]


class Looks(nn.Module):
    """Returns its input, and notes whether and in which dtype its thread autocasts on CUDA."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {"enabled": torch.is_autocast_enabled("cuda"), "dtype": torch.get_autocast_dtype("cuda")}
        return x


def in_a_fresh_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("precision", REDUCED)
def test_each_replica_of_dp_autocasts_in_its_own_thread_on_cuda(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nn.DataParallel's threads begin with CUDA's default, float16, and are given no other dtype."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(nn.Module, "to", lambda self, *_: self)
    replicated: list[nn.Module] = []
    monkeypatch.setattr(nn, "DataParallel", lambda module, device_ids: replicated.append(module) or module)
    seen: Seen = {}
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    context = WrapContext(devices, {}, default_units, Precision(precision, "cuda"))
    make_strategy("dp").wrap(context.precision.around(Looks(seen)), context)
    in_a_fresh_thread(lambda: replicated[0](torch.zeros(1)))
    assert seen == {"enabled": True, "dtype": REDUCED[precision]}


def test_outputs_of_any_structure_are_float32_and_integers_stay() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": x.bfloat16(), "b": (x.half(), [x.long()]), "c": "text"}

    out: Any = Precision("bf16", "cpu").around(Many())(torch.zeros(2))
    assert (out["a"].dtype, out["b"][0].dtype, out["b"][1][0].dtype) == (torch.float32, torch.float32, torch.int64)
    assert out["c"] == "text"


class Attributes(nn.Module):
    """A model with attributes of names that a wrapper may use, and one that is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.config, self.device, self.dtype = {"vocabulary": 2}, "its own", "its own too"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def test_a_loss_finds_the_models_attributes_under_autocast() -> None:
    model: Any = Precision("bf16", "cpu").around(Attributes())
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (each.config, each.device, each.dtype) == ({"vocabulary": 2}, "its own", "its own too")
        assert each.head.weight is each.module.head.weight
        assert type(each) is type(model) and each(torch.zeros(1, 2)).dtype == torch.float32
    with pytest.raises(AttributeError, match="'Attributes' object has no attribute 'missing'"):
        _ = model.missing
    assert {name for name, _ in model.named_parameters()} == {"module.head.weight", "module.head.bias"}
    plain = nn.Linear(1, 1)
    for precision in (Precision("fp32", "cpu"), Precision("tf32", "cuda")):
        assert precision.around(plain) is plain, "the step of a float32 model has no module more"
