"""One optimizer step: in one pass or in micro-batches, clipped or not; what loss() may return, what ranks gather."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import IterableDataset

from harness.errors import WorkloadError
from harness.plan.cell import Cell
from harness.plan.trial import SkipTrial
from harness.train import training as training_module
from harness.train.loader import Batches, Share, epoch_shares
from harness.train.model import too_large
from harness.train.precision import LossScale
from harness.train.ranks import Ranks
from harness.train.strategies.base import Single
from harness.train.training import Training, are_equal, on_device
from harness.train.workloads import as_datasets, as_loss
from harness.train.workloads.image_classification import ImageClassification
from tests.equivalence import BATCH, SAMPLES, SEED, Regression

CPU = torch.device("cpu")
ONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
CELL = Cell("w", None, None, "single", "cpu", 1, 1, "strong", None, BATCH, optimizer={"name": "SGD", "lr": 0.1})


def training_of(cell: Cell = CELL, workload: Any = None, *, world_size: int = 1) -> Training:
    ranks = replace(ONE, devices=(CPU,) * (cell.devices if cell.strategy == "dp" else 1), world_size=world_size)
    return Training(cell, workload or Regression(), SEED, ranks)


def steps(training: Training) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The steps of an epoch, whose last batch holds one sample; further ranks hold the same batches."""
    ranks, parts = training._ranks, training._cell.micro_batches
    shares = list(epoch_shares(SAMPLES, training._cell.global_batch_size, SEED, 0, 0, 1))
    data = training._workload.datasets()[0]
    source = Batches(data, seed=SEED, ranks=ranks, options={}, micro_batches=parts).of(shares)
    for share in shares:
        whole = replace(share, global_samples=share.global_samples * ranks.world_size)
        yield training.step(islice(source, parts) if parts > 1 else next(source), whole)


def flat(training: Training) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])


def trained(cell: Cell, unit: str = "samples") -> tuple[torch.Tensor, float]:
    """All parameters after one epoch, and the mean loss."""
    training = training_of(cell, Regression(unit))
    done = list(steps(training))
    weight = sum(float(weight) for _, weight in done)
    assert unit == "tokens" or weight == SAMPLES
    return flat(training), sum(float(loss) for loss, _ in done) / weight


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("strategy", ["single", "dp"])
@pytest.mark.parametrize("accumulation", [2, 7, 9])
def test_micro_batches_train_as_the_whole_batch_does(accumulation: int, strategy: str, unit: str) -> None:
    cell = replace(CELL, strategy=strategy, devices=2 if strategy == "dp" else 1)
    whole, loss = trained(CELL, unit)
    parts, same_loss = trained(replace(cell, training={"accumulation": accumulation}), unit)
    assert torch.allclose(parts, whole, rtol=1e-5, atol=1e-7)
    assert same_loss == pytest.approx(loss, rel=1e-5)


def test_a_clipped_step_is_as_long_as_its_norm_allows() -> None:
    before = flat(training_of())

    def moved(options: dict[str, Any]) -> torch.Tensor:
        training = training_of(replace(CELL, global_batch_size=SAMPLES, training=options))
        next(steps(training))
        return flat(training) - before

    assert float(moved({}).norm()) > 0.002
    assert float(moved({"clip_grad_norm": 0.02}).norm()) == pytest.approx(0.1 * 0.02, rel=1e-3)
    assert float(moved({"clip_grad_value": 0.02}).abs().max()) == pytest.approx(0.1 * 0.02, rel=1e-3)


