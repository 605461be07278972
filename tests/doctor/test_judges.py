"""The judgement of each check on given observations, without ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harness.doctor import (
    communication,
    data,
    facts,
    gradients,
    memory_needs,
    parameters,
    real_steps,
    speed,
    state,
    validation,
)
from harness.doctor.facts import Padded, Steps, moved_by_hand, padded_of, real_lengths
from harness.doctor.subject import Case, Subject, describe_error, doctor_cell
from harness.measure.generators import UNKNOWN
from harness.plan import checks
from harness.plan.cell import Cell
from harness.plan.checks import join_names
from harness.train.ranks import Ranks
from tests.doctor.conftest import only
from tests.doctor.healthy import Healthy, Net
from tests.doctor.ranks import CPU, cell_for, subject_of

RANK = speed.Threads(threads=1, processors=2, node=0, before=1, now=1, started=[])


def cell(strategy: str = "ddp", devices: int = 2, batch: int = 64, **more: Any) -> Cell:
    share = batch // devices if batch % devices == 0 else None
    made = Cell("w", None, None, strategy, "cpu", devices, 1, "strong", share, batch)
    return replace(made, optimizer={"name": "SGD", "lr": 0.1}, **more)


def case(*args: Any, steps: Sequence[Steps] = (), **more: Any) -> Case:
    return Case(cell(*args, **more), steps=steps)


def steps(**more: Any) -> Steps:
    made = Steps(calls=4, inner_calls=4, losses=[64.0] * 4, weights=[64.0] * 4, trainable=2, digests={"w": "a"})
    return replace(made, **more)


def test_a_few_of_many_names() -> None:
    assert join_names(["a", "b"]) == "a, b"
    assert join_names(list("abcdef")) == "a, b, c, d and 2 more"


@pytest.mark.parametrize(
    ("strategy", "batch", "devices", "sizes"),
    [
        ("dp", 10, 4, [3, 3, 3, 1]),
        ("dp", 5, 4, [2, 2, 1, 0]),
        ("ddp", 10, 4, [2, 3, 2, 3]),
        ("ddp", 3, 4, [0, 1, 1, 1]),
        ("fsdp", 64, 2, [32, 32]),
    ],
)
def test_the_sizes_each_replica_gets(strategy: str, batch: int, devices: int, sizes: list[int]) -> None:
    assert checks.part_sizes(strategy, batch, devices) == sizes
    assert sum(sizes) == batch
    if strategy == "dp":
        assert [size for size in sizes if size] == [len(chunk) for chunk in torch.zeros(batch).chunk(devices)]


def test_dp_leaves_devices_idle_if_chunks_run_out() -> None:
    idle = checks.uneven_batch("dp", 4, 5)
    only(idle, "warning", seen="2, 2, 1, 0 (1 without samples)", check="batch divisibility")
    assert checks.uneven_batch("dp", 4, 10) and not checks.uneven_batch("dp", 4, 12)
    only(checks.uneven_batch("ddp", 4, 3), "error", advice="a global batch of 4")
    assert checks.uneven_batch("ddp", 4, 64) == []


def test_a_last_batch_that_idles_devices_is_reported_if_epochs_are_trained() -> None:
    four = cell("ddp", 4, 64)
    only(checks.judge_batches(129, 64, four, epochs=True), "note", seen="last batch of an epoch: 1 of 64 samples")
    assert checks.judge_batches(129, 64, four, epochs=False) == []
    assert checks.judge_batches(128, 64, four, epochs=True) == []
    assert checks.judge_batches(128 + 4, 64, four, epochs=True) == []
    only(checks.judge_batches(129, 128, four, epochs=True), seen="1 of 128 samples")  # two micro-batches


def test_an_uncalled_wrapper_is_named() -> None:
    assert not [*parameters.judge_wrapper([steps()] * 2, case())]
    assert not [*parameters.judge_wrapper([steps(calls=0)], case("single", 1))]
    inside = " in 4 steps on 2 devices: 0; the model inside it 4"
    only(parameters.judge_wrapper([steps(calls=0)] * 2, case()), seen=inside)
    only(parameters.judge_wrapper([steps(calls=0)], case("ddp", 1)), seen=" in 4 steps on 1 device: 0; ")
    only(parameters.judge_wrapper([steps(wrapped_by_itself="net: DataParallel")] * 2, case()), seen="net: DataParallel")


@pytest.mark.parametrize(
    ("why", "strategy", "options", "severity"),
    [
        ("none", "ddp", {}, "error"),  # its second step would fail
        ("none", "ddp", {"find_unused_parameters": True}, "note"),
        ("none", "ddp", {"static_graph": True}, "note"),
        ("none", "fsdp", {}, "warning"),
        ("zero", "ddp", {}, "warning"),
        ("some", "ddp", {}, "error"),
        ("not stepped", "ddp", {}, "warning"),
        ("rounded", "ddp", {}, "warning"),
    ],
)
def test_parameters_that_do_not_move_are_named(why: str, strategy: str, options: dict[str, Any], severity: str) -> None:
    still = [steps(unchanged={"head.weight": why})] * 2
    finding = only(parameters.judge(still, case(strategy, strategy_options=options)), severity, seen="1 of 2")
    assert "head.weight" in finding.seen


def test_parameters_that_do_not_move_on_any_rank_differ_or_move_twice_are_named() -> None:
    still = steps(unchanged={"a": "none", "b": "none"})
    only(parameters.judge([still] * 2, case()), "error", seen="all 2")
    assert not [*parameters.judge([steps(unchanged={"a": "zero"}), steps()], case("fsdp"))]  # an empty shard
    apart = only(parameters.judge([steps(), steps(digests={"w": "b"})], case()), "error", seen="differ between ranks")
    assert "(w)" in apart.seen
    twice = [steps(), steps(moved_by_hand=["w"])]
    only(parameters.judge(twice, case()), seen="before the optimizer steps: 1 of 2 (w)")


def test_ranks_that_draw_the_same_numbers_or_have_different_initial_weights_are_named() -> None:
    same = [steps(random_states={"torch's": "a"})] * 2
    only(state.judge_streams(same, case()), "warning")
    assert not [*state.judge_streams([same[0], steps(random_states={"torch's": "b"})], case())]
    assert not [*state.judge_streams([steps()] * 2, case())]
    of_numpy = [steps(random_states={"NumPy's": "a", "torch's": str(n)}) for n in (0, 1)]
    only(state.judge_streams(of_numpy, case()), "note", seen="NumPy's generator", means="right if they select")
    own = state.judge_streams([steps(random_states={"drop.noise": "a"})] * 2, case())
    only(own, "note", seen="the generator drop.noise", advice="add the rank")
    unread = state.judge_streams([steps(random_states={"drop.noise": UNKNOWN})] * 2, case())
    only(unread, "note", seen="the generator drop.noise: its state cannot be read")
    found = state.judge_randomness([{"w": "a", "v": "c"}, {"w": "b", "v": "c"}], case("fsdp"))
    only(found, seen="1 of 2 parameters", means="fsdp shards")


@pytest.mark.parametrize(
    ("losses", "diverges"),
    [
        ([1.0, 0.9, 0.8], False),
        ([1.0, 2.0, 3.9], False),
        ([1.0, 5.0, 25.0], True),
        ([1.0, math.nan, 0.5], True),
        ([1.0, math.inf, 0.5], True),
        ([-2.0, -2.5, -3.0], False),
        ([1e-4, 1e-2, 0.6], True),
        ([0.0, 0.1, 0.4], False),
    ],
)
def test_divergence_criteria(losses: list[float], *, diverges: bool) -> None:
    assert gradients.diverges(losses) is diverges


def test_divergence_of_one_strategy_is_attributed_to_that_strategy() -> None:
    wild = steps(losses=[64.0, 640.0, 6400.0, 64000.0], lr=0.1)
    calm = [replace(wild, single_device_losses=[1.0, 0.9, 0.8, 0.7])] * 2
    only(gradients.judge_divergence(calm, case()), "error", means="learning rate is not the cause")
    both = [replace(wild, single_device_losses=[1.0, 10.0, 100.0, 1000.0])] * 2
    assert not only(gradients.judge_divergence(both, case()), "warning", seen="0.1", means="tried once").stops
    infinite = [replace(wild, losses=[64.0, math.nan])]
    finding = only(gradients.judge_divergence(infinite, case("single", 1)), "error")
    assert finding.stops and finding.row()["stops"]
    finding = only(gradients.judge_divergence([wild], case("single", 1)))
    assert finding.seen.startswith("losses of single on 1 device at a learning rate of 0.1: ")


def products(factor: float, unlike: float = 0.0, *, noisy: bool = False) -> list[gradients.Products]:
    """One parameter whose gradient is ``factor`` times one device's, and ``unlike`` beside it."""
    return [gradients.Products({"w": (factor, 1.0, factor**2 + unlike**2)}, noisy, 64)]


