"""fully_shard as practitioners use it: bytes and dtypes of what is gathered, float32 layers, shards, units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.errors import WorkloadError
from harness.measure import peak_memory
from harness.plan.cell import Cell
from harness.train.loader import Share
from harness.train.precision import Precision
from harness.train.ranks import Ranks
from harness.train.strategies import STRATEGIES, make_strategy
from harness.train.strategies.base import WrapContext, default_units
from harness.train.training import Phase, Training
from harness.train.workloads.image_classification import ImageClassification, SmallResNet
from harness.train.workloads.language_model import LanguageModel
from tests.analysis.test_doubts import doubts_of, line
from tests.worlds import fake_group

CPU = torch.device("cpu")
RANKS = 8
CELL = Cell("w", None, None, "fsdp", "cpu", RANKS, 1, "weak", 2, 2 * RANKS, optimizer={"name": "SGD", "lr": 0.01})
SHARE = Share((), 2, 2 * RANKS)


@dataclass
class Traffic(TorchDispatchMode):
    """Bytes that fully_shard's collectives gather and scatter, whole, on one rank."""

    gathered: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    scattered: int = 0
    calls: int = 0
    scattered_dtypes: set[torch.dtype] = field(default_factory=set)
    phase: str = "forward"

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "allgather_base" in name or "all_gather_into_tensor" in name:
            whole = args[0] if "c10d._allgather" in name else None
            assert isinstance(whole, torch.Tensor), name
            self.gathered[self.phase] += whole.nbytes
            self.calls += 1
        if "reduce_scatter" in name:
            whole = args[1]
            self.scattered += whole.nbytes
            self.scattered_dtypes.add(whole.dtype)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """Rank 0 of eight whose collectives move nothing."""
    with fake_group(RANKS):
        yield


def training_of(cell: Cell, workload: Any, world_size: int | None = None, seed: int = 0) -> Training:
    size = dist.get_world_size() if world_size is None else world_size
    return Training(cell, workload, seed, Ranks(0, size, 0, 0, "n", "127.0.0.1", (CPU,)))


def gpt() -> LanguageModel:
    return LanguageModel(model="nano", context=16, text_bytes=20_000)


def tokens(count: int = 2) -> torch.Tensor:
    return torch.randint(256, (count, 17), generator=torch.Generator().manual_seed(0))


def bytes_a_parameter(training: Training) -> tuple[float, float, float, Traffic]:
    """Gathered in forward, gathered in backward, scattered, of one step."""
    traffic = Traffic()

    def backward_begins(point: Phase) -> None:
        traffic.phase = "backward" if point is Phase.FORWARD else traffic.phase

    with traffic:
        training.step(tokens(), SHARE, backward_begins)
    n = training.parameters
    return traffic.gathered["forward"] / n, traffic.gathered["backward"] / n, traffic.scattered / n, traffic


def root_fraction() -> float:
    """The fraction of the parameters that are in no block: those of the root."""
    model = gpt().build_model()
    blocks = sum(p.numel() for m in model.modules() if type(m) is nn.ModuleList for p in m.parameters())
    return 1 - blocks / sum(p.numel() for p in model.parameters())


PADDING = 0.05
"""Each parameter is padded to a multiple of the ranks."""


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize(
    ("precision", "options", "size", "again", "text"),
    [
        ("fp32", {}, 4, 1 - root_fraction(), "float32"),
        ("bf16", {}, 2, 1 - root_fraction(), "parameters gathered and computed in bfloat16"),
        ("fp16", {}, 2, 1 - root_fraction(), "parameters gathered and computed in float16"),
        ("bf16", {"mixed_precision": "autocast"}, 4, 1 - root_fraction(), "forward autocast to bfloat16"),
        ("fp32", {"reshard_after_forward": True}, 4, 1, "float32"),
        ("fp32", {"reshard_after_forward": False}, 4, 0, "float32"),
    ],
)
def test_a_step_gathers_each_parameter_once_in_its_dtype_and_the_units_once_more(
    precision: str, options: dict[str, Any], size: int, again: float, text: str
) -> None:
    """Those of the root, in no unit, only if the file says so; the row names the dtypes and the number of groups."""
    training = training_of(replace(CELL, precision=precision, strategy_options=options), gpt())
    assert training.facts["dtypes"].endswith(text) and training.facts["shard_units"] == 3
    forward, backward, scattered, traffic = bytes_a_parameter(training)
    assert forward == pytest.approx(size, rel=PADDING)
    assert backward == pytest.approx(size * again, rel=PADDING)
    assert scattered == pytest.approx(4, rel=PADDING)
    assert traffic.scattered_dtypes == {torch.float32}


