"""The reasons for which a planned trial is not started, given the trials that were recorded before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from harness.analysis.sample_size import needed_blocks
from harness.config.doctor_checks import allowed_findings, how_to_allow
from harness.config.sections import LOOKS
from harness.doctor.gate import DIVERGENCE, SkipRule, diverges, failed_rules, skip_reason, skip_rules
from harness.plan.cell import Cell
from harness.plan.feasibility import end_of
from harness.plan.planner import Plan
from harness.plan.trial import SkipReason, Trial, TrialResult, WorkerGroup, skipped
from harness.run.resume import Lines

DIVERGES = "preflight: divergence, also when tried once: "
"""How the reason begins that a cell is not tried again."""
TRAININGS = ("throughput", "convergence")
RAISES = 2
"""The blocks or seeds of this invocation after which a cell that raised in each, and never trained, is skipped."""


class SkipPolicy:
    """Decides which trials are skipped: no time left, refused by the doctor, precise enough, too little memory.

    ``lines``: those of earlier invocations. ``read_lines``: returns every recorded line; called when the number of
    blocks is decided. ``spent_device_s``: the device-seconds of the run so far. ``began``: when the invocation did.
    """

    def __init__(
        self,
        plan: Plan,
        read_lines: Callable[[], Lines],
        spent_device_s: float = 0.0,
        lines: Lines = (),
        began: float | None = None,
    ) -> None:
        self._plan, self._read_lines = plan, read_lines
        self._out_of_memory: list[Cell] = []
        self._refusals: list[SkipRule] = []
        self._failed: set[tuple[Cell, int]] = set()
        self._raised: dict[Cell, dict[tuple[int, int], str]] = {}  # by block and seed
        self._trained: set[Cell] = set()
        self._diverging: dict[tuple[str, ...], str] = {}
        self._diverged: set[Cell] = set()
        self._loader_workers: dict[tuple[str, ...], int] = {}
        known = {trial.id: trial for trial in plan.trials}
        self._cells = len({trial.cell.id for trial in plan.trials if trial.scenario in TRAININGS})
        for line in lines:
            if (trial := known.get(line["trial_id"])) and not trial.threads:
                result = TrialResult(trial.id, line["outcome"], str(line["reason"]), facts=line["facts"])
                self._learn_of_cell(trial, result)
                if trial.scenario in TRAININGS and result.outcome == "ok":
                    self._trained.add(trial.cell)
        self._needed: dict[int, dict[str, int]] = {}  # by the look
        spent_s = time.time() - began if began else 0.0
        self.end = end_of(plan.experiment, plan.machine.devices, spent_device_s, spent_s)
        """The limit that ends the run first."""
        self.deadline = time.time() + self.end.seconds if self.end else None
        """The time at which it does, in seconds since the epoch."""

    def learn(self, trial: Trial, result: TrialResult) -> None:
        """Take a trial's result into account for the trials after it."""
        if trial.threads:  # other ones than its cell's trials have
            return
        self._refusals += skip_rules(trial.cell, result.facts, self._plan.experiment.allow)
        if trial.purpose == "doctor":
            self._refusals += failed_rules(trial.cell, result)
        elif result.outcome == "error" and trial.trains:
            self._learn_error(trial.cell)
        self._learn_of_cell(trial, result)
        if trial.timed and not trial.repeats:
            change = self._failed.discard if result.outcome == "ok" else self._failed.add
            change((trial.cell, trial.block))
        if trial.scenario in TRAININGS:
            if result.outcome == "ok":
                self._trained.add(trial.cell)
            elif result.outcome == "error" and result.error_type:  # else its group did not start
                self._raised.setdefault(trial.cell, {})[trial.block, trial.seed] = result.reason

    def _learn_error(self, cell: Cell) -> None:
        """Refuse the size of a cell that raised as one of its kind did; the whole kind, if no other had so few samples.

        What raises with a large batch may train with a smaller one.
        """
        of_kind = (rule for rule in self._refusals if rule.workload_key == cell.workload_key)
        known = [rule for rule in of_kind if rule.like and not rule.scenario]
        alike = {rule.like: rule for rule in known if rule.like and rule.precision == cell.precision}
        if alike:
            smallest = min(alike, key=_samples)
            like = None if _samples(cell) < _samples(smallest) else cell
            self._refusals.append(replace(alike[smallest], like=like))

    def _learn_of_cell(self, trial: Trial, result: TrialResult) -> None:
        """Learn what holds after a resume too: whether the cell diverges, or runs out of memory."""
        # an examination, or a profile, needs memory that the cell itself does not: it says nothing of the cell
        of_cell = trial.trains and trial.purpose != "profile"
        if result.outcome == "oom" and of_cell and self._plan.experiment.limits.prune_oom:
            self._out_of_memory.append(trial.cell)
        if "loader_workers" in result.facts:
            self._loader_workers.setdefault(trial.cell.loader_key, result.facts["loader_workers"])
        key, findings = trial.cell.workload_key, result.facts.get("findings", ())
        for finding in findings if DIVERGENCE not in allowed_findings(self._plan.experiment.allow) else ():
            if finding["check"] == DIVERGENCE:
                self._diverging[key] = finding["seen"]
        losses = [float(str(loss)) for loss in result.steps.get("loss", ())] if key in self._diverging else []
        half = len(losses) // 2  # the first loss may be near zero, as of a queue that fills
        grew = bool(half) and diverges([max(losses[:half]), max(losses[half:])])
        grew |= result.outcome == "diverged" or result.reason.startswith(DIVERGES)
        if grew and trial.scenario in TRAININGS:  # a check takes other steps
            self._diverged.add(trial.cell)

    def informed(self, group: WorkerGroup) -> WorkerGroup:
        """Return the group whose trials know the loader workers that an examination found to be needed."""
        known = self._loader_workers
        return replace(
            group, trials=tuple(replace(t, loader_workers=known.get(t.cell.loader_key)) for t in group.trials)
        )

    def skipped(self, trial: Trial) -> TrialResult | None:
        """Return the result of a trial that is not started, with its reason; None if it is started."""
        if self.end and self.deadline and time.time() >= self.deadline:
            return skipped(trial, SkipReason("time_up", self.end.reason))
        reason = self._refused(trial) or self._raises(trial) or self._precise_enough(trial)
        smaller = next((cell for cell in self._out_of_memory if needs_no_less(trial.cell, cell)), None)
        if not reason and smaller and trial.purpose != "links":
            batch = f"a batch of {smaller.per_device_batch_size} per device of the same cell"
            reason = SkipReason("out_of_memory", f"{batch} ran out of memory (limits.prune_oom)")
        if not reason and trial.purpose == "profile" and (trial.cell, trial.block) in self._failed:
            # it would fail again, and end its worker group
            reason = SkipReason("not_measured", "the trial that it profiles has no result in this block")
        return skipped(trial, reason) if reason else None

    def _raises(self, trial: Trial) -> SkipReason | None:
        """Skip what raised in RAISES blocks and never trained, or each cell in one: a trial takes a group's start."""
        raised = [*self._raised.get(trial.cell, {}).values()]
        if not trial.trains or not raised or trial.cell in self._trained:
            return None
        if not self._trained and len(self._raised) == self._cells:
            return SkipReason("not_measured", f"every cell raised, this one: {raised[-1]}")
        if len(raised) < RAISES:
            return None
        return SkipReason("not_measured", f"raised in {len(raised)} blocks, last: {raised[-1]}")

    def _refused(self, trial: Trial) -> SkipReason | None:
        if not trial.trains:
            return None
        if trial.cell in self._diverged and (seen := self._diverging.get(trial.cell.workload_key)):
            return SkipReason("doctor", f"{DIVERGES}{seen}{how_to_allow(DIVERGENCE)}")
        return skip_reason(self._refusals, trial.cell, trial.scenario)

    def _precise_enough(self, trial: Trial) -> SkipReason | None:
        """Decide after the pilot's blocks, or at each look: after every block intervals would become too narrow."""
        timed = self._plan.experiment.throughput
        rule = timed.rule if timed else None
        if timed is None or rule is None or trial.scenario not in ("throughput", "profile"):
            return None
        looks = LOOKS[:-1] if rule == "decide" else (timed.least_blocks,)
        needed = timed.most_blocks
        for look in (look for look in looks if look <= trial.block):
            if look not in self._needed:
                placements = self._plan.experiment.placements
                self._needed[look] = needed_blocks(self._plan.trials, self._read_lines(), rule, look, placements)
            needed = min(needed, self._needed[look].get(trial.cell.id, timed.most_blocks))
        if trial.block < needed:
            return None
        if rule == "decide":
            return SkipReason(
                "precise", f"decided: after {needed} blocks no comparison of this cell was open, batches aside"
            )
        return SkipReason("precise", f"precise enough: {needed} blocks suffice for {100 * rule.halfwidth:g} %")


def needs_no_less(cell: Cell, other: Cell) -> bool:
    """Return whether a cell needs at least the other's memory: the same cell at the same batch or a larger one."""
    batch = other.per_device_batch_size
    same = replace(cell, per_device_batch_size=batch, global_batch_size=other.global_batch_size, scaling=other.scaling)
    return (cell.per_device_batch_size or 0) >= (batch or 0) and same == other


def _samples(cell: Cell) -> float:
    """Return the samples of a step on each device, of unequal shares their mean."""
    return cell.global_batch_size / cell.devices
