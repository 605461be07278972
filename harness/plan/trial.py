"""The parts of a plan: trials, worker groups, skipped trials, and the result of a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from harness.errors import HarnessError
from harness.plan.cell import Cell, Placement, int_option, place
from harness.plan.rows import ExchangeRow, Kind, LinkRow, Outcome, Purpose, RankRow, SkipCode, TrialFacts, WindowRow
from harness.system.sanitize import variable_text

Scenario = Literal["throughput", "convergence", "profile", "equivalence", "doctor", "links"]


class PurposeTraits(NamedTuple):
    """What the trials of a purpose are.

    ``mark``: in their ids. ``order``: their place in the order of a worker group; of a throughput trial 0, of a
    training 1. ``label``, ``why``: what they measure, and what for. ``done``: the end of one, in a line of a run.
    ``times``: steps in windows, as a throughput trial. ``repeats``: a base that its block measures beside it.
    """

    mark: str
    order: int
    label: str
    why: str
    done: str = ""
    times: bool = False
    repeats: bool = False


PURPOSES: Mapping[Purpose, PurposeTraits] = {
    "twin": PurposeTraits("t", 0, "A/A test of the base", "for the A/A test of the base", times=True, repeats=True),
    "threads": PurposeTraits(
        "c", 0, "bases with all CPU threads", "for one process with all CPU threads", times=True, repeats=True
    ),
    "explain": PurposeTraits("", 0, "cells that explain others", "for the losses of efficiency", times=True),
    "profile": PurposeTraits("p", 3, "profiles", "for the collectives and busy GPUs (profiles)", "profiled"),
    "equivalence": PurposeTraits("e", -1, "equivalence checks", "for the equivalence of strategies", "checked"),
    "doctor": PurposeTraits("d", -2, "preflight", "for the doctor, first in their worker groups", "examined"),
    "links": PurposeTraits("l", 2, "links and collectives", "for the bandwidth of links and collectives", "measured"),
}
"""The purposes of diagnostic trials, in the order of tables."""
TIMED = frozenset(name for name, traits in PURPOSES.items() if traits.times)
REPEATS = frozenset(name for name, traits in PURPOSES.items() if traits.repeats)


@dataclass(frozen=True)
class Trial:
    """One cell in one block, or, for convergence, one cell with one seed."""

    cell: Cell
    kind: Kind
    block: int
    seed: int
    added: bool = False
    purpose: Purpose = ""
    check_id: str | None = None
    """The id of the equivalence check's cell, which shows whether this cell trains as one device does."""
    trace_bytes: int = 0
    """The largest trace of each rank that a profile keeps; 0: none, but the time of its collectives."""
    threads: int = 0
    """The CPU threads of its process; 0: those of a device."""
    loader_workers: int | None = None
    """Loader workers of a device that an earlier examination found to be needed; None: not known, or the file's."""

    @property
    def timed(self) -> bool:
        """Whether its steps are timed in windows."""
        return self.kind == "throughput" or self.purpose in TIMED

    @property
    def repeats(self) -> bool:
        """Whether it measures a base once more."""
        return self.purpose in REPEATS

    @property
    def trains(self) -> bool:
        """Whether it trains its cell: an examination takes other steps, a measurement of links none."""
        return self.purpose not in ("doctor", "links")

    @property
    def scenario(self) -> Scenario:
        """The scenario that its ranks run."""
        own = "throughput" if self.kind == "throughput" else "convergence"
        return cast("Scenario", "throughput" if self.purpose in TIMED else self.purpose or own)

    @property
    def id(self) -> str:
        repeat = f"s{self.seed}" if self.kind == "convergence" else f"b{self.block}"
        mark = PURPOSES[self.purpose].mark if self.purpose else ""
        return f"{self.cell.id}-{repeat}{mark}"

    @property
    def of_any_version(self) -> Trial:
        """The trial without the version of the user's code that it runs."""
        return replace(self, cell=replace(self.cell, variant=None, code=None), check_id=None)


