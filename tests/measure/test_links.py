"""Links and collectives by size: with a clock of its own and ranks that are not there, and for real over gloo."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from harness.analysis.hardware import bus_factor
from harness.measure import links
from harness.measure.links import Device, Meter, NotMeasuredError, Operation, measure_links, sweep
from harness.plan.rows import LinkRow
from harness.train.ranks import Ranks
from tests.benchmarks.emulated_links import why_not, world
from tests.link_ranks import PER_NODE, SECONDS
from tests.worlds import fake_group, run_ranks

T = TypeVar("T")
CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, 0, "n", "127.0.0.1", (CPU,))
KIB, MIB, GIB = 2**10, 2**20, 2**30


class Clock:
    """A clock that only transfers move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def transfer(clock: Clock, latency_s: float, bytes_per_s: float, **columns: Any) -> Operation:
    """A transfer of known latency and bandwidth."""

    def prepare(size: int) -> Callable[[], None]:
        return lambda: clock.advance(latency_s + size / bytes_per_s)

    return Operation(columns.pop("name", "all_reduce"), "gloo", frozenset((0,)), prepare, "inside a node", **columns)


def meter(clock: Clock, ranks: Ranks = ALONE) -> Meter:
    return Meter(ranks, lambda: None, clock, lambda devices: None)


def swept(clock: Clock, series: Sequence[Operation], seconds: float, most_bytes: int = GIB) -> list[LinkRow]:
    return list(sweep(series, meter(clock), seconds, most_bytes))


def test_sizes_double_until_the_time_is_over_at_the_latency_and_bandwidth_of_their_transfer() -> None:
    clock = Clock()
    first, *_, last = rows = swept(clock, [transfer(clock, 1e-4, 1e8)], 5.0)
    sizes = [row["size_bytes"] for row in rows]
    assert sizes == [KIB * 2**k for k in range(len(sizes))]
    last_s = (links.REPETITIONS + 1) * (1e-4 + sizes[-1] / 1e8)
    assert clock.now <= 5.0 < clock.now + 2 * last_s
    assert sizes[-1] == 32 * MIB
    assert first["time_s"] == pytest.approx(1e-4 + KIB / 1e8)
    assert last["size_bytes"] / last["time_s"] == pytest.approx(1e8, rel=0.01)
    assert (first["repetitions"], first["calls"], last["calls"]) == (links.REPETITIONS, 9, 1)
    assert last["min_s"] == pytest.approx(last["max_s"])
    # a message that is sent and returned counts half
    once, both = (swept(clock, [transfer(clock, 0.0, 1e8, legs=legs)], 0.1)[0]["time_s"] for legs in (1, 2))
    assert both == pytest.approx(once / 2)


@pytest.mark.parametrize(
    ("granule", "most_bytes", "sizes"),
    [
        (1, 5000, [KIB, 2 * KIB, 4 * KIB]),
        (12, 2048, [1020, 2040]),  # the next smaller size that divides by the ranks
    ],
)
def test_sizes_end_at_the_memory(granule: int, most_bytes: int, sizes: list[int]) -> None:
    clock = Clock()
    rows = swept(clock, [transfer(clock, 1e-6, 1e12, granule=granule)], 5.0, most_bytes=most_bytes)
    assert [row["size_bytes"] for row in rows] == sizes


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_free_bytes", lambda ranks: 80 * GIB)


def test_sizes_end_at_one_gibibyte() -> None:
    clock = Clock()
    rows, notes = measure_links([[transfer(clock, 1e-6, 1e12)]], meter(clock), 60.0, ALONE)
    assert (rows[-1]["size_bytes"], notes) == (GIB, [])


def test_pairs_whose_first_messages_come_too_late_are_left_out_with_a_note() -> None:
    clock = Clock()
    pairs = [transfer(clock, 0.05, 1e9, name="send_receive", source=0, target=n) for n in range(1, 9)]
    rows, notes = measure_links([pairs], meter(clock), 4.0, ALONE)
    targets = {row["target"] for row in rows}
    first_contacts = 1 + int(links.FIRST_CONTACT * 4.0 / ((links.REPETITIONS + 1) * 0.05))
    assert targets == set(range(1, 1 + first_contacts)) and first_contacts < 8
    assert notes == [f"send_receive: {first_contacts} of 8 pairs measured in the time"]


