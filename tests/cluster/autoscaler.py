"""Ray's own autoscaler with its provider of fake nodes, on one machine: each node is a further raylet."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from tests.cluster.machines import Machine

HEAD_ID = "f" * 51 + "00000"
"""The id that the provider of fake nodes gives its head."""
FILES = Path(ray.__file__).parent / "autoscaler/_private/fake_multi_node"
DISABLED = {"disable_node_updaters": True, "disable_launch_config_check": True}
BASE: dict[str, Any] = {
    "cluster_name": "fake",
    "max_workers": 8,
    "provider": {"type": "fake_multinode", "head_node_id": HEAD_ID, "launch_multiple": True, **DISABLED},
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{name: False for name in ("no_restart", "file_mounts_sync_continuously")},
    **{f"{name}_commands": [] for name in ("initialization", "setup", "head_setup", "worker_setup")},
    **{f"{name}_start_ray_commands": [] for name in ("head", "worker")},
    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
}
VARIABLES = dict.fromkeys(("AUTOSCALER_UPDATE_INTERVAL_S", "RAY_FAKE_CLUSTER", "RAY_enable_autoscaler_v2"), "1")
VARIABLES |= dict.fromkeys(("RAY_CLOUD_INSTANCE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING"), HEAD_ID)
WATCH = """
import json, sys, time
import ray
from ray.autoscaler.v2.sdk import get_cluster_status

ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
while True:
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    asked = [dict(demand.bundle) for each in status.resource_demands.cluster_constraint_demand
        for demand in each.bundles_by_count for _ in range(demand.count)]
    alive = sum(node["Alive"] for node in ray.nodes())
    print(json.dumps({"time": time.time(), "asked": asked, "alive": alive}), flush=True)
    time.sleep(0.25)
"""
"""Prints the bundles that the autoscaler is asked for, and the number of live nodes, again and again."""


def start_head(machine: Machine, *, cpus: int, most: int, idle_minutes: float) -> str:
    """Start a head of these CPUs whose autoscaler can bring nodes of one CPU; return its address."""
    types = {
        "ray.head.default": {"resources": {"CPU": cpus}, "node_config": {}, "max_workers": 0},
        "small": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": most},
    }
    config = {**BASE, "available_node_types": types, "idle_timeout_minutes": idle_minutes}
    provider = machine.folder / "provider"
    shutil.copytree(FILES, provider)
    (provider / "example.yaml").write_text(json.dumps(config))  # the provider reads it, and the wheel lacks it
    machine.run("mount", "--bind", str(provider), str(FILES))
    words = ["--head", f"--node-ip-address={machine.address}", "--port=6379", f"--num-cpus={cpus}"]
    words += ["--include-dashboard=false", "--disable-usage-stats", f"--autoscaling-config={provider}/example.yaml"]
    machine.run("ray", "start", *words, cwd=Path("/"), PYTHONPATH="", **VARIABLES)
    return f"{machine.address}:6379"


@contextmanager
def watching(machine: Machine, log: Path) -> Iterator[None]:
    """Record in a file what the autoscaler is asked for."""
    process = machine.start("python", "-c", WATCH, log=log, cwd=Path("/"), PYTHONPATH="")
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seen(log: Path) -> list[dict[str, Any]]:
    """Return what was recorded until now; the last line may not be whole."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
