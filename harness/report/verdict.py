"""The verdict on a run: what to use, how far it scales, why not better, how sure, and what to do next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from harness.analysis.results import Results
from harness.config.yaml_source import dump
from harness.report.causes import Option, causes_of, name_of, next_experiment, options_of, smaller_causes, target
from harness.report.decision import decision
from harness.report.row import Row, is_missing, number, plural, rows_of
from harness.report.sentence import MOST, TOPICS, Context, Sentence, context_of
from harness.report.sentences import MOST_BLOCKS, PHRASES, cost, further
from harness.report.tables.text import percent
from harness.system.sanitize import escape_control, redact_text

NEXT_FILE = "next.yaml"
LONGER = 4
"""The factor by which windows are made longer where noise hides what is to be seen."""
SHORTEST = 0.25
"""Seconds of a window that a number of steps alone set."""
NOTHING_NEXT = "# The verdict proposes no option to compare.\n"
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
    cause: Row
    file: str

    @property
    def least(self) -> float:
        """The least share of the step that the cause takes: the lower end of its interval, if there is one."""
        return number(self.cause.value if is_missing(self.cause.low) else self.cause.low)


def next_step(statements: Sequence[Row], context: Context) -> NextStep:
    """Return what to do next.

    First what is missing; then blocks or longer windows that decide what is open; then an option against a cause whose
    interval excludes 0. A run that leaves nothing to do is exported.
    """
    proposal = _proposal(statements, context)
    blocks, results = _blocks(statements), context.results
    if any(line["facts"].get("inline") for line in results.lines):
        why = "These trials ran in the command's own process (--inline), for a debugger. To measure all of them:"
        step = _run_file(why, _changed(results, "The same experiment.", {}), results)
        blocks = None  # such a run is never resumed
    elif unfinished := _unfinished(statements, context):
        step = NextStep(*unfinished, proposal.file if proposal else NOTHING_NEXT)
    elif blocks and number(blocks["n"]) <= MOST_BLOCKS:
        step = _more_blocks(blocks, proposal, context)
    elif proposal and proposal.least > 0:
        step = _try(proposal, context)
    elif blocks:
        step = _longer_windows(context)
    elif {row.code for row in statements if row.topic == "training"} == {"missed"}:
        step = _more_epochs(results)
    else:
        command = f"python -m harness export {folder_of(results)} --markdown"
        step = NextStep("Nothing here calls for another measurement. To show the verdict to others:", command)
    others = [one for row in _one_each(statements) for one in smaller_causes(causes_of(row, context), context)]
    feasible = blocks is not None and blocks.subject == "fixed" and blocks.n <= MOST_BLOCKS
    if blocks and feasible and "--add-blocks" not in step.command:
        others.insert(0, f"To decide what is open: {_add_blocks(blocks.n, results)}")
    return replace(step, others=tuple(others))


def folder_of(results: Results) -> str:
    """Return the run folder as a word of a shell."""
    return shlex.quote(str(results.folder.path))


def _unfinished(statements: Sequence[Row], context: Context) -> tuple[str, str] | None:
    """Return why and how to resume a run that lacks trials, or in which nothing was measured."""
    trials, resume = context.table("trials"), _resume(context.results)
    codes = [row.code for row in statements if row.topic == "incomplete"]
    if len(trials) and trials["purpose"].fillna("").eq("links").all():  # a run of the links alone is never resumed
        return None
    if "missing" in codes or "time_up" in codes:
        return "The run is incomplete. To measure what is missing, and keep what is measured:", resume
    if not context.has_measured:
        return "Nothing was measured. Once the causes above are mended, what failed is measured again by:", resume
    return None


def _proposal(statements: Sequence[Row], context: Context) -> Proposal | None:
    """Return the first option to try against a cause of a leading cell, the one that stands out most from the noise."""
    found = []
    for row in _one_each(statements):
        cause = target(causes_of(row, context))
        if cause and (options := options_of(cause, context)):
            cell_id, option = cause.cell_id, options[0]
            text = next_experiment(context.results.experiment, context.cells[cell_id], option)
            head = f"# Compares {option.axis} in {context.label(cell_id)}.\n"
            found.append(Proposal(option, cause, f"{head}{text}"))
    return max(found, key=lambda one: one.least, default=None)


def _one_each(statements: Sequence[Row]) -> list[Row]:
    """Return the first cause of each cell that has any."""
    found: dict[str, Row] = {}
    for row in statements:
        if row.topic == "loss":
            found.setdefault(row.cell_id, row)
    return [*found.values()]


def _try(proposal: Proposal, context: Context) -> NextStep:
    share, cause = percent(proposal.cause.value), name_of(proposal.cause.subject)
    where = context.name(proposal.cause.cell_id)
    why = f"{share} of the step is {cause}. Compare {proposal.option} for {where}, all else as here:"
    return _run_file(why, proposal.file, context.results)


def _run_file(why: str, file: str, results: Results) -> NextStep:
    """Return the step that runs next.yaml: in the folder of the experiment file if it names the user's own code."""
    path = shlex.quote(str(results.folder.path / NEXT_FILE))
    if results.experiment.own_code:
        why = f"{why.removesuffix(':')}, in the folder of your experiment file:"
        return NextStep(why, f"cp {path} . && python -m harness.run {NEXT_FILE}", file)
    return NextStep(why, f"python -m harness.run {path}", file)