class Looks(Regression):
    """Notes the autocast dtype of each forward pass of the model, None without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype | None] = []
        self.losses: list[torch.dtype] = []

    def build_model(self) -> nn.Module:
        def note(*_: object) -> None:
            self.seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)

        model = super().build_model()
        model.register_forward_pre_hook(note)
        return model

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = super().loss(model, batch)
        self.losses.append(total.dtype)
        assert not torch.is_autocast_enabled("cpu")
        return total, weight


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("dp", 2)])
def test_the_model_computes_in_bf16_in_every_replica_while_losses_and_parameters_are_fp32(
    strategy: str, devices: int, precision: str, dtype: torch.dtype | None, accumulation: int
) -> None:
    cell = replace(CELL, strategy=strategy, devices=devices, precision=precision)
    workload = Looks()
    training = training_of(replace(cell, training={"accumulation": accumulation}), workload)
    loss, _ = next(steps(training))
    share = next(epoch_shares(SAMPLES, BATCH, SEED, 0, 0, 1))
    (whole,) = Batches(workload.datasets()[0], seed=SEED, ranks=training._ranks, options={}).of([share])
    training.evaluate(whole, share)
    assert len(workload.seen) == devices * (accumulation + 1) and set(workload.seen) == {dtype}
    assert {*workload.losses, loss.dtype} == {torch.float32}
    assert {parameter.dtype for parameter in training.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_the_names_of_a_bf16_models_parameters_are_its_own(strategy: str) -> None:
    training = training_of(replace(CELL, strategy=strategy, devices=2 if strategy == "dp" else 1, precision="bf16"))
    names = {name for name, _ in Regression().build_model().named_parameters()}
    assert {name for name, _ in training.unwrapped.named_parameters()} == names
    state = training.strategy.optimizer_state(training.model, training.optimizer)
    assert set(state["param_groups"][0]["params"]) == names


FP16 = replace(CELL, precision="fp16")


@pytest.mark.parametrize("options", [{}, {"accumulation": 3}, {"clip_grad_norm": 0.02}])
def test_fp16_trains_as_fp32_does_within_its_rounding(options: dict[str, Any]) -> None:
    """Clipping sees gradients without the loss scale, of 65,536, and micro-batches share one."""
    before = flat(training_of())
    training, exact = (training_of(replace(cell, training=options)) for cell in (FP16, CELL))
    for each in (training, exact):
        next(steps(each))
    moved, expected = flat(training) - before, flat(exact) - before
    assert float((moved - expected).norm() / expected.norm()) < 0.01
    assert training.loss_scale() == LossScale(65536.0, 1, 2000)


class Long(Regression):
    """Samples of many tokens, so that gradients per sample and per token differ by orders of magnitude."""

    def __init__(self) -> None:
        super().__init__("tokens")

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = super().loss(model, batch)
        return total * 1000, weight * 1000


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(("strategy", "accumulation"), [("single", 1), ("single", 3), ("dp", 1), ("ddp", 1)])
def test_the_loss_scale_of_tokens_acts_alike(strategy: str, accumulation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What backward sees is within a factor of about 2 of the loss per token, and the same without accumulation."""
    monkeypatch.setattr("harness.train.training.dist", Events())
    scaled_losses: list[torch.Tensor] = []
    scale = torch.amp.GradScaler.scale
    note = scaled_losses.append
    monkeypatch.setattr(torch.amp.GradScaler, "scale", lambda self, loss: note(loss.detach()) or scale(self, loss))
    cell = replace(FP16, strategy=strategy, training={"accumulation": accumulation} if accumulation > 1 else {})
    loss, weight = next(steps(training_of(cell, Long(), world_size=2 if strategy == "ddp" else 1)))
    seen, per_token = float(torch.stack(scaled_losses).sum()), float(loss / weight)
    assert 0.5 < seen / per_token < 2
    if accumulation == 1:
        rate = 2.0 ** round(math.log2(float(weight) / BATCH))
        assert seen == pytest.approx(float(loss) / (BATCH * rate), rel=1e-3)


def test_a_step_whose_gradient_overflows_is_skipped_and_halves_the_scale() -> None:
    training = training_of(FP16)
    training.scaler.load_state_dict({**training.scaler.state_dict(), "scale": 2.0**40})
    before = flat(training)
    next(steps(training))
    assert torch.equal(flat(training), before)
    assert training.loss_scale() == LossScale(2.0**39, 0, 2000)
    training = training_of(FP16)
    training.expect_few_steps()  # as an equivalence check does: none of its steps is to be skipped
    next(steps(training))
    assert training.loss_scale() == LossScale(1024.0, 1, 2000)


