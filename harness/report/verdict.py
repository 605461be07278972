"""The verdict on a run: what to use, how far it scales, why not better, how sure, and what to do next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, pairwise

import pandas as pd

from harness.analysis.common import grouped, is_no_claim
from harness.analysis.results import Results, attempt
from harness.analysis.verdict import Statement
from harness.analysis.verdict.rules import RANKED_SEEDS
from harness.config.experiment import Experiment
from harness.config.yaml_source import dump, parse_value
from harness.plan.labels import strategy_text
from harness.report.causes import (
    IN_PROGRAM,
    MACHINE,
    Option,
    certain_of,
    name_of,
    next_experiment,
    options_of,
    smaller_causes,
    target,
)
from harness.report.row import is_missing, number, plural, rows_of
from harness.report.sentence import Context, Sentence
from harness.report.sentences import TOPICS, decision, sentences
from harness.report.tables.text import duration, percent
from harness.report.tables.trust import INTERVALS, imprecise
from harness.system.sanitize import escape_control, redact_text

HEADINGS: Mapping[str, str] = {topic: heading for topic, (heading, _) in TOPICS.items()} | {"next": "What to do next"}
"""The headings by topic, in the order of the page."""
MOST_BLOCKS = 100
"""The most further blocks that are proposed."""
NEXT_FILE = "next.yaml"
TIME_TO_IMPROVE = 300.0
LONGER = 4
"""The factor by which windows are made longer where noise hides what is to be seen."""
SHORTEST = 0.25
"""Seconds of a window that a number of steps alone set."""
NOTHING_NEXT = "# The verdict proposes no option to compare.\n"
MENDED = "Once what failed is mended, --resume measures it."
MARKUP = re.compile(r"([\\`*_\[\]<>|#~!])")
BRACKETS = (
    "Numbers in brackets: 95 % intervals over blocks, the repetitions of the grid; of times to a target the range over "
    "seeds. Exposed communication: gradient exchange that no computation hides. Contention: for memory bandwidth, "
    "caches or power. Wrapper overhead: the strategy's own work on each device. x2: on 2 devices."
)
"""What the numbers in brackets are, and the terms, for below the sentences."""


@dataclass(frozen=True)
class NextStep:
    """The one command, why it is the one, and what ``next.yaml`` holds; ``others``: what else may be tried."""

    why: str
    command: str
    file: str = NOTHING_NEXT
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """An option to compare in one cell against a cause, and the experiment file that does."""

    option: Option
    cause: Statement
    file: str

    @property
    def least(self) -> float:
        """The least share of the step that the cause takes: the lower end of its interval, if there is one."""
        facts = self.cause.facts
        return number(facts.share if is_missing(facts.low) else facts.low)


def next_step(context: Context) -> NextStep:
    """Return what to do next.

    First what is missing; then blocks or longer windows that decide what is open; then an option against a cause whose
    interval excludes 0. A run that leaves nothing to do is exported.
    """
    proposal, results = _proposal(context), context.results
    blocks = next((one for one in context.stated("trust") if one.n), None)
    feasible = blocks is not None and blocks.n <= MOST_BLOCKS
    if any(line["facts"].get("inline") for line in results.lines):
        why = "These trials ran in the command's own process (--inline), for a debugger. To measure all of them:"
        step = _run_changed(why, "The same experiment.", {}, results)
        blocks = None  # such a run is never resumed
    elif unfinished := _unfinished(context):
        step = NextStep(unfinished, _resume(results), proposal.file if proposal else NOTHING_NEXT)
    elif improved := _improved(context):
        step = improved
    elif blocks and feasible:
        step = _more_blocks(blocks, proposal, context)
    elif proposal and proposal.least > 0:
        step = run_file(_why(proposal, context), proposal.file, results)
    elif in_program := _in_program(context):
        step = in_program
    elif blocks:
        step = _longer_windows(context)
    elif trainings := _trainings(context):
        step = trainings
    else:
        command = f"python -m harness export {folder_of(results)} --markdown"
        step = NextStep("Nothing here calls for another measurement. To show the verdict to others:", command)
    others = [line for causes in context.causes.values() for line in smaller_causes(causes, context)]
    if blocks and feasible and blocks.subject == "fixed" and "--add-blocks" not in step.command:
        others.insert(0, f"To decide what is open: {_resume(results)} --add-blocks {blocks.n}")
    why = f"{MENDED} {step.why}" if "--resume" not in step.command and _is_measured_again(context) else step.why
    return replace(step, why=why, others=tuple(others))


def folder_of(results: Results) -> str:
    """Return the run folder as a word of a shell."""
    return shlex.quote(str(results.folder.path))


def _unfinished(context: Context) -> str:
    """Return why to resume a run that lacks trials, or in which nothing was measured; empty if there is no reason."""
    trials, codes = context.table("trials"), {one.code for one in context.stated("incomplete")}
    if len(trials) and trials["purpose"].fillna("").eq("links").all():  # a run of the links alone is never resumed
        return ""
    if codes & {"missing", "time_up"}:
        return "The run is incomplete. To measure what is missing, and keep what is measured:"
    if not context.has_measured:
        return "Nothing was measured. Once the causes above are mended, what failed is measured again by:"
    return ""


def _is_measured_again(context: Context) -> bool:
    """Return whether a resume measures what failed; it refuses changed code of variants, and out of memory is final."""
    results = context.results
    if results.experiment.variants or any(line["facts"].get("inline") for line in results.lines):
        return False
    stated, refused = context.stated("failed"), context.stated("incomplete")
    return any(
        (one.code == "trials" and one.subject != "oom") or (one.code == "preflight" and refused) for one in stated
    )


def _proposal(context: Context) -> Proposal | None:
    """Return the first option to try against a cause of a leading cell, the one that stands out most from the noise."""
    found = []
    tried = {one.cell_id for one in context.stated("improved")}
    for cell_id, causes in context.causes.items():
        cause = None if cell_id in tried else target(causes)
        if cause and (options := options_of(cause, context)):
            axes = {options[0].axis: list(options[0].values)}
            text = next_experiment(context.results.experiment, context.cells[cell_id], axes)
            head = f"# Compares {options[0].axis} in {context.label(cell_id)}.\n"
            found.append(Proposal(options[0], cause, f"{head}{text}"))
    return max(found, key=lambda one: one.least, default=None)


def _why(proposal: Proposal, context: Context) -> str:
    cause = proposal.cause
    largest = certain_of(context.causes[str(cause.cell_id)])[0]
    fixed = f"; no option reduces {name_of(largest)}" if largest.subject in MACHINE else ""
    fixed = "; more of it is unexplained" if largest.subject == "rest" else fixed
    where = f"{proposal.option} for {context.name(cause.cell_id)}, all else as here:"
    return f"{percent(cause.facts.share)} of the step is {name_of(cause)}{fixed}. Compare {where}"


def _in_program(context: Context) -> NextStep | None:
    """Return what to change in a script or loop against the largest of the causes that a change may reduce."""
    causes = [cause for of_cell in context.causes.values() if (cause := target(of_cell))]
    known = [cause for cause in causes if cause.subject in IN_PROGRAM] if context.of_program else []
    if not known:
        return None
    largest = max(known, key=lambda cause: number(cause.facts.share))
    why = f"{percent(largest.facts.share)} of the step is {name_of(largest)}: try {IN_PROGRAM[str(largest.subject)]}"
    return NextStep(f"{why}. As an argument and an axis of the grid it is compared in one run.", "")


def _improved(context: Context) -> NextStep | None:
    """Return how to go on with the setting that an improvement has confirmed, or how to confirm what helped."""
    found = {one.code: one for one in context.stated("improved")}
    if (one := found.get("confirmed")) is None:
        if "unfinished" not in found:
            return None
        settings = context.results.experiment.improve
        command = f"{_resume(context.results)} --improve {settings.time if settings else TIME_TO_IMPROVE:.0f}s"
        return NextStep("To confirm what helped, in fresh processes; what was tried is not measured again:", command)
    changes = parse_value(f"{{{one.subject}}}", source="improvements")
    head = f"# {context.label(one.cell_id)}, improved by {one.subject}.\n"
    file = f"{head}{next_experiment(context.results.experiment, context.cells[str(one.cell_id)], changes)}"
    why = f"With {one.subject} {context.name(one.cell_id)} is faster. To measure it alone, all else as here:"
    return run_file(why, file, context.results)


def run_file(why: str, content: str, results: Results, name: str = NEXT_FILE) -> NextStep:
    """Return the step that runs a file of the run folder: beside the experiment file if that names own code."""
    path = shlex.quote(str(results.folder.path / name))
    if results.experiment.own_modules:
        why = f"{why.removesuffix(':')}, in the folder of your experiment file:"
        return NextStep(why, f"cp {path} . && python -m harness.run {name}", content)
    return NextStep(why, f"python -m harness.run {path}", content)


def _more_blocks(row: Statement, proposal: Proposal | None, context: Context) -> NextStep:
    results, blocks, settings = context.results, row.n, context.results.experiment.throughput
    more = plural(blocks, "more block")
    ledger, trials = context.table("ledger"), context.table("trials")
    groups = trials[trials["kind"] == "throughput"][["group_id", "block"]].drop_duplicates()
    spent = float(ledger["seconds"][ledger["group_id"].isin(groups["group_id"])].sum())
    if spent > 0 and len(groups):  # at the wall time of the run's own blocks
        total_s = spent / groups["block"].nunique() * blocks
        more += f" (about {f'{total_s / 60:.0f} min' if 60 <= total_s < 3570 else duration(total_s)})"
    why = f"About {more} decide{'s' if blocks == 1 else ''} what is open"
    waits = settings and settings.wait_for_quiet
    if not waits and any("foreign load" in row.doubts for row in rows_of(context.table("trials"))):
        why += "; fewer on an idle machine, as other programs used the processors during some trials: close them, or "
        why += "set throughput: {wait_for_quiet: 60s} in a new run"
    if row.subject == "fixed":
        command = f"{_resume(results)} --add-blocks {blocks}"
        return NextStep(f"{why}:", command, proposal.file if proposal else NOTHING_NEXT)
    most = (settings.most_blocks if settings else 0) + blocks
    number = most if settings and settings.rule == "decide" else {"at_most": most}
    why = f"{why}; a rule sets their number, so that it takes a new run:"
    return _run_changed(why, f"With {more}.", {"throughput": {"blocks": number}}, results)


def _longer_windows(context: Context) -> NextStep:
    results, settings = context.results, context.results.experiment.throughput
    longer = LONGER * ((settings and settings.window_seconds) or SHORTEST)
    again = "Close other programs, then measure again" if context.has_doubt("foreign load") else "Measure again"
    why = f"The intervals of this run are too wide for a decision. {again} with throughput.window_seconds: {longer:g}"
    why += ", all else as here:"
    return _run_changed(why, "With longer windows.", {"throughput": {"window_seconds": longer}}, results)


def _trainings(context: Context) -> NextStep | None:
    """Return how to train longer if no training reached the target, or with the seeds that an order needs."""
    stated, given = context.stated("training"), context.results.experiment.convergence
    if {one.code for one in stated} == {"missed"}:
        return _longer_trainings(context.results)
    lacking = RANKED_SEEDS - len(given.seeds) if given else 0
    if given is None or lacking <= 0 or not any(one.code == "few seeds" and one.others for one in stated):
        return None
    seeds = [*given.seeds, *islice((seed for seed in count() if seed not in given.seeds), lacking)]
    why = f"Times to the target have an order from {RANKED_SEEDS} seeds on. With convergence.seeds: {seeds}"
    why += ", all else as here:"
    return _run_changed(why, f"With {len(seeds)} seeds.", {"convergence": {"seeds": seeds}}, context.results)


NOT_REACHED = "No setting reached the target with every seed"


def _longer_trainings(results: Results) -> NextStep:
    given = results.experiment.convergence
    lengths = {name: getattr(given, name) for name in ("epochs", "steps", "seconds") if getattr(given, name, None)}
    if not lengths:
        return NextStep(f"{NOT_REACHED}: let the program train longer, by its own arguments.", "")
    ((name, length),) = lengths.items()
    why = f"{NOT_REACHED}. With convergence.{name}: {2 * length:g}, all else as here:"
    longer = {"convergence": {name: 2 * length}, **scheduled(results.experiment, length, 2 * length)}
    return _run_changed(why, f"With more {name}.", longer, results)


def scheduled(experiment: Experiment, length: object, longer: object) -> dict[str, dict[str, object]]:
    """Return the schedule for trainings of another length: what was as long as they were, as T_max, is so again."""
    given: Mapping[str, object] = getattr(experiment, "schedule", {})
    changed = {name: longer for name, value in given.items() if type(value) is int and value == length}
    return {"schedule": {**given, **changed}} if changed and longer != length else {}


def _run_changed(why: str, comment: str, change: Mapping[str, Mapping[str, object]], results: Results) -> NextStep:
    """Return the step that runs the run's experiment file with some settings changed."""
    content = results.experiment.model_dump(mode="json", exclude_defaults=True)
    content["name"] = f"{results.experiment.name[:40]}-next"
    for section, settings in change.items():
        known = content.setdefault(section, {})
        for name, value in settings.items():
            known[name] = {**known.get(name, {}), **value} if isinstance(value, Mapping) else value
    return run_file(why, f"# {comment}\n{dump(content, flow=None, width=100)}", results)


