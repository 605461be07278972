"""What commands share: their exit codes, their arguments, versions, and one message for an error."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, chdir, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

import typer
from rich.console import Console

from harness.errors import (
    ClusterLostError,
    ComparisonError,
    ExperimentError,
    HarnessError,
    InternalError,
    PredictionError,
    WriteError,
)
from harness.system import sanitize
from harness.system.files import PACKAGE_FOLDER, package_version
from harness.system.process import INTERRUPTED, handle_signals
from harness.system.sanitize import escape_control

if TYPE_CHECKING:
    from harness.config.sections import AssumedLink, Target
    from harness.config.values import PlainValue
    from harness.plan.inventory import Inventory
    from harness.report.tables.text import TextTable

FAILED, BAD_INPUT = 1, 2
Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")

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
        return FAILED if isinstance(error, (ClusterLostError, InternalError, WriteError)) else BAD_INPUT
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


def show(text: str, *, wrap: bool = False) -> None:
    """Print text without markup or control characters of its own; ``wrap``: in lines as wide as the terminal."""
    Console().print(escape_control(text), highlight=False, markup=False, soft_wrap=not wrap)


def show_table(content: TextTable, title: str) -> None:
    """Print a table below its title; nothing without rows."""
    from harness.run.console import rich_table

    if content.rows:
        Console().print(rich_table(content, title), "")


def away_from_current_folder(no_user_code: bool) -> AbstractContextManager[None]:
    """With --no-user-code leave the current folder: Ray's workers look for modules there, matplotlib for settings."""
    return chdir(PACKAGE_FOLDER.parent) if no_user_code else nullcontext()


def versions() -> str:
    """Return the versions of the harness, Python, torch and ray; imports none of them."""
    harness, torch, ray = (package_version(name) or "not installed" for name in ("harness", "torch", "ray"))
    return f"harness {harness} (Python {platform.python_version()}, torch {torch}, ray {ray})"


def parse_assumed(text: str) -> Inventory:
    """Return the inventory of '2x8' or '2x8:H100-80GB', two nodes of eight GPUs; raises ExperimentError."""
    from harness.config.known_hardware import device_named
    from harness.plan.inventory import Inventory

    size, colon, name = text.partition(":")
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,3})", size)
    if not match or int(match[1]) == 0:
        allowed = "NODESxGPUS such as 1x8 or 2x8, or with a device, 2x8:H100-80GB"
        raise ExperimentError("--assume", [f"got {text[:80]!r}; allowed: {allowed}"])
    nodes, gpus = int(match[1]), int(match[2])
    if not colon:
        return Inventory.assume(nodes, gpus)
    try:
        device = device_named(name)
    except ValueError as error:
        raise ExperimentError("--assume", [str(error)]) from None
    if not gpus:
        raise ExperimentError("--assume", [f"got {text[:80]!r}: no GPU that is one; allowed: at least 1 a node"])
    return Inventory.assume(nodes, gpus, device=device)


def parse_link(text: str | None) -> AssumedLink | None:
    """Return the link of '8x infiniband-ndr'; raises PredictionError."""
    from pydantic import ValidationError

    from harness.config.problems import describe_errors
    from harness.config.sections import AssumedLink

    if text is None:
        return None
    try:
        return AssumedLink.model_validate(text)
    except ValidationError as error:
        raise PredictionError(f"--between-nodes: {'; '.join(describe_errors(error, AssumedLink))}") from None


def parse_time(text: str, option: str) -> float:
    """Return 300.0 for '5m'; raises ExperimentError unless it is a time above 0."""
    from pydantic import TypeAdapter, ValidationError

    from harness.config.values import Seconds

    try:
        seconds: float = TypeAdapter(Seconds).validate_python(text)
    except ValidationError:
        problem = f"got {text[:80]!r}; allowed: a time above 0 such as '90s', '5m' or '1h'"
        raise ExperimentError(option, [problem]) from None
    return seconds


def parse_target(text: str) -> Target:
    """Return the target of 'val_accuracy=0.95', or with >= or <=; = is at most of a loss or a perplexity.

    Raises PredictionError.
    """
    from harness.config.sections import Target

    number = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?"
    match = re.fullmatch(rf"\s*((?:val|train|reported)_\w{{1,80}})\s*(<=|>=|=)\s*({number})\s*", text)
    metric, sign, value = match.groups() if match else ("", "", "nan")
    rises, falls = metric.endswith(("accuracy", "psnr", "iou")), metric.endswith(("loss", "perplexity"))
    if not math.isfinite(float(value)) or (sign == "=" and not rises and not falls):
        raise PredictionError(
            f"--target: got {text[:80]!r}; allowed: METRIC=VALUE, such as val_accuracy=0.95 or val_loss<=0.3"
        )
    at_most = sign == "<=" or (sign == "=" and falls)
    return Target(metric=metric, **{"at_most" if at_most else "at_least": float(value)})


def parse_only(text: str, option: str = "--only") -> dict[str, PlainValue]:
    """Return {'strategy': ['ddp'], 'devices': [2]} for 'strategy=ddp,devices=2'; an axis may have several values."""
    from harness.config.axes import check_filter
    from harness.config.yaml_source import parse_value

    wanted: dict[str, list[PlainValue]] = {}
    for part in re.split(r",(?![^\[]*\])", text):  # at commas, but not inside [0, 1]
        name, equals, value = part.partition("=")
        try:
            read = [parse_value(value, source=option)] if equals and value.strip() else []
        except ExperimentError:
            read = []
        if not read:
            raise ExperimentError(option, [f"got {part!r}; allowed: AXIS=VALUE, several joined by commas"])
        wanted.setdefault(name.strip(), []).extend(read)
    try:
        return check_filter({**wanted})
    except ValueError as error:
        raise ExperimentError(option, [str(error)]) from None


def parse_each(texts: Iterable[str], option: str, parse: Callable[[str], Value]) -> tuple[Value, ...]:
    """Return the different values of an option that may be repeated; raises ComparisonError."""
    try:
        return tuple(dict.fromkeys(map(parse, texts)))
    except ValueError as error:
        raise ComparisonError(f"{option}: {error}") from None


def parse_share(text: str, option: str) -> float:
    """Return 0.05 for '5%', '5 %' or '0.05'; raises ComparisonError unless it is above 0 and below 1."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share < 1:
        raise ComparisonError(f"{option}: got {text!r}; allowed: a share above 0 and below 1, such as 5% or 0.05")
    return share


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Return (16, 32) for '16,32'; raises PredictionError unless they are different whole numbers above 0."""
    numbers = tuple(int(part) for part in text.split(",") if re.fullmatch(r"\s*[0-9]{1,7}\s*", part))
    if len(numbers) != len(text.split(",")) or not all(numbers):
        raise PredictionError(
            f"{option}: got {text!r}; allowed: whole numbers above 0, joined by commas, such as 16,32"
        )
    return numbers


def parse_cells(text: str | None) -> str | dict[str, PlainValue] | None:
    """Return the beginning of a cell's id, of 4 hexadecimal digits or more, or the axes of 'strategy=ddp,devices=2'."""
    if text is None or re.fullmatch(r"[0-9a-f]{4,12}", text):
        return text
    return parse_only(text, "--cell")
