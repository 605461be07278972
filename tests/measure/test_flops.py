"""FLOPs of a sample, against formulas worked out by hand; the measured ceiling, with a fake clock."""

from __future__ import annotations

import gc
import math
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, register_flop_formula

from harness.measure import flops
from harness.measure.flops import Flops, count_flops, first_samples, measured_peak
from harness.train.workloads.conv_stack import CHANNELS, ConvStack
from harness.train.workloads.image_classification import ImageClassification
from harness.train.workloads.language_model import SHAPES, LanguageModel
from harness.train.workloads.mlp import SIZES, Mlp
from harness.train.workloads.padded_sequences import PaddedSequences

CPU = torch.device("cpu")
ROWS = torch.ones(4, 8)


class Net:
    """A workload of one model, whose loss is the sum of what it gives."""

    unit = "samples"

    def __init__(self, make: Callable[[], nn.Module], weight: Any = 4) -> None:
        self.build_model, self.weight = make, weight

    def datasets(self) -> tuple[Any, Any]:
        raise AssertionError("counting reads no data")

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        given = model(batch)
        total = given[0] if isinstance(given, tuple) else given
        return total.sum(), self.weight


class Applied(nn.Module):
    """A linear layer of 8 to 8, then a function of what it gives and its weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8, bias=False), function

    def forward(self, rows: Tensor) -> Tensor:
        return self.function(self.linear(rows), self.linear.weight)


def count(make: Callable[[], nn.Module], batch: Any, weight: Any = 4) -> Flops:
    return count_flops(Net(make, weight), batch, CPU)


def applied(function: Callable[[Tensor, Tensor], Tensor]) -> Flops:
    return count(lambda: Applied(function), ROWS)


def by_hand(model: nn.Module, sample: Tensor) -> float:
    """Forward FLOPs of its convolutions and linear layers, from their own shapes; times three, less the input's."""
    layers: list[float] = []

    def convolution(layer: nn.Conv2d, _: Any, out: Tensor) -> None:
        (kernel, _), (height, width) = layer.kernel_size, out.shape[2:]
        inputs = layer.in_channels / layer.groups
        layers.append(2 * kernel * kernel * inputs * layer.out_channels * height * width)

    def linear(layer: nn.Linear, _: Any, out: Tensor) -> None:
        layers.append(2 * layer.in_features * layer.out_features)

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(convolution)
        elif isinstance(layer, nn.Linear):
            layer.register_forward_hook(linear)
    with torch.no_grad():
        model.eval()(sample)
    return 3 * sum(layers) - layers[0]  # nobody needs the gradient of the images


def images(side: int, count: int = 2) -> tuple[Tensor, Tensor]:
    return torch.ones(count, 3, side, side), torch.zeros(count, dtype=torch.int64)


class Watched:
    """A workload that notes the parameters that its loss is given, and may read a value that depends on them."""

    unit = "samples"

    def __init__(self, workload: Any, reads: bool) -> None:
        self.workload, self.reads, self.build_model = workload, reads, workload.build_model
        self.without_memory: list[bool] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        self.without_memory.append(all(isinstance(p, FakeTensor) for p in model.parameters()))
        total, weight = self.workload.loss(model, batch)
        return total.item() * total if self.reads else total, weight


@pytest.mark.parametrize(
    ("workload", "batch"),
    [
        (ImageClassification(model="resnet8", width=4), images(16)),
        (LanguageModel(context=8), torch.ones(3, 9).long()),
        (ConvStack(model="small"), (images(8)[0], images(8)[0])),
    ],
)
def test_parameters_have_no_memory_unless_the_loss_reads_their_values(workload: Any, batch: Any) -> None:
    """Those of a second model and its gradients would not fit beside a training that fills the device."""
    plain, reading = Watched(workload, False), Watched(workload, True)
    assert count_flops(plain, batch, CPU) == count_flops(reading, batch, CPU)
    assert (plain.without_memory, reading.without_memory) == ([True], [True, False])
    of_shards = count_flops(reading, batch, CPU, sharded=True)
    assert of_shards.per_unit is None and of_shards.reason.startswith("DataDependentOutputException")
    assert reading.without_memory == [True, False, True]


