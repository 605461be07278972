"""The private names of Ray. No other module uses one; each function states its use and the cost of its fallback.

A fallback costs time or detail, never protection: a function on which the authentication token or the loopback rule
depends returns whether it was effective, and ``session.as_ray_reads`` refuses to start Ray without that certainty.

Of the autoscaler, Ray's public ``request_resources`` never expires, is replaced by what Ray Train requests, and does
not tell that no type of node has what is asked for: a driver that was killed would keep its nodes, and a run that
cannot start would wait for its whole time.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.system.process import variables

TEMPORARY_FOLDER = "_temp_dir"
"""A private argument of ray.init."""
CALLBACKS = "_create_default_callbacks"
"""A private method of TorchTrainer."""


def find(module: str, name: str) -> Any:
    """Return this name of a module of Ray; None if the installed Ray does not have it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def reread_configuration() -> bool:
    """Make Ray read its environment variables again; return whether it did.

    Ray reads the loopback rule when it is imported and a token once: either may belong to another cluster. Without
    these names only a Ray that is imported after the variables are set is certain to use them.
    """
    variable = find("ray._private.ray_constants", "ENABLE_RAY_CLUSTERS_ENV_VAR")
    env_bool = find("ray._private.ray_constants", "env_bool")
    known = find("ray._private.ray_constants", "ENABLE_RAY_CLUSTER") is not None
    config, tokens = find("ray._raylet", "Config"), find("ray._raylet", "AuthenticationTokenLoader")
    if not (known and variable and env_bool and hasattr(config, "initialize") and hasattr(tokens, "instance")):
        return False
    on_linux = sys.platform.startswith("linux")  # elsewhere Ray uses only the loopback interface by default
    constants = sys.modules["ray._private.ray_constants"]
    constants.ENABLE_RAY_CLUSTER = env_bool(variable, on_linux)  # type: ignore[attr-defined]
    config.initialize("")
    tokens.instance().reset_cache()
    return True


def disable_auto_init() -> bool:
    """Prevent Ray from starting by itself on the first call of its API; return whether that was possible.

    A fit() that has not noticed the end of its cluster would start another one, open to the network. Without this
    name only a Ray that is imported while RAY_ENABLE_AUTO_CONNECT is 0 is certain not to start.
    """
    if find("ray._private.auto_init_hook", "enable_auto_connect") is None:
        return False
    sys.modules["ray._private.auto_init_hook"].enable_auto_connect = False  # type: ignore[attr-defined]
    return True


def init(folder: Path | None, **arguments: object) -> None:
    """Call ray.init with a session folder of our own, if one is given.

    Without the private argument RAY_TMPDIR names the folder, and Ray makes its own "ray" below it, which costs four
    characters of a socket's path.
    """
    import ray

    if folder is None:
        ray.init(**arguments)
        return
    try:
        ray.init(**arguments, **{TEMPORARY_FOLDER: str(folder)})
    except (RuntimeError, TypeError) as error:  # raised before anything is started
        if TEMPORARY_FOLDER not in str(error):
            raise
        with variables({}, {"RAY_TMPDIR": str(folder)}):
            ray.init(**arguments)


def shut_down() -> None:
    """Shut Ray down, with a SIGKILL for its processes: they ignore SIGTERM, for which Ray waits a second each.

    Without these names Ray waits.
    """
    import ray

    node = find("ray._private.worker", "_global_node")
    kill = getattr(node, "kill_all_processes", None)
    if kill is not None:
        node.kill_all_processes = functools.partial(_kill_at_once, kill)
    ray.shutdown()


def _kill_at_once(kill_all_processes: Callable[..., None], *given: object, **named: object) -> None:
    try:
        kill_all_processes(check_alive=False, allow_graceful=False)
    except TypeError:  # other parameters
        kill_all_processes(*given, **named)


