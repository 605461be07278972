"""The run's request for nodes at Ray's own coordinator, with a clock of our own; no Ray is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.core.generated import autoscaler_pb2 as messages
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

from harness.errors import ClusterError
from harness.launch.ray import private
from harness.launch.ray.node_request import EXPIRE_S, RENEW_S, NodeRequest, RayCoordinator
from harness.plan.growth import Bundles

ONE = {"CPU": 1.0}
TICK_S = _AutoscalingCoordinatorActor.TICK_INTERVAL_S
FREE_S = 300
"""The time within which nodes are free after the driver was killed."""


class Autoscaler:
    """Ray's coordinator in this process. ``asked``: what it sent to the autoscaler, each time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[list[dict[str, float]]] = []
        self._actor = _AutoscalingCoordinatorActor(
            get_current_time=lambda: self.now,
            send_resources_request=lambda bundles, label_selectors=None: self.asked.append(bundles),
            get_cluster_nodes=list,
        )

    def request(self, name: str, bundles: Bundles, expire_after_s: float) -> None:
        self._actor.request_resources(name, [dict(bundle) for bundle in bundles], expire_after_s)

    renew = request

    def cancel(self, name: str) -> None:
        self._actor.cancel_request(name)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds // TICK_S)):
            self.now += TICK_S
            self._actor._tick()


class Trainer:
    """The part of a trainer that starts its controller; returns the policy that the controller gets."""

    def _initialize_and_run_controller(self, *, scaling_policy: Any, more: int) -> Any:
        assert more == 1
        return scaling_policy


@pytest.fixture
def autoscaler() -> Autoscaler:
    return Autoscaler()


@pytest.fixture
def request_of(autoscaler: Autoscaler) -> Iterator[NodeRequest]:
    request = NodeRequest(autoscaler, renew_s=3600)
    yield request
    request.close()


def test_requests_of_others_are_kept_beside_it(autoscaler: Autoscaler, request_of: NodeRequest) -> None:
    for _ in range(3):
        request_of.ask([ONE] * 4)
    assert autoscaler.asked == [[ONE] * 4], "the same bundles are requested once"
    autoscaler.request("other", [ONE], 180)
    assert autoscaler.asked[-1] == [ONE] * 5
    request_of.ask([ONE] * 2)
    assert autoscaler.asked[-1] == [ONE] * 3
    request_of.close()
    assert autoscaler.asked[-1] == [ONE]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trainer_of_the_run_requests_nothing(autoscaler: Autoscaler, request_of: NodeRequest, workers: int) -> None:
    """The policy of a worker group, through the life of its controller: before, inside and after the group."""
    request_of.ask([ONE] * 2)
    trainer = Trainer()
    private.leave_out_requests(trainer)
    policy = trainer._initialize_and_run_controller(
        scaling_policy=FixedScalingPolicy(scaling_config=ScalingConfig(num_workers=workers)), more=1
    )
    assert isinstance(policy, FixedScalingPolicy) and type(policy) is not FixedScalingPolicy
    policy = cloudpickle.loads(cloudpickle.dumps(policy))
    policy.after_controller_start(SimpleNamespace(run_id="1"))
    decision = policy.make_decision_for_non_running_worker_group()
    assert decision.num_workers == workers
    policy.make_decision_for_running_worker_group(None, None)
    asyncio.run(policy.before_controller_shutdown())
    policy.before_controller_abort()
    assert autoscaler.asked == [[ONE] * 2]


def test_a_request_that_is_not_renewed_expires(autoscaler: Autoscaler, request_of: NodeRequest) -> None:
    """After kill -9 nobody renews it."""
    request_of.ask([ONE] * 4)
    autoscaler.pass_time(EXPIRE_S - TICK_S)
    assert len(autoscaler.asked[-1]) == 4
    autoscaler.pass_time(2 * TICK_S)
    assert autoscaler.asked[-1] == []
    assert autoscaler.now < FREE_S / 2
    assert RENEW_S * 3 < EXPIRE_S  # two renewals may fail


def test_a_thread_renews_it_until_it_is_closed(autoscaler: Autoscaler) -> None:
    renewed: list[Bundles] = []
    autoscaler.renew = lambda name, bundles, expire_after_s: renewed.append(bundles)  # type: ignore[method-assign]
    request = NodeRequest(autoscaler, renew_s=0.01)
    time.sleep(0.05)
    assert not renewed  # nothing is requested yet
    request.ask([ONE])
    until = time.monotonic() + 30
    while not renewed and time.monotonic() < until:
        time.sleep(0.01)
    request.close()
    count = len(renewed)
    assert renewed[0] == [ONE] and autoscaler.asked[-1] == []
    time.sleep(0.05)
    assert len(renewed) == count


def test_the_requests_that_the_autoscaler_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(*requests: list[tuple[dict[str, float], int]]) -> bytes:
        state = messages.AutoscalingState(last_seen_cluster_resource_state_version=6)
        for request in requests:
            constraint = state.infeasible_cluster_resource_constraints.add()
            for bundle, count in request:
                constraint.resource_requests.add(request={"resources_bundle": bundle}, count=count)
        resources = messages.ClusterResourceState(cluster_resource_state_version=7)
        reply = messages.GetClusterStatusReply(autoscaling_state=state, cluster_resource_state=resources)
        return reply.SerializeToString()

    class Client:
        reply = status()

        def __init__(self, address: str) -> None: ...

        def get_cluster_status(self) -> bytes:
            return self.reply

    known = private.find
    monkeypatch.setattr(private, "find", lambda module, name: None)  # a Ray without its private names
    assert private.autoscaler_state() == private.AutoscalerState() and private.draining_nodes() == set()
    with pytest.raises(ClusterError, match="has no coordinator of requests"):
        RayCoordinator()
    monkeypatch.setattr(private, "find", lambda module, name: Client if name == "GcsClient" else known(module, name))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379"))
    assert private.autoscaler_state() == (7, 6, [])
    Client.reply = status([({"GPU": 8.0}, 1), ({"GPU": 1.0}, 2)])
    assert private.autoscaler_state() == (7, 6, [[{"GPU": 8.0}, {"GPU": 1.0}, {"GPU": 1.0}]])
