"""``harness predict``: step times of more devices than a run measured, from what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from harness.cli.common import RunArgument, exit_code_of, show
from harness.errors import PredictionError

if TYPE_CHECKING:
    import pandas as pd

Devices = Annotated[str, typer.Option(metavar="N,N...", help="The numbers of devices to predict.")]
Nodes = Annotated[
    str | None,
    typer.Option(metavar="N,N...", help="The nodes of each of them. Default: as few as hold the devices."),
]
LinksOf = Annotated[
    Path | None,
    typer.Option(
        "--links",
        metavar="FOLDER_OR_FILE",
        help="Collectives of a further measurement: the run folder of harness doctor FILE --links, or its "
        "tables/collectives.csv.",
    ),
]
Far = Annotated[bool, typer.Option("--far", help="Predict more than 8 times the largest measured size, marked.")]
FitUpTo = Annotated[
    int | None, typer.Option("--fit-up-to", metavar="N", min=1, help="Predict from sizes of at most N devices.")
]


def predict_command(
    run_folder: RunArgument,
    devices: Devices,
    nodes: Nodes = None,
    links: LinksOf = None,
    far: Far = False,
    fit_up_to: FitUpTo = None,
) -> None:
    """Predict step times for more devices than RUN_FOLDER measured, with 95 % intervals; measures nothing."""

    def work() -> int:
        from harness.analysis.prediction import Asked, read_links
        from harness.analysis.results import load, predict
        from harness.cli.values import parse_numbers

        numbers = parse_numbers(devices, "--devices")
        asked = Asked(numbers, parse_numbers(nodes, "--nodes") if nodes else (), far=far, most_fitted=fit_up_to)
        asked.check()
        results = load(run_folder)
        if results.exchanges.empty:
            raise PredictionError(
                f"{run_folder}: recorded no exchanges, from which steps are predicted; measure ddp or fsdp on several "
                "devices with throughput.explain: true and this version"
            )
        further = read_links(links, results.collectives) if links else None
        table = predict(results, asked, further)
        _show(table, numbers)
        files = _draw(results.folder.figures, table)
        show(f"Figure: {', '.join(map(str, files))}" if files else "No figure: nothing was predicted.")
        return 0

    raise typer.Exit(exit_code_of(work))


def _show(table: pd.DataFrame, devices: tuple[int, ...]) -> None:
    from harness.report.row import rows_of
    from harness.report.tables.prediction import family_label, measured_alone, prediction_table, refusals
    from harness.run.console import rich_table

    for _, family in table.groupby("family_id", sort=False):
        content = prediction_table(family, narrow=True)
        if content.rows:
            Console().print(rich_table(content, family_label(rows_of(family)[0])), "")
    for reason in [*refusals(table), *measured_alone(table, devices)]:
        show(reason)


def _draw(folder: Path, table: pd.DataFrame) -> list[Path]:
    from harness.report.figures.prediction import write_prediction

    return write_prediction(folder, table)
