"""Run every check on one cell: first each rank alone, then real steps and the checks that need all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import getsourcelines, unwrap
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.doctor_checks import DOCTOR_CHECKS, DoctorCheck
from harness.doctor import data, memory_needs, parameters, real_steps
from harness.doctor.facts import Steps
from harness.doctor.gate import EVALUATION, EXECUTION, SKIP_RULES, skip_rules
from harness.doctor.real_steps import REHEARSED
from harness.doctor.subject import (
    SMALL,
    Case,
    Check,
    FewBuilds,
    ProcessState,
    Subject,
    any_error,
    describe_error,
    doctor_cell,
)
from harness.measure.scenarios import TrialContext
from harness.plan import memory_forecast as memory
from harness.plan.checks import Finding
from harness.plan.known_errors import advice_on, remedy
from harness.plan.rows import MemoryFacts, TrialFacts
from harness.plan.trial import SkipTrial, TrialResult
from harness.system.user_code import is_the_users
from harness.train.ranks import LOADER_WORKERS
from harness.train.workloads import Workload

AnyCheck = Check[Any]
Seen = Mapping[str, Sequence[Any]]
"""The observations of all ranks by the name of the check."""


def load(row: DoctorCheck) -> AnyCheck:
    """Return the check of a row, with its name."""
    module, _, constant = row.place.partition(".")
    found: AnyCheck = getattr(import_module(f"harness.doctor.{module}"), constant)
    return replace(found, name=row.name)


CHECKS: tuple[AnyCheck, ...] = tuple(map(load, DOCTOR_CHECKS))
"""In the order of the table, in which they are observed and judged."""
PLACED: Mapping[str, AnyCheck] = {
    row.findings: check for row, check in zip(DOCTOR_CHECKS, CHECKS, strict=True) if check.about
}
"""The checks that know what their findings are about, by the name of these."""


class Method(NamedTuple):
    """A method of the user's own: its name, the name of its file, its lines from the number of the first."""

    name: str
    file: str
    first: int
    lines: tuple[str, ...] = ()

    def at(self, number: int) -> str:
        return f"{self.name} ({self.file}:{number})"

    def matches(self, pattern: str) -> Iterator[str]:
        """Yield the place of each line of code that matches; what follows a # counts as a comment."""
        for number, line in enumerate(self.lines, self.first):
            if re.search(pattern, line.partition("#")[0]):
                yield self.at(number)


def place_of(check: str, methods: Mapping[str, Method], parts: Sequence[str] = ()) -> str:
    """Return the places that a check's findings are about: 'Net.forward (mine.py:8), Mine.loss (mine.py:20)'.

    If one line alone of these methods looks like the cause, its place; else the first line of each method. ``parts``:
    of the model that the finding is about: the nearest methods around them are looked at first. Those of other inner
    modules are looked at last, for a single line.
    """
    placed = PLACED.get(check)
    about = [methods[name] for name in (placed.about if placed else ()) if name in methods]
    inner = {name.removeprefix(INNER): method for name, method in methods.items() if name.startswith(INNER)}
    if "forward" not in (placed.about if placed else ()):
        inner = {}
    around = [inner[name] for name in (max(_around(part, inner), default="", key=len) for part in parts) if name]
    for some in (around, about, inner.values()):
        lines = [each for method in dict.fromkeys(some) for each in method.matches(placed.clue)] if placed else []
        if placed and placed.clue and len(lines) == 1:
            return lines[0]
    return ", ".join(method.at(method.first) for method in dict.fromkeys(around or about))


INNER = "forward of "
"""Begins the names of inner modules' methods."""


def _around(part: str, modules: Iterable[str]) -> Iterator[str]:
    """Yield the names of the modules that are a part, or that hold it."""
    return (name for name in modules if part == name or part.startswith((f"{name}.", f"{name}[")))


