"""The files of experiments/clusters/ without a cluster: schemas, the operator's rules, versions, our own options."""

from __future__ import annotations

import copy
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from ray.autoscaler._private.util import prepare_config, validate_config

from harness.cli.commands import app
from harness.config.load import parse_experiment
from harness.system.process import INTERRUPTED, UNSETTLED
from tests.conftest import ROOT

FOLDER = ROOT / "experiments/clusters"
RAY_UP = [FOLDER / f"ray-up-{name}.yaml" for name in ("local", "aws")]
SCRIPT, PAGE, KUBERAY = FOLDER / "slurm.sbatch", FOLDER / "README.md", FOLDER / "kuberay-rayjob.yaml"
KUBERNETES = "1.30"
"""The version of Kubernetes whose schemas the pods are checked against."""
LONGEST_NAME = 47
"""Of a RayJob: names of what the operator makes for it are longer, and a label has at most 63 characters."""


def documents(uncommented: bool = False) -> dict[str, Any]:
    """The manifests by their kind; also with the lines that only some clusters need."""
    text = KUBERAY.read_text()
    text = re.sub("^( *)#: ", r"\1", text, flags=re.MULTILINE) if uncommented else text
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def schema_problem(cluster: dict[str, Any]) -> str:
    """What Ray's own schema of a cluster file finds."""
    try:
        validate_config(prepare_config(copy.deepcopy(cluster)))
    except jsonschema.ValidationError as error:
        return error.message
    return ""


@pytest.mark.parametrize("file", RAY_UP, ids=lambda file: file.stem)
def test_a_cluster_file_has_rays_own_schema(file: Path) -> None:
    cluster = yaml.safe_load(file.read_text())
    assert schema_problem(cluster) == ""
    assert "'max_worker' was unexpected" in schema_problem({**cluster, "max_worker": 2})
    assert "is not of type 'number'" in schema_problem({**cluster, "idle_timeout_minutes": "60"})
    assert "'ssh_usr' was unexpected" in schema_problem({**cluster, "auth": {**cluster["auth"], "ssh_usr": "x"}})


@pytest.mark.parametrize("file", RAY_UP, ids=lambda file: file.stem)
def test_a_cluster_file_keeps_its_nodes_and_starts_them_with_a_token_and_without_niceness(file: Path) -> None:
    cluster = yaml.safe_load(file.read_text())
    types = cluster.get("available_node_types", {"all": cluster}).values()
    assert all(each["min_workers"] == each["max_workers"] for each in types)
    assert sum(each["min_workers"] for each in types) == cluster["max_workers"]
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        (start,) = (command for command in commands if "ray start" in command)
        assert "RAY_AUTH_MODE=token" in start and "RAY_worker_niceness=0" in start and "--disable-usage-stats" in start


