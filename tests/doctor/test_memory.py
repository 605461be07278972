"""The measured sizes of a model, its examination if it fits on no device, and tensors that steps leave behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from harness.config.values import MIB
from harness.doctor import facts, memory_needs
from harness.doctor.examine import examine
from harness.doctor.facts import LEAST, StepMemory, least_growth
from harness.doctor.subject import Subject
from harness.plan.cell import Cell
from harness.plan.memory_forecast import Mode
from harness.system.process import no_garbage_collection
from tests.doctor.conftest import only
from tests.doctor.healthy import Healthy
from tests.doctor.ranks import cell_for, subject_of
from tests.plan.test_memory_estimate import cell, kept, sizes

pytestmark = pytest.mark.usefixtures("no_timed_checks")


class Wide(Healthy):
    """A linear layer of 8 x 1000 and a tanh, whose output is kept: 4,000 bytes a sample, and 32 of the input."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 1000), nn.Tanh(), nn.Linear(1000, 1, bias=False))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return model(x).sum(), torch.tensor(float(len(y)))


@pytest.mark.parametrize("fits", [True, False])
def test_activations_are_measured_in_each_precision(*, fits: bool) -> None:
    found = memory_needs.observe(subject_of(Wide(), modes=[Mode("fp32"), Mode("bf16")], whole_model_fits=fits))
    assert found["fp32"] == kept(4032)
    assert found["bf16"]["per_sample"] == 2016
    # autocast keeps a copy of the last weights in 2 bytes; on the meta device the model itself is cast
    assert found["bf16"]["fixed"] == (2 * 1000 if fits else 0)