def test_what_build_model_keeps_in_the_workload_is_real_afterwards() -> None:
    class Keeps(Net):
        weights: Tensor | None = None

        def __init__(self) -> None:
            self.weight = 4

        def build_model(self) -> nn.Module:
            self.weights = torch.ones(3)
            return nn.Linear(4, 2)

    workload = Keeps()
    assert count_flops(workload, torch.ones(1, 4), CPU).per_unit
    assert not isinstance(workload.weights, FakeTensor)  # in which a later step would mix both


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_model_larger_than_any_memory_is_counted_without_it(built_on: str, sharded: bool) -> None:
    def make() -> nn.Module:
        with torch.device(built_on):
            return nn.Linear(10**7, 10**7, bias=False)  # 400 TB

    assert count_flops(Net(make, 1), torch.ones(1, 10**7), CPU, sharded=sharded) == Flops(2 * 2 * 1e14)


SMALL = (("resnet8", 4), ("resnet8", 16), ("resnet14", 6))
RESNETS = [{"model": model, "width": width, "norm": norm} for model, width in SMALL for norm in ("batch", "group")]
RESNETS += [{"data": "synthetic", "model": "resnet18", "image_size": side, "classes": 10} for side in (32, 72)]


@pytest.mark.parametrize("options", RESNETS)
def test_resnets_are_as_by_hand(options: dict[str, Any]) -> None:
    workload, batch = ImageClassification(**{"data": "digits", **options}), images(options.get("image_size", 16))
    flops = count_flops(workload, batch, CPU)
    assert flops.per_unit == pytest.approx(by_hand(workload.build_model(), batch[0][:1]), rel=1e-9)


@pytest.mark.parametrize("model", CHANNELS)
def test_the_stack_of_convolutions_is_as_by_hand(model: str) -> None:
    side, channels = 6, (3, *CHANNELS[model], 3)
    layers = [2 * 9 * inputs * outputs * side**2 for inputs, outputs in pairwise(channels)]
    flops = count_flops(ConvStack(model=model), (images(side)[0],) * 2, CPU)
    assert flops.per_unit == 3 * sum(layers) - layers[0]  # nobody needs the gradient of the images


@pytest.mark.parametrize("model", ["small", "medium"])
def test_the_layers_by_hand_are_as_by_hand(model: str) -> None:
    side, hidden = SIZES[model]
    flops = count_flops(Mlp(model=model), (torch.ones(2, side**2), torch.zeros(2, dtype=torch.int64)), CPU)
    assert flops.per_unit == 2 * (2 * side**2 * hidden + 3 * hidden**2 + 3 * hidden * 10)


@pytest.mark.parametrize("context", [8, 32])
@pytest.mark.parametrize("model", ["nano", "micro"])
def test_a_language_models_tokens_are_as_by_hand(model: str, context: int) -> None:
    shape = SHAPES[model]
    matrices = 12 * shape.layers * shape.width**2 + shape.vocabulary * shape.width
    flops = count_flops(LanguageModel(model=model, context=context), torch.ones(3, context + 1).long(), CPU)
    assert flops.per_unit == 6 * matrices + 12 * shape.layers * shape.width * context


