"""Progress on the console: a live display in a terminal, plain lines if the output is no terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness.analysis.common import throughput
from harness.analysis.verdict.rules import RANK
from harness.plan.labels import Labels
from harness.plan.planner import Plan
from harness.plan.rows import RecordedTrial
from harness.plan.trial import PURPOSES
from harness.record.folder import RunFolder
from harness.report.page import Parts
from harness.report.row import plural
from harness.report.tables.links import links_tables
from harness.report.tables.preview import grade_line
from harness.report.tables.ratios import main_axes, parity_table, versus_table
from harness.report.tables.scaling import epoch_lines, scaling_by_setting
from harness.report.tables.text import TextTable, counts, duration, speed
from harness.report.tables.trust import FINDING_TEXTS, belief_lines, finding_rows, summary_line
from harness.report.verdict import Verdict
from harness.run import events
from harness.run.plan_text import memory_lines, memory_table, plan_lines, plan_table
from harness.run.request import as_started
from harness.run.time_left import TimeLeft
from harness.system.sanitize import escape_control

COLOURS = {"ok": "green", "skipped": "yellow"}
SEVERITY_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def doctor_lines(findings: pd.DataFrame, figures: Mapping[str, Mapping[str, str]], plan: Plan) -> list[Text]:
    """Return the doctor's measurements and findings as text: observation, meaning, advice."""
    labels = {trial.id: plan.labels.of_cell(trial.cell) for trial in plan.trials if trial.id in figures}
    examined = sum(trial.purpose == "doctor" for trial in plan.trials)
    lines = [Text("")]
    for trial_id, values in figures.items():
        measured = "; ".join(f"{name} {value}" for name, value in values.items())
        lines.append(Text(f"{labels.get(trial_id, trial_id)}: {measured}", style="dim"))
    return [*lines, *finding_lines(findings), Text(""), Text(summary_line(findings, examined), style="bold")]


def finding_lines(findings: pd.DataFrame) -> list[Text]:
    """Return findings as text, each after an empty line: where, place, observation, meaning, advice."""
    lines = []
    for row in finding_rows(findings):
        severity = (f"{row.severity:<8}", SEVERITY_COLOURS[row.severity])
        head = Text.assemble(severity, f"{escape_control(row.check)}: ")
        lines += [Text(""), head.append(escape_control(row.where), style="bold")]
        for title, name in FINDING_TEXTS.items():
            if row[name]:
                lines.append(Text(f"  {title:<8}  {escape_control(str(row[name]))}"))
    return lines


def trial_result(line: RecordedTrial) -> str:
    """Return its throughput, what took how long, or the reason of a failure."""
    if line["outcome"] != "ok":
        return str(line["reason"])
    if line["purpose"] and (done := PURPOSES[line["purpose"]].done):
        found = line["facts"].get("findings")
        return f"{done} in {line['steps_s']:.1f} s" + (f": {plural(len(found), 'finding')}" if found else "")
    if line["kind"] != "convergence":
        return f"{speed(throughput(line['windows']))} {line['unit']}/s"
    samples = line["facts"].get("training_samples")
    return f"trained{f' on {samples:,} samples' if samples else ''} in {line['steps_s']:.1f} s"


INDENT = 12 * " "
"""Before the further lines of a finding's texts."""
IN_BRACKETS = "In brackets: 95 % intervals over blocks, the repetitions of the whole grid."


def verdict_grid(verdict: Verdict) -> Table:
    """Return the decision as a table of two columns, labels and sentences; its command is shown below it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")  # a path is longer than a line
    for label, sentences in verdict.lines.items():
        if label == "NEXT" and len(verdict.lines) > 1:  # last, above the command
            grid.add_row("", Text(f"{IN_BRACKETS} {verdict.slots}".strip(), style="dim"))
        for at, one in enumerate(sentences):
            style = "bold red" if one.is_bad else "bold"
            lead = (escape_control(f"{one.lead}: ") if one.lead else "", style)
            title = Text("" if at else label, style="bold red" if one.topic == "incomplete" else "bold")
            grid.add_row(title, Text.assemble(lead, escape_control(one.text)))
    return grid


def rich_table(content: TextTable, title: str) -> Group:
    """Return a text table as a table for the terminal, below its title, which may be wider."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for heading in content.columns:
        table.add_column(heading.title, justify="right" if heading.number else "left", overflow="fold")
    for row in content.rows:
        style = {"apart": "dim italic", "base": "bold"}.get(row.kind, "")
        table.add_row(*(Text(escape_control(cell)) for cell in row.cells), style=style)
    return Group(Text(escape_control(title), style="bold"), table)