def test_a_factor_of_n_is_a_sum_for_a_mean_and_another_difference_is_named_by_parameter() -> None:
    only(gradients.judge(products(2.0), case()), seen=": 2 times that of one device", means="instead of a mean")
    only(gradients.judge(products(0.25), case(devices=4)), seen=": 1/4 of that of one device")
    assert not [*gradients.judge(products(1.001), case())]
    unlike = only(gradients.judge(products(1.0, 0.3), case()), seen="from that of one device: 30 %")
    assert "largest in w" in unlike.seen and "PPO" not in unlike.advice
    assert "as PPO" in only(gradients.judge(products(1.0, 0.04), case())).advice
    sparse = [replace(each, sparse=True) for each in products(1.0, 0.3)]
    told = only(gradients.judge(sparse, case())).advice
    assert "sparse=False" in told and told.endswith(unlike.advice) and "sparse" not in unlike.advice
    assert not [*gradients.judge(products(1.0, 0.3, noisy=True), case())]  # noise in the loss widens the bound
    assert [*gradients.judge(products(2.0, noisy=True), case())]  # but not beyond a factor
    assert not [*gradients.judge(products(math.nan), case())]  # one device's is none either
    assert (gradients.relative(0.0, 0.0, 0.0), gradients.relative(0.0, 0.0, 1.0)) == (0.0, math.inf)