@pytest.mark.parametrize(
    ("kind", "channels", "groups", "places"),
    [*((nn.Conv2d, 8, groups, 16) for groups in (1, 2, 8)), (nn.ConvTranspose2d, 4, 2, 36)],
)
def test_a_convolution_costs_one_group_a_channel(kind: Any, channels: int, groups: int, places: int) -> None:
    flops = count(lambda: nn.Sequential(nn.Conv2d(3, 8, 1), kind(8, channels, 3, groups=groups)), images(6, 4)[0])
    # 36 places of 3 x 8 twice, then places of 9 x 8 x channels / groups three times
    assert flops.per_unit == 2 * 36 * 24 * 2 + 2 * places * 9 * 8 * channels / groups * 3


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.inputs, self.causal = nn.Linear(8, 24, bias=False), causal

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.inputs(tokens).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(query, key, value, is_causal=self.causal)


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_hand_in_tokens_whatever_the_kernel(backend: str, causal: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.__members__[backend]):
        flops = count(lambda: Attention(causal), torch.ones(3, 16, 8), weight=torch.tensor(3 * 16))
    # a token: 2 x 8 x 24 forward and once backward; 2 heads x 16 keys x 4 twice forward, twice that backward
    assert flops == Flops(2 * 8 * 24 * 2 + 2 * (2 * 2 * 16 * 4) * 3, "")


def test_linear_layers_are_as_by_hand_and_a_frozen_one_has_no_weight_gradient() -> None:
    # forward 2 x 8 x 5 = 80 a sample; backward as much for the weight, nothing for the input
    assert count(lambda: nn.Linear(8, 5), ROWS) == Flops(160.0, "")
    frozen = count(lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)), ROWS)
    assert frozen.per_unit == 128 * 3


def test_a_recurrent_net_is_absent_also_packed_whatever_its_lengths() -> None:
    absent = Flops(None, "a recurrent layer, whose kernel depends on the batch and may have no formula")
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        assert count(lambda kind=kind: kind(8, 8), torch.ones(1, 4, 8)) == absent
    workload = PaddedSequences()
    for lengths in ((9, 3), (5, 5)):
        ones = [torch.ones(length, dtype=torch.int64) for length in lengths]
        assert count_flops(workload, workload.collate([(one, one) for one in ones]), CPU) == absent


@torch.library.custom_op("harness_test::doubled", mutates_args=())
def doubled(rows: Tensor) -> Tensor:
    return rows * 2


@torch.library.custom_op("harness_test::tripled", mutates_args=())
def tripled(rows: Tensor) -> Tensor:
    return rows * 3


for operator in (doubled, tripled):
    operator.register_autograd(lambda context, grad: grad * 2)


