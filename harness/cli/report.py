"""``harness report``: tables, figures and report of a run folder, made anew."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.common import NoUserCode, RunArgument, away_from_current_folder, exit_code_of, show
from harness.errors import RunFolderError
from harness.system.uri import is_uri

Local = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="With a URI: the folder below which the run is copied. Default: results."),
]


def report_command(run_folder: RunArgument, local: Local = None, no_user_code: NoUserCode = False) -> None:
    """Rebuild tables, figures and report of RUN_FOLDER; needs neither torch nor ray. A URI is copied down first."""
    below = (local or Path("results")).absolute() if no_user_code else local or Path("results")
    if no_user_code and not is_uri(run_folder):
        run_folder = str(Path(run_folder).absolute())

    def work() -> int:
        with away_from_current_folder() if no_user_code else nullcontext():
            if local is not None and not is_uri(run_folder):
                raise RunFolderError("--local: it is where the run of a URI is copied; leave it out")
            from harness.record.folder import RunFolder
            from harness.record.mirror import on_this_machine

            folder = RunFolder.open(on_this_machine(run_folder, below))  # before what draws is imported
            from harness.report.html import write_report

            results = write_report(folder.path)
        show(f"Report: {results.folder.report}")
        return 0

    raise typer.Exit(exit_code_of(work))
