"""Epochs on one process: their rates, and a training that goes on from its checkpoint as if it had never stopped."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from harness.config.sections import Convergence
from harness.errors import WorkloadError
from harness.measure import convergence
from harness.measure.convergence import COLLECT_STEPS, MOST_RECORDED, Epochs, Evaluator, StepLosses, evaluating
from harness.measure.stepper import TrainingData
from harness.measure.window import HostTimer, measure_window
from harness.plan.cell import Cell
from harness.train import checkpoint, loader
from harness.train.checkpoint import CheckpointManager
from harness.train.loader import Share
from harness.train.ranks import Ranks, StoreExchange
from harness.train.training import Training

pytestmark = pytest.mark.usefixtures("no_group")

CPU = torch.device("cpu")
SGD = {"name": "SGD", "lr": 0.1, "momentum": 0.9}
CELL = Cell("w", None, None, "single", "cpu", 1, 1, "strong", 8, 8, optimizer=SGD)
SAMPLES = 20  # three steps an epoch, the last of four samples


def test_a_metric_that_no_sample_has_is_unknown_and_ends_no_training() -> None:
    means = convergence._means({"loss": (3.0, 2.0), "recall": (0.0, 0.0)})
    assert means["loss"] == 1.5 and math.isnan(means["recall"])


class Noisy:
    """Batch statistics, dropout and Python's random numbers: what a training loses that forgets its state."""

    unit = "samples"

    def __init__(self, dropout: float) -> None:
        self.dropout = dropout

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(16, 1)]
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        noise = random.random() if model.training else 0.0
        return (model(x + 0.01 * noise) - y).square().sum(), torch.tensor(float(len(x)))


def data(samples: int = SAMPLES) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def epochs_of(
    cell: Cell, epochs: int, folder: Path | None = None, every: int = 1, workload: Any = None, **settings: Any
) -> Epochs:
    """A training of so many epochs, gone on with where there is something in the folder."""
    random.seed(5)
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,) * cell.devices)
    # replicas run in threads, which draw from one generator in any order
    workload = workload or Noisy(0.0 if cell.strategy == "dp" else 0.5)
    training = Training(cell, workload, 3, ranks)
    keeper = CheckpointManager(folder, every, training, ranks) if folder else None
    own_data = TrainingData(cell, 3, ranks, settings.pop("train", data()), data(), workload)
    run = Epochs(training, own_data, Convergence(epochs=epochs, **settings), lambda: None, keeper)
    run.run()
    return run


WARM_UP = {"lr_scaling": "linear", "lr_base_batch_size": 2, "warmup_epochs": 2}


@pytest.mark.parametrize(
    ("training", "milestones", "rates"),
    [
        ({}, [1, 3], [0.1, 0.01, 0.01, 0.001]),
        # from 0.1 to the scaled rate, 0.4, in six steps: the third has come 2/6 of the way, the sixth 5/6
        (WARM_UP, [3], [0.1 + 0.3 * 2 / 6, 0.1 + 0.3 * 5 / 6, 0.4, 0.04]),
    ],
)
def test_each_epoch_records_the_scheduled_learning_rate_beside_which_a_warm_up_goes(
    training: dict[str, Any], milestones: list[int], rates: list[float]
) -> None:
    schedule = {"name": "MultiStepLR", "milestones": milestones, "gamma": 0.1}
    run = epochs_of(replace(CELL, training=training, schedule=schedule), 4)
    assert [row["learning_rate"] for row in run.rows] == pytest.approx(rates)


OPTIMIZERS = [SGD, {"name": "SGD", "lr": 0.1}, {"name": "AdamW", "lr": 0.01}, {"name": "Adagrad", "lr": 0.05}]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["momentum", "plain", "AdamW", "Adagrad"])
@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_training_goes_on_to_the_same_numbers(tmp_path: Path, strategy: str, optimizer: dict[str, Any]) -> None:
    recipe = {"lr_scaling": "sqrt", "lr_base_batch_size": 2, "warmup_epochs": 3}
    cell = replace(CELL, strategy=strategy, devices=2 if strategy == "dp" else 1, optimizer=optimizer)
    cell = replace(cell, schedule={"name": "CosineAnnealingLR", "T_max": 5}, training=recipe)
    whole = epochs_of(cell, 5)
    epochs_of(cell, 2, tmp_path)
    rest = epochs_of(cell, 5, tmp_path)
    assert rest.resumed_epoch == 2 and rest.steps.columns == whole.steps.columns
    exact = ("epoch", "samples", "train_loss", "learning_rate", "val_loss")
    assert [[row[name] for name in exact] for row in rest.rows] == [[row[name] for name in exact] for row in whole.rows]
    clocks = [row["train_s"] for row in rest.rows]
    assert clocks == sorted(clocks)
    assert rest.spent["epochs"] < rest.train_s
    ends = zip(whole.training.model.state_dict().values(), rest.training.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in ends)


