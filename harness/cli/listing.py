"""``harness list``: the names that an experiment file may use, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from harness.cli.common import exit_code_of
from harness.errors import ExperimentError, nearest

Row = tuple[str, ...]
What = Annotated[str, typer.Argument(metavar="workloads|models|strategies|checks", help="What to list.")]


def _workloads() -> Iterator[Row]:
    from harness.config.builtin_workloads import BUILTIN_WORKLOADS

    yield "workload", "what it trains", "data"
    for name, workload in BUILTIN_WORKLOADS.items():
        folder = ", ./a/folder" if workload.folders else ""
        yield name, workload.summary, f"{', '.join(workload.data_names)}{folder}"
    yield "package.module:ClassName", "a class of your own beside the experiment file; see harness init", ""


def _models() -> Iterator[Row]:
    from harness.config.builtin_workloads import BUILTIN_WORKLOADS

    yield "workload", "models"
    for name, workload in BUILTIN_WORKLOADS.items():
        yield name, ", ".join(workload.models)
    yield "package.module:ClassName", "what its __init__ accepts as `model`"


def _strategies() -> Iterator[Row]:
    from harness.config.strategy_traits import BUILTIN_TRAITS

    yield "strategy", "what it is", "options, as in ddp.bucket_cap_mb"
    for name, traits in BUILTIN_TRAITS.items():
        yield name, traits.summary, ", ".join(traits.options.model_fields)
    yield "package.module:ClassName", "a subclass of harness.train.strategies.base.Strategy", ""


def _checks() -> Iterator[Row]:
    from harness.config.doctor_checks import LOOKS_AT

    yield "check of the doctor", "what it looks at"
    yield from LOOKS_AT.items()


LISTS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "workloads": _workloads,
    "models": _models,
    "strategies": _strategies,
    "checks": _checks,
}


def list_command(what: What) -> None:
    """List the names that an experiment file may use: workloads, models, strategies; or the doctor's checks."""

    def work() -> int:
        if what not in LISTS:
            raise ExperimentError("harness list", [f"got {what!r}; {nearest(what, LISTS)}"])
        headings, *rows = LISTS[what]()
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console().print(table, highlight=False, markup=False)
        return 0

    raise typer.Exit(exit_code_of(work))
