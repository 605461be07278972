"""What a worker group tells the driver, one message at a time. Plain values and arrays of them: no tensors."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from harness.config.experiment import Experiment
from harness.plan.environment import GroupRank, NodeEnvironment
from harness.plan.trial import TrialResult, WorkerGroup


@dataclass(frozen=True)
class GroupStarted:
    """The processes are up: one environment a node, and who runs where (one row a rank).

    ``parts``: seconds of coming up, by what they went to, as far as the launcher knows.
    """

    environments: tuple[NodeEnvironment, ...]
    ranks: tuple[GroupRank, ...]
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialStarted:
    trial_id: str


Message = GroupStarted | TrialStarted | TrialResult


@dataclass(frozen=True)
class Job:
    """What a worker group needs to know."""

    experiment: Experiment
    group: WorkerGroup
    threads_per_device: int
    import_path: str | None = None


class Launcher(Protocol):
    """Runs worker groups."""

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        """Runs a group in fresh processes and gives its messages as they come.

        After the first failed trial the group ends, and its other trials stay without a result. No trial starts
        after ``deadline`` (unix time). Closing the generator ends the processes.
        """
        ...


@dataclass(frozen=True)
class ByLauncher:
    """Hands each group to the launcher that its cells name."""

    launchers: Mapping[str, Launcher]

    def launch(self, group: WorkerGroup, *, deadline: float | None) -> Generator[Message, None, None]:
        return self.launchers[group.launcher].launch(group, deadline=deadline)


def process_variables(group: WorkerGroup, threads_per_device: int) -> dict[str, str]:
    """What every launcher sets in the environment of a group's processes before they import anything."""
    threads = str(threads_per_device)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if group.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""  # a CPU trial on a GPU machine must not see its GPUs
    if group.placement.device_ids:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that numbers are those of nvidia-smi
    return variables
