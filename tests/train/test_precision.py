"""The dtypes of forward passes in whichever thread; settings of a process that change its speed or its arithmetic."""

from __future__ import annotations

import copy
import cProfile
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.train.precision import REDUCED, Autocast, Precision, ProcessSettings, in_effect
from harness.train.ranks import Ranks, crowded, crowding, pinned
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


@pytest.mark.parametrize("precision", REDUCED)
def test_each_replica_of_dp_autocasts_in_its_thread_on_cuda(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    thread = threading.Thread(target=replicated[0], args=[torch.zeros(1)])
    thread.start()
    thread.join()
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


CPU, CUDA = Precision("fp32", "cpu"), Precision("fp32", "cuda")
ALONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (torch.device("cpu"),))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "deterministic algorithms": deterministic,
    "torch's profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "Python's profiler or debugger": cProfile.Profile,
    "autocast of the workload": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_seen_while_it_is_on_and_in_a_forward_pass_alone(mode: str) -> None:
    model = nn.Linear(2, 2)
    settings = ProcessSettings(model, CPU, "float32", compiled=False)
    with MODES[mode]():
        assert in_effect(CPU) == [mode]
        model(torch.ones(1, 2))
    assert in_effect(CPU) == []
    assert settings.names()[:1] == [mode]  # a context in loss(): off again when the step has ended
    model(torch.ones(1, 2))
    assert settings.names()[:1] == [mode] and not model._forward_hooks
    later = ProcessSettings(model, CPU, "float32", compiled=True)
    with MODES[mode]():
        assert later.names() == [mode], "switched on later, it is seen in the end"
    assert later.names() == []


@pytest.mark.parametrize(
    ("level", "ranks", "seen"), [("DETAIL", 2, True), ("INFO", 2, True), ("OFF", 2, False), ("DETAIL", 1, False)]
)
def test_debug_levels_count_between_ranks(monkeypatch: pytest.MonkeyPatch, level: str, ranks: int, seen: bool) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_debug_level", lambda: SimpleNamespace(name=level))
    assert in_effect(CPU) == ([f"TORCH_DISTRIBUTED_DEBUG={level}"] if seen else [])


@pytest.mark.parametrize(
    ("precision", "variable", "value", "seen"),
    [
        (CUDA, "CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING"),
        (CUDA, "CUDA_LAUNCH_BLOCKING", "0", None),
        (CUDA, "CUDA_LAUNCH_BLOCKING", "", None),
        (CPU, "CUDA_LAUNCH_BLOCKING", "1", None),
        (CUDA, "PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        (CUDA, "NVIDIA_TF32_OVERRIDE", "1", "NVIDIA_TF32_OVERRIDE=1"),
        (CUDA, "NVIDIA_TF32_OVERRIDE", "0", None),  # fp32 has none
        (Precision("tf32", "cuda"), "NVIDIA_TF32_OVERRIDE", "0", "NVIDIA_TF32_OVERRIDE=0"),
        (Precision("tf32", "cuda"), "NVIDIA_TF32_OVERRIDE", "1", None),
    ],
)
def test_variables_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, variable: str, value: str, seen: str | None
) -> None:
    before = torch.get_float32_matmul_precision()
    precision.apply()
    monkeypatch.setenv(variable, value)
    assert in_effect(precision) == ([seen] if seen else [])
    torch.set_float32_matmul_precision(before)


def test_what_a_workload_switches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    CUDA.apply()
    assert in_effect(CUDA) == []
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert in_effect(CUDA) == ["cudnn.deterministic", "fp32_precision=tf32"]
    assert in_effect(CPU) == []
    CUDA.apply()


class Adapted(nn.Module):
    """A frozen layer in bfloat16, an adapter in float32, and numbers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).bfloat16().requires_grad_(False)
        self.adapter = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.frozen(x.bfloat16()).float())


class Fourier(nn.Module):
    """Complex parameters of float32, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.counts = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weights).real


