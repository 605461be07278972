"""The protocol between a worker group and the driver: a job in, messages out, as plain values without tensors."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from harness.config.experiment import Experiment
from harness.plan.run_environment import GroupRank, NodeEnvironment
from harness.plan.trial import TrialResult, WorkerGroup
from harness.system.user_code import CodeVersion


@dataclass(frozen=True)
class GroupStarted:
    """The processes are ready: one environment a node, one row a rank.

    ``parts``: seconds of the start-up by part, as far as the launcher knows them.
    """

    environments: tuple[NodeEnvironment, ...]
    ranks: tuple[GroupRank, ...]
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialStarted:
    trial_id: str


@dataclass(frozen=True)
class Measured:
    """A trial's result without its explanation, which follows: it counts if the explanation ends the group."""

    result: TrialResult


Message = GroupStarted | TrialStarted | TrialResult
Sent = Message | Measured  # by ranks; launchers keep a Measured, and yield messages


@dataclass(frozen=True)
class Job:
    """The input of a worker group.

    ``import_path``: the folder of the user's code, first on its import path; with variants ``versions``, by name.
    """

    experiment: Experiment
    group: WorkerGroup
    threads_per_device: int
    import_path: str | None = None
    versions: Mapping[str, CodeVersion] = field(default_factory=dict)

    def version_of(self, rank: int) -> CodeVersion | None:
        """Return the version of the user's code that a rank imports; None without variants."""
        variant = self.group.variant_of(rank)
        return self.versions.get(variant) if variant else None  # inline the process has imported it


class Launcher(Protocol):
    """Runs worker groups."""

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        """Run a group in fresh processes; yield its messages as they arrive.

        After the first failed trial the group ends, and its other trials stay without a result. No trial starts
        after ``deadline`` (unix time). Closing the generator ends the processes.
        """
        ...

    def busy_cores(self) -> dict[str, float]:
        """Return the cores that all processes of each node kept busy over a second, by the name of the host.

        Empty if the launcher does not know.
        """
        ...


@dataclass(frozen=True)
class ByLauncher:
    """Hands each group to the launcher that its cells name."""

    launchers: Mapping[str, Launcher]

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        return self.launchers[group.launcher].launch(group, deadline=deadline)

    def busy_cores(self) -> dict[str, float]:
        return self.launchers["ray"].busy_cores()  # Ray has every node


def process_variables(group: WorkerGroup, threads_per_device: int) -> dict[str, str]:
    """Return the environment variables that a group's processes need before they import anything."""
    threads = str(threads_per_device)
    variables = {**dict(group.variables), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if group.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""  # a CPU trial on a GPU machine must not see its GPUs
    else:
        variables["TEARDOWN_CUPTI"] = "1"  # else the profiler stays attached after a profile, and slows every kernel
    if group.placement.device_ids:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that numbers are those of nvidia-smi
    return variables
