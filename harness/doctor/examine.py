"""Every check on one cell, on every rank: first what a rank sees by itself, then what needs the others."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.doctor import (
    collectives,
    copies,
    data,
    devices,
    divergence,
    gradients,
    loader,
    loss_parameters,
    memory,
    parameters,
    randomness,
    shapes,
    state,
    steps,
    threads,
    wrapper,
)
from harness.doctor.gate import SKIP_RULES, skip_rules
from harness.doctor.subject import Subject, as_examined
from harness.measure.scenarios import TrialContext
from harness.plan.cell import Cell
from harness.plan.checks import batches
from harness.plan.checks.finding import Finding
from harness.plan.rows import TrialFacts
from harness.plan.trial import TrialResult

RUNS = "it runs"
GRAPH = "parameters of the loss"
BY_ITSELF: dict[str, Callable[[Subject], Any]] = {
    devices.NAME: devices.observe,
    randomness.NAME: randomness.observe,
    GRAPH: loss_parameters.observe,
    state.NAME: state.observe,
    shapes.NAME: shapes.observe,
    data.NAME: data.observe,
    memory.NAME: memory.observe,
    batches.NAME: batches.observe,
    loader.NAME: loader.observe,
    copies.NAME: copies.observe,
}
"""What each rank looks at without the others."""
STOPS = (memory.NAME, copies.NAME, shapes.NAME, parameters.NAME)
"""Where one of these finds an error, no step is taken."""


@dataclass
class Examination:
    """What was found, and what was measured on the way, in words."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> bool:
        """Whether there is an error among them."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def facts(self) -> TrialFacts:
        """Plain values for the trial's line."""
        return {"findings": [finding.row() for finding in self.findings], "figures": self.figures}


def run_examination(context: TrialContext) -> TrialResult:
    """The doctor's findings; where one is an error, no trial of the same kind is measured after it."""
    with context.part("build"):
        workload, datasets = context.workload()
    asked = context.trial.cell
    subject = Subject(
        as_examined(asked),
        workload,
        datasets,
        context.trial.seed,
        context.ranks,
        context.advance,
        micro_batches=asked.micro_batches,
    )
    with context.part("examination"):
        found = examine(subject, epochs=context.experiment.convergence is not None)
    facts = context.ranks.broadcast(found.facts)
    context.cache.setdefault(SKIP_RULES, []).extend(skip_rules(asked, facts))
    return TrialResult(context.trial.id, "ok", unit=workload.unit, steps_s=context.parts["examination"], facts=facts)


class ExaminationFailed(Exception):
    """The steps of an examination failed; ``facts`` has what was found before."""

    def __init__(self, error: Exception, found: Examination) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.facts = found.facts


def examine(subject: Subject, *, epochs: bool) -> Examination:
    """Runs every check. ``epochs``: the cell is trained for whole epochs too. Raises ExaminationFailed."""
    found = Examination()
    seen, failed = _by_itself(subject)
    _judge_alone(found, seen, subject.cell, epochs)
    if failed and not found.wrong:
        found.findings += _could_not(failed, real_steps_fail=_fails_in_steps(subject))
    if any(f.severity == "error" and (f.check in STOPS or failed) for f in found.findings):
        return found
    try:
        _together(subject, found, seen)
    except Exception as error:
        raise ExaminationFailed(error, found) from error
    return found


def _by_itself(subject: Subject) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Each check's observations by rank, and what failed: check -> what it raised, on which rank."""
    mine: dict[str, Any] = {}
    raised: dict[str, str] = {}
    for name, observe in BY_ITSELF.items():
        try:
            mine[name] = observe(subject.fresh())
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        subject.advance()
    ranks = subject.ranks.gather((mine, raised))
    failed: dict[str, str] = {}
    for rank, (_, errors) in enumerate(ranks):
        for name, text in errors.items():
            failed.setdefault(name, f"{text} (rank {rank})")
    seen = {name: [values[name] for values, _ in ranks] for name in BY_ITSELF if name not in failed}
    return seen, failed


