"""Peak memory: what a trial used, and traces of a step, by hand and beside the profiler's allocations."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from harness.measure import peak_memory
from harness.measure.memory_trace import examine, largest_load
from harness.plan.cell import Cell
from harness.train import workloads
from harness.train.model import faked
from harness.train.training import Training
from tests import allocations
from tests.allocations import cells, estimated, measured
from tests.worlds import fork_ranks

CPU = [torch.device("cpu")]
MIB = 2**20


def test_resetting_the_peak_discards_the_old_one() -> None:
    if not peak_memory.reset_peak(CPU):
        pytest.skip("this system does not let a process reset its peak")
    peak_memory.reset_peak(CPU)
    before = peak_memory.peak(CPU)["peak_memory_bytes"]
    block = mmap.mmap(-1, 64 * MIB)  # new pages: an allocator may have as much to give again
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    high = peak_memory.peak(CPU)["peak_memory_bytes"]
    block.close()
    peak_memory.reset_peak(CPU)
    after = peak_memory.peak(CPU)["peak_memory_bytes"]
    assert before is not None and high is not None and after is not None
    assert high - max(before, after) > 50 * MIB


def test_a_gpus_peak_is_the_fullest_devices_and_a_cpu_has_no_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_memory.peak(CPU)["peak_reserved_bytes"] is None
    forgotten: list[torch.device] = []
    allocated = {torch.device("cuda", 0): 10, torch.device("cuda", 1): 30}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", allocated.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * allocated[device])
    devices = list(allocated)
    assert peak_memory.reset_peak(devices) and forgotten == devices
    result = peak_memory.peak(devices)
    assert (result["peak_memory_bytes"], result["peak_reserved_bytes"]) == (30, 60)
    assert (result["allocated_by_device"], result["reserved_by_device"]) == ("10, 30", "20, 60")
    assert result["resident_bytes"] != result["peak_memory_bytes"]


def test_adam_state_memory_by_hand() -> None:
    """A layer of 3 times 5 weights and 5 biases in fp32; Adam keeps two moments of each, and a step of each tensor."""
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.Adam(model.parameters())
    training = cast(Training, SimpleNamespace(model=model, optimizer=optimizer))
    assert peak_memory.of_state(training) == {"parameter_bytes": 80, "gradient_bytes": 0, "optimizer_bytes": 0}
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    expected = {"parameter_bytes": 80, "gradient_bytes": 80, "optimizer_bytes": 2 * 80 + 2 * 4}
    assert peak_memory.of_state(training) == expected


def test_sharded_tensors_count_their_local_shard() -> None:
    class Shard:
        grad = None

        def to_local(self) -> torch.Tensor:
            return torch.ones(7, dtype=torch.bfloat16)

    model = SimpleNamespace(parameters=lambda: [Shard()], modules=list)
    optimizer = SimpleNamespace(state={})
    result = peak_memory.of_state(cast(Training, SimpleNamespace(model=model, optimizer=optimizer)))
    assert result["parameter_bytes"] == 14


WIDTH, BATCH = 64, 256
WEIGHT, ROW = 4 * WIDTH * WIDTH, 4 * BATCH * WIDTH
"""Bytes of a layer's weight, and of a layer's output for the batch."""


class Stack(nn.Module):
    """Square layers, each with a sine, which keeps its input."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(_run, layer, x, use_reentrant=False) if self.checkpoints else _run(layer, x)
        return x


def _run(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sin()  # type: ignore[no-any-return]


class Net:
    unit = "samples"
    checkpoints = False

    def build_model(self) -> nn.Module:
        return Stack(self.checkpoints)

    def datasets(self) -> tuple[Any, Any]:
        data = TensorDataset(torch.zeros(BATCH, WIDTH))
        return data, data

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]).sum(), torch.tensor(len(batch[0]))


class Checkpointed(Net):
    checkpoints = True