class Bounded(Healthy):
    """A model whose tanh keeps its own output for the backward pass."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return model(x).tanh().sum(), torch.tensor(float(len(y)))


def test_an_examination_leaves_no_graph_behind() -> None:
    """On an H100 each examined cell of a GPT left 6 GB, which counted as the peak of all later trials."""
    memory_needs.observe(subject_of(Bounded()))
    gc.collect()
    assert not [tensor for tensor in facts.held_tensors() if tensor.grad_fn is not None]


@pytest.mark.parametrize("fits", [True, False])
def test_of_units_that_are_computed_again_the_inputs_and_the_largest_are_kept(*, fits: bool) -> None:
    """Of linear, tanh and linear the inputs: 32, 4,000 and 4,000 bytes a sample; no unit keeps anything else."""
    modes = [Mode("fp32"), Mode("fp32", checkpointed=True)]
    found = memory_needs.observe(subject_of(Wide(), modes=modes, whole_model_fits=fits))
    assert found == {"fp32": kept(4032), "fp32 checkpointed": kept(8032)}
    found = memory_needs.observe(subject_of(InBlocks(), modes=modes, whole_model_fits=fits))
    # of each block its input of 8 values and, of one, two times 1,000
    assert found == {"fp32": kept(3 * 4 * 2008), "fp32 checkpointed": kept(3 * 4 * 8 + 4 * 2000)}


class InBlocks(Wide):
    """Three blocks of a linear layer of 8 x 1000, two functions that keep their outputs, and one of 1000 x 8."""

    def build_model(self) -> nn.Module:
        blocks = [
            nn.Sequential(nn.Linear(8, 1000), nn.Tanh(), nn.Sigmoid(), nn.Linear(1000, 8, bias=False)) for _ in range(3)
        ]
        return nn.Sequential(nn.ModuleList(blocks))

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return [*model[0]]  # type: ignore[index]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        for block in self.shard_units(model):
            x = block(x)
        return x.sum(), torch.tensor(float(len(y)))


@pytest.mark.slow
def test_activations_of_a_compiled_model() -> None:
    found = memory_needs.observe(subject_of(Wide(), modes=[Mode("fp32"), Mode("fp32", compiled=True)]))
    assert 0 < found["fp32 compiled"]["per_sample"] <= found["fp32"]["per_sample"]


def test_a_precision_that_the_cell_does_not_have_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("not implemented for this type")

    monkeypatch.setattr(torch, "autocast", refuses)
    examined = subject_of(Wide(), modes=[Mode("fp32"), Mode("bf16")])
    assert list(memory_needs.observe(examined)) == ["fp32"]
    with pytest.raises(RuntimeError, match="not implemented"):
        memory_needs.observe(replace(examined, cell=replace(examined.cell, precision="bf16")))


def test_sizes_are_surveyed_without_a_device_if_the_model_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "bare_model", None)
    found: Any = memory_needs.survey(subject_of(Wide(), cell_for("fsdp", 1)))
    assert (found["parameter_bytes"], found["trainable_bytes"], found["buffer_bytes"]) == (40_000, 40_000, 0)
    assert (found["unit_bytes"], found["root_bytes"], found["on_meta"]) == (36_000, 0, False)

    monkeypatch.setattr(Wide, "build_model", None)  # a model that cannot be built
    assert memory_needs.survey(subject_of(Wide())) is None


@pytest.mark.parametrize(
    ("examined", "available", "fits"),
    [
        (cell("fsdp", optimizer={"name": "AdamW"}), 6, True),  # the update of one device: 1 + 1 + 2 + 1 GiB
        (cell("fsdp", optimizer={"name": "AdamW"}), 5, False),
        (cell("fsdp"), 5, True),
        (cell("fsdp", device="cpu", devices=2), 5, True),
        (cell("fsdp", device="cpu", devices=4), 5, False),  # 2 GiB on each of four ranks of one node
    ],
)
def test_the_whole_model_on_one_device(examined: Cell, available: int, *, fits: bool) -> None:
    model = sizes(activations={}, device_bytes=available * 2**30, host_bytes=available * 2**30)
    assert memory_needs.fits_on_one_device(model, examined) is fits


def test_a_model_larger_than_one_device_is_examined_without_being_whole_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the whole model on one device")

    for method in ("bare_model", "single_device_training"):
        monkeypatch.setattr(Subject, method, whole)
    monkeypatch.setattr(memory_needs, "fits_on_one_device", lambda facts, cell: False)
    found = examine(subject_of(Healthy(), cell_for("dp", 2), devices=2))
    assert {other.check for other in found.findings[1:]} <= {"threads"}  # of this machine
    lacks = only(found.findings[:1], "note", check="single-device reference", means="loss parameters")
    assert "gradient scaling" in lacks.means
    assert found.memory and found.memory["activations"]["fp32"]["per_sample"] > 0


def test_real_steps_and_their_reference_are_at_a_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = subject_of(Wide(), cell("ddp", training={"lr_scaling": "linear", "lr_base_batch_size": 16}))
    smaller = memory_needs.at_affordable_batch(examined, sizes(device_bytes=5 * 2**30))
    assert smaller and (smaller.cell.per_device_batch_size, smaller.cell.global_batch_size) == (8, 16)
    assert smaller.cell.lr_factor == examined.cell.lr_factor == 4.0
    assert memory_needs.at_affordable_batch(examined, sizes(device_bytes=2 * 2**30)) is None
    wide = subject_of(Wide(), cell("fsdp", devices=8))
    sharded = memory_needs.at_affordable_batch(wide, sizes(device_bytes=int(6.5 * 2**30)))
    assert sharded and not sharded.whole_model_fits  # of 0.9 x 6.5 GiB: 5.5 with shards, 6 on one device
    unchanged = memory_needs.at_affordable_batch(examined, sizes())
    assert unchanged and unchanged.cell == examined.cell
    reference = cell("ddp", devices=8)  # 256 samples: 1 + 1 + 32 GiB on one device
    assert memory_needs.global_batch_fits(sizes(), reference)
    assert not memory_needs.global_batch_fits(sizes(device_bytes=30 * 2**30), reference)


def test_an_examination_without_an_affordable_batch_names_the_checks_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_needs, "at_affordable_batch", lambda subject, facts: None)
    found = examine(subject_of(Healthy()))
    lacks = only(found.findings[-1:], "note", check="real steps", seen="one sample per device", means="no real steps")
    assert "gradient scaling" in lacks.means


HELD: list[torch.Tensor] = []


def hold() -> None:
    HELD.append(torch.zeros(LEAST))


def hold_a_graph() -> None:
    HELD.append(torch.zeros(1, requires_grad=True).sum())


def collect_and_hold(generation: int) -> None:
    gc.collect(generation)
    hold()


def leave_a_cycle() -> None:
    cycle: list[object] = [torch.zeros(LEAST)]
    cycle.append(cycle)


def kept_after(step: Callable[[], None]) -> list[int]:
    HELD.clear()
    gc.collect()
    with no_garbage_collection(), StepMemory() as memory:
        for _ in range(4):
            step()
            memory.note_step()
        return memory.kept_bytes()


COLLECTING = [(partial(collect_and_hold, generation), 4 * LEAST) for generation in range(3)]


@pytest.mark.parametrize(("step", "least"), [(hold, 4 * LEAST), (hold_a_graph, MIB), *COLLECTING])
def test_what_steps_hold_grows_also_if_they_collect_garbage(step: Callable[[], None], least: int) -> None:
    assert least_growth(kept_after(step)) >= least


def test_garbage_that_is_not_collected_yet_is_not_held_and_steps_that_keep_nothing_do_not_grow() -> None:
    assert kept_after(leave_a_cycle) == [] and least_growth(kept_after(lambda: None)) == 0


def test_a_new_tensor_at_the_address_of_an_earlier_one_counts() -> None:
    with StepMemory() as memory:
        kept = torch.zeros(LEAST)
        memory._before[id(kept)] = ref(torch.zeros(1))
        memory.note_step()
        assert memory.kept_bytes()[0] >= 4 * LEAST


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_worker_has_frozen_stays_frozen(frozen: bool) -> None:
    was_frozen = bool(gc.get_freeze_count())
    (gc.freeze if frozen else gc.unfreeze)()
    try:
        assert least_growth(kept_after(hold)) >= 4 * LEAST
        assert bool(gc.get_freeze_count()) == frozen
    finally:
        (gc.freeze if was_frozen else gc.unfreeze)()


def test_a_sparse_tensor_that_is_kept_counts_as_its_indices_and_values() -> None:
    kept = memory_needs._Kept([])
    graph = torch.eye(4).to_sparse()
    kept.note(graph)
    assert kept.total == sum(part.untyped_storage().nbytes() for part in (graph._indices(), graph._values())) > 0
    kept.note(torch.ones(2))
    assert kept.total == 8 + sum(part.untyped_storage().nbytes() for part in (graph._indices(), graph._values()))