def test_a_snapshot_holds_the_loss_scale_which_other_precisions_have_not() -> None:
    assert training_of().loss_scale() is None
    training = training_of(FP16)
    next(steps(training))
    kept = training.snapshot()
    training.scaler.load_state_dict({**training.scaler.state_dict(), "scale": 4.0})
    training.restore(kept)
    assert training.loss_scale() == LossScale(65536.0, 1, 2000)


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp"])
def test_channels_last_reaches_the_convolutions(strategy: str) -> None:
    cell = replace(CELL, strategy=strategy, devices=2 if strategy == "dp" else 1, training={"channels_last": True})
    workload = ImageClassification(model="resnet8", data="digits", width=8)
    assert all(p.is_contiguous() for p in training_of(CELL, workload).model.parameters()), "without the option"
    training = training_of(cell, workload)
    seen: list[tuple[bool, ...]] = []

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        weight: Any = module.weight
        seen.append(tuple(t.is_contiguous(memory_format=torch.channels_last) for t in (args[0], output, weight)))

    for module in training.unwrapped.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            module.register_forward_hook(note)
    training.step((torch.randn(4, 3, 8, 8), torch.arange(4)), Share((), 4, 4))
    weights = strategy in ("single", "ddp")  # fully_shard takes contiguous parameters only, dp copies them so
    assert seen and {one[:2] for one in seen} == {(True, True)}
    assert not weights or {one[2] for one in seen} == {True}


@pytest.mark.parametrize(("options", "wanted"), [({}, False), ({"cudnn_benchmark": True}, True)])
def test_cudnn_benchmarks_as_asked(options: dict[str, Any], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not wanted)
    training_of(replace(CELL, training=options))
    assert torch.backends.cudnn.benchmark == wanted


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(
    ("hook", "dtype"), [("none", None), ("bf16_compress", torch.bfloat16), ("fp16_compress", torch.float16)]
)
def test_a_comm_hook_rounds_the_gradients_that_are_exchanged(hook: str, dtype: torch.dtype | None) -> None:
    training = training_of(replace(CELL, strategy="ddp", strategy_options={"comm_hook": hook, "backend": "gloo"}))
    next(steps(training))
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    rounded = {to: all(torch.equal(g, g.to(to).float()) for g in gradients) for to in (torch.bfloat16, torch.float16)}
    assert rounded[torch.bfloat16] == (dtype is torch.bfloat16)
    assert rounded[torch.float16] == (dtype is not None)  # which holds numbers of this size that bfloat16 holds


@pytest.mark.parametrize("name", ["fused", "foreach"])
def test_an_optimizers_implementation_is_an_option(name: str) -> None:
    assert training_of(replace(CELL, optimizer={**CELL.optimizer, name: True})).optimizer.defaults[name] is True
    assert training_of().optimizer.defaults[name] is None


def test_a_model_larger_than_its_device_is_a_skip_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.train.model.device_bytes", lambda device: 1000)
    with pytest.raises(SkipTrial, match=r"^weights and gradients of the model take .* GiB; one device has .* GiB$"):
        training_of()
    monkeypatch.setattr("harness.train.model.device_bytes", lambda device: 10_000)
    training_of()


def test_a_frozen_parameter_has_no_gradient_that_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(100, 1, bias=False), nn.Linear(1, 100, bias=False))  # 400 bytes each
    monkeypatch.setattr("harness.train.model.device_bytes", lambda device: 1200)
    assert too_large(model, CPU)
    model[0].requires_grad_(False)
    assert too_large(model, CPU) is None