def test_the_manifest_follows_the_operators_rules_and_mounts_every_volume() -> None:
    """What the operator refuses by rules that its schema does not hold, and what a benchmark needs."""
    job = documents()["RayJob"]
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert len(job["metadata"]["name"]) <= LONGEST_NAME
    assert spec["submissionMode"] == "SidecarMode"  # its submitter is in the head's pod
    assert not {"submitterPodTemplate", "clusterSelector"} & spec.keys()
    assert spec["shutdownAfterJobFinishes"] or not spec["ttlSecondsAfterFinished"]
    assert cluster["authOptions"]["mode"] == "token"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert not group.get("resources") or not {"num-cpus", "num-gpus", "memory"} & group["rayStartParams"].keys()
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    for pod in pods(job).values():
        mounted = {mount["name"] for each in pod["spec"]["containers"] for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def pods(job: dict[str, Any]) -> dict[str, Any]:
    """The pods of a RayJob, each as a manifest of its own."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = {"head": cluster["headGroupSpec"]} | {each["groupName"]: each for each in cluster["workerGroupSpecs"]}
    whole = {"apiVersion": "v1", "kind": "Pod"}
    return {
        name: {**whole, **group["template"], "metadata": {"name": name, **group["template"].get("metadata", {})}}
        for name, group in groups.items()
    }


@pytest.mark.parametrize("uncommented", [False, True])
def test_pods_claim_and_experiment_have_kubernetes_own_schema(uncommented: bool) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    found = documents(uncommented)
    (worker,) = pods(found["RayJob"])["gpu"]["spec"]["containers"]
    assert ("storageClassName" in found["PersistentVolumeClaim"]["spec"]) == uncommented
    assert ("kueue.x-k8s.io/queue-name" in found["RayJob"]["metadata"].get("labels", {})) == uncommented
    assert ("securityContext" in worker and "rdma/hca" in worker["resources"]["limits"]) == uncommented
    plain = {"claim": found["PersistentVolumeClaim"], "map": found["ConfigMap"], **pods(found["RayJob"])}
    assert set(plain) == {"claim", "map", "head", "gpu"}
    for manifest in plain.values():
        validate.validate(manifest, KUBERNETES, strict=True)
    spoilt = copy.deepcopy(plain["gpu"])
    spoilt["spec"]["containers"][0]["volumeMount"] = spoilt["spec"]["containers"][0].pop("volumeMounts")
    with pytest.raises(validate.ValidationError):
        validate.validate(spoilt, KUBERNETES, strict=True)


def test_the_experiment_ends_before_the_job_is_killed_and_its_results_can_be_copied() -> None:
    found = documents()
    content = yaml.safe_load(found["ConfigMap"]["data"]["scaling.yaml"])
    wall = parse_experiment(content, source="scaling.yaml").limits.wall
    assert wall and wall < found["RayJob"]["spec"]["activeDeadlineSeconds"]
    environment = yaml.safe_load(found["RayJob"]["spec"]["runtimeEnvYAML"])
    assert int(environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    seconds = found["RayJob"]["spec"]["ttlSecondsAfterFinished"]
    assert seconds >= 3600 and f"`ttlSecondsAfterFinished` ({seconds})" in PAGE.read_text()


def test_machines_in_a_cloud_have_the_package_and_boto3_before_ray_starts() -> None:
    (setup,) = yaml.safe_load((FOLDER / "ray-up-aws.yaml").read_text())["setup_commands"]
    assert "-m venv ~/harness/.venv" in setup and setup.endswith("pip install -e ~/harness boto3")


def test_versions_are_those_that_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "ray")
    cluster = documents()["RayJob"]["spec"]["rayClusterSpec"]
    version = Version(cluster["rayVersion"])
    assert version in needed.specifier
    images = re.findall(r"(?:rayproject/ray|harness):(\d+\.\d+\.\d+)", KUBERAY.read_text())
    assert len(images) == 3 and {Version(image) for image in images} == {version}


def unknown_options(text: str) -> set[str]:
    """The options of each ``harness.run`` command in a text that our command line does not have."""
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    known = {option for parameter in run.params for option in (*parameter.opts, *parameter.secondary_opts)}
    joined = text.replace("\\\n", " ")
    commands = re.findall(r"harness[. ]run ((?:[^\n|&;`)']|'[^'\n]*')*)", joined)
    assert commands
    given = {word.partition("=")[0] for command in commands for word in command.split() if word.startswith("--")}
    return given - known


@pytest.mark.parametrize("file", [SCRIPT, PAGE, KUBERAY], ids=lambda file: file.name)
def test_every_option_of_our_command_exists(file: Path) -> None:
    text = file.read_text()
    assert unknown_options(text) == set()
    assert unknown_options(text.replace("--resume auto", "--resum auto")) == {"--resum"}


def test_the_batch_script_requeues_for_usr1_alone_and_the_page_names_every_file() -> None:
    text = SCRIPT.read_text()
    asked = shlex.split(" ".join(line[len("#SBATCH") :] for line in text.splitlines() if line.startswith("#SBATCH")))
    assert "--signal=B:USR1@120" in asked and "--requeue" in asked
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    assert f'[ -n "$requeue" ] && [ $code = {INTERRUPTED} ]' in text and f"[ $code = {UNSETTLED} ]" in text
    patterns = (r"NOTICE_S - (\d+)", r"^rest=(\d+)", r"requeue\" ] \|\| rest=(\d+)", r"nodes (\d+) \|\| kill")
    report, term, of_requeue, kill = (int(re.findall(pattern, text, re.MULTILINE)[0]) for pattern in patterns)
    assert of_requeue + kill < report, "the requeue comes before the time limit"
    assert term + kill < 30, "nodes are held no longer after the command"
    text = PAGE.read_text()
    assert [path.name for path in sorted(FOLDER.iterdir()) if path != PAGE and path.name not in text] == []


CALLED = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n'
COMMAND = f"""{CALLED}
echo $$ > "$CALLS.pid"
[ "$1" != - ] || {{ cat > /dev/null; echo starting; exec sleep ${{SLEEPS:-0}}; }}
echo measuring
mkdir -p results/run
[ -z "$SETTLED" ] || touch results/run/trials.jsonl
[ "$CODE" = late ] && trap '' TERM || trap 'exit $CODE' TERM
for second in {{1..60}}; do sleep 0.5; done
"""
NAMES = f"{CALLED}[ $1 != show ] || printf '%s\\n' {platform.node()} n63\n"
STEP = f"""{CALLED}
trap '' TERM
[ -z "$LASTS" ] || sleep 9
while [ "$1" != bash ]; do shift; done
[ -n "$LASTS" ] || "$@"
"""
COPY = f'{CALLED}cp "$2" "$3"\n'
"""Stand-ins: of python, which starts the nodes, then measures, of scontrol, which names this node and another, of srun,
which runs the step on one node, and of sbcast, which copies to one node."""


@dataclass(frozen=True)
class SlurmJob:
    """Our script with short time limits beside stand-ins for SLURM's commands, Ray and the harness."""

    process: subprocess.Popen[bytes]
    folder: Path

    def end(self) -> tuple[int, str, list[str]]:
        """Return the exit code, the output, and what was called."""
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output.decode(), (self.folder / "calls").read_text().splitlines()


PROGRAMS = {"python": COMMAND, "srun": STEP, "ray": CALLED, "scontrol": NAMES, "scancel": CALLED, "sbcast": COPY}


def start_job(
    folder: Path,
    others: Mapping[str, str | None] = MappingProxyType({}),
    *,
    start_s: str = "1",
    file: str = "e.yaml",
    **more: str,
) -> SlurmJob:
    """Start our script on a file.

    ``others``: stand-ins in place of PROGRAMS; ``start_s``: of the nodes; ``more``: variables.
    """
    (folder / "bin").mkdir()
    for name, program in {**PROGRAMS, **others}.items():
        if program is None:
            continue
        (folder / "bin" / name).write_text(program)
        (folder / "bin" / name).chmod(0o755)
    (folder / "calls").touch()
    (folder / "e.yaml").touch()
    text = SCRIPT.read_text()
    limits = {"$((300 + 5 * SLURM_JOB_NUM_NODES))": start_s, "rest=20": "rest=3"}
    for limit, short in {**limits, "limit=600": "limit=5", "NOTICE_S=120": "NOTICE_S=35"}.items():
        assert limit in text
        text = text.replace(limit, short)
    (folder / "job.sbatch").write_text(text if "SLURMD_NODENAME" not in more else in_pyxis(text))
    slurm = {"SLURM_SUBMIT_DIR": "/", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "2"}
    slurm |= {"SLURM_PROCID": "0", "RAY_TMPDIR": str(folder)}
    places = {"PATH": "/usr/sbin:/usr/bin:/bin", "VENV": str(folder), "CALLS": str(folder / "calls")}
    variables = {**slurm, **places, "IFACE": "lo", "CODE": "130", "LASTS": "", "SETTLED": "", **more}
    words = ["bash", "job.sbatch", file]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    return SlurmJob(subprocess.Popen(words, cwd=folder, env=variables, **pipes), folder)  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_while_nodes_start_ends_the_job_and_it_is_not_requeued(tmp_path: Path, sent: signal.Signals) -> None:
    job = start_job(tmp_path, SLEEPS="15")
    assert job.process.stdout and job.process.stdout.readline() == b"starting\n"
    job.process.send_signal(sent)
    code, output, called = job.end()
    said = "job 7 is not requeued: it settled no trial in its time limit" in output
    assert code == 5 and said == (sent == signal.SIGUSR1)  # a job that is cancelled had no limit
    assert not any(line.startswith(("python -u", "scontrol requeue")) for line in called)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code", "requeued"),
    [
        (signal.SIGUSR1, INTERRUPTED, True),
        (signal.SIGUSR1, UNSETTLED, False),
        (signal.SIGUSR1, 0, False),  # all was measured meanwhile
        (signal.SIGUSR1, 1, False),
        (signal.SIGTERM, INTERRUPTED, False),
    ],
)
def test_a_job_is_requeued_if_a_trial_settled(tmp_path: Path, sent: signal.Signals, code: int, requeued: bool) -> None:
    job = start_job(tmp_path, CODE=str(code))
    assert job.process.stdout and job.process.stdout.readline() == b"starting\n"
    assert job.process.stdout.readline() == b"measuring\n"
    job.process.send_signal(sent)
    found, output, called = job.end()
    assert found == code and ("scontrol requeue 7" in called) == requeued
    assert ("not requeued: it settled no trial" in output) == (code == UNSETTLED)
    assert ("not requeued: the command ended with exit code 1" in output) == (code == 1)