def test_kinds_share_the_time_and_one_that_fails_is_a_note() -> None:
    clock = Clock()

    def refuse(size: int) -> Callable[[], None]:
        raise RuntimeError("no such\ncollective")

    names = ("all_reduce", "all_gather", "reduce_scatter")
    first, second, third = (transfer(clock, 1e-4, 1e8, name=name) for name in names)
    rows, notes = measure_links([[first], [replace(second, prepare=refuse)], [third]], meter(clock), 3.0, ALONE)
    largest = {row["operation"]: row["size_bytes"] for row in rows}
    assert clock.now <= 3.0
    assert largest == {"all_reduce": 4 * MIB, "reduce_scatter": 16 * MIB}  # 1 s, and the 2.5 s that are left
    assert notes == ["all_gather: RuntimeError: no such collective (rank 0)"]


class Two(Ranks):
    """The first of two ranks; the other is always slower, and fails to prepare if asked to."""

    other_fails = False

    def broadcast(self, value: T) -> T:
        return value

    def sum(self, values: Sequence[float]) -> list[float]:
        return [value + self.other_fails for value in values]

    def gather(self, value: Any) -> list[Any]:
        times, _, now = value
        return [value, ([2 * seconds for seconds in times], "OutOfMemoryError: no" * self.other_fails, now + 99)]


FIRST = Two(0, 2, 0, 0, "n", "127.0.0.1", (CPU,))


def test_the_slowest_rank_gives_the_time_unless_one_cannot_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    both, operation = meter(clock, FIRST), transfer(clock, 0.5, 1e30)
    assert both.seconds(operation, KIB, 1) == [1.0] * links.REPETITIONS
    assert both.now == (before := clock.now) > 0.0
    monkeypatch.setattr(Two, "other_fails", True)
    with pytest.raises(NotMeasuredError, match=r"OutOfMemoryError: no \(rank 1\)"):
        meter(clock, FIRST).seconds(operation, KIB, 1)
    assert clock.now == before, "no rank starts a call"


def test_a_rank_on_which_a_measured_operation_fails_does_not_wait_for_its_peers() -> None:
    clock = Clock()
    broken = False

    def call() -> None:
        if broken:
            raise RuntimeError("connection reset")

    operation = replace(transfer(clock, 0.5, 1e30), prepare=lambda size: call)
    both = meter(clock, FIRST)
    both.seconds(operation, KIB, 1)
    broken = True
    with pytest.raises(RuntimeError, match="connection reset"):
        both.seconds(operation, KIB, 1)
    with pytest.raises(NotMeasuredError, match=r"connection reset \(rank 0\)"):  # not known to work: on all alike
        meter(clock, FIRST).seconds(operation, KIB, 1)


@pytest.fixture
def eight() -> Iterator[Ranks]:
    """One of eight ranks whose collectives do nothing."""
    with fake_group(8, rank=2):
        yield Ranks(2, 8, 2, 0, "n", "127.0.0.1", (CPU,))


def devices(*nodes: str) -> list[Device]:
    return [Device(node, None, None) for node in nodes]


def test_collectives_get_the_whole_tensor_and_a_rank_s_part(eight: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, list[int]]] = []

    def record(name: str, real: Any, *tensors: torch.Tensor, **options: Any) -> object:
        called.append((name, [tensor.nbytes for tensor in tensors]))
        return real(*tensors, **options)

    for name in ("all_reduce", links.ALL_GATHER, links.REDUCE_SCATTER):
        monkeypatch.setattr(dist, name, partial(record, name, getattr(dist, name)))
    for (operation,) in links.collectives(eight, "gloo", devices(*"aaaabbbb")):
        assert operation.members == frozenset(range(8)) and operation.tier == "between nodes"
        assert operation.size(1100) == 1088
        operation.prepare(operation.size(KIB))()
    assert called == [("all_reduce", [1024]), (links.ALL_GATHER, [1024, 128]), (links.REDUCE_SCATTER, [128, 1024])]


def test_every_pair_of_ranks_is_measured_once_neighbours_first() -> None:
    four = Ranks(1, 4, 1, 0, "a", "127.0.0.1", (CPU,))
    found = links.pairs(four, "gloo", devices("a", "a", "b", "b"))
    ends = [(pair.source, pair.target) for pair in found]
    assert ends == [(0, 1), (0, 3), (1, 2), (2, 3), (0, 2), (1, 3)]
    tiers = {ends: pair.tier for ends, pair in zip(ends, found, strict=True)}
    assert [ends for ends, tier in tiers.items() if tier == "inside a node"] == [(0, 1), (2, 3)]
    assert all(pair.members == {pair.source, pair.target} and pair.legs == 2 for pair in found)