class Events:
    """Stands for torch.distributed: notes when the sum of weights begins and when it is awaited."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def all_reduce(self, total: torch.Tensor, *, async_op: bool = False) -> Events:
        assert async_op, "a blocking collective before backward"
        self.seen.append("begun")
        total *= 2
        return self

    def wait(self) -> None:
        self.seen.append("awaited")


@pytest.mark.parametrize("accumulation", [1, 3])
def test_tokens_of_a_global_batch_are_summed_in_backward(accumulation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that hold the same batch: twice the tokens, and a gradient that the mean over ranks leaves alone."""
    events = Events()
    monkeypatch.setattr("harness.train.training.dist", events)
    cell = replace(CELL, training={"accumulation": accumulation})
    gradients = []
    for world_size in (2, 1):
        training = training_of(cell, Regression("tokens"), world_size=world_size)
        training.model[0].weight.register_hook(lambda _: events.seen.append("backward"))  # type: ignore[index]
        next(steps(training))
        gradients.append(torch.cat([p.grad.flatten() for p in training.model.parameters() if p.grad is not None]))
    last = accumulation - 1
    first = ["begun", "awaited"]  # once a training: the tokens of a sample
    one_device = ["backward"] * accumulation
    assert events.seen == first + ["backward"] * last + ["begun", "backward", "awaited"] + one_device
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_tokens_that_are_declared_take_no_exchange_and_no_pass_over_gradients(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, scaled = Events(), []
    monkeypatch.setattr("harness.train.training.dist", events)
    monkeypatch.setattr("harness.train.training.are_equal", lambda *_: False)  # as on a GPU
    scale = training_module.scale_gradients
    monkeypatch.setattr(
        "harness.train.training.scale_gradients", lambda model, factor: (scaled.append(1), scale(model, factor))
    )
    cell, gradients, seen = replace(CELL, training={"accumulation": accumulation}), [], []
    for declared in (3, None):
        workload = OfOneLength(longer=False)
        workload.tokens_per_sample = declared
        training = training_of(cell, workload, world_size=2)
        next(steps(training))
        gradients.append(torch.cat([p.grad.flatten() for p in training.model.parameters() if p.grad is not None]))
        seen.append((len(events.seen), len(scaled)))
    assert seen == [(0, 0), (4, 1)]
    torch.testing.assert_close(gradients[0], gradients[1])


class Masked(Regression):
    """Batches without a token, whose loss is 0."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = super().loss(model, batch)
        return total * 0.0, weight * 0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_global_batch_without_a_token_changes_nothing(accumulation: int) -> None:
    training = training_of(replace(CELL, training={"accumulation": accumulation}), Masked("tokens"))
    before = flat(training)
    next(steps(training))
    assert torch.equal(flat(training), before)


class OfOneLength(Regression):
    """Three tokens a sample; ``longer``: more in the batches from the second on."""

    def __init__(self, longer: bool) -> None:
        super().__init__("tokens")
        self.tokens, self.longer = 3, longer
        self.tokens_per_sample: int | None = None

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, _ = super().loss(model, batch)
        tokens, self.tokens = self.tokens, self.tokens + self.longer
        return total, torch.tensor(float(tokens * len(batch[0])))


@pytest.mark.parametrize("longer", [False, True])
def test_gradients_are_scaled_after_backward_only_if_samples_have_other_tokens_than_in_the_first_step(
    longer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.train.training.dist", Events())
    scaled: list[float] = []
    monkeypatch.setattr("harness.train.training.scale_gradients", lambda model, factor: scaled.append(float(factor)))
    taken = steps(training_of(CELL, OfOneLength(longer), world_size=2))
    next(taken), next(taken)
    assert scaled == ([0.75] if longer else [])


def test_a_number_without_a_value_is_not_compared() -> None:
    """As in a trace of memory, whose tensors are fake."""
    assert are_equal(torch.ones(()), torch.ones(())) and not are_equal(1.0, torch.full((), 0.5))
    with FakeTensorMode():
        assert not are_equal(torch.ones(()), torch.ones(()))


class Counts(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_further_micro_batches_of_tokens_add_a_detached_loss_and_a_sum_of_weights_alone() -> None:
    """Beside forward and backward: what divides a loss follows from the first step."""
    workload, counted = OfOneLength(longer=False), {}
    batch = torch.utils.data.default_collate([workload.datasets()[0][index] for index in range(2)])
    for parts in (2, 6):
        training = training_of(replace(CELL, training={"accumulation": parts}), workload)
        share = Share((), 2 * parts, 2 * parts)
        training.step([batch] * parts, share)
        with Counts() as counts:
            training.step([batch] * parts, share)
        counted[parts] = counts.seen
    model = workload.build_model()
    workload.loss(model, batch)[0].backward()  # a gradient is there, to which the next one is added
    with Counts() as bare:
        (workload.loss(model, batch)[0] * 0.5).backward()
    assert (counted[6] - counted[2]) / 4 <= bare.seen + 2


def test_a_weight_in_the_hosts_memory_is_not_copied_to_the_device() -> None:
    """A copy of pageable memory makes the host wait for the GPU."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    weight = torch.tensor(3)
    with Copies():
        assert on_device(weight, torch.device("meta")).device.type == "meta"
    assert not [name for name in seen if "copy" in name]


class Synchronised(Regression):
    def build_model(self) -> nn.Module:
        return nn.Sequential(super().build_model(), nn.SyncBatchNorm(1))


@pytest.mark.usefixtures("no_group")
def test_without_exchange_synchronised_statistics_are_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """SyncBatchNorm gathers them in every forward pass, no_sync() or not."""
    gathered: list[object] = []

    def gathers(self: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        gathered.append(rows)
        return rows

    monkeypatch.setattr(nn.SyncBatchNorm, "forward", gathers)
    training = training_of(CELL, Synchronised())
    norm = training.model[1]  # type: ignore[index]
    rows = torch.tensor([[1.0], [3.0]])
    with training.without_exchange():
        assert torch.allclose(norm(rows), torch.tensor([[-1.0], [1.0]]), atol=1e-4) and not gathered
    norm(rows)
    assert len(gathered) == 1


def test_a_sum_and_a_weight_are_returned_as_they_are() -> None:
    total = torch.tensor(2.0)
    for weight in (torch.tensor(4.0), 4, 4.0, torch.tensor([4])):
        assert as_loss((total, weight)) == (total, weight)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Counted(Stream):
    """torch's loader takes its length; it has no samples by index."""

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (
            (Stream(), [1]),
            "the training set of datasets(), a Stream, has no __len__: streams are not measured as a workload",
        ),
        (([1], Counted()), "the validation set of datasets(), a Counted, is an IterableDataset"),
        ((Stream(), [1]), "measured as it is, with script: or loop:"),
        ((iter([1]), [1]), "has no __len__ and no __getitem__: streams are not measured"),
        ([1], "datasets() must return (training, validation); got a list of 1 items"),
        (None, "got None"),
    ],
)
def test_datasets_that_cannot_be_read_by_index_are_refused_in_one_sentence(returned: object, text: str) -> None:
    with pytest.raises(WorkloadError) as error:
        as_datasets(returned)
    assert text in str(error.value)
    assert as_datasets([[1, 2], {0: 1}]) == ([1, 2], {0: 1})


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (torch.tensor(2.0), "a tensor without dimensions"),
        (torch.zeros(64), "a tensor of shape (64,)"),
        (2.0, "a float"),
        (None, "None"),
        ({"loss": 1}, "a dict"),
        ((torch.tensor(2.0),) * 3, "a tuple of 3 items"),
        ((torch.zeros(64), torch.tensor(64.0)), "(a tensor of shape (64,), a tensor without dimensions)"),
        ((2.0, 64), "(a float, an int)"),
        ((torch.tensor(2.0), None), "(a tensor without dimensions, None)"),
    ],
)
def test_anything_else_is_named(returned: object, got: str) -> None:
    with pytest.raises(WorkloadError) as error:
        as_loss(returned)
    assert str(error.value).startswith("loss() must return (sum, weight): ")
    assert str(error.value).endswith(f"; got {got}")