def _blocks(statements: Sequence[Row]) -> Row | None:
    """Return the statement that asks for further blocks."""
    return next((row for row in statements if row.topic == "trust" and (row.n or 0) > 0), None)


def _more_blocks(row: Row, proposal: Proposal | None, context: Context) -> NextStep:
    results, blocks = context.results, row.n
    more = f"{plural(blocks, 'more block')}{cost(blocks, context)}"
    why = f"About {more} decide{'s' if blocks == 1 else ''} what is open"
    if row.subject == "fixed":
        return NextStep(f"{why}:", _add_blocks(blocks, results), proposal.file if proposal else NOTHING_NEXT)
    settings = results.experiment.throughput
    most = (settings.most_blocks if settings else 0) + blocks
    number = most if settings and settings.rule == "decide" else {"at_most": most}
    file = _changed(results, f"With {more}.", {"throughput": {"blocks": number}})
    return _run_file(f"{why}; a rule sets their number, so that it takes a new run:", file, results)


def _longer_windows(context: Context) -> NextStep:
    results = context.results
    settings = results.experiment.throughput
    longer = LONGER * ((settings and settings.window_seconds) or SHORTEST)
    file = _changed(results, "With longer windows.", {"throughput": {"window_seconds": longer}})
    again = "Close other programs, then measure again" if context.has_doubt("foreign load") else "Measure again"
    why = f"{again} with throughput.window_seconds: {longer:g}, all else as here:"
    return _run_file(f"The intervals of this run are too wide for a decision. {why}", file, results)


def _more_epochs(results: Results) -> NextStep:
    settings = results.experiment.convergence
    epochs = 2 * (settings.epochs if settings else 1)
    file = _changed(results, "With more epochs.", {"convergence": {"epochs": epochs}})
    return _run_file(
        f"No training reached the target. With convergence.epochs: {epochs}, all else as here:", file, results
    )


def _changed(results: Results, comment: str, change: Mapping[str, Mapping[str, object]]) -> str:
    """Return the run's experiment file with some settings changed."""
    content = results.experiment.model_dump(mode="json", exclude_defaults=True)
    content["name"] = f"{results.experiment.name[:40]}-next"
    for section, settings in change.items():
        known = content.setdefault(section, {})
        for name, value in settings.items():
            known[name] = {**known.get(name, {}), **value} if isinstance(value, Mapping) else value
    return f"# {comment}\n{dump(content, flow=None, width=100)}"


def _add_blocks(blocks: int, results: Results) -> str:
    return f"{_resume(results)} --add-blocks {blocks}"


def _resume(results: Results) -> str:
    """Return the command that resumes the run, on the cluster that its last invocation named."""
    invocations = results.environment.get("invocations", [])
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
        return BRACKETS if any(one.topic != "next" for one in self.sentences) else ""

    @property
    def by_heading(self) -> dict[str, list[Sentence]]:
        """The sentences by heading, in the order of the page."""
        order = [*TOPICS]
        found: dict[str, list[Sentence]] = {}
        for sentence in sorted(self.sentences, key=lambda one: order.index(one.topic)):
            found.setdefault(TOPICS[sentence.topic], []).append(sentence)
        return found

    @property
    def reasons(self) -> dict[str, list[Sentence]]:
        """Those of ``by_heading`` that have more to say than the decision."""
        return {head: found for head, found in self.by_heading.items() if found[0].topic != "next"}


NO_VERDICT = Verdict(())


def verdict_if_possible(results: Results) -> Verdict:
    """Return the verdict; without sentences if it fails by an error of the harness, which the report names."""
    try:
        return make_verdict(results)
    except Exception:
        return NO_VERDICT


def make_verdict(results: Results) -> Verdict:
    """Return the verdict on a run, in sentences."""
    context, statements = context_of(results), rows_of(results.verdict)
    sentences: list[Sentence] = []
    for topic, phrase in PHRASES.items():
        rows = _one_each(statements) if topic == "loss" else [row for row in statements if row.topic == topic]
        sentences += [replace(phrase(row, context), evidence=row.evidence) for row in rows[:MOST]]
        if len(rows) > MOST:
            more = f"And {len(rows) - MOST} more, in tables/verdict.csv."
            sentences.append(Sentence(topic, "", more, evidence=str(rows[0]["evidence"])))
    step = next_step(statements, context)
    last = Sentence("next", "", step.why, command=step.command)
    lines = decision(statements, context, last)
    return Verdict((*sentences, *further(context), last), step.file, step.others, lines)


def plain(text: str) -> str:
    """Return text in which nothing is markup: no link, image, mention, HTML or end of a cell."""
    safe = " ".join(escape_control(redact_text(text)).split())
    return MARKUP.sub(r"\\\1", safe).replace("@", "@\u200b")


def verdict_lines(name: str, verdict: Verdict) -> Iterator[str]:
    """Yield the decision as Markdown: its labels, sentences and commands."""
    yield f"### {plain(name)}"
    for label, sentences in verdict.lines.items():
        yield ""
        yield f"**{label}**"
        for one in sentences:
            lead = f"**{plain(one.lead)}**: " if one.lead else ""
            yield f"- {lead}{plain(one.text)}"
            if one.command:
                yield f"  `{escape_control(one.command).replace('`', '')}`"