@pytest.mark.slow
@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(("model", "precision"), [("resnet8", "bf16"), ("gpt", "fp16")])
def test_a_network_trains_in_reduced_precision_and_its_statistics_stay_float32(model: str, precision: str) -> None:
    workload: Any = gpt() if model == "gpt" else ImageClassification(model="resnet8", data="digits", width=4)
    batch: Any = tokens(4) if model == "gpt" else (torch.randn(4, 3, 8, 8), torch.arange(4))
    cell = replace(CELL, devices=1, per_device_batch_size=4, global_batch_size=4, precision=precision)
    training = training_of(cell, workload)
    seen: dict[str, torch.dtype] = {}

    def note(kind: str) -> Any:
        def of(module: Any, *_: object) -> None:
            seen[f"{kind} weights"] = module.weight.dtype

        return of

    for module in training.unwrapped.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(note("product"))
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(note("norm"))
    before = [p.full_tensor().clone() for p in training.model.parameters()]  # type: ignore[attr-defined]
    losses = [training.step(batch, Share((), 4, 4))[0] for _ in range(12)]
    assert losses[0].dtype == torch.float32 and losses[-1] < losses[0]
    after = [p.full_tensor() for p in training.model.parameters()]  # type: ignore[attr-defined]
    assert {p.dtype for p in after} == {torch.float32}
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    reduced = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert seen["product weights"] == reduced and seen.get("norm weights", torch.float32) == torch.float32
    assert training.evaluate(batch, Share((), 4, 4))["loss"][0] > 0


@pytest.mark.usefixtures("eight_ranks")
def test_statistics_are_one_group_of_the_model_not_one_a_layer() -> None:
    def gathers(precision: str) -> tuple[int, int | None]:
        training = training_of(
            replace(CELL, precision=precision), ImageClassification(model="resnet8", data="digits", width=8)
        )
        with Traffic() as traffic, torch.no_grad():
            training.model(torch.randn(2, 3, 8, 8))
        return traffic.calls, training.strategy.shard_units

    calls, units = gathers("fp32")
    assert units == calls  # each group once in a forward pass
    assert gathers("bf16") == (calls + 1, calls + 1)


class FlatList:
    """A network whose layers, the one with statistics among them, are children of one nn.Sequential."""

    unit = "samples"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch).square().sum(), torch.tensor(float(len(batch)))


class Frozen(FlatList):
    """The same network, whose layer with statistics has frozen weights."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.get_submodule("1").requires_grad_(False)
        return model


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(("kind", "precision"), [(FlatList, "bf16"), (Frozen, "bf16"), (Frozen, "fp16")])
def test_a_layer_with_statistics_is_sharded_once_and_stays_float32(kind: type[FlatList], precision: str) -> None:
    """It is a unit itself, and one of the layers with weights of their own dtype."""
    cell = replace(CELL, devices=1, per_device_batch_size=4, global_batch_size=4, precision=precision)
    training = training_of(cell, kind())
    seen: list[torch.dtype] = []
    norm: Any = training.unwrapped.get_submodule("1")
    norm.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    losses = [training.step(torch.randn(4, 4), Share((), 4, 4))[0] for _ in range(2)]
    assert bool(torch.isfinite(torch.stack(losses)).all()) and set(seen) == {torch.float32}
    assert training.facts["shard_units"] == 4


class FrozenEncoder(FlatList):
    """The same network, of which only the last layer is trained."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.requires_grad_(False)
        model.get_submodule("3").requires_grad_(True)
        return model