def _resume(results: Results) -> str:
    """Return the command that resumes the run: on the cluster that its last invocation named, or as a job again."""
    invocations = results.environment.get("invocations", [])
    if invocations and (submit := invocations[-1].get("submit")):
        return submit
    words = [str(word) for word in (invocations[-1].get("command") or [])] if invocations else []
    addresses = [after for word, after in pairwise(words) if word == "--address"]
    addresses += [word.partition("=")[2] for word in words if word.startswith("--address=")]
    address = f" --address {shlex.quote(addresses[-1])}" if addresses else ""
    return f"python -m harness.run --resume {folder_of(results)}{address}"


@dataclass(frozen=True)
class Verdict:
    """The sentences, an experiment file that the last one may need, and what else may be tried."""

    sentences: tuple[Sentence, ...]
    next_file: str = NOTHING_NEXT
    others: tuple[str, ...] = ()
    lines: Mapping[str, Sequence[Sentence]] = field(default_factory=dict)
    """The decision by its labels; without sentences none."""
    slots: str = ""
    """What a device of a CPU is, whose threads are a part of the machine's; empty without one."""

    @property
    def proposes(self) -> bool:
        """Whether there is a file to run."""
        return self.next_file != NOTHING_NEXT

    @property
    def command(self) -> str:
        """The one command that is proposed; empty if there is none."""
        return next((one.command for one in self.sentences if one.command), "")

    @property
    def brackets(self) -> str:
        """What the numbers in brackets are; empty if the next step is all there is to say."""
        return f"{BRACKETS} {self.slots}".strip() if any(one.topic != "next" for one in self.sentences) else ""

    @property
    def by_heading(self) -> dict[str, list[Sentence]]:
        """The sentences by heading, in the order of the page."""
        by_topic = grouped(self.sentences, lambda one: one.topic)
        return {heading: by_topic[topic] for topic, heading in HEADINGS.items() if topic in by_topic}

    @property
    def reasons(self) -> dict[str, list[Sentence]]:
        """The sentences of ``by_heading`` that say more than the decision."""
        return {heading: found for heading, found in self.by_heading.items() if found[0].topic != "next"}


