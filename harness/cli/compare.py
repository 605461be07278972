"""``harness compare`` and ``harness history``: several runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from harness.cli.arguments import command, parse_cells, parse_each, parse_only, parse_share, show, show_table
from harness.errors import Collected, ComparisonError, RunFolderError
from harness.system.uri import is_uri

if TYPE_CHECKING:
    from harness.analysis.compare import Comparison

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN_FOLDER|URI...", help="The first run, then one or more later ones.")
]
By = Annotated[
    list[str] | None,
    typer.Option(metavar="AXIS", help="Match cells that differ in this axis or option, several by commas."),
]
Only = Annotated[str | None, typer.Option(help="A part of the cells only: 'strategy=ddp,devices=2'.")]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        metavar="'METRIC < NUMBER'",
        help="Exit with 3 if a cell fails: throughput or speedup, later over first; with 4 if a cell is undecided.",
    ),
]
Noise = Annotated[
    str | None,
    typer.Option(
        "--run-noise",
        metavar="SHARE",
        help="Standard deviation of throughput between runs: 5% or 0.05. Not trusted below that of a run's blocks.",
    ),
]
HistoryFolder = Annotated[
    Path | None,
    typer.Option("--history", help="Folder of earlier runs, for the run noise. Default: that of the first run."),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Page = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="FILE", help="The page. Default: beside the last run; none with --json, --markdown."
    ),
]
Cell = Annotated[str | None, typer.Option(help="A cell's id, or a part of the cells: 'strategy=ddp,devices=2'.")]
Picture = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="The figure (.png, .svg). Default: FOLDER/history.png.")
]


@command
def compare_command(
    run_folders: Runs,
    by: By = None,
    only: Only = None,
    fail_if: FailIf = None,
    run_noise: Noise = None,
    history: HistoryFolder = None,
    markdown: Markdown = False,
    json: Json = False,
    output: Page = None,
) -> int:
    """Compare runs with the first one, cell by cell; needs neither torch nor ray.

    A difference is decided by the noise between runs: that of 3 or more earlier runs of the same cells, or --run-noise.
    """
    from harness.analysis.compare import compare, parse_condition
    from harness.analysis.results import load
    from harness.analysis.run_pairs import Question
    from harness.config.axes import check_axis

    found = Collected()
    conditions = found.value(lambda: parse_each(fail_if or [], "--fail-if", parse_condition)) or ()
    names = (name.strip() for text in by or [] for name in text.split(","))
    axes = found.value(lambda: parse_each(names, "--by", check_axis)) or ()
    wanted = found.value(lambda: {} if only is None else parse_only(only)) or {}
    noise = found.value(lambda: None if run_noise is None else parse_share(run_noise, "--run-noise"))
    for folder in run_folders:
        if not is_uri(folder) and not os.path.isdir(folder):
            problem = "not a run folder: it is not there; give results/<experiment>/<time>-<id>"
            found.add(RunFolderError(f"{folder}: {problem}"))
    if history is not None and not os.path.isdir(history):
        found.add(ComparisonError(f"--history: got {history}; allowed: a folder that is there, with earlier runs"))
    if markdown and json:
        found.add(ComparisonError("--markdown and --json: only one of both can be printed"))
    found.raise_all()
    question = Question(axes, wanted, noise, history)
    comparison = compare([load(folder) for folder in run_folders], question, conditions)
    _show(comparison, markdown=markdown, json=json, output=output)
    return comparison.exit_code


def _show(comparison: Comparison, *, markdown: bool, json: bool, output: Path | None) -> None:
    """Write the page, unless only text for another program is wanted, and print the comparison."""
    from harness.report import compare as report

    page = output if markdown or json else output or report.default_page(comparison)
    if page:
        report.write_output(page, report.as_html(comparison))
    if markdown or json:
        text = report.as_json(comparison) if json else report.as_markdown(comparison)
        Console(emoji=False).print(text, highlight=False, markup=False, soft_wrap=True)
        return
    for line in report.run_lines(comparison):
        show(line)
    show("")
    for title, content in report.cell_tables(comparison):
        show_table(content, title)
    for line in report.sentences(comparison):
        show(line, wrap=True)
    show(f"Page: {page}")


@command
def history_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of runs, such as results/.")],
    cell: Cell = None,
    output: Picture = None,
) -> int:
    """Draw the throughput of cells over all runs below FOLDER; needs neither torch nor ray."""
    wanted = parse_cells(cell)
    from harness.report.history import write_history

    path = output or folder / "history.png"
    tables, said = write_history(folder, wanted, path)
    show("")
    for title, content in tables:
        show_table(content, title)
    for line in said:
        show(line, wrap=True)
    show(f"Figure: {path}")
    return 0