def seen(**more: Any) -> data.Samples:
    names = [str(index) for index in range(16)]
    return replace(data.Samples(256, names, names, []), **more)


def test_data_that_ranks_do_not_share() -> None:
    assert not [*data.judge([seen(), seen()], case())]
    only(data.judge([seen(), seen(count=128)], case()), seen="256, 128 samples on ranks 0 to 1")
    other = ["x"] * 16
    only(data.judge([seen(), seen(first=other, again=other)], case()), seen="16 of 16 compared samples")
    own = [seen(count=250, samplers=[data.Sampler(replicas=4, rank=0, holds=1000, gives=250)])]
    only(data.judge(own, case("dp")), means="750 samples are never used", seen="under dp")
    assert data.empty(1) == [] and data.empty(0)[0].severity == "error"


def test_a_limiting_loader_is_reported_with_both_rates() -> None:
    one = [steps(step_s=0.064)]
    rate = speed.Rate(0.01, processors=10)
    found = speed.judge([rate] * 2, case(steps=[*one, steps(step_s=0.032)]))
    finding = only(found, seen="workers a device: 100 samples/s")
    assert "model alone: 1,000" in finding.seen and finding.advice.startswith("set loader.workers to 10, ")
    cheaper = "make samples cheaper (40 workers a device, for which it has 10 processors)"
    finding = only(speed.judge([replace(rate, workers=4)], case(steps=one)))
    assert finding.advice == f"{cheaper}, or measure with data: synthetic_device"
    unknown = speed.judge([speed.Rate(0.01, complete=False)], case(steps=one))
    finding = only(unknown, "note", seen="at least 100 samples/s", means="perhaps")
    assert "loader.workers" not in finding.advice
    assert [*speed.judge([speed.Rate(0.0013)], case(steps=one))]
    for enough in (speed.Rate(0.0001), speed.Rate(0.0012), None):  # a machine's speed varies
        assert not [*speed.judge([enough], case(steps=one))]


def test_a_cell_is_examined_a_micro_batch_at_a_time_at_the_rate_of_the_whole_batch_as_one_device_is() -> None:
    scaled = {"lr_scaling": "linear", "lr_base_batch_size": 32}
    more = {"warmup_epochs": 2, "accumulation": 4, "clip_grad_norm": 1.0}
    asked = replace(cell("ddp", 2, 128), compile=True, training={**scaled, **more})
    seen = doctor_cell(asked)
    assert (seen.micro_batches, seen.compile, seen.per_device_batch_size, seen.global_batch_size) == (1, False, 16, 32)
    assert seen.lr_factor == asked.lr_factor == 4.0
    assert (seen.training["clip_grad_norm"], seen.training["warmup_epochs"]) == (1.0, 2)
    plain = cell("ddp", 2, 128)
    assert doctor_cell(plain) == plain
    automatic = replace(plain, training={**plain.training, "accumulation": 2, "most_micro_batch": 4})
    assert {"accumulation", "most_micro_batch"}.isdisjoint(doctor_cell(automatic).training)
    weak = replace(cell("dp", 2, 128), scaling="weak", training=scaled)
    subject = subject_of(Healthy(), weak, devices=2)
    rates = [made.optimizer.param_groups[0]["lr"] for made in (subject.training(), subject.single_device_training())]
    assert rates == [0.4, 0.4]


