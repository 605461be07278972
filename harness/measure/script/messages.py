"""What the process that trains and the one that follows it send each other: steps, facts, the end."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

from harness.measure.script.profiling import ProfiledSteps
from harness.measure.script.reports import Reports
from harness.plan.rows import RankFacts


@dataclass(frozen=True)
class Schedule:
    """The timed windows: the step after which the first begins, the steps of each, and their number.

    Without windows, of a training: the step at whose end it ends.
    """

    start: int
    steps: int = 0
    windows: int = 0

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(self.start + number * self.steps for number in range(self.windows + 1))


def _numbers() -> MutableSequence[float]:
    return array("d")  # 8 bytes each: a training may have millions


@dataclass
class Steps:
    """The counted steps: when each ended by the host's clock, its wait for data, its samples, and its pauses.

    ``edges``: the step and the time of each edge of a window, after the device has finished. ``device_s``: seconds of
    each step from the first edge on by the GPU's stream; empty on a CPU.
    """

    ended: MutableSequence[float] = field(default_factory=_numbers)
    wait_s: MutableSequence[float] = field(default_factory=_numbers)
    samples: MutableSequence[float] = field(default_factory=_numbers)
    pause_s: MutableSequence[float] = field(default_factory=_numbers)
    edges: list[tuple[int, float]] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Facts:
    """What is known of the script's process at its end.

    ``optimizers``: the class of each, by its first step. ``evaluations``: times since the first edge, outside of
    pauses, that batches came between two steps without gradients, or in an iteration that nothing was trained in.
    ``connected``: the size of its process group, 0 without one. ``parameters``: shape and sum of those of the counted
    optimizer; empty if they may be shards. ``gpus``: those of its parameters, by UUID. ``threads``: torch's computing
    threads. ``workers``: processes of multiprocessing, as of a DataLoader. ``memory``: its peak. ``passes``,
    ``batches``: backward passes, and batches that are trained on, a step, rounded. ``counted``: whether the script
    counted its samples or tokens itself.
    """

    optimizers: Sequence[str]
    evaluations: int
    connected: int
    parameters: Sequence[tuple[tuple[int, ...], str]]
    gpus: Sequence[str]
    threads: int
    workers: int
    memory: RankFacts
    passes: int = 1
    batches: int = 1
    counted: bool = False


@dataclass(frozen=True)
class Hold:
    """Take no further step until the step is named at which the training ends; answered by Held."""


@dataclass(frozen=True)
class Held:
    """The training waits at the end of this step, or of the next one."""

    count: int


@dataclass(frozen=True)
class Progress:
    """The ends of further steps, by the host's clock, without their pauses."""

    seconds: Sequence[float]
    count: int


@dataclass(frozen=True)
class WindowsBegun:
    """The first window begins."""


@dataclass(frozen=True)
class Finished:
    """The last window has ended, or the script itself; ``late``: the step at which the first edge was noticed.

    ``reports``: those of a training.
    """

    steps: Steps
    facts: Facts
    by_itself: bool
    late: int | None = None
    reports: Reports | None = None


@dataclass(frozen=True)
class Profiled:
    """The steps after the windows were profiled; None if they were not, as the script ended before."""

    steps: ProfiledSteps | None


@dataclass(frozen=True)
class Raised:
    """The script raised an exception, or ended with an exit code other than 0."""

    kind: str
    message: str
    steps: int


class EndOfTrial(SystemExit):
    """Ends the script after its last counted step."""
