"""``harness init --cluster``: the files of experiments/clusters/ with a site's answers."""

from __future__ import annotations

import difflib
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from harness.cli import init_cluster
from harness.cli.commands import app
from harness.cli.init_cluster import COUNT, FOLDER, GPUS, MEMORY, NAME, NAMES, NOTICE, PATH, PATHS, SIZE, TIME

SAMPLES = {
    COUNT: "4",
    GPUS: "0",
    SIZE: "64Gi",
    MEMORY: "480G",
    TIME: "1-04:00:00",
    NAME: "h100",
    NAMES: "n1,n2,n3",
    PATH: "/shared/x.img",
    PATHS: "gcc",
    NOTICE: "240",
}
CASES = [
    (name, question)
    for name, file in init_cluster.CLUSTERS.items()
    for question in file.questions
    if question != "gres"
]


def init(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("cluster", "question"), CASES)
def test_an_answer_stands_in_each_of_its_places_and_nothing_else_changes(cluster: str, question: str) -> None:
    file = init_cluster.CLUSTERS[cluster]
    sample = SAMPLES[file.questions[question].allowed]
    result = init("--cluster", cluster, f"{question}={sample}")
    assert result.exit_code == 0, result.output
    before, after = (FOLDER / file.name).read_text(), Path(file.name).read_text()
    changed = [line[1:] for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line.startswith("+ ")]
    for pattern in file.questions[question].places:
        assert re.search(pattern, before, re.MULTILINE)
    assert any(sample in line for line in changed) and len(changed) <= 6
    assert f"{question} (" not in result.output
    alternatives = [group for group in init_cluster.ALTERNATIVES if cluster == "slurm" and question in group]
    assert not any(f"{other} (" in result.output for group in alternatives for other in group)


def test_all_answers_make_a_script_that_bash_reads(here: Path) -> None:
    answers = {"nodes": "16", "gres": "gpu:a100:4", "account": "ml", "partition": "h100,a100", "pyxis": "/s/h.sqsh"}
    result = init("--cluster", "slurm", *(f"{name}={value}" for name, value in answers.items()))
    text = (here / "slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n", "slurm.sbatch"], check=False).returncode == 0
    assert "sbatch slurm.sbatch EXPERIMENT.yaml" in result.output
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert asked[0] == "#SBATCH --nodes=16 --cpus-per-task=64 --mem=0"  # gres is in place of --gpus-per-node
    assert asked[-3:] == ["#SBATCH --account=ml", "#SBATCH --partition=h100,a100", "#SBATCH --gres=gpu:a100:4"]
    assert (
        '\nsbcast --force /s/h.sqsh "$LOCAL.sqsh" || exit 2\nin_step=(--container-image="$LOCAL.sqsh" ' in text
        and "\non_first=(srun --export=ALL --overlap --nodes=1 " in text
    )


def test_an_image_modules_and_another_name_stand_in_the_script(here: Path) -> None:
    answers = ("apptainer=/s/h.sif", "modules=apptainer,cuda/12.4")
    (here / "jobs").mkdir()
    init("--cluster", "slurm", *answers, "--output", "jobs/n4.sbatch")
    text = (here / "jobs/n4.sbatch").read_text()
    assert subprocess.run(["bash", "-n", "jobs/n4.sbatch"], check=False).returncode == 0
    assert "\nmodule load apptainer cuda/12.4 || exit 2\n" in text
    assert '\nsbcast --force /s/h.sif "$LOCAL.sif" || exit 2\non_node=(apptainer exec --nv ' in text
    assert ' PYTHONNOUSERSITE=1 "$LOCAL.sif")\n' in text
    assert '\non_first=("${on_node[@]}")\n' in text
    assert "sbatch -N $SLURM_JOB_NUM_NODES jobs/n4.sbatch" in text and "slurm.sbatch" not in text


def test_manifests_keep_their_form(here: Path) -> None:
    answers = {"image": "r.example/x:1", "nodes": "3", "gpus": "4", "cpus": "16", "memory": "64Gi"}
    answers |= {"storage_class": "true", "queue": "007", "rdma": "rdma/hca_a"}
    init("--cluster", "kuberay", *(f"{name}={value}" for name, value in answers.items()))
    found = {each["kind"]: each for each in yaml.safe_load_all((here / "kuberay-rayjob.yaml").read_text())}
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    limits = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": 4}
    assert worker["resources"] == {"requests": limits, "limits": limits | {"rdma/hca_a": 1}}
    assert [group[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [3, 3, 3]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["image"] == worker["image"] == "r.example/x:1" and head["resources"]["limits"]["cpu"] == "2"
    assert found["RayJob"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "007"}
    assert found["PersistentVolumeClaim"]["spec"]["storageClassName"] == "true"  # a text
    init("--cluster", "ssh", "head=n0", "workers=n1,n2", "user=1000")
    machines = yaml.safe_load((here / "ray-up-local.yaml").read_text())
    assert machines["provider"] == {"type": "local", "head_ip": "n0", "worker_ips": ["n1", "n2"]}
    assert (machines["min_workers"], machines["max_workers"], machines["auth"]["ssh_user"]) == (2, 2, "1000")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster", "slrum"], "did you mean 'slurm'?"),
        (["--cluster", "slurm", "nodes=0"], "nodes: got '0'; allowed: a number from 1"),
        (["--cluster", "slurm", "account=a;b"], "account: got 'a;b'; allowed: a name"),
        (["--cluster", "slurm", "venv=$(x)"], "allowed: a path or name without spaces"),
        (["--cluster", "slurm", "time=:"], "time: got ':'; allowed: such as 2:00:00, 1-12:00 or 90, in minutes"),
        (["--cluster", "slurm", "nodes=4", "nodes=8"], "nodes: got it twice; allowed: one answer"),
        (["--cluster", "slurm", "--output", "my job.sbatch"], "got 'my job.sbatch'; allowed: a path or name without"),
        (["--cluster", "slurm", "scaling"], "got 'scaling'; allowed: NAME=VALUE of nodes, gpus, gres"),
        (["--cluster", "ssh", "gpus=2"], "got 'gpus=2'; allowed: NAME=VALUE of head, workers, user, key"),
        (["--cluster", "slurm", "pyxis=/a", "apptainer=/b"], "got pyxis and apptainer; allowed: one of them"),
        (["--cluster", "slurm", "venv=/v", "pyxis=/a"], "got venv and pyxis; allowed: one of them"),
        (["--cluster", "slurm", "venv=/v", "apptainer=/a"], "got venv and apptainer; allowed: one of them"),
        (["--cluster", "slurm", "venv_tar=/v", "venv=/a"], "got venv and venv_tar; allowed: one of them"),
        (["--cluster", "slurm", "gpus=8", "gres=gpu:8"], "got gpus and gres; allowed: one of them"),
        (["--cluster", "slurm", "--data", "digits"], "it takes no --script, --workload or --data"),
    ],
)
def test_a_wrong_answer_is_one_error_and_nothing_is_written(arguments: list[str], said: str, here: Path) -> None:
    result = init(*arguments)
    assert result.exit_code == 2 and said in result.output
    assert not list(here.iterdir())


def test_without_the_files_of_the_repository_the_error_says_where_they_are(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_cluster, "FOLDER", here / "none")
    result = init("--cluster", "slurm")
    assert result.exit_code == 2 and "is missing: it is in a clone of the repository" in result.output