def test_threads_beyond_the_processors() -> None:
    rank, eight = RANK, replace(RANK, threads=8)
    assert not [*speed.judge_threads([rank, rank], case())]
    found = speed.judge_threads([rank, rank], case(loader={"workers": 2}))
    only(found, seen="4 loader workers", advice="reduce loader.workers")
    assert not [*speed.judge_threads([replace(rank, processors=5)], case(strategy="dp", loader={"workers": 1}))]
    replicas = speed.judge_threads([replace(rank, processors=4)], case(strategy="dp", loader={"workers": 2}))
    only(replicas, seen="1 computing threads and 4 loader workers")
    only(speed.judge_threads([eight] * 2, case()), seen="16 computing threads")
    assert not [*speed.judge_threads([eight] * 2, case(oversubscribed=True))]
    assert not [*speed.judge_threads([rank, replace(rank, node=1), replace(rank, node=1)], case(devices=3, batch=63))]
    elsewhere = speed.judge_threads([rank, replace(rank, node=1, threads=4)], case())
    only(elsewhere, seen="4 computing threads on a node with 2 processors (4 threads in the first of its 1 rank)")


def test_ranks_that_are_pinned_to_the_same_processors_are_named() -> None:
    zero, one, both = (replace(RANK, pinned=frozenset(own)) for own in ({0}, {1}, {0, 1}))
    finding = only(speed.judge_threads([zero, zero], case()))
    assert finding.seen == "several ranks are pinned to the same processors of a node: 0"
    assert not [*speed.judge_threads([zero, zero], case(oversubscribed=True))]
    for healthy in ([zero, replace(zero, node=1)], [zero, one], [both, both], [RANK, RANK], [zero]):
        assert not [*speed.judge_threads(healthy, case())]


def test_changed_threads_and_what_the_workload_started_are_named() -> None:
    rank = replace(RANK, threads=2, processors=4)
    changed = "computing threads of rank 0: 2 after the model was built and trained, 1 before"
    assert changed in only(speed.judge_threads([replace(rank, now=2)], case("single", 1))).seen
    started = replace(rank, started=["thread metrics"])
    assert "rank 0: 1 (thread metrics)" in only(speed.judge_threads([started], case("single", 1))).seen


def test_a_weight_of_samples_is_their_number_and_one_of_tokens_a_whole_number_of_at_least_one_a_sample() -> None:
    assert not [*gradients.judge_loss_weight([steps(samples=[64])], case())]
    found = gradients.judge_loss_weight([steps(samples=[64]), steps(samples=[32], weights=[1.0])], case())
    only(found, "error", seen="a batch of 32 samples: 1 (rank 1)")
    assert not [*gradients.judge_loss_weight([steps(samples=[64], weights=[640.0], unit="tokens")], case())]
    for weight, severity in ((63.0, "warning"), (64.5, "warning"), (0.0, "error"), (math.nan, "error")):
        only(gradients.judge_loss_weight([steps(samples=[64], weights=[weight], unit="tokens")], case()), severity)
    declared = steps(samples=[64], weights=[640.0], unit="tokens", units_per_sample=10)
    assert not [*gradients.judge_loss_weight([declared], case())]
    declared.units_per_sample = 12
    only(gradients.judge_loss_weight([declared], case()), "error", means="tokens_per_sample, 12,")
    masked, other = (steps(samples=[64], weights=[weight], unit="tokens") for weight in (0.0, 640.0))
    assert not [*gradients.judge_loss_weight([other, masked], case())]
    only(gradients.judge_loss_weight([masked, masked], case()), "error")


