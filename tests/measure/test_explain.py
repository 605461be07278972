"""A whole timed trial on one process: its windows, its phases, ddp's exchange taken away and put back."""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from harness.config.sections import Throughput
from harness.config.strategy_traits import EXCHANGE_CPU, StrategyTraits
from harness.errors import WorkloadError
from harness.measure import explain as explaining
from harness.measure import profiles, throughput
from harness.measure.explain import measure_replicas
from harness.measure.profiles import (
    NO_KERNELS,
    CollectiveTime,
    Event,
    MarkedSteps,
    measure_collectives,
    measure_communication,
    read_ddp_timers,
)
from harness.measure.stepper import Stepper, TrainingData
from harness.measure.throughput import measure_throughput
from harness.plan.cell import Cell
from harness.plan.trial import SkipTrial
from harness.train.ranks import Ranks
from harness.train.training import Training

CPU = torch.device("cpu")
CELL = Cell("w", None, None, "single", "cpu", 1, 1, "weak", 8, 8, optimizer={"name": "Adam", "lr": 0.01})
FAST = Throughput(blocks=1, warmup_steps=3, windows=2, window_steps=4, window_seconds=0.0)


class Net:
    unit = "samples"
    lie = 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return (model(x) - y).square().sum(), torch.tensor(float(len(x) + self.lie))


def stepper_for(cell: Cell, workload: Any = None, samples: int = 64) -> Stepper:
    ranks = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,) * cell.devices)
    workload = workload or Net()
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    training = Training(cell, workload, 0, ranks)
    return Stepper(training, TrainingData(cell, 0, ranks, data, data, workload), lambda: None)


def of_strategy(stepper: Stepper, name: str) -> Stepper:
    stepper.data = replace(stepper.data, cell=replace(CELL, strategy=name))
    return stepper


@pytest.mark.parametrize("cheap", [True, False])
def test_timed_windows_mark_their_phases_where_that_is_cheap(monkeypatch: pytest.MonkeyPatch, cheap: bool) -> None:
    monkeypatch.setattr("harness.measure.throughput.phases_are_cheap", lambda *asked: cheap)
    speed = measure_throughput(stepper_for(CELL), FAST)
    kinds = [window.kind for window in speed.windows]
    rounds = kinds.count("warmup")
    assert 2 <= rounds <= FAST.warmup_rounds
    assert kinds == ["warmup"] * rounds + ["timed"] * 2 + ["phases"] * (not cheap)
    timed, marked = speed.windows[rounds : rounds + 2], speed.windows[rounds + 2 :]
    assert [(window.weight, bool(window.phases)) for window in timed] == [(32.0, cheap)] * 2
    assert all(window.steps == 3 for window in marked)
    for window in timed if cheap else marked:
        assert sum(window.phases.values()) == pytest.approx(sum(window.step_s), rel=1e-9)
        assert sum(window.step_s) <= window.duration_s and min(window.phases["forward"], window.phases["backward"]) > 0
    assert speed.finite and speed.window_steps == FAST.window_steps and speed.load["watched_s"] > 0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("rounds", "steady"), [(2, True), (3, True), (FAST.warmup_rounds, False)])
def test_rank_0_ends_the_warm_up(monkeypatch: pytest.MonkeyPatch, rounds: int, steady: bool, first: bool) -> None:
    """What it finds counts on every rank."""
    told: list[Any] = []
    stepper = stepper_for(CELL)
    stepper.ranks = replace(stepper.ranks, rank=0 if first else 1)
    monkeypatch.setattr(throughput, "is_steady", lambda taken: len(taken) >= 2)
    monkeypatch.setattr(Ranks, "broadcast", lambda ranks, value: told.append(value) or (len(told) == rounds, steady, 3))
    monkeypatch.setattr(Ranks, "barrier", lambda ranks: None)
    taken, found = throughput._warm_up(stepper, FAST)
    assert (len(taken), found.steady) == (rounds, steady)
    assert [own for _, own, _ in told] == [number >= 2 for number in range(1, rounds + 1)]