def test_of_many_ranks_a_sample_of_pairs_of_each_tier_is_measured_and_stated() -> None:
    size, per_node = 512, 8
    one = Ranks(1, size, 1, 0, "a", "127.0.0.1", (CPU,))
    found = links.pairs(one, "gloo", devices(*(str(rank // per_node) for rank in range(size))))
    ends = [(pair.source or 0, pair.target or 0) for pair in found]
    inside = [source // per_node == target // per_node for source, target in ends]
    assert len(set(ends)) == len(ends) == 2 * links.PAIRS_OF_TIER
    assert inside == [True, False] * links.PAIRS_OF_TIER  # if the time ends early, both tiers have some
    for of_tier in (ends[::2], ends[1::2]):  # no rank, such as the first, whose node is busier, is in several
        assert len({rank for two in of_tier for rank in two}) == 2 * links.PAIRS_OF_TIER
    places = devices(*(str(rank // per_node) for rank in range(24)))
    fewer = links.pairs(replace(one, world_size=24), "gloo", places)
    for of_tier in (fewer[::2], fewer[1::2]):
        assert len({rank for pair in of_tier for rank in pair.members}) == 2 * links.PAIRS_OF_TIER
    again = links.pairs(replace(one, rank=9), "gloo", devices(*(str(rank // per_node) for rank in range(size))))
    assert [(pair.source, pair.target) for pair in again] == ends  # the same on every rank
    (note,) = links.left_out([found], size)
    assert note.startswith("send_receive: all pairs but a sample of 16 of 130816 (8 inside a node, 8 between nodes)")
    few = links.pairs(replace(one, world_size=17), "gloo", devices(*map(str, range(16)), "0"))  # one pair inside
    assert len({(pair.source, pair.target) for pair in few}) == len(few) == 1 + links.PAIRS_OF_TIER


def test_pairs_of_gpus_of_one_number_in_their_nodes_are_sampled_as_a_tier_of_their_own() -> None:
    def gpu(node: int, number: int, of_node: int = 8) -> Device:
        topology: Any = {
            "gpus": [f"GPU-{node}-{index}" for index in range(of_node)],
            "links": [["X"] * of_node] * of_node,
        }
        named = "GPU-" * (node % 2)  # NVML has the prefix, torch has none
        return Device(str(node), f"{named}{node}-{number}", topology)

    tiers = ("inside a node", "between nodes", "between nodes, same rail")
    many = replace(ALONE, world_size=64)
    found = links.pairs(many, "gloo", [gpu(rank // 8, rank % 8) for rank in range(64)])
    ends = {tier: [(pair.source, pair.target) for pair in found if pair.tier == tier] for tier in tiers}
    assert [len(of_tier) for of_tier in ends.values()] == [links.PAIRS_OF_TIER] * 3
    assert all(one % 8 == other % 8 for one, other in ends["between nodes, same rail"])
    assert all(one % 8 != other % 8 for one, other in ends["between nodes"])
    assert "8 between nodes, same rail" in links.left_out([found], 64)[0]
    single = links.pairs(replace(ALONE, world_size=2), "gloo", [gpu(node, 0, of_node=1) for node in range(2)])
    assert [pair.tier for pair in single] == ["between nodes"]  # one GPU a node: all are of one number


def test_the_row_of_a_trial_states_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    many = replace(ALONE, world_size=64)
    series = [links.pairs(many, "gloo", devices(*(str(rank // 8) for rank in range(64))))]
    monkeypatch.setattr(links, "operations_of", lambda ranks: series)
    monkeypatch.setattr(links, "measure_links", lambda *given: ([], ["all_gather: no"]))
    monkeypatch.setattr(links, "Meter", lambda *given: None)
    context: Any = SimpleNamespace(ranks=many, advance=None, trial=SimpleNamespace(id="t"), parts={"links": 1.0})
    context.part = lambda name: nullcontext()
    context.experiment = SimpleNamespace(throughput=SimpleNamespace(links_seconds=1.0))
    stated = links.run_links_trial(context).facts["links_error"]
    assert stated.startswith("all_gather: no; send_receive: all pairs but a sample of 16 of 2016 (8 inside a node, ")


def test_up_to_sixteen_ranks_all_pairs_are_measured() -> None:
    found = links.pairs(replace(ALONE, world_size=16), "gloo", devices(*"aaaaaaaabbbbbbbb"))
    assert len(found) == 16 * 15 // 2 and links.left_out([found], 16) == links.left_out([[]], 1) == []


def test_a_process_copies_between_its_gpus_in_both_directions() -> None:
    gpus = tuple(torch.device("cuda", index) for index in range(3))
    square: list[list[str | None]] = [["X", "NV12", "SYS"], ["NV12", "X", "SYS"], ["SYS", "SYS", "X"]]
    topology: Any = {"gpus": ["GPU-a", "GPU-b", "GPU-c"], "links": square}
    found = links.copies(gpus, [Device("n", uuid, topology) for uuid in "abc"])
    both_ways = {pair: "NV12" if {*pair} == {0, 1} else "SYS" for pair in permutations(range(3), 2)}
    assert {(copy.source, copy.target): copy.link for copy in found} == both_ways
    with FakeTensorMode():  # tensors of GPUs that are not there
        arrived = found[1].prepare(KIB)()  # 0 to 2
    assert isinstance(arrived, torch.Tensor)
    assert (arrived.device, arrived.nbytes) == (gpus[2], KIB)


def test_one_process_has_copies_and_several_have_collectives_and_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value] * ranks.world_size)
    one = replace(ALONE, devices=(torch.device("meta", 0), torch.device("meta", 1)))
    assert [[op.name for op in kind] for kind in links.operations_of(one)] == [["copy", "copy"]]
    two = replace(ALONE, world_size=2)
    found = links.operations_of(two)
    names = ("all_reduce", "all_gather", "reduce_scatter", "send_receive")
    assert [[op.name for op in kind] for kind in found] == [[name] for name in names]
    assert {op.backend for kind in found for op in kind} == {"gloo"}
    assert links.backend_of("cuda") == "nccl"


OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "send_receive"]
MBIT_PER_S = 200
BYTES_PER_S = MBIT_PER_S * 1e6 / 8


def measured(folder: Path, seconds: float, variables: dict[str, str], prefixes: Sequence[Sequence[str]] = ()) -> Any:
    """What two ranks measure in this time; ``prefixes``: what each one's command begins with."""
    found = run_ranks("tests.link_ranks", 2, folder, prefixes=prefixes, variables={SECONDS: str(seconds), **variables})
    return json.loads(found.read_text())


@pytest.mark.slow
def test_two_processes_measure_every_operation_within_the_time(tmp_path: Path) -> None:
    found = measured(tmp_path, 5.0, {PER_NODE: "2"})
    rows = found["rows"]
    assert list(dict.fromkeys(row["operation"] for row in rows)) == OPERATIONS
    assert found["notes"] == []  # that the time ends a sweep: test_links.py, by a clock of its own
    for operation in OPERATIONS:
        sizes = [row["size_bytes"] for row in rows if row["operation"] == operation]
        assert sizes == [links.SMALLEST_BYTES * 2**k for k in range(len(sizes))] and len(sizes) > 3
    assert all(0 < row["min_s"] <= row["time_s"] <= row["max_s"] for row in rows)
    kinds = {(row["backend"], row["tier"], row["repetitions"]) for row in rows}
    assert kinds == {("gloo", "inside a node", links.REPETITIONS)}
    assert {(row["source"], row["target"]) for row in rows if row["operation"] == "send_receive"} == {(0, 1)}
    assert found["advanced"] >= links.REPETITIONS * len(rows)  # or the watchdog would end a long measurement


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two network namespaces whose links tc limits to a rate."""
    if reason := why_not():
        pytest.skip(reason)
    try:
        with world(2) as made:
            made.set_rate(MBIT_PER_S)
            yield [made.name(node) for node in range(2)]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{error.cmd}: {error.stderr.decode()}")


@pytest.mark.slow
def test_the_largest_size_shows_the_rate_of_the_link(nodes: list[str], tmp_path: Path) -> None:
    prefixes = [["ip", "netns", "exec", name] for name in nodes]
    found = measured(tmp_path, 5.0, {PER_NODE: "1", "GLOO_SOCKET_IFNAME": "s0"}, prefixes)
    assert {row["tier"] for row in found["rows"]} == {"between nodes"}
    for operation in ("send_receive", "all_reduce"):
        rows = [row for row in found["rows"] if row["operation"] == operation]
        row = max(rows, key=lambda row: row["size_bytes"])
        bus_bytes_per_s = bus_factor(operation, 2) * row["size_bytes"] / row["min_s"]  # which other load slows least
        assert bus_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.4), row  # of bits, or of one more leg, twice it