def methods_of(workload: Workload) -> Mapping[str, Method]:
    """Return the methods of the workload and of its model, without methods of the harness and of libraries.

    If the model's class is a library's, as nn.Sequential is, ``build_model`` stands for it. Methods of inner modules
    have the name of the module, after INNER.
    """
    own, kinds = (workload.inner, workload.kept.kinds) if isinstance(workload, FewBuilds) else (workload, {})
    found = {name: _method(type(own), name) for name in ("build_model", "datasets", "loss", "metrics", "evaluate")}
    of_kind = {kind: _method(kind, "forward") for kind in dict.fromkeys(kinds.values())}
    found["forward"] = (of_kind[kinds[""]] if kinds else None) or found["build_model"]
    found |= {f"{INNER}{name}": of_kind[kind] for name, kind in kinds.items() if name}
    return {name: method for name, method in found.items() if method}


def _method(owner: type, name: str) -> Method | None:
    function = unwrap(getattr(owner, name, len))
    code = getattr(function, "__code__", None)
    if code is None or not is_the_users(code.co_filename):
        return None
    try:
        lines, first = getsourcelines(code)
    except (OSError, TypeError):  # its file is gone
        lines, first = [], code.co_firstlineno
    return Method(function.__qualname__, Path(code.co_filename).name, first, tuple(lines))