@pytest.mark.slow
@pytest.mark.parametrize("settled", ["", "yes"])
def test_a_job_whose_report_takes_longer_than_the_notice_is_requeued_if_a_trial_settled(
    tmp_path: Path, settled: str
) -> None:
    (tmp_path / "results" / "earlier").mkdir(parents=True)
    (tmp_path / "results" / "earlier" / "trials.jsonl").touch()  # of an invocation before
    os.utime(tmp_path / "results" / "earlier" / "trials.jsonl", (0, 0))
    job = start_job(tmp_path, CODE="late", SETTLED=settled)
    assert job.process.stdout and job.process.stdout.readline() == b"starting\n"
    assert job.process.stdout.readline() == b"measuring\n"
    job.process.send_signal(signal.SIGUSR1)
    code, output, called = job.end()
    assert ("scontrol requeue 7" in called) == ("requeued without a report" in output) == bool(settled)
    assert code == (INTERRUPTED if settled else 137)


def test_without_ray_in_the_environment_no_node_is_used(tmp_path: Path) -> None:
    code, output, called = start_job(tmp_path, {"ray": None}).end()
    assert code == 2 and called == [] and "no ray in " in output and "VENV=FOLDER sbatch" in output


def test_an_environment_that_is_named_and_has_no_ray_is_not_replaced_by_another(tmp_path: Path) -> None:
    places = {"VENV": str(tmp_path / "other"), "PATH": f"{tmp_path}/bin:/usr/sbin:/usr/bin:/bin"}
    code, output, called = start_job(tmp_path, **places).end()
    assert code == 2 and called == [] and f"no ray in {tmp_path}/other/bin: name the environment" in output


