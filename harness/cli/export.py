"""``harness export``: a run for the places where a team looks."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli.common import RunArgument, exit_code_of, show
from harness.errors import ExportError

Markdown = Annotated[bool, typer.Option("--markdown", help="Print the verdict as Markdown, for a pull request.")]
Mlflow = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="URI",
        help="Write to an MLflow server, or a folder: one run, and below it one for each cell.",
    ),
]


def export_command(run_folder: RunArgument, markdown: Markdown = False, mlflow: Mlflow = None) -> None:
    """Export RUN_FOLDER from its records to Markdown or MLflow; works on old runs too."""

    def work() -> int:
        if markdown == (mlflow is not None):
            wrong = "give one of both" if markdown else "name a target"
            raise ExportError(f"harness export: {wrong}; allowed: --markdown, --mlflow URI")
        from harness.analysis.results import load

        results = load(run_folder)
        results.folder.check()
        if mlflow is not None:
            from harness.report.mlflow_export import export_to_mlflow

            show(export_to_mlflow(results, mlflow))
            return 0
        from harness.report.markdown import verdict_lines
        from harness.report.verdict import make_verdict

        for line in verdict_lines(results.experiment.name, make_verdict(results)):
            typer.echo(line)
        return 0

    raise typer.Exit(exit_code_of(work))