@dataclass
class DoctorReport:
    """The findings of a doctor trial, and its measurements in words, by title."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)
    memory: MemoryFacts | None = None
    """The sizes from which memory is estimated; None if the model cannot be built."""
    workload: Workload | None = None
    of_checks: TrialFacts = field(default_factory=TrialFacts)

    def add(self, check: AnyCheck, seen: Sequence[Any], case: Case, *, figures_alone: bool = False) -> None:
        """Add what follows from the observations of a check; ``figures_alone``: without facts and findings."""
        if check.facts and not figures_alone:
            self.of_checks |= check.facts(seen, case)
        self.findings += [] if figures_alone else [*check.judge(seen, case)]
        self.figures |= check.figures(seen, case) if check.figures else {}

    @property
    def facts(self) -> TrialFacts:
        """The facts of the trial's row; each finding has its place in the user's code, if there is one."""
        methods = methods_of(self.workload) if self.workload else {}
        rows = [finding.row() for finding in self.findings]
        for finding, row in zip(self.findings, rows, strict=True):
            if place := place_of(finding.check, methods, finding.parts):
                row["place"] = place
        found: TrialFacts = {"findings": rows, "figures": self.figures, **self.of_checks}
        return {**found, "memory": self.memory} if self.memory else found


class DoctorTrialFailed(Exception):
    """The real steps, or a check after them, failed; ``facts`` has the earlier findings, ``origin`` what was raised."""

    def __init__(self, error: Exception, found: DoctorReport) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.facts, self.origin = found.facts, error


def run_doctor_trial(context: TrialContext) -> TrialResult:
    """Examine a cell; after an error, later trials of the same kind are skipped."""
    with context.part("build"):
        workload, datasets = context.workload()
    cell = context.trial.cell
    subject = Subject(
        *(doctor_cell(cell), workload, datasets, context.trial.seed, context.ranks, context.advance),
        epochs=context.experiment.convergence is not None,
        explains=context.experiment.explains,
        planned=cell,
        modes=memory_needs.modes_of(cell, context.experiment),
    )
    with context.part("examination"):
        found = examine(subject)
    facts = context.ranks.broadcast(found.facts)
    context.cache.setdefault(SKIP_RULES, []).extend(skip_rules(cell, facts, context.experiment.allow))
    if "loader_workers" in facts:
        context.cache.setdefault(LOADER_WORKERS, {}).setdefault(cell.loader_key, facts["loader_workers"])
    return TrialResult(context.trial.id, "ok", unit=workload.unit, steps_s=context.parts["examination"], facts=facts)


def examine(subject: Subject) -> DoctorReport:
    """Run every check. Raises DoctorTrialFailed if the real steps raise, or a check after them that needs all ranks."""
    if empty := data.empty(subject.training_samples):
        return DoctorReport(empty, workload=subject.workload)
    subject = replace(subject, process=ProcessState.now(), workload=FewBuilds(subject.workload))
    sizes = memory_needs.survey(subject)
    subject = replace(subject, memory=sizes, whole_model_fits=memory_needs.fits_on_one_device(sizes, subject.cell))
    found = DoctorReport(memory=sizes, workload=subject.workload)
    if sizes and not subject.whole_model_fits:
        found.findings.append(
            memory_needs.without_reference(sizes, subject.cell, [c.name for c in CHECKS if c.needs_whole_model])
        )
    seen, failed = _observe_alone(subject)
    if sizes and memory.NAME in seen:
        found.memory = memory_needs.with_activations(sizes, seen[memory.NAME])
    stops = _judge_before_steps(found, seen, subject)
    if failed and not any_error(found.findings):
        found.findings.append(_failed_alone(subject, failed))
    if stops or (failed and any_error(found.findings)):
        return found
    affordable = memory_needs.at_affordable_batch(subject, found.memory)
    if affordable is None:
        assert found.memory
        left_out = [check.name for check in CHECKS if check.after_steps]
        found.findings.append(memory_needs.without_steps(found.memory, subject.cell, left_out))
        return found
    if found.memory and subject.whole_model_fits and not affordable.whole_model_fits:
        left_out = [check.name for check in CHECKS if check.needs_whole_model and check.after_steps]
        found.findings.append(memory_needs.without_reference(found.memory, affordable.cell, left_out))
    _judge_with_steps(affordable, found, seen)
    return found


def _judge_with_steps(subject: Subject, found: DoctorReport, seen: Seen) -> None:
    """Take real steps, then make the checks after them. Raises DoctorTrialFailed if one of both raises."""
    try:
        stepped = _with_steps(subject, found)
    except Exception as error:
        # memory that is not there: the trials of each batch find out for themselves
        if not (isinstance(error, SkipTrial | MemoryError) or "out of memory" in str(error).lower()):
            means = "an error of the workload: every trial of these cells would fail"
            where = next((note for note in getattr(error, "__notes__", ()) if note in REHEARSED), "the first steps")
            text, advice = f"{describe_error(error)}, in {where}", advice_on(str(error))
            found.findings.append(Finding(EXECUTION, "error", text, means, advice, stops=True))
        raise DoctorTrialFailed(error, found) from error
    if stepped is None:
        return
    for check in CHECKS:
        try:
            if check.after_steps:
                _judge_one(check, stepped, found, seen)
        except Exception as error:
            found.findings.append(_check_raised(check, error))
            if subject.ranks.world_size > 1:  # the other ranks may wait for this one in a collective
                raise DoctorTrialFailed(error, found) from error
    if raised := stepped.steps[0].evaluation_error:
        advice = remedy(raised) or "return a loss of each validation sample in eval mode too, or leave out convergence"
        means = "every training to convergence of these cells would fail; timed trials, which evaluate nothing, do not"
        found.findings.append(Finding(EVALUATION, "error", f"{raised}, in {REHEARSED[0]}", means, advice, stops=True))


def _observe_alone(subject: Subject) -> tuple[Seen, dict[str, str]]:
    """Return the observations of all ranks, and the error of each check that raised, with its rank."""
    checks = [check for check in CHECKS if subject.whole_model_fits or not check.needs_whole_model]
    values: dict[str, object] = {}
    raised: dict[str, str] = {}
    for check in checks:
        if check.observe and not check.needs_peers:
            try:
                values[check.name] = check.observe(subject.fresh())
            except Exception as error:
                raised[check.name] = describe_error(error)
            finally:
                subject.advance()
    ranks = subject.ranks.gather((values, raised))
    failed: dict[str, str] = {}
    for rank, (_, of_rank) in enumerate(ranks):
        failed |= {name: f"{text} (rank {rank})" for name, text in of_rank.items() if name not in failed}
    return {name: [of_rank[name] for of_rank, _ in ranks] for name in values if name not in failed}, failed


def _judge_before_steps(found: DoctorReport, seen: Seen, case: Case) -> bool:
    """Add the findings of what the ranks observed alone; return whether one of them forbids real steps."""
    stops = False
    for check in CHECKS:
        if check.name in seen and not check.after_steps:
            before = len(found.findings)
            try:
                found.add(check, seen[check.name], case)
            except Exception as error:  # the same on every rank, which judge the same observations
                found.findings.append(_check_raised(check, error))
            stops = stops or (check.stops and any_error(found.findings[before:]))
    return stops


def _failed_alone(subject: Subject, failed: dict[str, str]) -> Finding:
    """Return a finding on checks that raised: the workload does not run in real steps either, or not on few samples."""
    (check, text), fails = next(iter(failed.items())), False
    if subject.whole_model_fits:
        try:
            real_steps.observe_own_part(subject.fresh())
        except Exception:
            fails = True
    if any(subject.ranks.gather(fails)):
        means, advice = "an error of the workload on its own data", advice_on(text)
        return Finding(EXECUTION, "error", f"{text}, in the check: {check}", means, advice, stops=True)
    means = "steps run with the cell's own batch, but not with a few samples: these checks have no result"
    advice = "nothing to do if the workload needs more than a few samples in a batch"
    if not any(subject.ranks.gather(_needs_more_samples(subject))):
        means, advice = "these checks have no result", "nothing to do if the trials run; else report the error"
    return Finding(EXECUTION, "warning", f"{text}, in the checks: {', '.join(failed)}", means, advice)


def _needs_more_samples(subject: Subject) -> bool:
    """Return whether the loss of a few samples raises, with which most checks work; True if it cannot be tried."""
    try:
        if not subject.whole_model_fits:
            return True
        subject.loss(subject.bare_model(), subject.first_samples(SMALL))
    except Exception:
        return True
    return False


def _with_steps(subject: Subject, found: DoctorReport) -> Subject | None:
    """Take real steps in the wrapper, which the later checks share; None if one device finds that they are no use."""
    alone: Sequence[Steps] = ()  # each rank's steps on its own part of the batch
    if subject.ranks.world_size > 1 and subject.whole_model_fits:
        alone = subject.ranks.gather(real_steps.observe_own_part(subject.fresh()))
    if alone and any_error(unchanged := parameters.unchanged(alone, subject.cell)):
        found.findings += unchanged  # in the wrapper it would fail with a less clear error
        return None
    own = real_steps.observe(subject.fresh())
    if subject.whole_model_fits and memory_needs.global_batch_fits(subject.memory, subject.cell):
        real_steps.add_single_device_losses(subject.fresh(), own)
    own.own_step_s = alone[subject.ranks.rank].step_s if alone else 0.0
    return replace(subject, steps=tuple(subject.ranks.gather(own)))


def _check_raised(check: AnyCheck, error: Exception) -> Finding:
    """Return the finding of a check of the doctor that raised: no finding about the workload."""
    text = f"{describe_error(error)}, in the check: {check.name}"
    means = "the check has no result: the cells are measured without it"
    advice = "nothing to do if the trials run; else report the error with the workload"
    return Finding(EXECUTION, "warning", text, means, advice)


def _judge_one(check: AnyCheck, subject: Subject, found: DoctorReport, seen: Seen) -> None:
    ranks = subject.ranks
    # the same answer on all ranks: else some would wait for the others in a collective
    redundant = check.redundant is not None and ranks.broadcast(check.redundant(found.findings))
    redundant = redundant or (check.needs_whole_model and not subject.whole_model_fits)
    values: Sequence[object] | None = subject.steps
    if check.observe and not check.needs_peers:
        values = seen.get(check.name)  # None if it raised
    elif check.observe:
        values = None if redundant else ranks.gather(check.observe(subject.fresh()))
    if values is not None:
        found.add(check, values, subject, figures_alone=redundant)
