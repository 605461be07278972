"""The request of a run for nodes of a cluster's autoscaler, beside the requests of Ray Train."""

from __future__ import annotations

import contextlib
import threading
import uuid
from typing import TYPE_CHECKING

from harness.errors import ClusterError
from harness.launch.ray import private
from harness.plan.node_demand import Bundles

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

RENEW_S = 20.0
"""The time between two renewals, the same as Ray Train's."""
EXPIRE_S = 90.0
"""The time after its last renewal at which a request expires; Ray looks for expired ones every 20 s."""
ANSWER_S = 15.0
"""Timeout of the actor that holds the requests."""


class NodeRequest:
    """Bundles of resources that the cluster shall have until ``close``, however large it is now.

    Ray has one request for its autoscaler, which each call of ``request_resources`` replaces. Ray Train, Ray Data and
    this class therefore send theirs to Ray's coordinator, a detached actor that sends the sum to the autoscaler. The
    trainers of the run's worker groups request no nodes. The coordinator forgets a request that is not renewed for
    EXPIRE_S. A thread of the driver renews it; when the driver has died, the request expires, and the autoscaler
    removes idle nodes after its own timeout.
    """

    def __init__(self, renew_s: float = RENEW_S) -> None:
        self._actor: ActorHandle = private.autoscaling_coordinator()
        if self._actor is None:
            raise ClusterError(
                "cluster.wait_for: this version of Ray has no coordinator of requests, by which one expires if the run "
                "is killed; leave cluster.wait_for out, and add the nodes yourself"
            )
        self._name, self._bundles = f"harness-{uuid.uuid4().hex[:12]}", list[dict[str, float]]()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew, args=(renew_s,), daemon=True, name="node-request")
        self._thread.start()

    def ask(self, bundles: Bundles) -> None:
        """Request these bundles instead of the earlier ones; raise ClusterError if that is impossible."""
        import ray

        if (wanted := [dict(bundle) for bundle in bundles]) == self._bundles:
            return
        with self._lock:
            self._bundles = wanted
            try:
                ray.get(self._send(), timeout=ANSWER_S)
            except ray.exceptions.RayError as error:
                raise ClusterError(
                    f"cluster.wait_for: Ray's coordinator of requests does not answer ({type(error).__name__}); "
                    "see 'ray status'"
                ) from error

    def close(self) -> None:
        """Withdraw the request, if the coordinator still answers."""
        import ray

        self._closed.set()
        with self._lock, contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.cancel_request.remote(requester_id=self._name), timeout=ANSWER_S)
        self._thread.join(ANSWER_S)

    def _renew(self, renew_s: float) -> None:
        while not self._closed.wait(renew_s):
            with self._lock, contextlib.suppress(Exception):  # the cluster is gone, which the run notices by itself
                if self._bundles and not self._closed.is_set():
                    self._send()

    def _send(self) -> ObjectRef[object]:
        return self._actor.request_resources.remote(
            requester_id=self._name, resources=self._bundles, expire_after_s=EXPIRE_S
        )