def test_a_weight_that_is_not_the_batchs_length_and_a_batch_above_the_data_set_are_refused() -> None:
    workload = Net()
    workload.lie = 1
    with pytest.raises(WorkloadError, match="weight of 18 for 2 batches of 8 samples, in all 16"):
        stepper_for(CELL, workload).window("timed", 2)
    with pytest.raises(SkipTrial, match="global batch 8 exceeds the 7"):
        stepper_for(CELL, samples=7)


SPEED = throughput.ThroughputMeasurement((), 8, True, True, {})


@pytest.fixture
def no_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts no FLOPs, for which a stepper of plain values has no batch."""
    monkeypatch.setattr(explaining, "_arithmetic", lambda *args: {})


@pytest.mark.usefixtures("no_arithmetic")
def test_a_trial_whose_communication_cannot_be_disabled_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(CELL, strategy="ddp", devices=2, strategy_options={"static_graph": True})
    asked: list[Any] = []
    monkeypatch.setattr(explaining, "measure_communication", lambda *args, **kw: (asked.append((*args, kw)) or [], {}))
    ranks = replace(stepper_for(CELL).ranks, rank=1, world_size=2)
    stepper = cast(Any, SimpleNamespace(ranks=ranks, data=SimpleNamespace(cell=cell)))
    explained = explaining.explain(stepper, SPEED, {})
    assert explained == ([], {"explain_error": explaining.STATIC_GRAPH}, ())
    assert not asked
    marked_apart = replace(SPEED, windows=(SimpleNamespace(kind="phases"),))
    stepper.data.cell = replace(cell, strategy_options={})
    for speed in (SPEED, marked_apart):
        explaining.explain(stepper, speed, {})
    assert [options[-1] for options in asked] == [{"detailed": True}, {"detailed": False}], "as the timed windows"


@pytest.mark.usefixtures("no_arithmetic")
@pytest.mark.parametrize(
    ("traits", "devices", "is_unknown"),
    [
        (StrategyTraits(), 2, True),
        (StrategyTraits(), 1, False),
        (StrategyTraits(explained_by="profile"), 2, False),
        (None, 2, False),  # dp, whose replicas are measured
    ],
)
def test_an_own_strategy_whose_traits_name_no_measurement_is_unknown_with_that_reason(
    traits: StrategyTraits | None, devices: int, is_unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "measure_replicas", lambda *args: {})
    cell = replace(CELL, strategy="own:Zero" if traits else "dp", devices=devices, own_traits=traits)
    stepper = cast(Any, SimpleNamespace(ranks=stepper_for(CELL).ranks, data=SimpleNamespace(cell=cell)))
    facts = {"explain_error": explaining.NOT_NAMED} if is_unknown else {}
    assert explaining.explain(stepper, SPEED, {}) == ([], facts, ())


@pytest.mark.usefixtures("no_group")
@pytest.mark.slow
def test_on_one_device_ddp_has_a_window_without_exchange_too() -> None:
    ddp = replace(CELL, strategy="ddp")
    stepper = stepper_for(ddp)
    speed = measure_throughput(stepper, FAST)
    alone, _, unrecorded = explaining.explain(stepper, speed, {})
    assert [window.kind for window in alone] == ["alone"] and unrecorded == ()
    _, _, recorded = explaining.explain(stepper, speed, {}, exchanges=True)
    assert [row["operation"] for row in recorded] == ["all_reduce"]
    without, _, none = explaining.explain(stepper_for(CELL), speed, {}, exchanges=True)
    assert (without, none) == ([], ())


@pytest.mark.usefixtures("no_arithmetic")
def test_without_memory_for_the_whole_model_fsdp_has_no_step_alone_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(CELL, strategy="fsdp", devices=2)
    training = SimpleNamespace(parameters=10**15)
    ranks = replace(stepper_for(CELL).ranks, rank=1, world_size=2)
    monkeypatch.setattr(Ranks, "gather", lambda ranks, fits: [fits, True])  # the other rank has room
    stepper = cast(Any, SimpleNamespace(ranks=ranks, training=training, data=SimpleNamespace(cell=cell)))
    assert explaining.explain(stepper, SPEED, {})[1] == {"explain_error": explaining.TOO_LARGE}


class CountingNet(Net):
    """Counts its calls in a buffer that no state_dict() holds."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("calls", torch.zeros(()), persistent=False)
        model.register_forward_hook(lambda module, batch, out: module.calls.add_(1) and None)
        return model


