"""The wait for nodes, on a cluster whose nodes come by a script; no Ray is started and nothing really waits."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from harness.config.experiment import Experiment
from harness.errors import ClusterError
from harness.launch.ray import private
from harness.launch.ray.cluster import Bundles
from harness.plan.inventory import Inventory, Node
from harness.plan.planner import make_plan
from harness.run import growth
from harness.run.events import Event, Note
from harness.run.growth import POLL_S, GrowingRay, Wait
from tests.conftest import Make

NODES = [Node(f"n{i}", f"10.0.0.{i}", f"h{i}", 32, 4, "A100") for i in range(4)]
GRID = {"strategy": ["single", "ddp"], "devices": [1, 4, 8, 16], "per_device_batch_size": 8}


class Scripted:
    """A cluster that has ``script[i]`` nodes at the i-th look, and its own clock.

    ``most``: the GPUs that its autoscaler can bring, which refuses to bring more; by default it brings what it can.
    """

    def __init__(self, *script: int, most: float = inf) -> None:
        self.inventory = Inventory(tuple(NODES[: script[0]]), attached=True)
        self._script, self._most = list(script[1:]), most
        self.asked: list[Bundles] = []
        self.now = 0.0

    def ask(self, bundles: Bundles) -> None:
        self.asked.append(bundles)

    def refuses(self) -> bool:
        return sum(bundle["GPU"] for bundle in self.asked[-1]) > self._most

    def look(self) -> bool:
        count = self._script.pop(0) if self._script else len(self.inventory.nodes)
        changed = count != len(self.inventory.nodes)
        self.inventory = replace(self.inventory, nodes=tuple(NODES[:count]))
        return changed

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait(cluster: Scripted, experiment: Experiment, seconds: float = 600.0) -> tuple[Any, list[str]]:
    events: list[Event] = []
    waiting = Wait(cluster, seconds, events.append, clock=lambda: cluster.now, sleep=cluster.sleep)
    plan = waiting.plan(experiment, make_plan)
    return plan, [event.text for event in events if isinstance(event, Note)]


@pytest.fixture
def experiment(make_experiment: Make) -> Experiment:
    return make_experiment(GRID, device="cuda", throughput={"blocks": 2})


def test_it_ends_once_the_largest_cell_fits_and_holds_what_is_there(experiment: Experiment) -> None:
    cluster = Scripted(1, 1, 2, 2, 4)
    plan, notes = wait(cluster, experiment)
    assert not [skip for skip in plan.skips.values() if skip.code == "too_few_devices"]
    assert cluster.now == 4 * POLL_S and len(plan.inventory.nodes) == 4 and plan.inventory.waited_s is None
    assert cluster.asked[0] == [{"GPU": 1.0}] * 16
    assert notes[0] == (
        "Waiting at most 600 s for nodes: 2 cells cannot run yet; too few devices: needs 16 on one node, has 4 GPUs"
    )
    assert notes[1].startswith("After 4 s: 1 cell cannot run yet; ") and notes[-1].startswith("After 8 s: no more to")
    assert len(notes) == 3
    cluster = Scripted(4)
    plan, notes = wait(cluster, experiment)
    assert cluster.now == 0 and not notes and plan.trials
    assert cluster.asked == [[{"GPU": 4.0}] * 4]


def test_after_a_wait_in_vain_what_fits_is_run(experiment: Experiment) -> None:
    cluster = Scripted(1, 1, 2)
    plan, notes = wait(cluster, experiment, seconds=200)
    assert cluster.now == pytest.approx(200, abs=POLL_S)
    assert {trial.cell.devices for trial in plan.trials} == {1, 4, 8}
    reasons = {skip.text for skip in plan.skips.values() if skip.code == "too_few_devices"}
    assert reasons == {
        "too few devices: needs 16 on one node, has 4 + 4 GPUs; no more came in 200 s (cluster.wait_for)"
    }
    assert notes[-1] == "No more nodes came in 200 s; what fits on 2 nodes, 64 CPU cores, 8 GPUs (A100) is run"
    assert [note.split(":")[0] for note in notes[2:-1]] == ["After 64 s", "After 124 s", "After 184 s"]
    plan, notes = wait(Scripted(0), experiment, seconds=10)
    assert not plan.trials and {reason.code for reason in plan.skips.values()} == {"too_few_devices"}
    assert all(why.text.endswith("; no more came in 10 s (cluster.wait_for)") for why in plan.skips.values())
    assert notes[-1] == "No more nodes came in 10 s; what fits on 0 nodes, 0 CPU cores, no GPU is run"


@pytest.mark.parametrize(
    ("cluster", "devices", "asked", "said"),
    [
        (
            Scripted(1, 1, 1, 2, most=8),
            {1, 4, 8},
            [16, 8, 2],
            "After 2 s: 1 cell cannot run yet; too few devices: needs 8",
        ),
        (Scripted(1, most=4), {1, 4}, [16, 8, 4], "After 4 s: no more to wait for: 1 node, "),  # it brings nothing
    ],
)
def test_what_the_autoscaler_cannot_bring_is_given_up_from_the_largest(
    experiment: Experiment, cluster: Scripted, devices: set[int], asked: list[int], said: str
) -> None:
    plan, notes = wait(cluster, experiment)
    assert {trial.cell.devices for trial in plan.trials} == devices
    reasons = {skip.text for skip in plan.skips.values() if skip.code == "too_few_devices"}
    assert not [reason for reason in reasons if "no more came" in reason]  # it was not waited for
    assert [len(bundles) for bundles in cluster.asked] == asked
    assert notes[1] == "The autoscaler cannot bring 16 times 1 device: such cells are skipped"
    assert [note for note in notes if note.startswith(said)]


# --- a cluster of Ray's


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The ids of the nodes that Ray names, at each look; the last stay."""
    script: list[list[str]] = [["a"]]

    class Request:
        def ask(self, bundles: Bundles) -> None: ...

        def close(self) -> None: ...

    def live_nodes() -> list[dict[str, str]]:
        return [{"NodeID": name} for name in (script.pop(0) if len(script) > 1 else script[0])]

    monkeypatch.setattr(growth, "NodeRequest", Request)
    monkeypatch.setattr(growth, "live_nodes", live_nodes)
    monkeypatch.setattr(growth, "replace", lambda cluster, request: cluster)
    return script