def test_checkpoints_are_written_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    epochs_of(CELL, 5, tmp_path, every=2)
    assert checkpoint.epochs(tmp_path) == [5, 4]


def test_a_training_that_was_done_is_not_trained_again_unless_its_last_checkpoint_is_torn(tmp_path: Path) -> None:
    done, again = (epochs_of(CELL, 3, tmp_path) for _ in range(2))
    assert again.rows == done.rows and again.spent["epochs"] == 0.0
    model = tmp_path / "epoch-3" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-4])
    rest = epochs_of(CELL, 4, tmp_path)
    assert rest.resumed_epoch == 2 and checkpoint.epochs(tmp_path) == [4, 3]


def test_a_training_that_diverged_keeps_nothing_of_it(tmp_path: Path) -> None:
    run = epochs_of(replace(CELL, optimizer={"name": "SGD", "lr": 1e30}), 3, tmp_path)
    assert run.diverged and (run.diverged.rank, run.diverged.step) == (0, 2)
    assert checkpoint.epochs(tmp_path) == []


def test_a_trainings_phases_are_sums_over_its_epochs_and_add_up_and_each_sample_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = epochs_of(replace(CELL, training={"accumulation": 2, "clip_grad_norm": 1.0}), 1)
    assert run.rows[0]["samples"] == SAMPLES and run.diverged is None
    clock = partial(next, count(0.0))  # a second passes from one reading to the next
    monkeypatch.setattr(convergence, "HostTimer", partial(HostTimer, clock))
    monkeypatch.setattr(convergence, "measure_window", partial(measure_window, clock=clock))
    window = epochs_of(CELL, 3).window
    assert (window["window_kind"], window["rank"], window["window"]) == ("epochs", 0, 0)
    assert window["steps"] == 9 and window["weight"] == 3 * SAMPLES
    seconds = {"wait": 9, "copy": 9, "forward": 9, "backward": 9, "optimizer": 9, "rest": 18}  # one of each of 9 steps
    assert {phase: window[f"{phase}_s"] for phase in seconds} == seconds
    assert sum(seconds.values()) <= window["duration_s"] < sum(seconds.values()) + 9


class Cyclic(Noisy):
    """Each step leaves a cycle of references that holds a tensor."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.held = weakref.WeakSet[torch.Tensor]()
        self.most = self.exempt = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cycle: list[Any] = [held := torch.zeros(1)]
        cycle.append(cycle)
        self.held.add(held)
        self.most = max(self.most, len(self.held))
        self.exempt = self.exempt or gc.get_freeze_count()  # once: it counts one by one
        return super().loss(model, batch)


def test_garbage_of_an_epoch_is_collected_in_it() -> None:
    workload = Cyclic()
    epochs_of(replace(CELL, global_batch_size=2), 1, workload=workload, train=data(2 * 4 * COLLECT_STEPS))
    assert workload.most <= 2 * COLLECT_STEPS
    assert workload.exempt > 1000 and gc.get_freeze_count() == 0, "collections of an epoch walk no modules"


def test_every_step_has_its_loss_and_the_rate_of_that_step() -> None:
    schedule = {"name": "StepLR", "step_size": 4, "gamma": 0.1, "interval": "step"}
    run = epochs_of(replace(CELL, schedule=schedule), 2)
    steps = run.steps.columns
    assert (steps["epoch"], steps["step"]) == ([1, 1, 1, 2, 2, 2], [1, 2, 3, 4, 5, 6])
    assert steps["learning_rate"] == pytest.approx([0.1] * 4 + [0.01] * 2)
    first = sum(loss * size for loss, size in zip(steps["loss"][:3], (8, 8, 4), strict=True)) / SAMPLES
    assert first == pytest.approx(run.rows[0]["train_loss"])


class Accurate(Noisy):
    """Its accuracy is the share of samples whose target is positive."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        assert not model.training
        return {"accuracy": ((batch[1] > 0).sum(), len(batch[1]))}


