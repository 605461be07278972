"""``harness export``: a run for the places where a team looks."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli.common import RunFolderArgument, exit_code_of
from harness.errors import HarnessError

Markdown = Annotated[bool, typer.Option("--markdown", help="Print the verdict as Markdown, for a pull request.")]


def export_command(run_folder: RunFolderArgument, markdown: Markdown = False) -> None:
    """Print the verdict on RUN_FOLDER in another format, from its records; works on old runs too."""

    def work() -> int:
        if not markdown:
            raise HarnessError("harness export: name a format; allowed: --markdown")
        from harness.analysis.results import load
        from harness.report.markdown import verdict_lines
        from harness.report.verdict import make_verdict

        results = load(run_folder)
        results.folder.check()
        for line in verdict_lines(results.experiment.name, make_verdict(results)):
            typer.echo(line)
        return 0

    raise typer.Exit(exit_code_of(work))