@pytest.mark.usefixtures("no_group")
def test_state_with_buffers_that_are_not_persistent_is_restored_after_the_communication_windows() -> None:
    stepper = stepper_for(replace(CELL, strategy="ddp"), CountingNet())
    stepper.window("warmup", 3)
    before = stepper.training.snapshot()
    windows, result = measure_communication(stepper, 20, detailed=True)
    assert [window.kind for window in windows] == ["alone", "together"] * 2
    assert {window.steps for window in windows} == {5}
    assert set(result) in ({"exchange_s", "exposed_s"}, {"exchange_s"})  # on one process DDP may tell nothing
    assert EXCHANGE_CPU in result["exchange_s"]
    after = stepper.training.snapshot()
    assert stepper.training.model.module.calls.item() == 3  # type: ignore[union-attr, operator]
    for name, value in before["model"].items():
        assert torch.equal(value, after["model"][name]), name
    for index, state in before["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, after["optimizer"]["state"][index][name]), name


@pytest.mark.parametrize(
    ("ranks_here", "threads", "cpu_s"),
    [(2, 1, 0.3), (1, 1, 0.1), (2, 4, 0.1), (4, 1, 0.1)],  # a free processor takes gloo's part; OpenMP's threads spin
)
def test_the_exchanges_cpu_time_is_that_of_all_threads_if_no_processor_is_free(
    monkeypatch: pytest.MonkeyPatch, ranks_here: int, threads: int, cpu_s: float
) -> None:
    def window(kind: Any, thread_cpu_s: float, process_cpu_s: float) -> Any:
        return SimpleNamespace(kind=kind, steps=10, thread_cpu_s=thread_cpu_s, process_cpu_s=process_cpu_s)

    windows = [window("alone", 10, 11), window("together", 11, 14), window("alone", 20, 21), window("together", 21, 24)]
    monkeypatch.setattr(profiles.os, "sched_getaffinity", lambda process: {3, 5})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    own = [("n", {2 * rank, 2 * rank + 1} if ranks_here == 4 else {3, 5}) for rank in range(ranks_here)]  # 4: pinned
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [*own, ("other node", {7})])
    monkeypatch.setattr(Ranks, "sum", lambda ranks, values: [3 * value for value in values])
    ranks = Ranks(0, 3, 0, 0, "n", "127.0.0.1", (CPU,))
    assert profiles.cpu_of_exchange(windows, nn.Linear(1, 1), ranks) == pytest.approx(cpu_s)

    spent = [0.0]
    model: Any = SimpleNamespace(_sync_buffers=lambda: spent.append(spent[-1] + 0.01 * len(spent)))
    monkeypatch.setattr(profiles, "broadcasts_buffers", lambda model: True)
    for name in ("thread_time", "process_time"):
        monkeypatch.setattr(profiles.time, name, lambda: spent[-1])
    a_broadcast = 0.01 * (2 + profiles.LOGGED_STEPS + 1) / 2  # the median of all but the first
    assert profiles.cpu_of_exchange(windows, model, ranks) == pytest.approx(cpu_s - a_broadcast)


@pytest.mark.filterwarnings("ignore:.*Profiler.*")
def test_the_emulated_replicas_report_their_collectives() -> None:
    stepper = stepper_for(replace(CELL, strategy="dp", devices=2, global_batch_size=16))
    facts = measure_collectives(stepper)
    names = ("replicate", "scatter", "gather", "reduce")
    assert set(facts["exchange_s"]) == set(facts["exposed_s"]) == set(names)
    assert all(0 < facts["exposed_s"][name] <= facts["exchange_s"][name] for name in names)