class CalledTwice(Net):
    """As in contrastive training."""

    def build_model(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return (model(batch[0]) - model(batch[0].sin())).square().sum(), torch.tensor(len(batch[0]))


class ReadsAValue(Net):
    def loss(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        total, weight = super().loss(model, batch)
        return (total if total.item() < 1 else total * 2), weight


class ReadsAtBuild(Net):
    """Reads values while it is built, which only a model on the host has."""

    def build_model(self) -> nn.Module:
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        return super().build_model()


class Exits(Net):
    def build_model(self) -> nn.Module:
        raise SystemExit("no\nsuch model")


class NoData(Net):
    def datasets(self) -> tuple[Any, Any]:
        raise FileNotFoundError("no data here")


class Padded(Net):
    """Batches as wide as their longest sample; that of the fourth batch is."""

    def collate(self, samples: list[Any]) -> Any:
        (x,) = zip(*samples, strict=True)
        stacked = torch.stack(x)
        return (stacked[:, : 1 + int(stacked.max())],)

    def datasets(self) -> tuple[Any, Any]:
        data = TensorDataset(torch.arange(16).repeat_interleave(4).unsqueeze(1).expand(64, 32).clone())
        return data, data


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workloads of this module by the names of their classes."""
    monkeypatch.setattr(workloads, "build", lambda cell: globals()[cell.workload]())
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def cell(workload: str, batch: int = BATCH, **more: Any) -> Cell:
    made = Cell(workload, None, None, "single", "cpu", 1, 1, "weak", batch, batch)
    return replace(made, **{"optimizer": {"name": "SGD"}, **more})


def peak(workload: str, **more: Any) -> int:
    found = examine(cell(workload, **more))
    assert found["peak"] is not None, found["reason"]
    return found["peak"]["peak_bytes"]


def test_the_peak_of_a_net_that_a_reader_can_add_up() -> None:
    """At the end of the forward pass and the start of backward: weights, the batch, two outputs a layer."""
    found: Any = examine(cell("Net"))
    assert found["sizes"]["parameter_bytes"] == 8 * WEIGHT
    kept = 8 * WEIGHT + ROW + 16 * ROW
    assert kept <= found["peak"]["peak_bytes"] <= kept + 2 * ROW + WEIGHT
    assert found["peak"]["without_gradients_bytes"] <= found["peak"]["peak_bytes"]
    assert found["reason"] == ""


@pytest.mark.slow
def test_the_optimizer_micro_batches_precision_checkpoints_and_calls_change_the_peak_as_they_should() -> None:
    plain = peak("Net")
    assert peak("Net", optimizer={"name": "SGD", "momentum": 0.9}) == plain + 8 * WEIGHT
    assert peak("Net", training={"accumulation": 4}) < 0.5 * plain
    assert peak("Net", precision="bf16") < 0.8 * plain
    assert peak("Checkpointed") < 0.7 * plain
    assert peak("CalledTwice") > WEIGHT + 3 * ROW
    assert peak("ReadsAtBuild") == plain, "a model that needs memory to be built is built on the host"


class Blocks(Net):
    """The same net as one block of two layers after the other."""

    def build_model(self) -> nn.Module:
        whole = Stack(checkpoints=False)
        blocks = [Stack(checkpoints=False) for _ in range(4)]
        for number, block in enumerate(blocks):
            block.layers = whole.layers[2 * number : 2 * number + 2]
        return nn.Sequential(*blocks)


@pytest.mark.parametrize("placed", [{}, {"strategy": "fsdp", "devices": 2}], ids=["single", "fsdp"])
def test_of_units_that_are_computed_again_inputs_and_one_units_outputs_are_in_the_peak(placed: dict[str, Any]) -> None:
    """Of 16 outputs in 8 layers, 4 inputs of blocks and the 4 outputs of one block are left."""
    kept, again = (
        peak("Blocks", activation_checkpointing=name, global_batch_size=BATCH * placed.get("devices", 1), **placed)
        for name in ("none", "full")
    )
    assert kept - 10 * ROW <= again <= kept - 6 * ROW


def test_of_a_model_without_units_it_is_not_known() -> None:
    found = examine(cell("CalledTwice", activation_checkpointing="full"))
    assert found["peak"] is None and "activation_checkpointing applies to shard units" in found["reason"]


def test_an_update_of_all_tensors_at_once_is_traced_as_on_cuda() -> None:
    """torch's multi-tensor Adam has a temporary tensor for each parameter; at a batch of 1 it is the peak."""
    options = {"optimizer": {"name": "AdamW"}, "batch": 1}
    assert peak("Net", device="cuda", **options) - peak("Net", **options) > 4 * WEIGHT


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        ("ReadsAValue", "the code reads the value of a tensor, as .item() does, and a trace has none"),
        ("Exits", "SystemExit: no such model"),
        ("NoData", "FileNotFoundError: no data here"),
    ],
)
def test_what_cannot_be_traced_has_its_reason_in_one_line(workload: str, reason: str) -> None:
    found = examine(cell(workload))
    assert found["peak"] is None
    assert found["reason"].startswith(reason) and "\n" not in found["reason"]
    assert (found["sizes"] is not None) is (workload == "ReadsAValue")


def test_the_largest_of_the_first_padded_batches_is_traced() -> None:
    (batch,) = largest_load(cell("Padded", 8), Padded(), Padded().datasets()[0]).micro_batches
    assert batch[0].shape == (8, 16)


def test_each_rank_of_fsdp_has_a_share_and_its_shards() -> None:
    """Of four ranks: a quarter of the weights and of the momentum."""
    options: dict[str, Any] = {"strategy": "fsdp", "optimizer": {"name": "SGD", "momentum": 0.9}, "batch": 1}
    two, four = (
        peak("Net", devices=devices, global_batch_size=devices, strategy_options={}, **options) for devices in (2, 4)
    )
    assert 0.75 * 16 * WEIGHT / 4 < two - four < 1.5 * 16 * WEIGHT / 4


WORLDS = 5


@pytest.mark.slow
def test_traces_are_within_two_percent_of_real_allocations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a ResNet and a GPT, on one device, in DDP and in fully_shard over gloo; of the GPT with checkpointing too.

    Beside the smallest of five steps, and of another world if that is beyond: in some steps gloo's threads have not yet
    given up the tensors of an exchange, which in some worlds, and on a busy machine in more, is so in every step.
    """
    monkeypatch.undo()
    torch.set_num_threads(1)
    real = {name: measured(alone) for name, alone in cells(1).items()}
    planned = {name: estimated(alone) for name, alone in {**cells(1), **cells(2)}.items()}
    assert len(planned) == 9
    for world in range(WORLDS):
        (folder := tmp_path / str(world)).mkdir()
        for name, peaks in json.loads(fork_ranks(allocations.main, 2, folder).read_text()).items():
            real[name] = [*real.get(name, []), *peaks]
        errors = {name: planned[name] / min(real[name]) - 1 for name in planned}
        if all(abs(error) <= 0.02 for error in errors.values()):
            return
    raise AssertionError(errors)


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