@pytest.mark.usefixtures("no_group")
def test_units_without_a_trained_parameter_are_sharded_and_released_after_their_forward_pass() -> None:
    cell = replace(CELL, devices=1, per_device_batch_size=4, global_batch_size=4)
    training = training_of(cell, FrozenEncoder())
    gathered: list[bool] = []
    training.unwrapped.get_submodule("3").register_forward_pre_hook(
        lambda *_: gathered.append(not isinstance(training.unwrapped.get_submodule("0").weight, DTensor))
    )
    before = [parameter.full_tensor().clone() for parameter in training.model.parameters()]  # type: ignore[attr-defined]
    for _ in range(2):
        training.step(torch.randn(4, 4), Share((), 4, 4))
    after = [parameter.full_tensor() for parameter in training.model.parameters()]  # type: ignore[attr-defined]
    changed = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert gathered == [False, False] and training.facts["shard_units"] == 4
    assert changed == [parameter.requires_grad for parameter in training.model.parameters()]


@pytest.mark.usefixtures("no_group")
@pytest.mark.filterwarnings("ignore")  # pytest turns those of dynamo into errors
@pytest.mark.parametrize(("strategy", "nothing"), [("single", False), ("ddp", False), ("fsdp", True)])
def test_a_chain_of_torch_s_own_layers_is_compiled_inside_ddp_and_not_at_all_by_fsdp(
    strategy: str, nothing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another backend, since inductor needs a C++ compiler."""
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda model, **_: compiled(model, backend="eager"))
    cell = replace(CELL, strategy=strategy, devices=1, per_device_batch_size=4, global_batch_size=4, compile=True)
    training = training_of(cell, FlatList())
    assert not training.compiled_nothing, "no step was taken"
    training.step(torch.randn(4, 4), Share((), 4, 4))
    assert training.compiled_nothing is nothing


class OnMeta(LanguageModel):
    """A workload that builds its model on the meta device."""

    def build_model(self) -> nn.Module:
        with torch.device("meta"):
            return super().build_model()

    def init_weights(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
            if isinstance(module, nn.Linear | nn.LayerNorm):
                nn.init.uniform_(module.bias)


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("kind", [LanguageModel, OnMeta])
def test_shards_are_the_parts_of_the_model_that_one_device_builds_and_no_whole_model_moves_to_the_device(
    kind: type[LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = kind(model="nano", context=16, text_bytes=20_000)
    whole = training_of(replace(CELL, strategy="single", devices=1), workload, 1, seed=3).model.parameters()
    moved: list[object] = []
    to = nn.Module.to
    monkeypatch.setattr(nn.Module, "to", lambda self, *args, **kwargs: moved.append(args) or to(self, *args, **kwargs))
    shards = [*training_of(CELL, workload, seed=3).model.parameters()]
    assert not moved and all(shard.device == CPU for shard in shards)
    for parameter, shard in zip(whole, shards, strict=True):
        assert torch.equal(shard.to_local(), parameter.chunk(RANKS)[0])  # type: ignore[attr-defined]


@pytest.mark.usefixtures("eight_ranks")
def test_after_an_evaluation_the_state_in_memory_is_the_shards_still() -> None:
    """The root's parameters stay whole after a forward pass that no backward pass follows."""
    training = training_of(CELL, gpt())
    training.step(tokens(), SHARE)
    before = peak_memory.of_state(training)
    training.evaluate(tokens(), SHARE)
    assert peak_memory.of_state(training) == before
    training.step(tokens(), SHARE)


def test_a_model_on_the_meta_device_needs_init_weights() -> None:
    class Forgetful(OnMeta):
        init_weights = None  # type: ignore[assignment]

    with pytest.raises(WorkloadError, match=r"on the meta device, and it has no init_weights\(model\)$"):
        training_of(replace(CELL, strategy="single", devices=1), Forgetful(text_bytes=20_000), 1)


@pytest.mark.usefixtures("eight_ranks")
def test_hybrid_shards_inside_a_node_replicates_between_nodes_and_records_no_exchanges() -> None:
    cell = replace(CELL, nodes=2, strategy_options={"mesh": "hybrid"})
    training = training_of(cell, gpt())
    (parameter, *_) = training.model.parameters()
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    assert (mesh.mesh.tolist(), mesh.mesh_dim_names) == ([[0, 1, 2, 3], [4, 5, 6, 7]], ("replicate", "shard"))
    assert len(parameter.to_local()) == -(-len(parameter) // 4)  # type: ignore[attr-defined]
    training.step(tokens(), SHARE)
    points: list[object] = []
    assert not training.observe_exchange(points.append)
    one_node = training_of(replace(cell, nodes=1), gpt())
    assert not one_node.observe_exchange(points.append)
    for nodes in (1, 2):
        assert training_of(replace(CELL, nodes=nodes), gpt()).observe_exchange(points.append)


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_alone_steps_exchange_nothing_after_the_first_and_update_nothing(precision: str) -> None:
    training = training_of(replace(CELL, precision=precision), gpt())

    def words() -> list[torch.Tensor]:
        """The bits of the shards: what a collective that moves nothing leaves may be NaN, unequal to itself."""
        shards: Any = training.model.parameters()
        return [parameter.to_local().detach().view(torch.int32).clone() for parameter in shards]

    def calls() -> int:
        with Traffic() as traffic:
            training.step(tokens(), SHARE)
        return traffic.calls + traffic.scattered

    usual = calls()
    before = words()
    with training.without_exchange():
        first, *others = (calls() for _ in range(3))
    assert usual > first > 0 and others == [0, 0]
    assert all(map(torch.equal, before, words())), "they are shards again, and as before"
    assert calls() > 0


def test_the_children_of_lists_and_sequentials_in_their_order() -> None:
    inner = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    outer = nn.Sequential(inner, nn.Linear(1, 1))
    assert default_units(outer) == [inner[0], inner[1], outer[1]]
    lists = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), nn.Linear(1, 1)])
    assert default_units(lists) == [lists[0][0], lists[1]]  # type: ignore[index]