def test_a_custom_operator_is_absent_unless_it_has_a_formula() -> None:
    absent = Flops(None, "torch's FLOP counter has no formula for harness_test.doubled")
    assert applied(lambda rows, _: doubled(rows)) == absent
    packet = torch.ops.harness_test.tripled
    register_flop_formula(packet)(lambda shape, *, out_shape=None, **_: math.prod(shape))
    try:
        assert applied(lambda rows, _: tripled(rows)) == Flops(2 * 128 + 8, "")
    finally:
        del flop_registry[packet]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda rows, weight: rows @ weight[0], "aten.mv"),
        (lambda rows, weight: torch.fft.rfft(rows).abs(), "aten._fft_r2c"),
        (lambda rows, weight: torch.linalg.solve(weight, rows.T), "aten._linalg_solve_ex"),
        (lambda rows, weight: torch.cdist(rows, weight), "aten._cdist_forward"),
    ],
)
def test_other_products_without_a_formula_are_absent(function: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
    flops = applied(function)
    assert flops.per_unit is None and name in flops.reason.split("formula for ")[1].split(", ")


def test_passes_over_the_elements_cost_nothing_and_are_no_model_alone() -> None:
    def function(rows: Tensor, weight: Tensor) -> Tensor:
        rows = nn.functional.layer_norm(nn.functional.gelu(rows), (8,)).softmax(-1)
        rows = nn.functional.dropout(rows, 0.5) / torch.linalg.vector_norm(rows)
        rows = nn.functional.interpolate(rows[:, None], scale_factor=2, mode="linear")
        return nn.functional.max_pool1d(rows, 2).sort(-1).values.cumsum(-1)

    assert applied(function) == Flops(256.0, "")
    alone = count(lambda: nn.EmbeddingBag(10, 8), torch.zeros(4, 2, dtype=torch.int64))
    assert alone == Flops(None, "no matrix product, convolution or attention was seen")


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_no_model_flops(reentrant: bool) -> None:
    def function(rows: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda x: torch.relu(x @ weight) @ weight, rows, use_reentrant=reentrant)
        return result

    reason = "backward repeats forward work (activation checkpointing), which is no model FLOP"
    assert applied(function) == Flops(None, reason)


def test_a_gradient_inside_the_loss_counts_as_model_flops() -> None:
    def function(rows: Tensor, weight: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((rows @ weight).square().sum(), rows, create_graph=True)
        return slope

    flops = applied(function)
    assert flops.reason == "" and flops.per_unit is not None


@pytest.mark.parametrize("weight", [0, math.nan, math.inf, torch.tensor(-1)])
def test_a_weight_that_divides_nothing_is_reported(weight: Any) -> None:
    assert count(lambda: nn.Linear(8, 5), ROWS, weight) == Flops(None, f"loss() gave a weight of {float(weight):g}")


@pytest.mark.parametrize("error", [ValueError("no\n  luck"), torch.OutOfMemoryError("no luck"), MemoryError("no luck")])
def test_a_workload_that_raises_is_the_reason(error: Exception) -> None:
    def fail(*_: Any) -> Any:
        raise error

    assert applied(fail) == count(fail, ROWS) == Flops(None, f"{type(error).__name__}: no luck")


def test_an_interrupt_passes() -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        applied(interrupt)


@pytest.mark.parametrize("fails", [False, True])
def test_random_numbers_and_grad_mode_are_as_before(fails: bool) -> None:
    def function(rows: Tensor, weight: Tensor) -> Tensor:
        torch.manual_seed(7)
        torch.set_grad_enabled(not fails)
        if fails:
            raise ValueError
        return nn.functional.dropout(rows, 0.5)

    state = torch.get_rng_state()
    with torch.no_grad():
        assert (applied(function).per_unit is None) == fails and not torch.is_grad_enabled()
    with torch.inference_mode():
        assert (applied(function).per_unit is None) == fails and torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_freed_at_once(fails: bool) -> None:
    models: list[weakref.ref[nn.Module]] = []

    def make() -> nn.Module:
        model = nn.Linear(8, 3 if fails else 8)
        models.append(weakref.ref(model))
        return nn.Sequential(model, nn.Linear(8, 8))

    gc.collect()
    gc.disable()
    try:
        assert (count(make, ROWS).per_unit is None) == fails
        assert models[-1]() is None  # the one before had no memory
    finally:
        gc.enable()


class Pair(NamedTuple):
    rows: Tensor
    name: str


def test_first_samples_cuts_every_tensor_of_a_batch() -> None:
    rows = torch.arange(12).reshape(6, 2)
    cut = first_samples({"a": (rows, [rows[:, 0], "text"]), "b": Pair(rows, "pair"), "c": None}, 2)
    assert torch.equal(cut["a"][0], rows[:2]) and cut["a"][1][1] == "text" and cut["c"] is None
    assert torch.equal(cut["a"][1][0], rows[:2, 0])
    assert isinstance(cut["b"], Pair) and torch.equal(cut["b"].rows, rows[:2]) and cut["b"].name == "pair"
    assert torch.equal(first_samples(rows, 100), rows)
    nested = first_samples((UserDict(ids=rows), rows), 2)
    assert all(torch.equal(part, rows[:2]) for part in (nested[0]["ids"], nested[1]))
    one: Any = torch.tensor(1.0)
    for batch in ((ROWS, torch.ones(5)), [ROWS, one], {"scale": one}, ("no", "tensors")):
        assert first_samples(batch, 2) is batch, "values without a batch dimension"


def test_a_model_whose_ranks_share_statistics_is_counted_since_all_ranks_count() -> None:
    class Evaluated(Net):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            return super().loss(model.eval(), batch)

    workload = Evaluated(lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), 2)
    found = count_flops(workload, torch.zeros(2, 2), CPU)
    assert found.per_unit == 2 * 2 * 2 * 2, found.reason  # forward, and the gradient of the weight: none of the input


def settings() -> tuple[object, ...]:
    own = [backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)]
    return (torch.get_float32_matmul_precision(), *own, torch.backends.cudnn.allow_tf32)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.dtype, str]]:
    """Rows, dtype and float32 setting of each product that is done."""
    seen: list[tuple[int, torch.dtype, str]] = []

    def product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        assert left.shape == right.shape == out.shape and left.dtype == right.dtype == out.dtype
        seen.append((len(left), left.dtype, torch.get_float32_matmul_precision()))

    monkeypatch.setattr(torch, "mm", product)
    return seen