@pytest.mark.parametrize("wanted", [True, False])
def test_metrics_of_the_training_set_count_each_sample_once_and_not_on_the_clock(*, wanted: bool) -> None:
    train = TensorDataset(torch.ones(SAMPLES, 4), torch.tensor([[1.0]] * 5 + [[-1.0]] * 15))
    (row,) = epochs_of(CELL, 1, workload=Accurate(0.0), train=train, train_metrics=wanted).rows
    assert row.get("train_accuracy") == (0.25 if wanted else None) and "val_accuracy" in row
    assert {name for name in row if name.startswith("train_")} - {"train_accuracy"} == {"train_s", "train_loss"}


def test_metrics_of_the_ranks_are_added_by_name_whatever_their_order_and_what_a_rank_lacks() -> None:
    counted: list[list[dict[str, Any]]] = [
        [{"loss": (1.0, 2.0), "of_a": (1.0, 2.0)}, {"of_b": (3.0, 3.0), "loss": (3.0, 2.0)}],
        [{"of_b": (1.0, 5.0), "loss": (4.0, 4.0)}],
    ]
    store = dist.HashStore()  # type: ignore[attr-defined]

    def means(rank: int) -> dict[str, float]:
        exchange = StoreExchange(store, rank, 2)
        ranks = Ranks(rank, 2, rank, 0, "n", "127.0.0.1", (torch.device("cpu"),), exchange=exchange)
        batches = lambda dataset: ((None, batch) for batch in counted[rank])  # noqa: E731
        data: Any = SimpleNamespace(ranks=ranks, copier=lambda: lambda batch: batch, batches_once=batches)
        data.validation, data.workload = None, object()
        training: Any = SimpleNamespace(model=nn.Linear(1, 1), evaluate=lambda batch, share: batch)
        training.derived = lambda means: {}
        return Evaluator(training, data, lambda: None).evaluate()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(means, range(2))
    assert first == second == {"val_loss": 1.0, "val_of_a": 0.5, "val_of_b": 0.5}


def test_of_a_long_training_every_second_or_third_step_is_kept() -> None:
    long = StepLosses(2 * MOST_RECORDED + 1)
    long.add(1, 6, [[6.0, 2.0, 9.0], [2.0, 6.0, 9.0]], [[1.0, 1.0, 2.0], [3.0, 1.0, 4.0]], [0.3, 0.2, 0.1])
    assert (long.every, long.columns) == (3, {"epoch": [1], "step": [7], "loss": [2.0], "learning_rate": [0.3]})
    short = StepLosses(MOST_RECORDED)
    short.add(2, 0, [[6.0, math.nan]], [[2.0, 1.0]], [0.3, 0.2])
    assert short.columns["loss"][0] == 3.0 and math.isnan(short.columns["loss"][1])


class Plain(Noisy):
    """Without batch statistics, which each replica has of its own part, and without random numbers."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return (model(x) - y).square().sum(), torch.tensor(float(len(x)))


def test_a_batch_that_does_not_divide_trains_as_on_one_device() -> None:
    even = replace(CELL, global_batch_size=5, per_device_batch_size=5, optimizer={"name": "SGD", "lr": 0.05})
    uneven = replace(even, strategy="dp", devices=2, per_device_batch_size=None, uneven=True)
    one, two = (epochs_of(cell, 3, workload=Plain(0.0)).rows for cell in (even, uneven))
    for loss in ("train_loss", "val_loss"):
        assert [row[loss] for row in two] == pytest.approx([row[loss] for row in one], rel=1e-5)


class PrefetchingLoader:
    """Stands for torch's DataLoader with workers: two batches of a pass are taken ahead."""

    made = 0

    def __init__(self, dataset: Any, *, batch_sampler: Any, **settings: Any) -> None:
        type(self).made += 1
        self.dataset, self.keys = dataset, batch_sampler

    def __iter__(self) -> Iterator[Any]:
        keys = iter(self.keys)
        ahead = deque(islice(keys, 2))
        while ahead:
            batch = self.dataset.__getitems__(ahead.popleft())
            ahead.extend(islice(keys, 1))
            yield batch