def test_a_list_inside_a_block_is_part_of_the_block_and_a_model_without_lists_is_one_unit() -> None:
    """The downsampling branch of torchvision's residual blocks: a Sequential of a convolution and a BatchNorm."""
    model = torchvision.models.resnet50(weights=None)
    units = default_units(model)
    assert len(units) == 16 and {type(unit).__name__ for unit in units} == {"Bottleneck"}

    small = SmallResNet(1, width=4, channels=3, classes=10)
    assert default_units(small) == list(small.stages)
    assert default_units(nn.Linear(1, 1)) == []


def test_every_strategy_of_the_file_is_there() -> None:
    assert list(STRATEGIES) == list(BUILTIN_TRAITS) == ["single", "dp", "ddp", "fsdp"]
    assert all(STRATEGIES[name].traits is traits for name, traits in BUILTIN_TRAITS.items())


@pytest.mark.parametrize(
    ("precision", "options", "doubt"),
    [
        ("bf16", {}, ("other dtypes than the base's",)),
        ("fp16", {}, ("other dtypes than the base's",)),
        ("bf16", {"mixed_precision": "autocast"}, ()),  # the fair pair
        ("fp32", {}, ()),
    ],
)
def test_fsdps_policy_computes_in_other_dtypes_than_one_device(
    precision: str, options: dict[str, Any], doubt: tuple[str, ...]
) -> None:
    device = torch.device("cuda", 0)
    context = WrapContext((device,), options, lambda model: [], Precision(precision, "cuda"), 1, None)
    dtypes = {name: make_strategy(name).dtypes(context) for name in ("single", "ddp", "fsdp")}
    made = [line(name, rates=(50.0,), facts={"dtypes": text}) for name, text in dtypes.items()]
    assert doubts_of(made) == [(), (), doubt]
    assert doubts_of([made[0], line("fsdp", rates=(50.0,))]) == [(), ()]  # not known
