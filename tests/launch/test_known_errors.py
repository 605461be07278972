"""torch's own messages, raised here by torch where one process can, and the remedy that a trial's row names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from harness.launch.worker import failure
from harness.plan.known_errors import KNOWN_ERRORS, advice_on, remedy


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Twice(nn.Module):
    """Passes one layer twice through re-entrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for _ in range(2):
            values = checkpoint(self.layer, values, use_reentrant=True)
        return values


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.used(values)  # type: ignore[no-any-return]


def train(model: nn.Module) -> None:
    model = DistributedDataParallel(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def outside_its_unit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    torch.mv(model[0].weight, torch.ones(4))


def two_dtypes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    fully_shard(model)
    model(torch.ones(2, 4))


def other_the_second_time() -> None:
    taken = iter((True, False))

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos() if next(taken) else x

    checkpoint(part, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


@pytest.mark.parametrize(
    ("raises", "names"),
    [
        (lambda: train(Twice()), "ddp.static_graph: [true]"),
        (lambda: train(Unused()), "ddp.find_unused_parameters: [true]"),
        (outside_its_unit, "shard_units(model)"),
        (two_dtypes, "one dtype in each module"),
        (lambda: default_collate([torch.ones(3), torch.ones(4)]), "collate(samples)"),
        (lambda: default_collate([object()]), "collate(samples)"),
        (lambda: nn.BatchNorm1d(3)(torch.ones(1, 3)), "a larger per_device_batch_size"),
        (other_the_second_time, "the second time"),
    ],
)
def test_an_error_of_torch_has_the_remedy_in_the_row_of_its_trial(
    _group: None, raises: Callable[[], object], names: str
) -> None:
    with pytest.raises((RuntimeError, AssertionError, TypeError, ValueError)) as caught:
        raises()
    row = failure("t", 0, caught.value)
    assert names in row.reason.partition("; remedy: ")[2]
    assert names in advice_on(str(caught.value))


def test_collectives_without_a_process_group_have_a_remedy() -> None:
    with pytest.raises(ValueError, match="process group") as caught:
        dist.get_rank()
    assert "is_initialized()" in remedy(str(caught.value))


@pytest.mark.parametrize(
    ("message", "names"),
    [  # that need several ranks, a GPU, a full /dev/shm or a compiler: as torch 2.11 and 2.14 have them
        ("RuntimeError: one of the variables needed for gradient computation has been modified by an inplace "
         "operation: [torch.FloatTensor [4]] is at version 3; expected version 2 instead.",
         "broadcast_buffers: [false]"),
        ("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
         "start method", "loader.workers: [0]"),
        ("DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that dataloader's workers are out "
         "of shared memory. Please try to raise your shared memory limit.", "--shm-size"),
        ("unable to open shared memory object </torch_17_3> in read-write mode: Too many open files (24)", "ulimit -n"),
        ("unable to write to file </torch_17_3>: No space left on device (28)", "--shm-size"),
        ("received 0 items of ancdata", "ulimit -n"),
        ("[Errno 24] Too many open files: 'a.jpg'", "ulimit -n"),
        ("CUDA error: device-side assert triggered", "device: cpu"),
        ("torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:", "compile: [false]"),
        ("Your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but then "
         "got unused in the second iteration. this is not compatible with static_graph set to True.",
         "ddp.static_graph: [false]"),
        ("DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has inconsistent 5 params.",
         "neither the rank nor"),
        ("FSDP does not support deepcopy. Please use state dict for serialization.", "in build_model()"),
        ("DataLoader worker (pid(s) 17) exited unexpectedly", "loader.workers: [0]"),
        ("each element in list of batch should be of equal size", "collate(samples)"),
        ("NCCL error: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "oversubscribe: true"),
    ],
)  # fmt: skip
def test_messages_that_one_process_cannot_raise_have_a_remedy(message: str, names: str) -> None:
    assert names in remedy(message)


@pytest.mark.parametrize(
    "message",
    ["", "bad sample", "size mismatch for layer.weight", "mat1 and mat2 shapes cannot be multiplied", "CUDA error"],
)
def test_other_errors_have_none(message: str) -> None:
    assert not remedy(message)
    assert "on one device first" in advice_on(message)
    assert "remedy" not in failure("t", 0, ValueError(message)).reason


def test_a_long_message_keeps_its_remedy_and_each_remedy_is_reached() -> None:
    text = f"{'x ' * 5000} Please make sure ... try to use _set_static_graph() as a workaround"
    assert failure("t", 0, RuntimeError(text)).reason.endswith("use_reentrant=False)")
    assert len({*KNOWN_ERRORS.values()}) == len(KNOWN_ERRORS)