class Answering:
    """A cluster whose new nodes answer, or do not."""

    def __init__(self, *errors: bool) -> None:
        self._errors = list(errors)
        self.asked = 0

    def with_nodes_of_now(self) -> Answering:
        self.asked += 1
        if self._errors.pop(0):
            raise ClusterError("b: the node does not answer")
        return self


def test_only_a_change_of_the_nodes_is_looked_at(ray_cluster: list[list[str]]) -> None:
    cluster: Any = Answering(False)
    ray_cluster[:] = [["a"], ["a"], ["a", "b"], ["a", "b"]]
    with ExitStack() as stack:
        growing = GrowingRay(cluster, stack)
        assert [growing.look() for _ in range(3)] == [False, True, False] and cluster.asked == 1


def test_a_node_that_is_gone_before_it_answers_is_no_error_but_one_that_stays_is(ray_cluster: list[list[str]]) -> None:
    cluster: Any = Answering(True, True)
    ray_cluster[:] = [["a"], ["a", "b"], ["a"], ["a", "b"], ["a", "b"]]
    with ExitStack() as stack:
        growing = GrowingRay(cluster, stack)
        assert growing.look() is False
        with pytest.raises(ClusterError, match="does not answer"):
            growing.look()


def test_a_refusal_counts_if_it_holds_this_request_and_was_published_after_it(
    ray_cluster: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The autoscaler publishes more rarely than the run looks, and what it refused holds all that is smaller."""
    large, small = [{"GPU": 1.0}] * 16, [{"GPU": 1.0}] * 2
    state = private.AutoscalerState(version=5, answered=5, refused=[large])
    monkeypatch.setattr(growth.private, "autoscaler_state", lambda: state)
    cluster: Any = Answering()
    with ExitStack() as stack:
        growing = GrowingRay(cluster, stack)
        growing.ask(large)
        assert not growing.refuses()  # that was said before this request
        state = private.AutoscalerState(6, 6, [large])
        assert growing.refuses()
        growing.ask(small)
        assert not growing.refuses()  # the refusal of an earlier, larger request gives up no smaller size
        for version, refused, refuses in (
            (7, [], False),
            (8, [[{"GPU": 1.0}]], False),
            (9, [[{"GPU": 1.0}, {"CPU": 2.0}, {"GPU": 1}]], True),  # with the requests of others
        ):
            state = private.AutoscalerState(version, version, refused)
            growing.ask(small)  # the same: the answer counts
            assert growing.refuses() == refuses
