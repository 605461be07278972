"""``harness report``: tables, figures and report of a run folder, made anew."""

from __future__ import annotations

from contextlib import nullcontext

import typer

from harness.cli.common import NoUserCode, RunFolderArgument, away_from_current_folder, exit_code_of, show


def report_command(run_folder: RunFolderArgument, no_user_code: NoUserCode = False) -> None:
    """Rebuild tables, figures and report of RUN_FOLDER; needs neither torch nor ray."""

    if no_user_code:
        run_folder = run_folder.absolute()

    def work() -> int:
        with away_from_current_folder() if no_user_code else nullcontext():
            from harness.record.folder import RunFolder

            RunFolder.open(run_folder)  # before what draws is imported
            from harness.report.html import write_report

            results = write_report(run_folder)
        show(f"Report: {results.folder.report}")
        return 0

    raise typer.Exit(exit_code_of(work))
