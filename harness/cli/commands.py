"""The command ``harness``: its subcommands, and ``harness list``, which imports no torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from harness.cli import run_folder
from harness.cli.arguments import command, show, versions
from harness.cli.compare import compare_command, history_command
from harness.cli.experiment_file import doctor_command, plan_command, run_command
from harness.cli.init import init_command
from harness.errors import ExperimentError, nearest


def lists_of_names() -> Mapping[str, Sequence[tuple[str, ...]]]:
    """Return the headings and rows of each list that ``harness list`` shows."""
    from harness.config.builtin_workloads import BUILTIN_WORKLOADS
    from harness.config.doctor_checks import LOOKS_AT
    from harness.config.strategy_traits import BUILTIN_TRAITS

    own = "package.module:ClassName"
    data = {
        name: ", ".join(each.data_names) + ", ./a/folder" * each.folders for name, each in BUILTIN_WORKLOADS.items()
    }
    options = {name: ", ".join(traits.options.model_fields) for name, traits in BUILTIN_TRAITS.items()}
    return {
        "workloads": [
            ("workload", "what it trains", "data"),
            *((name, workload.summary, data[name]) for name, workload in BUILTIN_WORKLOADS.items()),
            (own, "a class of your own beside the experiment file; see harness init", ""),
        ],
        "models": [
            ("workload", "models"),
            *((name, ", ".join(workload.models)) for name, workload in BUILTIN_WORKLOADS.items()),
            (own, "what its __init__ accepts as `model`"),
        ],
        "strategies": [
            ("strategy", "what it is", "options, as in ddp.bucket_cap_mb"),
            *((name, traits.summary, options[name]) for name, traits in BUILTIN_TRAITS.items()),
            (own, "a subclass of harness.train.strategies.base.Strategy", ""),
        ],
        "checks": [("check of the doctor", "what it looks at"), *LOOKS_AT.items()],
    }


@command
def list_command(
    what: Annotated[str, typer.Argument(metavar="workloads|models|strategies|checks", help="What to list.")],
) -> int:
    """List the names that an experiment file may use: workloads, models, strategies; or the doctor's checks."""
    lists = lists_of_names()
    if what not in lists:
        raise ExperimentError("harness list", [f"got {what!r}; {nearest(what, lists)}"])
    headings, *rows = lists[what]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False, markup=False)
    return 0


COMMANDS: dict[str, Callable[..., None]] = {
    "init": init_command,
    "list": list_command,
    "plan": plan_command,
    "doctor": doctor_command,
    "run": run_command,
    "report": run_folder.report_command,
    "compare": compare_command,
    "history": history_command,
    "predict": run_folder.predict_command,
    "decide": run_folder.decide_command,
    "export": run_folder.export_command,
    "evaluate": run_folder.evaluate_command,
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


def run(name: str | None) -> None:
    """Run the command ``harness``, or one subcommand as a program of its own, such as ``python -m harness.run``."""
    warnings.filterwarnings("ignore")  # of libraries
    os.environ["MPLBACKEND"] = "Agg"  # matplotlib needs no display, and uses none if there is one
    if name is None:
        app(prog_name="harness")
    else:
        program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        program.command()(COMMANDS[name])
        program()
