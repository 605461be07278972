"""The command line: ``harness run``, ``harness plan``, ``harness doctor``, ``harness report``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from harness.cli.values import parse_assumed, parse_only
from harness.errors import HarnessError, InternalError, WriteError
from harness.system import sanitize
from harness.system.files import PACKAGE_FOLDER
from harness.system.sanitize import escape_control
from harness.system.signals import INTERRUPTED, handle_signals

if TYPE_CHECKING:
    from harness.config.experiment import Experiment
    from harness.run.console import ConsoleSink
    from harness.run.request import Request

FAILED, BAD_INPUT = 1, 2
Command = TypeVar("Command", bound=Callable[..., None])

File = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file (YAML).")]
Address = Annotated[
    str | None,
    typer.Option(envvar="RAY_ADDRESS", help="A Ray cluster, HOST:PORT of its head. Without it: this machine."),
]
Assume = Annotated[
    str | None, typer.Option(metavar="NODESxGPUS", help="Plan for an assumed cluster, such as 2x8, and stop.")
]
Only = Annotated[str | None, typer.Option(help="A part of the grid only: 'strategy=ddp,devices=2'.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop; no Ray is started.")]
Resume = Annotated[
    str | None,
    typer.Option(metavar="FOLDER|auto", help="Resume an earlier run of FILE; auto: its newest unfinished one."),
]
AddBlocks = Annotated[
    int, typer.Option(min=0, max=1000, metavar="N", help="With --resume: N more blocks of throughput than the run has.")
]
Output = Annotated[Path, typer.Option(help="The folder of run folders.")]
NoUserCode = Annotated[
    bool,
    typer.Option(
        "--no-user-code",
        help="Import nothing that FILE names or the current folder holds: for files from people you do not know.",
    ),
]
Preflight = Annotated[
    bool,
    typer.Option("--preflight/--no-preflight", help="Examine each kind of cell, first in its worker group (doctor)."),
]
Inline = Annotated[
    bool, typer.Option("--inline", help="For a debugger: one rank in this process, without Ray; its rows are marked.")
]
Links = Annotated[
    bool, typer.Option("--links", help="Measure links and collectives, up to 60 s a placement, instead; recorded.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the summary only.")]
RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="results/<experiment>/<time>-<id>")]

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False, no_args_is_help=True)


def _print_versions(wanted: bool) -> None:
    if wanted:
        from harness.cli.versions import versions

        Console().print(versions(), highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """The command line: ``harness run``, ``harness plan``, ``harness doctor``, ``harness report``."""


def _carry_out(
    act: Callable[..., int],
    file: File,
    address: Address = None,
    assume: Assume = None,
    dry_run: DryRun = False,
    resume: Resume = None,
    add_blocks: AddBlocks = 0,
    output: Output = Path("results"),
    only: Only = None,
    no_user_code: NoUserCode = False,
    preflight: Preflight = True,
    inline: Inline = False,
    quiet: Quiet = False,
) -> None:
    """Read the experiment in ``file``, act on it with a console, and exit with the exit code."""

    def work() -> int:
        from harness.run.request import Request, read_experiment, run_to_resume

        here = Path.absolute if no_user_code else Path  # the command then leaves the current folder
        request = Request(
            file=here(file),
            address=address,
            assumed=None if assume is None else parse_assumed(assume),
            dry_run=dry_run,
            resume=run_to_resume(resume, absolute=no_user_code),
            add_blocks=add_blocks,
            output=here(output),
            only={} if only is None else parse_only(only),
            no_user_code=no_user_code,
            preflight=preflight,
            inline=inline,
        )
        experiment = read_experiment(request)
        with _terminal(no_user_code=no_user_code, quiet=quiet, live=not inline) as sink:
            return act(request, experiment, sink)

    raise typer.Exit(exit_code_of(work))


def _examine(request: Request, experiment: Experiment, sink: ConsoleSink) -> int:
    from harness.run.doctor import run_doctor

    return run_doctor(request, experiment, sink)


def _measure_links(request: Request, experiment: Experiment, sink: ConsoleSink) -> int:
    from harness.run.doctor import run_links

    return run_links(request, experiment, sink)


def _run_or_plan(request: Request, experiment: Experiment, sink: ConsoleSink) -> int:
    """Plan or run; a plan does without the report and its libraries."""
    if request.plans_only:
        from harness.run.dry_run import show_plan

        return show_plan(request, experiment, sink)
    from harness.run.pipeline import run

    return run(request, experiment, sink)


def _with_options(*names: str) -> Callable[[Command], Command]:
    """Give a command that takes ``**options`` those of ``_carry_out`` with these names, all without names."""

    def with_options(command: Command) -> Command:
        _, *known = inspect.signature(_carry_out, eval_str=True).parameters.values()
        own = inspect.signature(command, eval_str=True).parameters.values()
        wanted = [parameter for parameter in known if not names or parameter.name in names]
        wanted += [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
        vars(command)["__signature__"] = inspect.Signature(wanted)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in wanted}
        return command

    return with_options


@app.command("run")
@_with_options()
def run_command(**options: Any) -> None:
    """Run the experiment in FILE and write tables, figures and a report."""
    _carry_out(_run_or_plan, **options)


@app.command("plan")
@_with_options("file", "address", "assume", "only", "no_user_code")
def plan_command(**options: Any) -> None:
    """Show the plan of a run of FILE; start nothing."""
    _carry_out(_run_or_plan, dry_run=True, **options)


@app.command("doctor")
@_with_options("file", "address", "output", "only", "no_user_code", "quiet")
def doctor_command(links: Links = False, **options: Any) -> None:
    """Check on real ranks whether FILE would measure what it says; nothing is recorded."""
    _carry_out(_measure_links if links else _examine, **options)


@app.command("report")
def report_command(run_folder: RunFolderArgument, no_user_code: NoUserCode = False) -> None:
    """Rebuild tables, figures and report of RUN_FOLDER; needs neither torch nor ray."""

    if no_user_code:
        run_folder = run_folder.absolute()

    def work() -> int:
        with _away() if no_user_code else nullcontext():
            from harness.record.folder import RunFolder

            RunFolder.open(run_folder)  # before what draws is imported
            from harness.report.html import write_report

            results = write_report(run_folder)
        text = escape_control(f"Report: {results.folder.report}")
        Console().print(text, highlight=False, markup=False, soft_wrap=True)
        return 0

    raise typer.Exit(exit_code_of(work))


def exit_code_of(work: Callable[[], int]) -> int:
    """Run ``work`` and return its exit code; a HarnessError is shown as one message, without a traceback."""
    try:
        with handle_signals():
            return work()
    except HarnessError as error:
        text = escape_control(sanitize.redact_text(str(error)))
        Console(stderr=True).print(f"error: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
        return FAILED if isinstance(error, (InternalError, WriteError)) else BAD_INPUT
    except KeyboardInterrupt:
        # CPython ends by SIGINT, whatever the exit code, once an interruption has left an exec() of a string, as
        # dataclasses and namedtuples use it; the next exec() takes that back
        exec("")
        return INTERRUPTED


def main() -> None:
    """The command ``harness`` with its subcommands."""
    _quiet_libraries()
    app()


def run_main() -> None:
    """``python -m harness.run``."""
    _quiet_libraries()
    _single(run_command)


def report_main() -> None:
    """``python -m harness.report``."""
    _quiet_libraries()
    _single(report_command)


def doctor_main() -> None:
    """``python -m harness.doctor``."""
    _quiet_libraries()
    _single(doctor_command)


def _single(command: Callable[..., None]) -> None:
    """Run one command as a program of its own."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(command)
    program()


@contextmanager
def _terminal(*, no_user_code: bool, quiet: bool, live: bool = True) -> Iterator[ConsoleSink]:
    """Yield the console of a command. With ``no_user_code`` its imports too take place outside the current folder."""
    with _away() if no_user_code else nullcontext():
        from harness.run.console import ConsoleSink, Lasting

        with ConsoleSink(Lasting(), quiet=quiet, live=live) as sink:
            yield sink


def _away() -> AbstractContextManager[None]:
    """Leave the current folder, in which Ray's workers look for modules and matplotlib for its settings."""
    return chdir(PACKAGE_FOLDER.parent)


def _quiet_libraries() -> None:
    """Ignore the warnings of libraries."""
    warnings.filterwarnings("ignore")