@dataclass(frozen=True)
class WorkerGroup:
    """Fresh processes that run trials of one block; each imports one variant of the code.

    A trial of fewer ranks than ``placement`` has workers runs on some of them, while the others wait. Several
    ``variants`` have that many workers each.
    """

    id: str
    block: int
    placement: Placement
    device: str
    oversubscribe: bool
    trials: tuple[Trial, ...]
    launcher: str = "ray"
    asked_backend: str = "auto"
    """The option ``backend`` of the trials' strategy; plan/feasibility.py skips a backend that cannot work."""
    variants: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of its processes, which the file names."""

    @property
    def workers(self) -> int:
        """The number of its processes."""
        return self.placement.workers * max(1, len(self.variants))

    @property
    def backend(self) -> str:
        """gloo for CPU slots and for ranks that share a GPU, which NCCL rejects; else NCCL, with gloo for CPU."""
        nccl = self.device == "cuda" and not self.oversubscribe and self.asked_backend != "gloo"
        return "cpu:gloo,cuda:nccl" if nccl else "gloo"

    @property
    def is_shared(self) -> bool:
        """Whether a trial runs on some of the ranks only; each trial then has a process group of its own."""
        return any(place(trial.cell).workers != self.workers for trial in self.trials)

    def ranks_of(self, trial: Trial) -> range:
        """Return the ranks that run a trial: by block other ones, and for the twin of a base others than the base's."""
        size = place(trial.cell).workers
        first = (self.block + (trial.purpose == "twin")) % (self.placement.workers // size) * size
        variant = self.variants.index(str(trial.cell.variant)) if self.variants else 0
        first += variant * self.placement.workers
        return range(first, first + size)

    def variant_of(self, rank: int) -> str | None:
        """Return the variant that a rank imports; None without variants."""
        return self.variants[rank // self.placement.workers] if self.variants else None

    def turns(self) -> list[tuple[Trial, ...]]:
        """Return the trials that run at once, in order: one, or a timed one of each variant, whose windows alternate.

        Other load then slows the variants alike. Loader workers would compute beside another variant's windows.
        """

        def key(trial: Trial) -> tuple[Trial, Placement]:
            alone = len(self.variants) < 2 or not trial.timed or int_option(trial.cell.loader, "workers", 0)
            return trial if alone else trial.of_any_version, place(trial.cell)

        return [tuple(trials) for _, trials in groupby(self.trials, key=key)]

    def keeping(self, wanted: Callable[[Trial], bool]) -> WorkerGroup:
        """Return the group with the wanted trials only, on as many workers as these need."""
        kept = tuple(filter(wanted, self.trials))
        placements = {place(trial.cell) for trial in kept}
        largest = [each for each in placements if all(each.holds(other) for other in placements)]
        twins = any(trial.purpose == "twin" for trial in kept) and any(trial.purpose != "twin" for trial in kept)
        placement = largest[0] if largest and not twins else self.placement
        left = {trial.cell.variant for trial in kept}
        return replace(self, trials=kept, placement=placement, variants=tuple(v for v in self.variants if v in left))

    def __str__(self) -> str:
        each = "for each of" if len(self.variants) > 1 else "of"
        variant = f" {each} {', '.join(self.variants)}" if self.variants else ""
        variables = "".join(f" {variable_text(name, value)}" for name, value in self.variables)
        by = f" by {self.launcher}" if self.launcher != "ray" else ""
        return f"{self.placement}{by}{variant}{' with' * bool(variables)}{variables}"


class SkipReason(NamedTuple):
    """The reason of a skipped trial, or of a cell without trials, as a code and as text with numbers."""

    code: SkipCode
    text: str


class SkipTrial(HarnessError):
    """Raised on every rank alike if a trial cannot run; its message is the row's reason."""

    def __init__(self, reason: SkipReason) -> None:
        self.reason = reason
        super().__init__(reason.text)


Columns = Mapping[str, Sequence[object] | npt.NDArray[np.generic]]


@dataclass(frozen=True)
class TrialResult:
    """The outcome and the measurements of a trial.

    ``steps``: a row each, of its slowest rank, or of all ranks with ``keep_steps: all``; ``epochs``: a row each.

    Times are in seconds, on rank 0: ``trial_s`` is the whole time inside the worker group, ``steps_s`` the part in
    steps of any kind, ``parts`` the whole by part. ``facts``: further columns of the trial's row. ``checks``: the
    parameter updates that an equivalence check compares. ``links``: the transfers and collectives of the placement.
    ``exchanges``: the collectives of a step. ``traces``: of each rank, of a profile that keeps them.
    """

    trial_id: str
    outcome: Outcome
    reason: str = ""
    error_type: str | None = None
    error_rank: int | None = None
    detail: str = ""
    started_at: float | None = None
    trial_s: float | None = None
    steps_s: float | None = None
    unit: str | None = None
    parameters: int | None = None
    skip_code: SkipCode | None = None
    facts: TrialFacts = field(default_factory=TrialFacts)
    parts: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[RankRow, ...] = ()
    windows: tuple[WindowRow, ...] = ()
    steps: Columns = field(default_factory=dict)
    epochs: Columns = field(default_factory=dict)
    training_steps: Columns = field(default_factory=dict)
    checks: Columns = field(default_factory=dict)
    links: tuple[LinkRow, ...] = ()
    exchanges: tuple[ExchangeRow, ...] = ()
    traces: tuple[bytes, ...] = ()

    @property
    def ends_group(self) -> bool:
        """Whether the group's processes must not run another trial."""
        return self.outcome not in ("ok", "diverged", "skipped")


def skipped(trial: Trial, reason: SkipReason) -> TrialResult:
    """Return the result of a trial that is not started."""
    return TrialResult(trial.id, "skipped", reason.text, skip_code=reason.code)