class Observed(TrainingData):
    """Notes the epoch of each share that a loader takes."""

    taken: list[int]

    def shares(self, epoch: int) -> Iterator[Share]:
        for share in super().shares(epoch):
            self.taken.append(epoch)
            yield share


def test_no_batch_of_the_next_epoch_is_loaded_while_the_clock_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "DataLoader", PrefetchingLoader)
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
    observed = Observed(replace(CELL, loader={"workers": 1}), 0, ranks, data(), data(), Noisy(0.5))
    object.__setattr__(observed, "taken", [])
    for epoch in range(2):
        before = len(observed.taken)
        source = observed.training_batches(epoch)
        assert len(observed.taken) == before
        for _ in range(observed.steps):
            next(source)
        assert observed.taken[before:] == [epoch] * observed.steps  # the evaluation follows here
    assert PrefetchingLoader.made == 1, "the loader's worker processes live on"


class Evaluated(Noisy):
    """Pads validation otherwise than training, and computes what is no mean over samples."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.trained: list[bool] = []
        self.seen: list[list[int]] = []

    def collate(self, samples: list[Any], training: bool) -> Any:
        self.trained.append(training)
        return tuple(torch.stack(part) for part in zip(*samples, strict=True))

    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, Any]:
        assert not model.training and not torch.is_grad_enabled()
        batches = list(loader)
        assert len(batches) == len(loader)
        self.seen.append([len(x) for x, _ in batches])
        return {"median": torch.cat([model(x) for x, _ in batches]).median(), "samples": sum(self.seen[-1])}


def test_evaluate_gets_the_whole_validation_set_in_one_split_and_its_values_are_metrics() -> None:
    workload = Evaluated()
    cell = replace(CELL, global_batch_size=16, per_device_batch_size=16)
    run = epochs_of(cell, 2, workload=workload)
    assert workload.seen == [[2] * 10, [2] * 10]  # a global batch of 16 over EVALUATED_PARTS
    assert all(row["val_samples"] == SAMPLES and math.isfinite(row["val_median"]) for row in run.rows)
    assert run.training.model.training
    # of an epoch: two training batches; two of validation, and ten for evaluate
    assert workload.trained == ([True] * 2 + [False] * 12) * 2


@pytest.mark.parametrize(
    ("returned", "got"),
    [(None, "None"), ([1.0], "a list of 1 items"), ({"a": "b"}, "a dict"), (torch.ones(2), "a tensor")],
)
def test_what_evaluate_returns_must_map_names_to_numbers(returned: Any, got: str) -> None:
    workload = Evaluated()
    workload.evaluate = lambda model, loader: returned  # type: ignore[method-assign]
    with pytest.raises(WorkloadError, match=f"evaluate.. must return .name: number.; got {got}"):
        epochs_of(CELL, 1, workload=workload)


class Scheduled(Noisy):
    """A schedule of its own, by step, and the steps after which it was called."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.after: list[int] = []

    def schedule(self, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Any:
        assert options == {"interval": "step"}
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def after_step(self, model: nn.Module, step: int) -> None:
        self.after.append(step)


def test_a_workloads_own_schedule_and_its_steps_go_on_in_a_resumed_training(tmp_path: Path) -> None:
    cell, first, second = replace(CELL, schedule={"interval": "step"}), Scheduled(), Scheduled()
    run = epochs_of(cell, 2, tmp_path, workload=first)
    assert [row["learning_rate"] for row in run.rows] == pytest.approx([0.1 / 3, 0.1 / 6])
    rest = epochs_of(cell, 3, tmp_path, workload=second)
    assert rest.resumed_epoch == 2 and rest.rows[-1]["learning_rate"] == pytest.approx(0.1 / 9)
    assert (first.after, second.after) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])


def test_a_module_that_is_frozen_in_eval_mode_is_so_after_an_evaluation_too() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()))
    model[1][0].eval()  # type: ignore[index]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [name for name, module in model.named_modules() if not module.training] == ["1.0"]
