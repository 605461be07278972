"""Our cluster file for machines with ssh: up, a run over both machines, its results fetched, Ray ended on both."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from tests.cluster.machines import ROOT, Machine, machines, wait_for, why_not

NEEDED = ("sshd", "ssh-keygen", "rsync")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]
pytestmark += [pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: tests/cluster/install.sh")]

FILE = ROOT / "experiments/clusters/ray-up-local.yaml"
EXPERIMENT = """
name: ssh
workload: emulated_compute
workload_options: {mebibytes: 0.1, step_ms: 5}
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}
throughput: {blocks: 1, warmup_steps: 3, windows: 1, window_steps: 10, window_seconds: 0, twin: false, explain: false}
equivalence: false
"""
HOME = """
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay overlay -o lowerdir=/root,upperdir=/mnt/upper,workdir=/mnt/work /root
"""
"""Gives a machine a home of its own that begins as this one's, where Python may be."""
PREPARE = """
mkdir -p /run/sshd /root/harness
ln -sfn {venv} /root/harness/.venv
/usr/sbin/sshd -o HostKey={keys}/host -o AuthorizedKeysFile={keys}/authorized -o UsePAM=no -o StrictModes=no \\
    -o PermitRootLogin=prohibit-password -o PidFile=none -E {folder}/sshd.log -f /dev/null
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Machine]]:
    """Two machines with sshd and a home of their own, in which the package is installed."""
    if reason := why_not(HOME):
        pytest.skip(reason)
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("key", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    shutil.copy(keys / "key.pub", keys / "authorized")
    with machines(tmp_path) as made:
        for machine in made:
            venv = Path(sys.executable).parents[1]
            machine.run("bash", "-ec", HOME + PREPARE.format(folder=machine.folder, keys=keys, venv=venv))
        made[0].run("bash", "-c", f"mkdir -p ~/.ray && umask 77 && printf {secrets.token_hex(32)} > ~/.ray/auth_token")
        yield made


def cluster_file(home: Path) -> Path:
    """Our file for these machines: its three lines edited, and one CPU for each machine, whose cores they share."""
    text = FILE.read_text()
    edits = {
        "head_ip: 10.0.0.1, worker_ips: [10.0.0.2]": "head_ip: 10.77.0.1, worker_ips: [10.77.0.2]",
        "ssh_user: ubuntu, ssh_private_key: ~/.ssh/id_ed25519": f"ssh_user: root, ssh_private_key: {home}/keys/key",
        "ray start --head": "ray start --num-cpus=1 --head",
        "ray start --address": "ray start --num-cpus=1 --address",
    }
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file = home / "cluster.yaml"
    file.write_text(text)
    return file


def raylets(machine: Machine) -> list[str]:
    return [command for command in machine.commands() if command.partition(" ")[0].endswith("/raylet")]


def test_up_run_fetch_stop(nodes: list[Machine], tmp_path: Path) -> None:
    head, other = nodes
    file = str(cluster_file(tmp_path))
    (tmp_path / "ssh.yaml").write_text(EXPERIMENT)

    def ray(*words: str, timeout: float = 120) -> str:
        return head.run("ray", *words, cwd=tmp_path, timeout=timeout, PYTHONPATH="", RAY_AUTH_MODE="token")

    ray("up", "-y", file, timeout=180)
    wait_for(lambda: raylets(other), 120)
    ray("rsync-up", file, str(tmp_path / "ssh.yaml"), "~/harness/ssh.yaml")
    command = "RAY_AUTH_MODE=token .venv/bin/python -m harness.run ssh.yaml --address auto --resume auto --quiet"
    output = ray("exec", file, f"cd ~/harness && {command}", timeout=240)
    ray("rsync-down", file, "~/harness/results/", f"{tmp_path}/fetched/")
    (folder,) = (tmp_path / "fetched/ssh").iterdir()
    results = harness.load(folder)
    assert set(results.trials["outcome"]) == {"ok"}, output
    spanning = results.ranks[results.ranks["trial_id"].isin(results.trials[results.trials["nodes"] == 2]["trial_id"])]
    assert set(spanning["address"]) == {"10.77.0.1", "10.77.0.2"}
    ray("exec", file, "~/harness/.venv/bin/ray stop")
    wait_for(lambda: not any(map(raylets, nodes)), 150)  # the other machine gives the first up after a minute
