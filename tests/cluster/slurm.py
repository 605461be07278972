"""A real SLURM on two machines of namespaces: a controller on the first, a daemon on each; no munge, no cgroups.

A job that is queued again waits for cred_expire, 120 s by default.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machines import Machine, wait_for

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
CONFIGURATION = """
ClusterName=harness
SlurmctldHost=n0
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=20
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=10
JobRequeue=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerParameters=bf_interval=5,sched_interval=5
NodeName=n[0-1] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n[0-1] Default=YES MaxTime=1:00:00 State=UP GraceTime=0
"""


def why_not() -> str | None:
    """Return why there can be no SLURM here; None if there can be."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client" if missing else None


@dataclass(frozen=True)
class Slurm:
    """A running SLURM, used from its first node."""

    nodes: Sequence[Machine]
    folder: Path

    def run(self, *words: str, cwd: Path | None = None, check: bool = True, **more: str) -> str:
        """Run one of its commands and return the output."""
        variables = {"SLURM_CONF": str(self.folder / "slurm.conf"), **more}
        return self.nodes[0].run(*words, cwd=cwd or self.folder, check=check, **variables)

    def state(self, job: str) -> str:
        """Return a job's state, such as RUNNING; '' if it is not known any more."""
        fields = self.run("scontrol", "show", "job", job, check=False).split()
        return next((field.partition("=")[2] for field in fields if field.startswith("JobState=")), "")

    def restarts(self, job: str) -> int:
        """Return how often a job was queued again."""
        fields = self.run("scontrol", "show", "job", job).split()
        return next(int(field.partition("=")[2]) for field in fields if field.startswith("Restarts="))

    def logs(self) -> str:
        return "".join(f"\n{file}:\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("*.log")))


@contextmanager
def slurm(nodes: Sequence[Machine], folder: Path) -> Iterator[Slurm]:
    """Start SLURM on two machines; their end is its end."""
    for name in ("state", "spool-n0", "spool-n1"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "cgroup.conf").touch()
    running = Slurm(nodes, folder)
    running.run("slurmctld", "-c")
    for node in nodes:
        node.run("slurmd", "-N", node.name, SLURM_CONF=str(folder / "slurm.conf"))
    wait_for(lambda: running.run("sinfo", "-h", "-o", "%D", "-t", "idle", check=False).strip() == "2", 60, running.logs)
    yield running
