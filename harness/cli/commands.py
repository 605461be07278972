"""The command ``harness`` and its subcommands, each in a file of this package."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from harness.cli.arguments import show, versions
from harness.cli.compare import compare_command, history_command
from harness.cli.experiment import doctor_command, plan_command, run_command
from harness.cli.init import init_command
from harness.cli.listing import list_command
from harness.cli.results import evaluate_command, export_command, predict_command, report_command

COMMANDS: dict[str, Callable[..., None]] = {
    "init": init_command,
    "list": list_command,
    "plan": plan_command,
    "doctor": doctor_command,
    "run": run_command,
    "report": report_command,
    "compare": compare_command,
    "history": history_command,
    "predict": predict_command,
    "export": export_command,
    "evaluate": evaluate_command,
}

BEGIN = "Begin with: harness init QUESTION, which writes FILE; harness plan FILE; harness run FILE."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, epilog=BEGIN)


def _print_versions(wanted: bool) -> None:
    if wanted:
        show(versions())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Measure how PyTorch training scales, and what limits it."""


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """The command ``harness`` with its subcommands."""
    _quiet_libraries()
    app(prog_name="harness")


def single(name: str) -> None:
    """Run one command as a program of its own, such as ``python -m harness.run``."""
    _quiet_libraries()
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(COMMANDS[name])
    program()


def _quiet_libraries() -> None:
    """Ignore the warnings of libraries; have matplotlib need no display, or use one if there is one."""
    warnings.filterwarnings("ignore")
    os.environ["MPLBACKEND"] = "Agg"