def clock_of(products: list[Any], durations: Iterator[float]) -> Callable[[], float]:
    """Time passes only in products: one duration for each."""
    state = {"now": 100.0, "done": 0}

    def clock() -> float:
        while state["done"] < len(products):
            state["done"] += 1
            state["now"] += next(durations)
        return state["now"]

    return clock


def test_the_peak_is_of_the_fastest_product_after_the_warm_up_within_the_seconds(products: list[Any]) -> None:
    # two to find the size, three to warm up (one of them faster than all that count), then 0.5, 0.25, 0.5 ...
    durations = chain([1.0, 1.0, 0.5, 0.125, 0.5, 0.5, 0.25], repeat(0.5))
    peak = measured_peak(CPU, "fp32", seconds=0.0, clock=clock_of(products, durations))
    assert peak == 2 * 256**3 / 0.25
    assert len(products) == 2 + 3 + 5
    products.clear()
    measured_peak(CPU, "fp32", seconds=4.0, clock=clock_of(products, repeat(0.5)))
    assert len(products) == 2 + 3 + 8


def test_matrices_grow_until_a_product_is_long(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    quick, long = 2**-10, 2**-7  # about 1 ms and 8 ms
    durations = chain([quick] * 4, repeat(long))
    peak = measured_peak(CPU, "fp32", seconds=0.0, clock=clock_of(products, durations))
    assert [rows for rows, _, _ in products][:6] == [256, 256, 512, 512, 1024, 1024]
    assert peak == 2 * 1024**3 / long
    products.clear()
    monkeypatch.setattr(flops, "MOST_ROWS", 512)
    measured_peak(CPU, "fp32", seconds=0.0, clock=clock_of(products, repeat(quick)))
    assert max(rows for rows, _, _ in products) == 512


@pytest.mark.parametrize(
    ("precision", "dtype", "setting"),
    [
        ("fp32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
        ("bf16", torch.bfloat16, "highest"),
        ("fp16", torch.float16, "highest"),
    ],
)
@pytest.mark.parametrize("before", ["highest", "high"])
def test_each_precision_sets_and_restores_its_backend_flags(
    products: list[Any], precision: str, dtype: torch.dtype, setting: str, before: str
) -> None:
    untouched = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    kept, random = settings(), torch.get_rng_state()
    try:
        measured_peak(CPU, precision, seconds=0.0, clock=clock_of(products, repeat(1.0)))
        assert {seen[1:] for seen in products} == {(dtype, setting)}
        assert settings() == kept
        assert torch.equal(torch.get_rng_state(), random)
    finally:
        torch.set_float32_matmul_precision(untouched)


def test_settings_are_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    kept = settings()
    monkeypatch.setattr(torch, "mm", fail)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        measured_peak(CPU, "tf32")
    assert settings() == kept


def test_a_gpu_gets_its_memory_back_once_nothing_refers_to_the_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def product(rows: int, *arguments: Any) -> Callable[[], float]:
        held = [torch.ones(2, 2) for _ in range(3)]
        made.extend(map(weakref.ref, held))
        return lambda: float(rows > len(held))

    monkeypatch.setattr(flops, "_timed_product", product)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(sum(one() is not None for one in made)))
    assert measured_peak(torch.device("cuda", 0), "bf16", seconds=0.0) == 2.0 * flops.CUDA_ROWS["bf16"] ** 3
    assert alive == [0] and len(made) == 3