NO_VERDICT = Verdict(())


def verdict_if_possible(results: Results) -> Verdict:
    """Return the verdict; without sentences if it fails by an error of the harness, which the report names."""
    try:
        return make_verdict(results)
    except Exception:
        return NO_VERDICT


def further(context: Context) -> list[Sentence]:
    """Return the sentences that follow from no statement: nothing measured, no claim about speed, wide intervals."""
    found = []
    leaders = attempt(context.results, "leaders")
    if not context.has_measured:
        text = "every trial failed or was skipped."
        found.append(Sentence("failed", "Nothing was measured", text, evidence="outcomes"))
    elif len(context.table("cells")) and leaders is not None and leaders.empty:
        text = "every measured cell is emulated, oversubscribed, faulty, an ingest or not equivalent to one device."
        found.append(Sentence("fastest", "No claim about speed", text, evidence="scaling"))
    elif left_out := dict.fromkeys(strategy_text(row) for row in rows_of(context.table("cells")) if is_no_claim(row)):
        text = f"{', '.join(left_out)}; what was measured of it is in tables and figures."
        found.append(Sentence("open", "Left out of these claims", text, evidence="scaling"))
    if wide := imprecise({name: context.table(name) for name in INTERVALS}):
        found.append(Sentence("open", "Wide intervals", wide, evidence="scaling"))
    return found


