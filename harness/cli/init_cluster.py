"""The files of ``harness init --cluster``: experiments/clusters/ with a site's answers in their places."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.errors import ExperimentError, nearest
from harness.system.files import PACKAGE_FOLDER

FOLDER = PACKAGE_FOLDER.parent / "experiments" / "clusters"
COUNT, GPUS, SIZE = ("a number from 1", r"[1-9]\d*"), ("a number from 0", r"0|[1-9]\d*"), ("such as 256Gi", r"\d+[GT]i")
TIME = ("such as 2:00:00, 1-12:00 or 90, in minutes", r"(\d+-)?\d+(:\d\d){0,2}")
NOTICE = ("a number from 60", r"[6-9]\d|[1-9]\d{2,}")
MEMORY = ("0 for all of it, or such as 480G", r"0|[1-9]\d*[MGT]")
NAME, NAMES = ("a name", r"[\w.:@-]+"), ("names with commas", r"[\w.:@-]+(,[\w.:@-]+)*")
PATH, PATHS = ("a path or name without spaces", r"[\w.@%+=:/~-]+"), ("names with commas", r"[\w.@%+=:/~,-]+")
"""What an answer may be, in words and as a pattern: nothing that a shell or YAML would read as more than a word."""


@dataclass(frozen=True)
class Question:
    """A question about a site. ``places``: what ANSWER replaces in the file, by pattern."""

    text: str
    allowed: tuple[str, str]
    places: Mapping[str, str]


@dataclass(frozen=True)
class ClusterFile:
    """A file of experiments/clusters/, the command that uses it as FILE, and its questions."""

    name: str
    start: str
    questions: Mapping[str, Question]


def _sbatch(option: str) -> Mapping[str, str]:
    return {rf"^##SBATCH --{option}=.*$": f"#SBATCH --{option}=ANSWER"}


CLUSTERS: Mapping[str, ClusterFile] = {
    "slurm": ClusterFile(
        "slurm.sbatch",
        "sbatch FILE EXPERIMENT.yaml",
        {
            "nodes": Question("nodes", COUNT, {r"^#SBATCH --nodes=\d+": "#SBATCH --nodes=ANSWER"}),
            "gpus": Question("GPUs of each node", GPUS, {r"--gpus-per-node=\d+": "--gpus-per-node=ANSWER"}),
            "gres": Question(
                "instead of gpus: the site's type, such as gpu:h100:8",
                PATH,
                {r" --gpus-per-node=\d+": "", **_sbatch("gres")},
            ),
            "cpus": Question(
                "CPUs of each node, CPUEfctv of scontrol show node, else CPUTot",
                COUNT,
                {r"--cpus-per-task=\d+": "--cpus-per-task=ANSWER"},
            ),
            "mem": Question("memory of each node", MEMORY, {r"^(#SBATCH .*--mem=)\S+": r"\g<1>ANSWER"}),
            "notice": Question(
                "seconds before the time limit for the report",
                NOTICE,
                {r"USR1@\d+": "USR1@ANSWER", r"^NOTICE_S=\d+": "NOTICE_S=ANSWER"},
            ),
            "time": Question("time limit", TIME, {r"--time=\S+": "--time=ANSWER"}),
            "account": Question("account", NAME, _sbatch("account")),
            "partition": Question("partition", NAMES, _sbatch("partition")),
            "qos": Question("quality of service", NAME, _sbatch("qos")),
            "modules": Question("modules to load, with commas", PATHS, {r"^# module load \S+": "module load ANSWER"}),
            "venv": Question(
                "environment with the packages, on every node", PATH, {r"\$SLURM_SUBMIT_DIR/\.venv": "ANSWER"}
            ),
            "venv_tar": Question(
                "instead of venv: a tar of it, which each node unpacks to its own disk",
                PATH,
                {r"^VENV_TAR=.*$": "VENV_TAR=${VENV_TAR:-ANSWER}"},
            ),
            "output": Question("folder of results", PATH, {r"\$\{OUTPUT:-results\}": "${OUTPUT:-ANSWER}"}),
            "iface": Question(
                "interface for Ray and gloo, such as ib0; NCCL finds InfiniBand itself",
                NAME,
                {r"^IFACE=.*$": "IFACE=${IFACE:-ANSWER}"},
            ),
            "pyxis": Question(
                "image file for pyxis and enroot",
                PATH,
                {
                    r"^# sbcast --force \S+\.sqsh ": "sbcast --force ANSWER ",
                    r"^# in_step=": "in_step=",
                    r"^# on_first=\(srun": "on_first=(srun",
                },
            ),
            "apptainer": Question(
                "image file for Apptainer",
                PATH,
                {
                    r"^# sbcast --force \S+\.sif ": "sbcast --force ANSWER ",
                    r"^# on_node=\(apptainer": "on_node=(apptainer",
                    r'^# on_first=\("\$\{on_node': 'on_first=("${on_node',
                },
            ),
        },
    ),
    "kuberay": ClusterFile(
        "kuberay-rayjob.yaml",
        "kubectl apply -f FILE",
        {
            "image": Question("image with this package", PATH, {r"image: \S+( +)# EDIT": r"image: ANSWER\1# EDIT"}),
            "nodes": Question("worker pods", COUNT, {r"([rR]eplicas): \d+": r"\1: ANSWER"}),
            "gpus": Question("GPUs of each pod", GPUS, {r"nvidia\.com/gpu: \d+": "nvidia.com/gpu: ANSWER"}),
            "cpus": Question("cores of each pod", COUNT, {r'cpu: "32"': 'cpu: "ANSWER"'}),
            "memory": Question("memory of each pod", SIZE, {r"memory: 256Gi": "memory: ANSWER"}),
            "storage_class": Question(
                "a class with ReadWriteMany", NAME, {r"#: storageClassName: CLASS": 'storageClassName: "ANSWER"'}
            ),
            "queue": Question("queue of Kueue", NAME, {r"#: (labels: .*)QUEUE": r'\g<1>"ANSWER"'}),
            "rdma": Question(
                "RDMA resource of each pod, such as rdma/hca",
                PATH,
                {r"#: (securityContext: )": r"\1", r"#: rdma/hca: 1": "ANSWER: 1"},
            ),
        },
    ),
    "ssh": ClusterFile(
        "ray-up-local.yaml",
        "ray up -y FILE",
        {
            "head": Question("address of the head", NAME, {r"head_ip: [^,]+": "head_ip: ANSWER"}),
            "workers": Question(
                "addresses of the others, with commas", NAMES, {r"worker_ips: \[.*?\]": "worker_ips: [ANSWER]"}
            ),
            "user": Question("user", NAME, {r"ssh_user: [^,]+": 'ssh_user: "ANSWER"'}),
            "key": Question("private key", PATH, {r"ssh_private_key: [^}]+": "ssh_private_key: ANSWER"}),
        },
    ),
}


ALTERNATIVES = (("venv", "venv_tar", "pyxis", "apptainer"), ("gpus", "gres"))
"""Questions of which one is answered."""


def cluster_text(cluster: str, given: Sequence[str]) -> tuple[ClusterFile, str, list[str]]:
    """Return the file of a kind of cluster, its text with the answers, and what remains to be answered.

    ``given``: answers as NAME=VALUE. Raises ExperimentError for an unknown cluster or question, or a value that is not
    allowed.
    """
    if cluster not in CLUSTERS:
        raise ExperimentError("--cluster", [f"got {cluster[:80]!r}; {nearest(cluster[:80], CLUSTERS)}"])
    file = CLUSTERS[cluster]
    answers = _checked(cluster, given)
    try:
        text = (FOLDER / file.name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ExperimentError(
            "--cluster",
            [f"{FOLDER / file.name} is missing: it is in a clone of the repository, installed by pip install -e ."],
        ) from None
    for name, value in answers.items():
        for pattern, replacement in file.questions[name].places.items():
            words = value.replace(",", " ") if name == "modules" else value
            text = re.sub(pattern, replacement.replace("ANSWER", words), text, flags=re.MULTILINE)
    if "workers" in answers:
        text = re.sub(r"(m\w\w_workers:) \d+", rf"\1 {answers['workers'].count(',') + 1}", text)
    settled = {
        name for group in ALTERNATIVES if any(one in answers for one in group) for name in group
    } | answers.keys()
    return file, text, [f"{name} ({each.text})" for name, each in file.questions.items() if name not in settled]


def _checked(cluster: str, given: Sequence[str]) -> dict[str, str]:
    questions = CLUSTERS[cluster].questions
    answers: dict[str, str] = {}
    problems = []
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or name not in questions:
            problems.append(f"got {each[:80]!r}; allowed: NAME=VALUE of {', '.join(questions)}")
        elif not re.fullmatch(questions[name].allowed[1], value):
            problems.append(f"{name}: got {value[:80]!r}; allowed: {questions[name].allowed[0]}")
        elif name in answers:
            problems.append(f"{name}: got it twice; allowed: one answer")
        answers[name] = value
    for group in ALTERNATIVES:
        if len(both := [name for name in group if name in answers]) > 1:
            problems.append(f"got {' and '.join(both)}; allowed: one of them")
    if problems:
        raise ExperimentError(f"--cluster {cluster}", problems)
    return answers