@pytest.mark.parametrize("value", [None, 0, "text"])
def test_every_ranks_value_is_gathered_none_too(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    def all_gather_object(values: list[object], own: object, group: object) -> None:
        values[:] = [own, "other"]

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    assert ONE.gather(value) == [value]
    assert replace(ONE, world_size=2).gather(value) == [value, "other"]


class Groups(Regression):
    """Parameter groups, and weights that are kept in bounds, as its code says."""

    def __init__(self, made: Any = None) -> None:
        super().__init__("samples")
        self.made, self.after = made, list[tuple[type, int]]()

    def optimizer(self, model: nn.Module, options: dict[str, Any]) -> Any:
        if self.made is not None:
            return self.made
        decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
        rest = [p for name, p in model.named_parameters() if not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=options["lr"])

    def after_step(self, model: nn.Module, step: int) -> None:
        self.after.append((type(model), step))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_workloads_own_optimizer_and_what_it_does_after_a_step_are_those_of_every_strategy(strategy: str) -> None:
    workload = Groups()
    scaled = {"lr_scaling": "linear", "lr_base_batch_size": BATCH // 2}
    cell = replace(CELL, strategy=strategy, devices=2 if strategy == "dp" else 1, training=scaled)
    training = training_of(cell, workload)
    assert [group["weight_decay"] for group in training.optimizer.param_groups] == [0.1, 0.0]
    assert training.effective_lr == pytest.approx(0.1 * BATCH / (BATCH // 2))
    assert [group["lr"] for group in training.optimizer.param_groups] == [training.effective_lr] * 2
    done = list(steps(training))
    kind = type(Regression("samples").build_model())
    assert workload.after == [(kind, number) for number in range(len(done))]  # without a wrapper
    assert flat(training).abs().max() <= 0.2


@pytest.mark.parametrize("made", [object(), [1]])
def test_what_is_no_optimizer_is_refused(made: Any) -> None:
    with pytest.raises(WorkloadError, match=r"optimizer\(\) must return a torch Optimizer; got a "):
        training_of(CELL, Groups(made))


class ShardsItsState(Single):
    """As a strategy that makes its optimizer itself, over ranks."""

    def make_optimizer(self, model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:  # type: ignore[override]
        return torch.optim.SGD(model.parameters(), lr=0.5)


def test_the_optimizer_of_a_strategy_that_makes_its_own_is_not_the_workloads() -> None:
    training = Training(CELL, Groups(), SEED, ONE, using=ShardsItsState())
    assert isinstance(training.optimizer, torch.optim.SGD) and len(training.optimizer.param_groups) == 1


class ReturnsItsLoss(Regression):
    """A workload whose model computes the loss: with CUDA graphs it lies in their memory."""

    outputs: ClassVar[list[torch.Tensor]] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        loss, weight = super().loss(model, batch)
        self.outputs.append(loss)
        return loss, weight


def test_with_cuda_graphs_each_pass_is_a_step_and_losses_are_kept_outside_of_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append("step"))
    for graphs in (False, True):
        marks.clear()
        training = training_of(workload=ReturnsItsLoss())
        training._marks_graphs = graphs
        kept = next(steps(training))[0]
        assert (kept.data_ptr() != ReturnsItsLoss.outputs[-1].data_ptr()) is graphs
        data, share = training._workload.datasets()[0], next(iter(epoch_shares(SAMPLES, BATCH, SEED, 0, 0, 1)))
        source = Batches(data, seed=SEED, ranks=ONE, options={}).of([share])
        training.evaluate(next(source), share)
        assert marks == ["step"] * 2 * graphs
        with training.evaluating_whole:
            assert (torch._dynamo.eval_frame._stance.stance == "force_eager") is graphs