@pytest.mark.parametrize("piece", [1, 2**24])
def test_a_step_against_the_gradient_is_one_of_training_and_a_bound_is_none(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(facts, "PIECE", piece)
    model = nn.Linear(4, 1, bias=False)
    ours, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(nn.Linear(4, 1).parameters(), 0.1)
    before = {"weight": model.weight.detach().clone()}
    model.weight.grad = torch.tensor([[1.0, 2.0, 0.0, -1.0]])
    assert moved_by_hand(model, before, ours) == []
    model.weight.data.sub_(0.01 * model.weight.grad)
    assert moved_by_hand(model, before, ours) == ["weight"]
    assert moved_by_hand(model, before, other) == []  # an optimizer of the workload's own steps it
    model.weight.data.copy_(before["weight"] + torch.tensor([[2.0, -1.0, 3.0, 0.0]]))  # across the gradient
    assert moved_by_hand(model, before, ours) == []


def test_eval_mode_matters_if_a_layer_depends_on_it_and_batch_statistics_need_two_samples_a_device() -> None:
    assert not [*state.judge_train_mode([steps(evaluates=True)], case())]
    found = state.judge_train_mode([steps(mode_layers=["drop"]), steps(evaluates=True)], case())
    only(found, seen="layers that it changes: drop")
    norms = [steps(batch_norms=["norm"])] * 2
    assert not [*state.judge_train_mode(norms, case(batch=4))]
    only(state.judge_train_mode(norms, case(batch=2)), seen="samples of a device in a step: 1")


def test_state_of_one_rank_matters_if_the_same_batch_has_another_loss() -> None:
    ranks = [steps(state={"mean": "a", "n": "1"}, same_batch_loss=1.0)]
    ranks.append(steps(state={"mean": "b", "n": "1"}, same_batch_loss=1.1))
    only(state.judge_rank_state(ranks, case()), check="state in forward", seen="each of 2 ranks: mean;")
    assert not [*state.judge_rank_state([ranks[0], replace(ranks[1], same_batch_loss=1.0)], case())]  # only shown
    assert not [*state.judge_rank_state([ranks[0], replace(ranks[0], same_batch_loss=1.1)], case())]  # its own draws
    for unknown in (None, math.nan, math.inf):
        for known, other in (ranks, ranks[::-1]):
            assert not [*state.judge_rank_state([replace(other, same_batch_loss=unknown), known], case())]
    noise = [replace(rank, random_states={"noise": str(number)}) for number, rank in enumerate(ranks)]
    assert not [*state.judge_rank_state(noise, case())]  # the noise of each rank explains the losses
    alike = [replace(rank, random_states={"noise": "a", "torch's": str(n)}) for n, rank in enumerate(ranks)]
    only(state.judge_rank_state(alike, case()), seen="each of 2 ranks: mean;")
    of_one = [steps(same_batch_loss=1.0), steps(state={"n": "1"}, same_batch_loss=1.1)]
    only(state.judge_rank_state(of_one, case("fsdp")), seen="each of 2 ranks: n;")


@pytest.mark.parametrize("of_rank_one", [{"shift": "a"}, {"shift": "a", "n": "1"}])
def test_a_buffer_that_rank_0_does_not_change_is_lost_under_ddp(of_rank_one: dict[str, str]) -> None:
    same = {"n": "1"} if "n" in of_rank_one else {}
    ranks = [steps(state=state, buffers=[*state], same_batch_loss=1.0) for state in (same, of_rank_one)]
    (finding,) = state.judge_rank_state(ranks, case())
    assert finding.seen == "buffers that forward changes on rank 1 of 2, and not on rank 0: shift"
    assert not [*state.judge_rank_state(ranks, case("fsdp"))]  # nothing overwrites it, and no loss depends on it
    assert not [*state.judge_rank_state(ranks, case(strategy_options={"broadcast_buffers": False}))]
    assert not [*state.judge_rank_state([ranks[1], ranks[1]], case())]  # all ranks change it alike
    assert not [*state.judge_rank_state(ranks[::-1], case())]  # ddp sends what rank 0 writes to all
    assert not [*state.judge_rank_state([ranks[0], replace(ranks[1], buffers=[])], case())]  # an attribute of Python


def test_reading_for_repeated_draws_leaves_every_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    assert not data.repeats_draws(TensorDataset(torch.zeros(3)))
    assert torch.equal(torch.get_rng_state(), before) and not seeded


def test_memory_grows_if_every_step_keeps_more() -> None:
    growing = [steps(), steps(kept_bytes=[2**20, 3 * 2**20, 5 * 2**20])]
    only(memory_needs.judge_memory_growth(growing, case()), seen="on rank 1: 2 MiB more")
    samples = steps(kept_bytes=[2**10, 3 * 2**10, 5 * 2**10])  # no graph among them
    only(memory_needs.judge_memory_growth([samples], case()), "note", means="unless what is kept has a bound")
    for kept in ([], [100], [2**20, 2**21, 2**21], [10, 14, 18]):
        assert not [*memory_needs.judge_memory_growth([steps(kept_bytes=kept)], case())]


def alone(*seconds: float) -> list[speed.Alone]:
    return [speed.Alone(own, f"host{rank}") for rank, own in enumerate(seconds)]


def test_a_rank_whose_own_step_is_slow_is_named() -> None:
    only(speed.judge_slow_rank(alone(0.01, 0.06), case()), seen="10.0, 60.0 ms; slow: rank 1 on host1")
    for times in ([0.001, 0.004], [0.1, 0.2], [0.0, 0.0]):  # too short to know, as parts of a batch differ, not known
        assert not [*speed.judge_slow_rank(alone(*times), case())]


@pytest.mark.parametrize("step_s", [0.0, 0.002])
def test_ranks_of_a_model_that_does_not_fit_on_one_device_or_has_short_steps_are_compared_by_matrix_products(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Two(Ranks):
        def gather(self, value: Any) -> Any:
            return [0.01, value]  # of the other rank

    monkeypatch.setattr(speed, "PAUSE_S", 0.0)
    monkeypatch.setattr(speed, "_products_s", lambda device: next(times))
    subject = Subject(
        cell(), None, (), 0, Two(1, 2, 1, 0, "n", "127.0.0.1", (CPU,)), steps=[steps(own_step_s=step_s)] * 2
    )
    for given, found in (([0.06] * 20, 0.06), ([0.06, 0.05, 0.01], 0.01)):  # slow throughout; other load that passes
        times = iter(given)
        assert speed.observe_slow_rank(subject).seconds == found
    monkeypatch.undo()
    assert 0 < speed._products_s(CPU) < 60


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]], [4, 2, 1]),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], None),
        ([[1, 2, 0, 0], [5, 0, 0, 0], [0, 1, 0, 0]], None),  # zeros are among the values
        ([[1, 2, 3, 0], [4, 5, 6, 0]], None),  # an end mark
    ],
)
def test_padding_is_what_rows_of_several_lengths_end_in(rows: list[list[int]], lengths: list[int] | None) -> None:
    found = real_lengths(torch.tensor(rows))
    assert (None if found is None else found.tolist()) == lengths