def _judge_alone(found: Examination, seen: dict[str, list[Any]], cell: Cell, epochs: bool) -> None:
    judges: dict[str, Callable[[list[Any]], list[Finding]]] = {
        devices.NAME: lambda s: devices.judge(s, cell),
        randomness.NAME: lambda s: randomness.judge(s, cell),
        GRAPH: lambda s: loss_parameters.judge(s, cell),
        state.NAME: lambda s: state.judge(s, cell),
        shapes.NAME: lambda s: shapes.judge(s, cell),
        data.NAME: lambda s: data.judge(s, cell),
        memory.NAME: lambda s: memory.judge(s, cell),
        batches.NAME: lambda s: batches.judge(s, cell, epochs=epochs),
        copies.NAME: lambda s: copies.judge(s, cell),
    }
    for name, judge in judges.items():
        if name in seen:
            found.findings += judge(seen[name])


def _fails_in_steps(subject: Subject) -> bool:
    """Whether some rank cannot take real steps, of its own part of the batch, without the others."""
    fails = False
    try:
        steps.observe_lonely(subject.fresh())
    except Exception:
        fails = True
    return any(subject.ranks.gather(fails))


def _could_not(failed: dict[str, str], *, real_steps_fail: bool) -> list[Finding]:
    """One finding for what raised: the workload does not run, or only not on the few samples of some checks."""
    check, text = next(iter(failed.items()))
    if real_steps_fail:
        means, advice = "the workload fails on its own data", "run it as `single` on one device first"
        return [Finding(RUNS, "error", f"{text}, while looking at: {check}", means, advice)]
    means = "it takes steps with the cell's own batch, but not with a few samples: these checks say nothing here"
    advice = "if a batch of a few samples is no use to this workload, leave it as it is"
    return [Finding(RUNS, "warning", f"{text}, while looking at: {', '.join(failed)}", means, advice)]


def _together(subject: Subject, found: Examination, seen: dict[str, list[Any]]) -> None:
    """Real steps in the wrapper, gradients against one device's, collectives."""
    cell, ranks = subject.cell, subject.ranks
    lonely = _steps_alone(subject)
    if any(finding.severity == "error" for finding in lonely):
        found.findings += lonely  # wrapped it would fail, and say less
        return
    mine = steps.observe(subject.fresh())
    steps.observe_alone(subject.fresh(), mine)
    all_steps = ranks.gather(mine)
    found.findings += wrapper.judge(all_steps, cell) or parameters.judge(all_steps, cell)
    found.findings += randomness.judge_streams([vars(rank) for rank in all_steps], cell)
    found.findings += threads.judge(ranks.gather(threads.observe(subject)), cell)
    if not ranks.broadcast(found.wrong):  # else what follows would only say it once more
        found.findings += divergence.judge(all_steps, cell)
        found.findings += gradients.judge(ranks.gather(gradients.observe(subject.fresh())), cell)
    step_s = [rank.step_s for rank in all_steps]
    if rates := seen.get(loader.NAME):
        if all(finding.severity == "note" for finding in found.findings):
            found.findings += loader.judge(rates, step_s, cell)
        found.figures |= loader.figures(rates, step_s, cell)
    exchanged = ranks.gather(collectives.observe(subject, all_steps[0].parameter_bytes))
    found.findings += collectives.judge(exchanged, cell, ranks.gather(socket.gethostname()))
    found.figures |= collectives.figures(exchanged)


def _steps_alone(subject: Subject) -> Sequence[Finding]:
    """What stands still even on one device: ddp would only say that its reduction did not finish."""
    if subject.ranks.world_size == 1:
        return []
    mine = steps.observe_lonely(subject.fresh())
    return parameters.still(subject.ranks.gather(mine), subject.cell)