def make_verdict(results: Results) -> Verdict:
    """Return the verdict on a run, in sentences."""
    context = Context(results)
    step = next_step(context)
    last = Sentence("next", "", step.why, command=step.command)
    said = (*sentences(context), *further(context), last)
    lines = {**decision(context), "NEXT": [last]}
    return Verdict(said, step.file, step.others, lines, _slots(results.trials))


def _slots(trials: pd.DataFrame) -> str:
    on_cpu = trials[(trials["device"] == "cpu") & (trials["purpose"] != "threads")]
    if not (threads := sorted({int(count) for count in on_cpu["threads"].dropna()})):
        return ""
    return f"A device is a process with {' or '.join(map(str, threads))} CPU thread{'s' * (threads != [1])}."


def plain(text: str) -> str:
    """Return text in which nothing is markup: no link, image, mention, HTML or end of a cell."""
    safe = " ".join(escape_control(redact_text(text)).split())
    return MARKUP.sub(r"\\\1", safe).replace("@", "@\u200b")


def verdict_lines(name: str, verdict: Verdict) -> Iterator[str]:
    """Yield the decision as Markdown: its labels, sentences and commands."""
    yield f"### {plain(name)}"
    for label, parts in verdict.lines.items():
        yield ""
        yield f"**{label}**"
        for one in parts:
            lead = f"**{plain(one.lead)}**: " if one.lead else ""
            yield f"- {lead}{plain(one.text)}"
            if one.command:
                yield f"  `{escape_control(one.command).replace('`', '')}`"