def test_a_number_pads_only_if_it_ends_the_rows_of_every_batch() -> None:
    padded = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]])
    assert padded_of([(torch.zeros(3), padded)] * 2) == Padded(12, 7)
    for other in (padded + 1, padded.flip(1), padded.float()):
        assert padded_of([(torch.zeros(3), padded), (torch.zeros(3), other)]) == Padded()


def test_padding_that_is_counted_is_named_with_the_share_of_real_tokens() -> None:
    seen = Padded(places=100, real=60)
    counted = data.judge_padding([steps(padded=seen, weights=[100.0], unit="tokens")], case())
    only(counted, seen="counts in a batch of rank 0: 100; places 100, of which 60")
    assert not [*data.judge_padding([steps(padded=seen, weights=[60.0], unit="tokens")], case())]
    assert not [*data.judge_padding([steps(padded=seen, weights=[100.0])], case())]
    assert data.padding_figures([steps(padded=seen)], case()) == {"real tokens in a padded batch": "60 %"}
    only(
        data.judge_padding([steps(padded=replace(seen, real=20), weights=[20.0], unit="tokens")], case()),
        "note",
        seen="20 %",
    )
    assert not [*data.judge_padding([steps()], case())]


class Keeps(Net):
    """Keeps in forward what is given: a new object, or parts of what it has."""

    def __init__(self, kept: Callable[[Any, Tensor], Any], first: Any = None) -> None:
        super().__init__()
        self.kept, self.last_seen = kept, first

    def forward(self, x: Tensor) -> Tensor:
        self.last_seen = self.kept(self.last_seen, x)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kept", "first", "found"),
    [
        (lambda before, x: SimpleNamespace(x=x), SimpleNamespace(), True),
        (lambda before, x: before, SimpleNamespace(), False),
        (lambda before, x: (x.sum(), x.mean()), None, True),
        (lambda before, x: {"n": (before or {"n": 0})["n"] + 1}, None, True),
        (lambda before, x: torch.ones(3), torch.ones(3), False),
    ],
    ids=["new object", "same object", "tuple of tensors", "counter in a dict", "equal values"],
)
def test_what_forward_keeps_in_an_attribute_is_named_under_dp(kept: Any, first: Any, found: bool) -> None:
    workload = Healthy()
    workload.Net = lambda: Keeps(kept, first)  # type: ignore[assignment,misc]
    subject = subject_of(workload, cell_for("dp", 2), devices=2)
    assert state.observe(subject) == ({"last_seen": False} if found else {})


@pytest.mark.parametrize("how", ["in place", "replaced", "read"])
def test_buffers_that_the_loss_in_train_mode_does_not_read_are_statistics_under_dp(how: str) -> None:
    class Norm(Keeps):
        def __init__(self) -> None:
            super().__init__(lambda before, x: before, None)
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x) * (1.0 + self.mean if how == "read" else 1.0)
            if how == "replaced":
                self.mean = self.mean + x.detach().float().mean()
            else:
                self.mean.add_(x.detach().float().mean() + 1.0)
            return out

    workload = Healthy()
    workload.Net = Norm  # type: ignore[assignment,misc]
    subject = subject_of(workload, cell_for("dp", 2), devices=2)
    assert state.observe(subject) == ({} if how == "in place" else {"mean": False})


