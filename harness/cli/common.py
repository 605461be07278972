"""What commands share: their exit codes, their arguments, versions, and one message for an error."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, chdir, nullcontext
from functools import partial, wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, ParamSpec

import typer
from rich.console import Console

from harness.errors import HarnessError, InternalError, WriteError
from harness.system import sanitize
from harness.system.files import PACKAGE_FOLDER
from harness.system.process import INTERRUPTED, handle_signals
from harness.system.sanitize import escape_control

FAILED, BAD_INPUT = 1, 2
Arguments = ParamSpec("Arguments")

RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN_FOLDER|URI", help="results/<experiment>/<time>-<id>; or URI/<experiment>/<time>-<id>"),
]
NoUserCode = Annotated[
    bool,
    typer.Option(
        "--no-user-code",
        help="Import nothing that FILE names or the current folder holds: for files from people you do not know.",
    ),
]


def exit_code_of(work: Callable[[], int], interrupted: int = INTERRUPTED) -> int:
    """Run ``work`` and return its exit code, ``interrupted`` after KeyboardInterrupt.

    A HarnessError is shown as one message, without a traceback.
    """
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
        return interrupted


def command(work: Callable[Arguments, int]) -> Callable[Arguments, None]:
    """Make a command of a function that returns an exit code."""

    @wraps(work)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> None:
        raise typer.Exit(exit_code_of(partial(work, *arguments, **options)))

    return run


def show(text: str) -> None:
    """Print text as it stands: without markup, line breaks or control characters of its own."""
    Console().print(escape_control(text), highlight=False, markup=False, soft_wrap=True)


def away_from_current_folder(no_user_code: bool) -> AbstractContextManager[None]:
    """With --no-user-code leave the current folder: Ray's workers look for modules there, matplotlib for settings."""
    return chdir(PACKAGE_FOLDER.parent) if no_user_code else nullcontext()


def versions() -> str:
    """Return the versions of the harness, Python, torch and ray; imports none of them."""
    parts = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in ("torch", "ray"))]
    return f"harness {_version('harness')} ({', '.join(parts)})"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
