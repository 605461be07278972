"""``harness report``, ``export``, ``evaluate`` and ``predict``: commands that take a run folder."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import NoUserCode, RunArgument, away_from_current_folder, command, show, show_table
from harness.errors import ExportError, PredictionError, RunFolderError
from harness.system.uri import is_uri

if TYPE_CHECKING:
    import pandas as pd

    from harness.analysis.prediction.predictions import Asked
    from harness.analysis.results import Results

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
BetweenNodes = Annotated[
    str | None,
    typer.Option(
        metavar="LINK",
        help="The link between nodes to assume where none was measured: infiniband-ndr, or 8x infiniband-ndr for the "
        "ports of a node. Default: hardware.between_nodes of the file.",
    ),
]
Far = Annotated[bool, typer.Option("--far", help="Predict more than 8 times the largest measured size, marked.")]
FitUpTo = Annotated[
    int | None, typer.Option("--fit-up-to", metavar="N", min=1, help="Predict from sizes of at most N devices.")
]
PredictionFigure = Annotated[
    Path | None, typer.Option("--output", metavar="DIR", help="A folder for the figure. Default: no file is written.")
]
TargetOption = Annotated[
    str, typer.Option(metavar="METRIC=VALUE", help="The target: val_accuracy=0.95, or with <= or >= instead of =.")
]
DevicesToDecide = Annotated[
    str | None,
    typer.Option("--devices", metavar="N,N...", help="The numbers of devices; those not measured are predicted."),
]
Price = Annotated[float | None, typer.Option(min=1e-6, help="The price of a device for an hour; default: the file's.")]
Within = Annotated[str | None, typer.Option(metavar="TIME", help="The longest time, such as 8h.")]
Budget = Annotated[float | None, typer.Option(min=1e-6, help="The most money.")]
Local = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="With a URI: the folder below which the run is copied. Default: results."),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the verdict as Markdown, for a pull request.")]
Mlflow = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="URI",
        help="Write to an MLflow server, or a folder: one run, and below it one for each cell.",
    ),
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="RUN_FOLDER/checkpoints/TRIAL/epoch-N, or the folder of the trial.")
]
OwnFile = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="The experiment file, for a workload of your own.")
]


def _asked(devices: str | None, nodes: str | None, between_nodes: str | None, *, far: bool) -> Asked:
    """Return the sizes that the options ask for; raise what reading them raises."""
    from harness.analysis.prediction.predictions import Asked
    from harness.cli.arguments import parse_link, parse_numbers

    numbers = parse_numbers(devices, "--devices") if devices else ()
    of_nodes = parse_numbers(nodes, "--nodes") if nodes else ()
    asked = Asked(numbers, of_nodes, far=far, between=parse_link(between_nodes))
    asked.check()
    return asked


def _read_links(links: Path | None, results: Results) -> pd.DataFrame | None:
    from harness.analysis.prediction.collective_times import read_links

    return read_links(links, results.collectives) if links else None


@command
def predict_command(
    run_folder: RunArgument,
    devices: Devices,
    nodes: Nodes = None,
    links: LinksOf = None,
    between_nodes: BetweenNodes = None,
    far: Far = False,
    fit_up_to: FitUpTo = None,
    price: Price = None,
    output: PredictionFigure = None,
) -> int:
    """Predict steps, with 95 % intervals, and throughput on more devices than RUN_FOLDER measured; measures nothing."""
    from harness.analysis.results import load, predict

    asked = replace(_asked(devices, nodes, between_nodes, far=far), most_fitted=fit_up_to)
    results = load(run_folder)
    if results.exchanges.empty:
        raise PredictionError(
            f"{run_folder}: recorded no exchanges, from which steps are predicted; measure ddp or fsdp on several "
            "devices with throughput.explain: true and this version"
        )
    table = predict(results, asked, _read_links(links, results))
    from harness.report.row import rows_of
    from harness.report.tables.prediction import disagreements, family_label, measured_alone, prediction_table, refusals

    cost = results.experiment.cost
    price, currency = price or (cost.per_device_hour if cost else None), cost.currency if cost else ""
    for _, family in table.groupby("family_id", sort=False):
        content = prediction_table(family, narrow=True, price=price, currency=currency)
        show_table(content, family_label(rows_of(family)[0]))
    for reason in [*disagreements(table), *refusals(table), *measured_alone(table, asked.devices)]:
        show(reason)
    if output is None:
        return 0
    from harness.report.figures.prediction import write_prediction

    files = write_prediction(output, table)
    show(f"Figure: {', '.join(map(str, files))}" if files else "No figure: nothing was predicted.")
    return 0


@command
def decide_command(
    run_folder: RunArgument,
    target: TargetOption,
    devices: DevicesToDecide = None,
    price: Price = None,
    within: Within = None,
    budget: Budget = None,
    nodes: Nodes = None,
    links: LinksOf = None,
    between_nodes: BetweenNodes = None,
    far: Far = False,
) -> int:
    """Say how many devices to use, for how long and at what price, until RUN_FOLDER's training reaches a target."""
    from harness.analysis.results import load
    from harness.analysis.time_to_target import decision
    from harness.cli.arguments import parse_target, parse_time
    from harness.report.decide import NEEDS_PRICE, PILOT, Wish, decision_lines, decision_table, pilot, write_decision
    from harness.system.files import remove_all, replace_text

    for option, given in (("--nodes", nodes), ("--links", links), ("--between-nodes", between_nodes)):
        if given and not devices:
            raise PredictionError(f"{option}: is for sizes that were not measured; give them with --devices")
    wanted, within_s = parse_target(target), parse_time(within, "--within") if within else None
    asked = _asked(devices, nodes, between_nodes, far=far)
    results = load(run_folder)
    cost = results.experiment.cost
    price = price if price is not None else cost.per_device_hour if cost else None
    if budget is not None and price is None:
        raise PredictionError(f"--budget: {NEEDS_PRICE}")
    if not all(math.isfinite(value) for value in (price, budget) if value is not None):
        raise PredictionError("--price, --budget: got a value that is not finite; allowed: a number above 0")
    wish = Wish(price, cost.currency if cost else "", within_s, budget)
    table, works = decision(results, wanted, asked, price, _read_links(links, results))
    shown = f"{wanted.metric} {'>=' if wanted.at_least is not None else '<='} "
    shown += f"{wanted.at_least if wanted.at_least is not None else wanted.at_most:g}"
    show_table(decision_table(table, wish), f"Time and price to {shown}")
    evaluations = results.epochs["evaluation_s"].dropna()
    for line in decision_lines(table, works, wish, float(evaluations.mean()) if len(evaluations) else None):
        show(line)
    files = write_decision(results.folder.figures, table, wish, shown)
    if files:
        show(f"Figure: {', '.join(map(str, files))}")
    step, path = pilot(results, wanted, table, works, wish), results.folder.path / PILOT
    if step:
        replace_text(path, step.file)
        show(f"{step.why}\n{step.command}")
    else:
        remove_all([path])  # of an earlier call
    return 0