def test_a_validation_set_is_not_empty_and_shares_no_samples_not_even_slices() -> None:
    rows, of = torch.arange(30.0).view(10, 3), TensorDataset
    train = of(rows[:8])
    for held, severity, seen in (
        (of(rows[:0]), "error", "0 samples"),
        (train, "note", "the training set itself"),
        (of(rows[6:]), "warning", "2 of its 4 samples train too"),
        (of(rows[:8].clone()), "warning", "8 of 8 compared samples equal one of 8 training samples"),
    ):
        subject = replace(subject_of(Healthy(), epochs=True), datasets=(train, held))
        only(validation.observe(subject), severity, seen=seen)
        assert validation.observe(replace(subject, epochs=False)) == []
    assert validation.observe(replace(subject, datasets=(train, of(rows[8:])))) == []
    shared = [validation._shared(of(rows[:8]), of(part)) for part in (rows[8:], rows[6:], rows.clone(), rows[:0])]
    assert shared == [0, 2, 0, 0]
    series = torch.arange(2000.0)
    windows = of(series[:1000].unfold(0, 8, 1))
    assert [validation._shared(windows, of(series[first:].view(-1, 8))) for first in (1000, 992)] == [0, 1]


def test_failing_copies_between_a_pair_block_the_cell() -> None:
    def move(tensor: Tensor, to: torch.device) -> Tensor:
        copied = tensor.clone()
        copied[-1] += str(to) == "cpu:0"
        return copied

    devices = [torch.device("cpu"), torch.device("cpu", 0)]  # two names of the host stand for two GPUs
    wrong = communication.corrupt_pairs(devices, [8, 64], 2, move)
    assert wrong == [("cpu", "cpu:0", "directly")]
    assert communication.corrupt_pairs(devices, [8], 1, lambda tensor, to: tensor.clone()) == []
    seen = [communication.Copied(wrong), communication.Copied()]
    only(communication.judge_copies(seen, case("ddp")), "warning", check="GPU copies")
    finding = only(communication.judge_copies(seen, case("dp")), "error", seen="cpu to cpu:0 directly", advice="IOMMU")
    assert "NCCL_P2P_DISABLE has no effect on dp" in finding.advice


def group(**more: Any) -> communication.Exchange:
    return replace(communication.Exchange([], 1e-4, bucket=2**20, bucket_s=1e-3), **more)


def test_wrong_sums_are_named() -> None:
    assert not [*communication.judge([group()] * 3, case(devices=3, batch=63))]
    wrong = communication.judge([group(), group(wrong=["all-reduce of 4 bytes"])], case())
    only(wrong, "error", seen="wrong results of all-reduce of 4 bytes on rank 1")
    figures = communication.figures([group()] * 4, case(devices=4))  # 2 x 3/4 of 2**20 bytes a millisecond
    assert figures["all-reduce of 1.0 MiB"] == "1.00 ms, bus bandwidth 1.57 GB/s"
    assert "all-reduce of 2,564 bytes" in communication.figures([group(bucket=2564)] * 2, case())


def test_wrong_collective_results_are_detected_in_buckets_no_larger_than_the_gradient() -> None:
    ranks = Ranks(0, 2, 0, 0, "n", "127.0.0.1", (CPU,))
    assert communication.wrong_results(ranks, 8, lambda t: t.fill_(3.0), lambda t, source: t.fill_(1.0)) == []
    wrong = communication.wrong_results(ranks, 8, lambda t: t.fill_(2.0), lambda t, source: t.fill_(7.0))
    assert wrong == ["all-reduce of 8 bytes", "broadcast of 8 bytes"]
    assert communication.bucket_bytes(cell(), 4000) == 4000
    assert communication.bucket_bytes(cell(), 10 * 2**20) == 10 * 2**20
    assert communication.bucket_bytes(cell(strategy_options={"bucket_cap_mb": 1}), 10 * 2**20) == 2**20
    assert communication.bucket_bytes(cell(strategy_options={"bucket_cap_mb": 0.5}), 10 * 2**20) == 2**19


def node(host: str, **more: Any) -> dict[str, Any]:
    return {"host": host, "python": "3.12.1", "packages": {"torch": "2.15.0", "harness": "0.1"}, **more}