FAILS = CALLED + "exit 3\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "log"), [("0", "Ray ended with exit code 3"), ("1", "nothing listens on 127.0.0.1:20007 after 1 s")]
)
def test_a_node_that_does_not_start_ends_the_job_at_once_and_is_named(tmp_path: Path, rank: str, log: str) -> None:
    init = "open('connected', 'w').close()"  # only once the head listens: else Ray logs an error in a healthy job
    (tmp_path / "ray.py").write_text(f"def is_initialized(): return False\ndef init(**_): {init}\n")
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    code, output, called = start_job(tmp_path, {"ray": FAILS, "python": python}, SLURM_PROCID=rank).end()
    assert code == 1 and f"a node did not start: {platform.node()}: Ray ended with exit code" in output
    assert log in (tmp_path / "ray-7.log").read_text() and not (tmp_path / "ray-7").exists()
    assert not (tmp_path / "connected").exists()
    assert "scancel --signal=TERM 7.0" in called


@pytest.mark.slow
def test_nodes_that_do_not_start_in_time_are_named(tmp_path: Path) -> None:
    alive = [{"Alive": True, "NodeManagerHostname": platform.node()}, {"Alive": False, "NodeManagerHostname": "n63"}]
    (tmp_path / "ray.py").write_text(f"def is_initialized(): return True\ndef nodes(): return {alive}\n")
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    code, output, called = start_job(tmp_path, {"python": python}, start_s="-19").end()
    assert code == 1 and "nodes that did not start in 1 s: n63; see ray-7.log; sbatch --exclude=NODES" in output
    assert "scancel --signal=TERM 7.0" in called


@pytest.mark.slow
def test_gpus_that_ray_does_not_find_are_said_and_the_command_runs(tmp_path: Path) -> None:
    named = {platform.node(): 4.0, "n63": 2.0}
    alive = [{"Alive": True, "NodeManagerHostname": name, "Resources": {"GPU": n}} for name, n in named.items()]
    (tmp_path / "ray.py").write_text(f"def is_initialized(): return True\ndef nodes(): return {alive}\n")
    python = f'{CALLED}[ "$1" = - ] || exit 0\nexec {sys.executable} "$@"\n'
    code, output, called = start_job(tmp_path, {"python": python}, SLURM_GPUS_ON_NODE="4").end()
    assert code == 0 and "of 4 GPUs a node Ray found 2 on n63: cells that need more are skipped" in output
    assert any(line.startswith("python -u -m harness.run e.yaml") for line in called)


def test_a_file_that_is_not_there_is_named_before_any_node_is_used(tmp_path: Path) -> None:
    code, output, called = start_job(tmp_path, file="f.yaml").end()
    assert code == 2 and called == [] and "no experiment file f.yaml: sbatch slurm.sbatch FILE" in output


def test_an_interface_that_the_first_node_lacks_is_named_before_any_node_is_used(tmp_path: Path) -> None:
    code, output, called = start_job(tmp_path, IFACE="ib7").end()
    assert code == 2 and called == [] and f"{platform.node()}: no IPv4 address of ib7;" in output