class InHalf(nn.Linear):
    """Computes in bfloat16 from float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16().float()).bfloat16()


BF16 = Precision("bf16", "cpu")


@pytest.mark.parametrize(
    ("model", "precision", "x", "dtypes", "names"),
    [
        (nn.Linear(2, 2), CPU, torch.float32, "as declared", []),
        (Autocast(nn.Linear(2, 2), "cpu", torch.bfloat16), BF16, torch.float32, "as declared", []),
        (Fourier(), CPU, torch.float32, "as declared", []),
        (nn.Linear(2, 2).double(), CPU, torch.float64, "parameters float64, outputs float64", ["dtype float64"]),
        (nn.Linear(2, 2).half(), CPU, torch.float16, "parameters float16, outputs float16", ["dtype float16"]),
        (nn.Linear(2, 2).bfloat16(), CPU, torch.bfloat16, "parameters bfloat16, outputs bfloat16", ["dtype bfloat16"]),
        (Adapted(), CPU, torch.float32, "parameters bfloat16 and float32, outputs float32", ["dtype bfloat16"]),
        (InHalf(2, 2), CPU, torch.float32, "parameters float32, outputs bfloat16", ["dtype bfloat16"]),
        (nn.Linear(2, 2).bfloat16(), BF16, torch.bfloat16, "parameters bfloat16, outputs bfloat16", []),
    ],
)
def test_dtypes_are_those_of_parameters_and_outputs(
    model: nn.Module, precision: Precision, x: torch.dtype, dtypes: str, names: list[str]
) -> None:
    settings = ProcessSettings(model, precision, "as declared", compiled=False)
    model(torch.ones(1, 2, dtype=x))
    assert (settings.dtypes, settings.names()) == (dtypes, names)


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([({0}, 1), ({0}, 1)], {0}),
        ([({0, 1}, 2), ({0, 1}, 2)], {0, 1}),
        ([({0, 1, 2}, 3), ({2, 3}, 2)], {0, 1, 2, 3}),  # overlapping: five threads
        ([({0}, 1), ({1}, 1), ({0}, 1)], {0}),
        ([({0}, 1), ({1}, 1)], set()),
        ([({0, 1}, 1), ({0, 1}, 1)], set()),  # the share of a container: as many processors as threads
        ([(set(), 4), (set(), 4)], set()),  # free
        ([({0}, 4)], set()),  # OMP_PROC_BIND: its other threads have other processors
        ([({0}, 1), (set(), 1)], set()),
    ],
)
def test_processors_are_crowded_by_several_pinned_ranks(ranks: list[Any], found: set[int]) -> None:
    assert crowded([(frozenset(own), threads) for own, threads in ranks]) == found


@pytest.mark.skipif((os.cpu_count() or 1) < 2 or not hasattr(os, "sched_setaffinity"), reason="one processor")
def test_the_affinity_is_that_of_the_thread_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train runs a rank's training beside the main thread."""
    own = min(os.sched_getaffinity(0))
    seen: list[Any] = []

    def train() -> None:
        os.sched_setaffinity(0, {own})
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        seen.append(pinned())
        for other in (lambda v: v, lambda v: (v[0], frozenset({own + 1}), 1), lambda v: ("another host", *v[1:])):
            monkeypatch.setattr(Ranks, "gather", lambda ranks, value, other=other: [value, other(value)])
            seen.append(crowding(ALONE))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [{own}, [f"processors {own} shared by ranks"], [], []]


def test_a_model_that_the_workload_compiles_or_scripts_has_no_hook() -> None:
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager", fullgraph=True)
    with warnings.catch_warnings(action="ignore"):  # torch advises against it, and people have it
        scripted = torch.jit.script(nn.Linear(2, 2))
    for model in (compiled, scripted):
        settings = ProcessSettings(model, CPU, "float32", compiled=False)
        assert model(torch.ones(1, 2)).shape == (1, 2) and settings.names() == []