def test_versions_that_differ_between_nodes() -> None:
    assert checks.judge_versions([node("a"), node("b")]) == []
    other = only(checks.judge_versions([node("a"), node("b", packages={"torch": "2.11.0", "harness": "0.1"})]), "error")
    assert other.seen == "torch: 2.15.0 on a, 2.11.0 on b"
    missing = only(checks.judge_versions([node("a"), node("b", packages={"torch": "2.15.0"})]))
    assert missing.seen == "harness: 0.1 on a, missing on b"
    only(checks.judge_versions([node("a", driver="550"), node("b", driver="560")]), "warning", check="versions")


def topology(*links: str) -> dict[str, Any]:
    """Three GPUs with the links 0-1, 0-2, 1-2."""
    a, b, c = links
    return {"gpus": ["x", "y", "z"], "links": [["X", a, b], [a, "X", c], [b, c, "X"]]}


def test_links_of_a_node_and_the_nearest_numa_node_of_a_gpu() -> None:
    assert checks.judge_links([node("a", topology=None), node("b", topology={"gpus": ["x"], "links": [["X"]]})]) == []
    mixed, switched = topology("NV12", "SYS", "SYS"), topology("NV12", "NV12", "NV12")
    apart = {**topology("SYS", "SYS", "SYS"), "apart": [[0, 2], [2, 0]]}
    for links, iommu, severity, text in (
        (mixed, False, "note", "links NV12, SYS; IOMMU off"),
        (mixed, True, "warning", "0-2 SYS, 1-2 SYS"),
        (apart, False, "warning", "without peer access: 0 from 2, 2 from 0 of 6 ordered pairs"),
        (switched, True, "note", ""),
    ):
        only(checks.judge_links([node("a", topology=links, iommu=iommu)]), severity, seen=text, check="links")
    two = {**topology("NV12", "SYS", "SYS"), "numa": [0, 0, 1]}
    near = "NUMA node 0 (processors 0-31): GPU 0, 1; NUMA node 1 (processors 32-63): GPU 2"
    only(checks.judge_links([node("a", topology=two, numa={"0": "0-31", "1": "32-63"})]), seen=near)
    assert "NUMA" not in only(checks.judge_links([node("a", topology={**two, "numa": [None] * 3})])).seen


@pytest.mark.parametrize(
    ("message", "text"),
    [("a tensor\n of 4", "a tensor of 4"), ("of three words", "of three ..."), ("x" * 20, f"{'x' * 13} ...")],
)
def test_a_long_error_is_cut_between_words_and_says_so(message: str, text: str) -> None:
    assert describe_error(ValueError(message), 13) == f"ValueError: {text}"


def test_names_that_evaluate_returns_must_be_those_of_every_rank() -> None:
    seen = [validation.Metrics(64, values={"auroc": 1.0})] * 2

    def judged(*evaluated: list[str] | str) -> list[checks.Finding]:
        return [*validation.judge_metrics(seen, case(steps=[steps(evaluated=each) for each in evaluated]))]

    unlike = judged(["auroc", "f1"], ["auroc", "loss", "of_1"], ["auroc", "loss"])
    only(unlike, "warning", seen="of 3 ranks alone: f1 (rank 0), loss (rank 1, 2), of_1 (rank 1)")
    only(judged(["auroc"], []), "warning", seen="auroc (rank 0)")
    only(judged(["auroc"], "ValueError: only here"), seen="raises: 1 of 2; on rank 1: ValueError: only here")
    assert judged(["auroc"], ["auroc"]) == [] == judged("few", "few")
    assert [*validation.judge_metrics([None] * 2, case())] == []


def test_a_parameter_that_no_step_changed_has_the_reason() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("still", "other", "low", "replaced")})
    model["low"].to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.ones_like(parameter)
    stepped = [model[name].weight for name in ("still", "low")]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    seen = steps()
    kinds = dict.fromkeys(before, "some")
    adam = torch.optim.Adam(stepped, lr=1e-4)
    real_steps._note_unchanged(seen, model, before, kinds, adam, {"replaced.weight"})
    rounded = {"other.weight": "not stepped", "low.weight": "rounded"}
    assert seen.unchanged == {"still.weight": "some", "replaced.weight": "some", **rounded}


class Looks(Healthy):
    """A workload that also runs its model in eval mode, as for pseudo-labels."""

    def __init__(self, *, trains: bool) -> None:
        self.trains = trains

    def loss(self, model: nn.Module, batch: Any) -> Any:
        model.eval()
        with torch.set_grad_enabled(self.trains):
            super().loss(model, batch)
        model.train()
        return super().loss(model, batch)


@pytest.mark.parametrize("trains", [False, True])
def test_passes_in_eval_mode_are_of_the_training_if_they_have_gradients(trains: bool) -> None:
    assert real_steps.observe(subject_of(Looks(trains=trains))).evaluates is trains
