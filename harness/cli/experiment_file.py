"""``harness run``, ``harness plan`` and ``harness doctor``: the commands that take an experiment file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from harness.cli import arguments
from harness.errors import Collected, ExperimentError
from harness.system.process import INTERRUPTED, UNSETTLED

if TYPE_CHECKING:
    from harness.run.request import Places, Request

Command = TypeVar("Command", bound=Callable[..., None])

File = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file (YAML).")]
OptionalFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE", help="The experiment file (YAML); not needed with --resume FOLDER while it is unchanged."
    ),
]
Links = Annotated[
    bool, typer.Option("--links", help="Measure links and collectives, up to 60 s a placement, instead; recorded.")
]


@dataclass(frozen=True)
class Options:
    """The options of the commands, as they are given; ``_with_options`` gives a command some of them."""

    address: Annotated[
        str | None,
        typer.Option(envvar="RAY_ADDRESS", help="A Ray cluster, HOST:PORT of its head. Without it: this machine."),
    ] = None
    assume: Annotated[
        str | None,
        typer.Option(metavar="NODESxGPUS[:NAME]", help="Plan for an assumed cluster, such as 2x8:H100-80GB, and stop."),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, its time and cost, and stop; no Ray is started.")
    ] = False
    resume: Annotated[
        str | None,
        typer.Option(metavar="FOLDER|auto", help="Resume an earlier run of FILE; auto: its newest unfinished one."),
    ] = None
    add_blocks: Annotated[
        int,
        typer.Option(min=0, max=1000, metavar="N", help="With --resume: N more blocks of throughput than the run has."),
    ] = 0
    improve: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Then try options on the best cell, for TIME such as 5m, and confirm the best."
        ),
    ] = None
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URI",
            help="The folder of run folders (default: results); or a store to which each trial is sent: "
            "s3://BUCKET/FOLDER.",
        ),
    ] = None
    local: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With a URI: the folder of run folders on this machine. Default: results."),
    ] = None
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Estimate the time from this run; else from the newest in --output with these cells.",
        ),
    ] = None
    only: Annotated[str | None, typer.Option(help="A part of the grid only: strategy=ddp,devices=2")] = None
    no_user_code: arguments.NoUserCode = False
    preflight: Annotated[
        bool, typer.Option("--preflight/--no-preflight", help="First run the doctor's checks on each kind of cell.")
    ] = True
    inline: Annotated[
        bool,
        typer.Option("--inline", help="For a debugger: one rank in this process, without Ray; its rows are marked."),
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the summary only.")] = False
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Print every epoch, the tables and what to know of the numbers, and in a terminal every trial.",
        ),
    ] = False
    memory: Annotated[
        bool, typer.Option("--memory", help="In a plan: whether each cell fits into memory; runs the workload's code.")
    ] = False


UNCHANGED = ("address", "dry_run", "add_blocks", "preflight", "inline", "quiet", "verbose", "memory", "no_user_code")
"""The options that a request has as they are given."""


def _carry_out(act: Literal["run", "doctor", "links"], file: Path | None, **options: Any) -> None:
    """Read the experiment in ``file``, act on it with a console, and exit with the exit code.

    A plan does without the report and its libraries.
    """

    def work() -> int:
        from harness.run.request import read_experiment

        request, found = _request_of(file, Options(**options))
        experiment = read_experiment(request, found)
        with arguments.away_from_current_folder(request.no_user_code):  # for the imports of the console too
            from harness.run.console import ConsoleSink, Lasting

            with ConsoleSink(Lasting(), quiet=request.quiet, verbose=request.verbose, live=not request.inline) as sink:
                if act == "doctor":
                    from harness.run.doctor import run_doctor as carry_out
                elif act == "links":
                    from harness.run.doctor import run_links as carry_out
                elif request.plans_only:
                    from harness.run.dry_run import show_plan as carry_out
                else:
                    from harness.run.improve import run_and_improve as carry_out
                if experiment.seeks_batches:
                    from harness.run.largest_batch import with_largest_batches

                    search = act == "run" and not request.plans_only
                    experiment = with_largest_batches(request, experiment, sink, search=search)
                return carry_out(request, experiment, sink)

    raise typer.Exit(arguments.exit_code_of(work, UNSETTLED if act == "run" else INTERRUPTED))


def _request_of(file: Path | None, options: Options) -> tuple[Request, Collected]:
    """Return the Request of a command line, and the mistakes in its options; raises HarnessError."""
    from harness.run.request import Places, Request, places_of

    found, away = Collected(), options.no_user_code  # the command then leaves the current folder
    nowhere = Places(Path("results"), None, None)  # until every mistake is found
    places = found.value(lambda: places_of(options.output, options.local, options.resume, absolute=away)) or nowhere
    assumed = found.value(lambda: None if options.assume is None else arguments.parse_assumed(options.assume))
    wanted = found.value(lambda: {} if options.only is None else arguments.parse_only(options.only)) or {}
    time = options.improve
    improve_s = found.value(lambda: None if time is None else arguments.parse_time(time, "--improve"))
    here = Path.absolute if away else Path
    return Request(
        file=here(_file_of(file, places, found)),
        assumed=assumed,
        improve=improve_s,
        **places._asdict(),
        like=here(options.like) if options.like else None,
        only=wanted,
        **{name: getattr(options, name) for name in UNCHANGED},
    ), found


def _file_of(file: Path | None, places: Places, found: Collected) -> Path:
    """Return FILE, else that of the run that is resumed; raises HarnessError with all mistakes that are ``found``."""
    from harness.run.request import AUTO

    if file:
        return file
    with found.also():
        run_folder = None if places.store else places.resume
        if run_folder is None or run_folder == AUTO:
            problem = (
                "is missing; give an experiment file (harness init writes one), or --resume RUN_FOLDER (no URI) alone"
            )
            raise ExperimentError("FILE", [problem])
        from harness.record.folder import RunFolder
        from harness.run.provenance import file_to_resume

        return file_to_resume(run_folder, RunFolder.open(run_folder).environment().get("invocations", []), sys.path)
    found.raise_all()
    raise AssertionError


def _with_options(*names: str) -> Callable[[Command], Command]:
    """Give a command that takes ``**options`` the options of ``Options`` with these names; without names all."""

    def with_options(command: Command) -> Command:
        known = inspect.signature(Options, eval_str=True).parameters.values()
        own = inspect.signature(command, eval_str=True).parameters.values()
        wanted = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
        wanted += [parameter for parameter in known if not names or parameter.name in names]
        vars(command)["__signature__"] = inspect.Signature(wanted)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in wanted}
        return command

    return with_options


@_with_options()
def run_command(file: OptionalFile = None, **options: object) -> None:
    """Run the experiment in FILE and write tables, figures and a report."""
    _carry_out("run", file, **options)


@_with_options("address", "assume", "like", "output", "only", "no_user_code", "memory")
def plan_command(file: File, **options: object) -> None:
    """Show the plan of a run of FILE; start nothing."""
    _carry_out("run", file, dry_run=True, **options)


@_with_options("address", "output", "local", "only", "no_user_code", "quiet")
def doctor_command(file: File, links: Links = False, **options: object) -> None:
    """Check, before any measurement, that FILE would measure what it says; record nothing."""
    _carry_out("links" if links else "doctor", file, **options)