def kill_controllers() -> None:
    """Kill the controllers of this driver's fits, and with them their workers: each fit() then returns.

    Without these names a fit() whose workers still start runs on, and crashes the process when Ray is shut down: its
    thread uses what Ray has freed.
    """
    import ray

    actors, worker = find("ray._private.state", "actors"), find("ray._private.worker", "global_worker")
    kill = getattr(getattr(worker, "core_worker", None), "kill_actor", None)
    if actors is None or kill is None:
        return
    for facts in actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id())).values():
        if facts.get("ActorClassName") == "TrainController" and facts.get("State") != "DEAD":
            kill(ray.ActorID.from_hex(facts["ActorID"]), True)  # for good


def worker_group_callback() -> type:
    """Return the base class of Ray Train's callbacks on worker groups.

    Without it (object) the time until Ray requests resources is not recorded apart from the controller's start.
    """
    base: type | None = find("ray.train.v2._internal.execution.callback", "WorkerGroupCallback")
    return base or object


def autoscaling_coordinator() -> Any:
    """Return the actor that merges the requests of a cluster's drivers for its autoscaler; None without this name.

    Ray Train and Ray Data request nodes through it, so that a request beside it would be replaced by theirs.
    """
    module = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
    create = find(module, "get_or_create_autoscaling_coordinator")
    return create() if create else None


class AutoscalerState(NamedTuple):
    """The published state of the autoscaler. ``refused``: the bundles of each request that it cannot meet.

    The cluster's resources and requests have a ``version``, which grows whenever they are read; ``answered`` is the
    version that the autoscaler had read: it publishes every few seconds.
    """

    version: int = 0
    answered: int = 0
    refused: Sequence[Sequence[Mapping[str, float]]] = ()


def autoscaler_state() -> AutoscalerState:
    """Return what the autoscaler has published.

    Without these names, and with the older autoscaler, which brings what it can, the run waits for its whole time.
    """
    import ray

    client, reply = find("ray._raylet", "GcsClient"), find("ray.core.generated.autoscaler_pb2", "GetClusterStatusReply")
    ask = getattr(client(ray.get_runtime_context().gcs_address), "get_cluster_status", None) if client else None
    if not (ask and reply):
        return AutoscalerState()
    status = reply.FromString(ask())
    refused = [
        [dict(each.request.resources_bundle) for each in one.resource_requests for _ in range(each.count)]
        for one in getattr(status.autoscaling_state, "infeasible_cluster_resource_constraints", ())
    ]
    return AutoscalerState(
        getattr(status.cluster_resource_state, "cluster_resource_state_version", 0),
        getattr(status.autoscaling_state, "last_seen_cluster_resource_state_version", 0),
        refused,
    )


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that end soon, and take no more work.

    Without this name a worker group that is placed on one of them fails to start.
    """
    known = getattr(find("ray._private.state", "state"), "get_draining_nodes", None)
    return set(known()) if known else set()


def leave_out_requests(trainer: object) -> None:
    """Have Ray Train request no nodes for a trainer's workers: the run holds one request for all of its groups, or
    there is one node alone, where the actor for requests would take over a second of the run's start.

    Without these names it requests them too, and the autoscaler may start more nodes than any group needs.
    """
    policy = find("ray.train.v2._internal.execution.scaling_policy", "FixedScalingPolicy")
    name = "_initialize_and_run_controller"
    run = getattr(trainer, name, None)
    if policy is None or run is None:
        return
    requests = ("_send_resource_request", "_maybe_send_resource_request", "_cancel_resource_request")
    silent = type("WithoutRequest", (policy,), dict.fromkeys(requests, lambda policy: None))

    def run_controller(*, scaling_policy: Any, **given: object) -> object:
        return run(scaling_policy=silent(scaling_config=scaling_policy.scaling_config), **given)

    setattr(trainer, name, run_controller)


def drop_callbacks(trainer: object, names: Sequence[str]) -> None:
    """Remove the callbacks of these classes from those that Ray Train adds to a trainer.

    Without this name they stay: two more processes a worker group, and the time of their start.
    """
    create = getattr(trainer, CALLBACKS, None)
    if create is not None:
        setattr(trainer, CALLBACKS, lambda: [each for each in create() if type(each).__name__ not in names])