def test_the_collectives_are_those_of_the_rank_that_waits_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it: their waiting is its slowness, no cost of exchange."""
    total_s = {"all-gather": 9.0, "reduce-scatter": 5.0, "shard copies": 3.0}  # no rank waits in its copies
    exposed_s = ((4.0, 4.0, 0.0), (5.0, 2.0, 3.0))
    seen = [dict(zip(total_s, map(CollectiveTime, total_s.values(), of_rank), strict=True)) for of_rank in exposed_s]
    monkeypatch.setattr(profiles, "profiled_steps", lambda stepper: MarkedSteps((0, 1), profiles.PROFILED_STEPS, []))
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [(times, *value[1:]) for times in seen])
    found = measure_collectives(of_strategy(stepper_for(CELL), "fsdp"))
    wanted_s = {"exchange_s": (9.0, 5.0, 3.0), "exposed_s": (5.0, 2.0, 3.0)}
    a_step = {kind: [seconds / profiles.PROFILED_STEPS for seconds in each] for kind, each in wanted_s.items()}
    assert found == {kind: dict(zip(total_s, seconds, strict=True)) for kind, seconds in a_step.items()}


def test_a_trace_has_the_profiled_steps_and_none_is_kept_beyond_its_size() -> None:
    (content,) = profiles.traces_of(stepper_for(CELL), 10**7)
    events = json.loads(gzip.decompress(content))["traceEvents"]
    steps = [event for event in events if event.get("ph") == "X" and event["name"].startswith("ProfilerStep#")]
    assert len(steps) == profiles.PROFILED_STEPS and any(event["name"] == "aten::addmm" for event in events)
    assert profiles.traces_of(stepper_for(CELL), 100) == (b"",)


@pytest.mark.usefixtures("no_group")
def test_ddps_timers_are_those_of_the_rank_that_waits_least_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stepper_for(replace(CELL, strategy="ddp")).training.model
    own, other = [(1.0, 4.0), (3.0, 4.0), (2.0, 4.0)], [(2.0, 5.0), (1.0, 5.0), (5.0, 6.0)]  # exposed, whole
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [own, other])
    found = read_ddp_timers(model, lambda: None, stepper_for(CELL).ranks)
    assert found == {"exposed_s": {"all-reduce": 1.0}, "exchange_s": {"all-reduce": 4.0}}


def measured_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, events: list[Event], lost_by_other: int = 0, strategy: str = "dp"
) -> Any:
    """The facts of a profile of dp with these events; the other rank's has lost some of its 9 kernels."""
    profiled = MarkedSteps((0, 100), profiles.PROFILED_STEPS, events)
    monkeypatch.setattr(profiles, "profiled_steps", lambda stepper: profiled)
    monkeypatch.setattr(Stepper, "step", lambda stepper: None)
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value, (value[0], lost_by_other, 9, value[-1])])
    stepper = of_strategy(stepper_for(CELL), strategy)
    stepper.ranks = replace(stepper.ranks, devices=(torch.device("cuda", 0),))
    return measure_collectives(stepper)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_profile_for_busy_seconds_alone_leaves_only_these_unknown(
    monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    """That of single or ddp: its communication is known from other measurements."""
    events = [Event("sgemm", (0, 9), 0)] if kernels else []
    assert "explain_error" not in measured_on_a_gpu(monkeypatch, events, 3 * kernels, strategy="ddp")


@pytest.mark.parametrize("kernels", [True, False])
def test_a_profile_without_kernels_has_a_reason(monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    """As in a container that forbids CUPTI: the calls are seen, and collectives are unknown, not 0 ms."""
    events = [Event("Broadcast", (0, 9), thread=1, correlation=1), *([Event("sgemm", (0, 9), 0)] if kernels else [])]
    facts = measured_on_a_gpu(monkeypatch, events)
    assert facts.pop("explain_error", None) == (None if kernels else NO_KERNELS)
    busy = {"busy_s": pytest.approx(9e-9 / profiles.PROFILED_STEPS)} if kernels else {}
    assert facts == {"exchange_s": {}, "exposed_s": {}, **busy}


REPLICATE = [
    Event("Broadcast", (0, 9), thread=1, correlation=1),
    Event("cudaLaunchKernelExC", (1, 2), thread=1, correlation=7),
    Event("ncclDevKernel_Broadcast_RING_LL", (10, 20), 0, correlation=7, launched_by=1),
]
GEMM = [Event("cudaLaunchKernel", (3, 4), thread=1, correlation=8), Event("sgemm", (15, 40), 0, correlation=8)]


@pytest.mark.parametrize(
    ("events", "lost_by_other", "lost"),
    [
        ([*REPLICATE, *GEMM], 0, None),
        ([*REPLICATE, GEMM[0]], 0, (1, 2)),  # the copy would be exposed in full
        ([*REPLICATE, GEMM[0], GEMM[1]._replace(annotation=True)], 0, (1, 2)),  # annotations have other numbers
        ([*REPLICATE[:2], *GEMM], 0, (1, 2)),  # and here not be seen
        ([*REPLICATE, *GEMM], 3, (3, 9)),  # the rank that waits least may be the other one
    ],
)
def test_collectives_are_unknown_if_a_kernel_that_was_launched_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, events: list[Event], lost_by_other: int, lost: tuple[int, int] | None
) -> None:
    facts = measured_on_a_gpu(monkeypatch, events, lost_by_other)
    if lost:
        assert facts == {"explain_error": profiles.LOST.format(*lost)}
        return
    assert facts.pop("busy_s") == pytest.approx(30e-9 / profiles.PROFILED_STEPS)
    ns = {name: seconds["replicate"] * profiles.PROFILED_STEPS * 1e9 for name, seconds in facts.items()}
    assert ns == {"exchange_s": pytest.approx(10), "exposed_s": pytest.approx(5)}


@pytest.mark.filterwarnings("ignore:.*Profiler.*")
def test_the_first_step_of_a_profile_does_not_count() -> None:
    taken: list[int] = []
    stepper = stepper_for(CELL)

    def step() -> None:
        with torch.profiler.record_function(f"step {len(taken)}"):
            taken.append(0)

    stepper.step = step  # type: ignore[method-assign, assignment]
    profiled = profiles.profiled_steps(stepper)
    names = [event.name for event in profiled.events if event.name.startswith("step")]
    first = profiles.FIRST_STEPS + 1
    assert names == [f"step {number}" for number in range(first, first + profiles.PROFILED_STEPS)]
    assert profiled.steps == profiles.PROFILED_STEPS and len(taken) == first + profiles.PROFILED_STEPS


TWO = replace(CELL, strategy="dp", devices=2, global_batch_size=16)


class Timed(Net):
    """Advances a clock by a second a forward pass, and by ten in a thread of its own."""

    def __init__(self) -> None:
        self.seconds, self.sizes, self.lock = 0.0, [], threading.Lock()

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with self.lock:
            self.seconds += 1.0 if threading.current_thread() is threading.main_thread() else 10.0
            self.sizes.append(len(batch[0]))
        return super().loss(model, batch)


@pytest.mark.parametrize(("cell", "times"), [(TWO, 1), (replace(TWO, training={"accumulation": 2}), 2)])
def test_threads_and_what_replicas_lose_to_each_other_are_separate_seconds_a_step(cell: Cell, times: int) -> None:
    workload = Timed()
    stepper = stepper_for(cell, workload)
    stepper.window("warmup", 2)
    before = stepper.training.snapshot()["model"]
    workload.sizes.clear()
    facts = measure_replicas(stepper, 20, clock=lambda: workload.seconds)
    assert facts == {"exchange_s": {"threads": times * (10.0 - 1.0), "side by side": times * (2 * 10.0 - 10.0)}}
    assert set(workload.sizes) == {8 // times}, "each replica has its chunk of the batch"
    assert len(workload.sizes) == profiles.ROUNDS * (5 + 1) * (1 + 1 + 2)
    after = stepper.training.snapshot()["model"]
    assert all(torch.equal(value, before[name]) for name, value in after.items()), "the training is left as it was"
