"""Readers of a run folder: text, JSON, recorded trials. No content is executed; every error names its file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Annotated, TypeVar, cast, get_args, get_type_hints

import pyarrow as pa
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json
from typing_extensions import TypedDict

from harness.config.axes import LATER
from harness.errors import RunFolderError
from harness.plan.comparison import options_text
from harness.plan.rows import Json, TrialLine
from harness.plan.run_environment import NodeFacts, RunEnvironment

MOST_INVOCATIONS = 100_000
T = TypeVar("T")


def find_run_folders(folder: Path) -> list[Path]:
    """Return the run folders below a folder, itself among them, by path; links are not followed."""
    found = []
    for here, folders, files in os.walk(folder):
        if {"plan.json", "experiment.resolved.yaml"} <= set(files):
            found.append(Path(here))
            folders.clear()
    return sorted(found)


def read_object(path: Path) -> Json:
    """Return a file's JSON object; raises RunFolderError."""
    with naming_file(path):
        return object_of(path.read_bytes())


@contextmanager
def naming_file(path: Path, part: str = "") -> Iterator[None]:
    """Convert exceptions raised in the block to a RunFolderError that names the file, and ``part`` of it."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, pa.ArrowException) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())[:200]
        cause = f"{type(error).__name__}: {reason}"
        raise RunFolderError(f"{path}: {part}is damaged or incomplete ({cause})") from error


def object_of(data: bytes) -> Json:
    content = decode_json(data)
    if not isinstance(content, dict):
        raise TypeError(f"expected a JSON object, got {type(content).__name__}")
    return content


def encode_json(value: object) -> str:
    """Return a value as one line of JSON, with NaN and Infinity as in Python's json; may raise TypeError."""
    try:
        return to_json(value, inf_nan_mode="constants").decode()
    except PydanticSerializationError:  # a lone surrogate, for example, which JSON can hold and UTF-8 cannot
        return json.dumps(value)


def decode_json(data: bytes) -> object:
    """Return the value of a JSON text, with ``?`` for each lone surrogate, which no table can hold.

    Raises ValueError, or RecursionError.
    """
    try:
        return from_json(data)
    except ValueError:
        content = json.loads(data)
        return json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))


class _LaunchedGroup(TypedDict):
    group_id: str
    invocation: int
    whole_s: float
    nodes: list[NodeFacts]


class _Environment(TypedDict, total=False):
    groups: list[_LaunchedGroup]


class _Group(TypedDict):
    trials: list[str]
    block: int


class _CannotRun(TypedDict):
    cell_id: str
    strategy: str
    devices: int
    per_device_batch_size: int | None
    global_batch_size: int


class _Impossible(_CannotRun):
    reason: str


class _Machine(TypedDict):
    devices_per_node: list[int]


class _Plan(TypedDict):
    machine: _Machine
    groups: list[_Group]
    skipped: list[_CannotRun]
    impossible: list[_Impossible]


class _Entry(TypedDict, total=False):
    group: Json
    invocation: Annotated[int, Field(ge=0, le=MOST_INVOCATIONS)]
    facts: Json


_ENTRY = TypeAdapter(_Entry)
ENVIRONMENT = TypeAdapter(_Environment)
PLAN = TypeAdapter(_Plan)
"""The part of environment.jsonl and of plan.json that tables and report are made from."""


def read_environment(path: Path) -> RunEnvironment:
    """Return the entries of environment.jsonl together: the worker groups, and of each invocation its latest facts.

    An entry that a crash cut short is skipped. Raises RunFolderError.
    """
    groups: list[Json] = []
    invocations: list[Json] = []
    with naming_file(path):
        *lines, rest = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines if _torn(rest, _ENTRY_HEADS) else [*lines, rest], start=1):
        with naming_file(path, f"line {number} "):
            entry = validated(_ENTRY, object_of(line))
            if "group" in entry:
                groups.append(entry["group"])
            else:
                invocations.extend({} for _ in range(entry["invocation"] + 1 - len(invocations)))
                invocations[entry["invocation"]].update(entry["facts"])
    return cast(RunEnvironment, {"invocations": invocations, "groups": groups})


def validated(adapter: TypeAdapter[T], content: object) -> T:
    """Return the content, validated; raises ValueError, which names the place, of a list that in its item."""
    try:
        return adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = first["loc"][isinstance(content, list) :]
        raise ValueError(f"{'.'.join(map(str, place))}: {first['msg']}") from None


_HEADS = (b'{"trial_id":"', b'{"trial_id": "')
_ENTRY_HEADS = (b'{"group":', b'{"invocation":')
"""First bytes of every line of trials.jsonl and of environment.jsonl; they identify a line that a crash cut short."""
_TRIAL_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_LINES = TypeAdapter(list[TrialLine], config=ConfigDict(strict=True, extra="allow"))
_ABSENT = {name: None for name, kind in get_type_hints(TrialLine).items() if NoneType in get_args(kind)} | LATER
"""Columns that a line may lack: those that may be None, and later axes, with the value that they then have."""


def read_lines(path: Path) -> list[TrialLine]:
    """Return the lines of trials.jsonl; raises RunFolderError.

    Lines that a crash cut short are skipped: the bytes after the last newline, or a partial line that a later
    invocation ended with a newline.
    """
    with naming_file(path):
        *lines, rest = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        with naming_file(path, f"line {number} "):
            try:
                row = object_of(line)
            except (ValueError, RecursionError):
                if _torn(line):
                    continue
                raise
            rows.append(_checked({**_ABSENT, **with_options(row)}))
    if not _torn(rest):
        raise RunFolderError(f"{path}: is damaged or incomplete (the last line is not a recorded trial)")
    return rows


def _torn(line: bytes, heads: Sequence[bytes] = _HEADS) -> bool:
    """Return whether a line is empty or only the beginning of a trial's; trailing zeros of some file systems aside."""
    written = line.rstrip(b"\0")
    return any(head.startswith(written[: len(head)]) for head in heads)


def with_options(row: Json) -> Json:
    """Return a row of a file with its options as a mapping; in the file they are text, the JSON of an object."""
    text = row.get("options")
    return {**row, "options": object_of(text.encode())} if isinstance(text, str) else row


def for_file(row: Json) -> Json:
    """Return a trial's row as it stands in a file, with its options as text."""
    return {**row, "options": options_text(row["options"])}


def _checked(line: Json) -> TrialLine:
    """Return the line of a trial, its values validated against the types of their columns; raises ValueError."""
    if not (isinstance(line.get("trial_id"), str) and _TRIAL_ID.fullmatch(line["trial_id"])):
        raise ValueError(f"trial_id: got {str(line.get('trial_id'))[:40]!r}; allowed: {_TRIAL_ID.pattern}")
    (trial,) = validated(_LINES, [line])
    check_integers((trial, trial["facts"], *(trial["links"] or ())))
    return trial


def check_integers(rows: Sequence[Mapping[str, object]]) -> None:
    """Raise ValueError, which names the column, if a row has an integer of more than 64 bits."""
    found = [value for row in rows for value in row.values() if type(value) is int]
    for value in (min(found), max(found)) if found else ():  # one by one they would take a third of a run's reading
        if not -(2**63) <= value < 2**63:
            name = next(name for row in rows for name, each in row.items() if each == value)
            raise ValueError(f"{name}: got an integer of more than 64 bits")