def ratio_tables(tables: Mapping[str, pd.DataFrame]) -> Iterator[tuple[str, TextTable]]:
    """Yield the comparisons along axes and of launchers and, of a run that timed nothing else, its links."""
    versus, parity = main_axes(tables["versus"]), tables["parity"]
    if len(versus):
        axes = dict.fromkeys(axis.removeprefix("workload.") for axis in versus["axis"])  # as labels name them
        yield f"Comparison along {', '.join(axes)}", versus_table(versus, narrow=True)
    if len(parity):
        yield "Comparison of launchers", parity_table(parity, narrow=True)
    if tables["scaling"].empty:
        yield from links_tables(tables)


class Lasting(Console):
    """A console that falls silent if its pipe is closed, as at Ctrl-C: the run goes on to its report."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class ConsoleSink:
    """Formats events. Use as a context manager.

    ``quiet``: shows notes and the summary only. ``verbose``: shows epochs, and in a terminal every trial.
    """

    def __init__(self, console: Console, *, quiet: bool = False, verbose: bool = False, live: bool = True) -> None:
        self._console, self._quiet, self._verbose = console, quiet, verbose and not quiet
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("trials"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._progress.add_task("run", total=None, visible=False, left="")
        self._labels = Labels(())
        self._left: TimeLeft | None = None
        self._now, self._unsent = "", 0
        self._folder: Path | None = None
        self._resumed = False
        self._logs: set[str] = set()  # the reasons of failures whose log was named
        self._skips: set[str] = set()  # the reasons of skipped trials that were shown
        # once a second: the display must not take the cores that are being measured
        display = Live(get_renderable=self._display, console=console, transient=True, refresh_per_second=1)
        self._live = display if live and console.is_terminal and not quiet else None

    def __enter__(self) -> ConsoleSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.Planned() | events.Previewed() | events.MemoryForecast():
                self._show_plan(event)
            case events.RunStarted(folder, plan, groups, done, limit_s):
                self._labels, self._left = plan.labels, TimeLeft(plan, groups, limit_s=limit_s)
                self._resumed = bool(done) if self._folder is None else self._resumed  # later: steps of --improve
                self._folder = folder
                trials = sum(len(group.trials) for group in groups)
                self._progress.reset(self._task, total=trials, visible=True)
                already = f", {done} already done" * bool(done)
                measuring = f"Run folder {folder}: {plural(trials, 'trial')} to measure{already}"
                self._show(measuring if folder else f"{plural(trials, 'cell')} to examine; nothing is recorded")
                if self._live:
                    self._live.start()
            case events.Reported():
                self._stop()
                self._finish(event)
            case events.DoctorFinished(findings, figures, plan):
                self._stop()
                self._print_texts(doctor_lines(findings, figures, plan))
            case events.Note(text):
                self._show(text, always=True)
            case _:
                self._follow(event)

    def _show_plan(self, event: events.Planned | events.Previewed | events.MemoryForecast) -> None:
        tables: list[Group | Table]
        if isinstance(event, events.MemoryForecast):
            tables, lines = [memory_table(event, self._console.width)], memory_lines(event)
        elif self._quiet:
            return
        elif isinstance(event, events.Planned):
            tables, lines = [plan_table(event.plan)], plan_lines(event.plan)
        else:
            tables, lines = [rich_table(event.table, "Preview")] if event.table else [], [*event.lines]
        self._console.print(*tables, end="\n" * bool(tables))
        self._say(*lines)

    def _follow(self, event: events.Event) -> None:
        if self._left:
            self._left.follow(event)
        match event:
            case events.GroupStarting(group):
                self._now = f"Starting {group}: {plural(len(group.trials), 'trial')} of block {group.block}"
                self._show(f"{self._now}{self._time_left()}", live=False)
            case events.GroupReady(group, start_s):
                self._now = f"Worker group {group.id}: ready after {start_s:.1f} s"
            case events.Unsent(trials):
                self._unsent = trials
            case events.TrialStarting(trial):
                self._now = escape_control(self._labels.of_trial(trial))
            case events.TrialEnded():
                self._show_result(event)
            case events.Reporting():
                self._now = "Writing tables, figures and the report"
                self._show(self._now, live=False)

    def _show_result(self, event: events.TrialEnded) -> None:
        """Show a trial's result, and the errors that the doctor found, while the run can be stopped.

        A terminal keeps failures and the first trial that is skipped for a reason; the live line counts the others.
        """
        trial, line, again, epochs = event
        self._progress.advance(self._task, 0 if again else 1)
        result = f"{self._labels.of_trial(trial)}  {trial_result(line)}{' (will be retried)' * again}"
        style = COLOURS.get(line["outcome"], "red")
        text = Text.assemble((f"{line['outcome']:<8}", style), escape_control(f" {result}"))
        for finding in line["facts"].get("findings", []):
            if finding["severity"] == "error":
                part = "preflight, " if trial.purpose == "doctor" else ""
                self._show(f"{part}{finding['check']}: {finding['seen']}. {finding['advice']}.")
        known = line["outcome"] == "skipped" and line["reason"] in self._skips
        self._skips.update([line["reason"]] if line["outcome"] == "skipped" else [])
        if self._verbose or not (known or self._quiet or (self._live and line["outcome"] == "ok")):
            task = self._progress.tasks[0]
            counted = Text(f"[{int(task.completed)}/{int(task.total or 0)}] ").append(text)
            self._console.print(counted.append(self._time_left()), soft_wrap=True)
        reason, log = re.sub(RANK, ": ", line["reason"]), line["log"]
        if self._folder and log and line["outcome"] not in ("ok", "skipped") and reason not in self._logs:
            self._logs.add(reason)
            self._show(f"  its log: {self._folder / log}")
        for epoch in epoch_lines(epochs) if self._verbose else ():
            self._show(f"  {epoch}")

    def _time_left(self) -> str:
        """Return '; about 4 min left' at most once a minute, for an output that is no terminal."""
        left = self._left.once_a_minute() if self._left and not self._live else ""
        return f"; {left}" if left else ""

    def _finish(self, event: events.Reported) -> None:
        self._console.print()
        tables, parts = event.tables, Parts("terminal")
        details: dict[str, Callable[[], None]] = {  # which the report has
            "scaling table": lambda: self._print_tables(scaling_by_setting(tables["scaling"])),
            "evidence": lambda: self._say(*belief_lines(tables)),
        }
        shown: dict[str, Callable[[], None]] = {
            **(details if self._verbose else {}),
            # of links alone there is no verdict
            "tables": lambda: self._print_tables(
                ratio_tables(tables) if self._verbose or tables["scaling"].empty else ()
            ),
            "count of trials": lambda: self._show_trials(event),
            "findings": lambda: self._print_texts(finding_lines(tables["findings"])),
            "report": lambda: self._show(f"Report: {event.report}", always=True),
            "verdict": lambda: self._show_verdict(event.verdict),
        }
        for name, show in shown.items():
            parts.make(f"the terminal's {name}", show, self._say)
        if parts.failures:
            RunFolder(event.folder).write_log(parts.log, parts.tracebacks)

    def _print_tables(self, tables: Iterable[tuple[str, TextTable]]) -> None:
        for title, content in tables:
            self._console.print(rich_table(content, title), "")

    def _print_texts(self, texts: Iterable[Text]) -> None:
        """Print paragraphs; those longer than a terminal's line with a hanging indent, elsewhere on a line each."""
        for text in texts:
            whole = not self._console.is_terminal or text.cell_len <= self._console.width
            first, *more = [text] if whole else text.wrap(self._console, self._console.width - len(INDENT))
            for line in (first, *(Text(INDENT).append(rest) for rest in more)):
                self._console.print(line, highlight=False, soft_wrap=True)

    def _show_trials(self, event: events.Reported) -> None:
        last = event.tables["trials"].drop_duplicates("trial_id", keep="last")
        seconds = duration(event.seconds)
        self._say(f"Trials: {counts(last['outcome'].tolist())}. Wall time with the report: {seconds}.")
        if not self._resumed and (grade := grade_line(event.tables["preview"])):  # which is of the first invocation
            self._say(grade)

    def _show_verdict(self, verdict: Verdict) -> None:
        self._console.print("", verdict_grid(verdict))
        if verdict.command:  # last and alone on its line, to be copied
            text = escape_control(as_started(verdict.command))
            self._console.print(text, highlight=False, markup=False, soft_wrap=True, style="bold")

    def _say(self, *lines: str) -> None:
        for line in lines:
            self._console.print(escape_control(line), highlight=False, markup=False)

    def _show(self, text: str, *, always: bool = False, live: bool = True) -> None:
        if always or (not self._quiet and (live or not self._live)):
            self._console.print(escape_control(text), highlight=False, markup=False, soft_wrap=True)

    def _display(self) -> Group:
        self._progress.update(self._task, left=self._left.text if self._left else "")
        unsent = [Text(f"not sent {plural(self._unsent, 'trial')}, in the local run folder alone")] * bool(self._unsent)
        return Group(*unsent, Text(f"now      {self._now}", style="bold"), self._progress)

    def _stop(self) -> None:
        if self._live:
            self._live.stop()