def in_pyxis(text: str) -> str:
    """The script with the lines for pyxis uncommented."""
    _, lines, _ = re.split("#    (?:pyxis|Apptainer).*:\n", text)
    lines_used = re.sub("^# ", "", lines, flags=re.MULTILINE).replace("/shared/harness.sqsh", '"$IMAGE"')
    return text.replace(lines, lines_used)


@pytest.mark.slow
def test_a_command_in_a_container_of_pyxis_is_stopped_by_its_step(tmp_path: Path) -> None:
    """As the lines to uncomment have it; srun itself would kill the step."""
    srun = f'{CALLED}while [ "$1" != bash ] && [ "$1" != python ]; do shift; done\n"$@"\n'
    scancel = f'{CALLED}[ "$*" != "--signal=TERM 7.2" ] || kill -TERM $(cat "$CALLS.pid")\n'
    image = tmp_path / "image"
    image.touch()
    job = start_job(tmp_path, {"srun": srun, "scancel": scancel}, SLURMD_NODENAME="n0", IMAGE=str(image))
    assert job.process.stdout and job.process.stdout.readline() == b"starting\n"
    assert job.process.stdout.readline() == b"measuring\n"
    job.process.send_signal(signal.SIGUSR1)
    code, _, called = job.end()
    options = f"--container-image={tmp_path}/harness-7.sqsh --container-mounts={tmp_path}:{tmp_path},/tmp:/tmp"
    steps = [line for line in called if line.startswith("srun ")]
    assert len(steps) == 3 and all(options in step for step in steps)
    assert sorted("--overlap" in step for step in steps) == [False, True, True]  # the first starts in the background
    assert called[0] == f"sbcast --force {image} {tmp_path}/harness-7.sqsh" and not list(tmp_path.glob("harness-7*"))
    assert code == INTERRUPTED and {"scancel --signal=TERM 7.2", "scontrol requeue 7"} <= {*called}


@pytest.mark.slow
def test_a_packed_venv_is_unpacked_on_each_node_and_its_programs_start_the_copied_python(tmp_path: Path) -> None:
    """A real venv that is no longer where it was made; the Ray that it starts and the command say where they run."""
    made, tar, copy = tmp_path / "made", tmp_path / "venv.tar", tmp_path / "harness-7"
    venv.create(made)
    (made / "bin/ray").write_text(f"#!{made}/bin/python3\nimport sys\nprint('ray of', sys.prefix)\n")
    (made / "bin/ray").chmod(0o755)
    subprocess.run(["tar", "-cf", tar, "-C", made, "."], check=True)
    shutil.rmtree(made)
    of_node = {"Alive": True, "Resources": {}}
    alive = [{**of_node, "NodeManagerHostname": name} for name in (platform.node(), "n63")]
    (tmp_path / "ray.py").write_text(f"def is_initialized(): return True\ndef nodes(): return {alive}\n")
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness/run.py").write_text("import sys\nprint('command of', sys.prefix)\n")
    programs = {"python": None, "ray": None}
    code, output, called = start_job(tmp_path, programs, VENV_TAR=str(tar)).end()
    assert code == 0 and f"command of {copy}\n" in output
    assert f"ray of {copy}\n" in (tmp_path / "ray-7.log").read_text()
    assert called[0] == f"sbcast --force {tar} {copy}.tar" and "scancel --signal=TERM 7.1" in called
    assert not list(tmp_path.glob("harness-7*"))


def test_a_venv_that_cannot_be_unpacked_ends_the_job_and_leaves_no_copy(tmp_path: Path) -> None:
    (tmp_path / "venv.tar").write_text("not a tar")
    code, output, called = start_job(tmp_path, VENV_TAR=str(tmp_path / "venv.tar")).end()
    assert code == 2 and "tar: " in output and not list(tmp_path.glob("harness-7*"))
    assert [line.split()[0] for line in called if line.startswith(("s", "ray"))] == ["sbcast", "srun", "srun"]


@pytest.mark.slow
@pytest.mark.parametrize("lasts", ["", "yes"])
def test_a_step_that_does_not_end_is_killed(tmp_path: Path, lasts: str) -> None:
    python = CALLED + '[ "$1" != - ] || cat > /dev/null\n'
    code, _, called = start_job(tmp_path, {"python": python}, LASTS=lasts).end()
    assert code == 0 and "scancel --signal=TERM 7.0" in called
    assert ("scancel --signal=KILL 7.0" in called) == bool(lasts)
