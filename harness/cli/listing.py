"""``harness list``: the names that an experiment file may use, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from harness.cli.arguments import command
from harness.errors import ExperimentError, nearest

Row = tuple[str, ...]
What = Annotated[str, typer.Argument(metavar="workloads|models|strategies|checks", help="What to list.")]


def rows_of() -> Mapping[str, Sequence[Row]]:
    """Return the headings and rows of each list."""
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
def list_command(what: What) -> int:
    """List the names that an experiment file may use: workloads, models, strategies; or the doctor's checks."""
    lists = rows_of()
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