@command
def report_command(run_folder: RunArgument, local: Local = None, no_user_code: NoUserCode = False) -> int:
    """Rebuild tables, figures and report of RUN_FOLDER; needs neither torch nor ray. A URI is copied down first."""
    below = (local or Path("results")).absolute() if no_user_code else local or Path("results")
    if no_user_code and not is_uri(run_folder):
        run_folder = str(Path(run_folder).absolute())
    with away_from_current_folder(no_user_code):
        if local is not None and not is_uri(run_folder):
            raise RunFolderError("--local: it is where the run of a URI is copied; leave it out")
        from harness.record.folder import RunFolder
        from harness.record.mirror import on_this_machine

        folder = RunFolder.open(on_this_machine(run_folder, below))  # before what draws is imported
        from harness.report.html import write_report

        results = write_report(folder.path)
    show(f"Report: {results.folder.report}")
    return 0


@command
def export_command(run_folder: RunArgument, markdown: Markdown = False, mlflow: Mlflow = None) -> int:
    """Export RUN_FOLDER from its records to Markdown or MLflow; works on old runs too."""
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
    from harness.report.verdict import make_verdict, verdict_lines

    for line in verdict_lines(results.experiment.name, make_verdict(results)):
        typer.echo(line)
    return 0


@command
def evaluate_command(checkpoint: Checkpoint, file: OwnFile = None, no_user_code: NoUserCode = False) -> int:
    """Print the validation metrics of the model in CHECKPOINT, on one device of this machine."""
    here, beside = checkpoint.absolute(), file.absolute() if file else None
    with away_from_current_folder(no_user_code):
        from harness.run.evaluation import evaluate

        for name, value in sorted(evaluate(here, beside, no_user_code=no_user_code).items()):
            show(f"{name} {value:.6g}")
    return 0
