"""JSON and lines of JSON: recorded trials as text, and read again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Any

from harness.errors import RunFolderError
from harness.plan.comparison import set_ids
from harness.plan.rows import SkipCode
from harness.record.reading import _check_objects, _object, naming_file
from harness.record.schema import TRIALS, WINDOWS

_HEADS = (b'{"trial_id":"', b'{"trial_id": "')
"""How every line begins, today and earlier, and so what is left of one that a crash cut short."""
_TRIAL_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_NEEDED = ("attempt", "cell_id", "kind", "purpose", "block", "invocation", "outcome", "strategy", "devices")
_WINDOW = ("rank", "window", "window_kind", "duration_s", "steps", "weight")
_DTYPES = {column.name: column.dtype for table in (WINDOWS, TRIALS) for column in table.columns}
_PYTHON: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "Int64": (int,),
    "Float64": (float, int),
    "boolean": (bool,),
}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The recorded trials in a file, brought up to today's version; raises RunFolderError.

    What a crash cut short does not count: the rest after the last newline, or a line that was ended later.
    """
    with naming_file(path):
        *lines, rest = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        with naming_file(path, f"line {number} "):
            try:
                row = _object(line)
            except (ValueError, RecursionError):
                if _torn(line):
                    continue
                raise
            rows.append(_with_set_ids(_checked(_upgraded(row))))
    if not _torn(rest):
        raise RunFolderError(f"{path}: is damaged or incomplete: it does not end with a recorded trial")
    return rows


def _torn(line: bytes) -> bool:
    """Whether a line is the beginning of one, or nothing: some file systems leave zeros for what was not written."""
    written = line.rstrip(b"\0")
    return any(head.startswith(written[: len(head)]) for head in _HEADS)


def _upgraded(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of an older schema version as one of today's, so that old run folders can be read."""
    if "sitting" in line:  # until version 2
        line["invocation"] = line.pop("sitting")
    if "purpose" not in line:
        later = {"purpose": "", "check_id": None, "alone_id": None, "wrapped_id": None, "launcher": "ray"}
        line = {**later, "facts": {}, "parts": {}, **line}
        for window in line["windows"]:
            window["window_kind"] = "warmup" if window.pop("warmup") else "timed"
    if "skip_code" not in line:  # until version 2
        line["skip_code"] = _skip_code(line)
    return line


_SKIP_CODES: Mapping[SkipCode, str] = {
    "strategy_devices": r"\S+ trains on (one device|\d+ devices at most)",
    "strategy_nodes": r"\S+ drives its devices from one process",
    "launcher_nodes": "torchrun, the control, runs on one node",
    "launcher_cluster": "torchrun, the control, runs on this machine alone",
    "uneven_nodes": r"\d+ devices do not split evenly over \d+ nodes",
    "device_ids_on_cpu": "device_ids names GPUs",
    "device_ids_uneven": "a worker group with device_ids takes every GPU",
    "too_few_devices": "too few devices:",
    "batch_indivisible": r"global batch \d+ does not divide",
    "micro_batch_indivisible": r"per-device batch \d+ does not divide",
    "static_graph": "static_graph does not go with",
    "strategy_compile": "compile does not apply to",
    "no_compiler": r"compile needs a C\+\+ compiler",
    "needs_cuda": "tf32 is a mode of CUDA|sync_batch_norm is a CUDA operator",
    "too_few_samples": r"(the check's )?global batch \d+ exceeds",
    "random_evaluation": "loss or model draw random numbers",
    "doctor_memory": "preflight: memory:",
    "doctor": "preflight",
    "out_of_memory": r".* of the same cell ran out of memory \(limits\.prune_oom\)$",
    "precise": "precise enough",
    "time_up": r"time is up: limits\.wall",
}
"""How the reasons of skipped trials begin in lines that have no code yet; the first that matches counts."""


def _skip_code(line: Mapping[str, Any]) -> SkipCode | None:
    """Return the code of a skipped trial by its reason; None if it was not skipped, or the text is unknown."""
    reason = str(line.get("reason", "")) if line.get("outcome") == "skipped" else None
    codes = (code for code, text in _SKIP_CODES.items() if reason is not None and re.match(text, reason, re.DOTALL))
    return next(codes, None)


def _with_set_ids(line: dict[str, Any]) -> dict[str, Any]:
    """Return the line with the ids of the sets that its cell is compared in, which lines lacked at first."""
    return line if "family_id" in line else {**line, **set_ids(line)}


def upgrade_environment(content: dict[str, Any]) -> dict[str, Any]:
    """Return environment.json's content of an older schema version in today's names."""
    if "sittings" in content:  # until version 2
        content["invocations"] = content.pop("sittings")
    for group in content.get("groups", []):
        if "sitting" in group:
            group["invocation"] = group.pop("sitting")
    return content


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    """The line of a trial, if its values are of the types of their columns; raises TypeError or ValueError."""
    if not (isinstance(line.get("trial_id"), str) and _TRIAL_ID.fullmatch(line["trial_id"])):
        raise ValueError(f"trial_id: got {str(line.get('trial_id'))[:40]!r}")
    _check_values(line, _NEEDED)
    for key in ("windows", "ranks"):
        _check_objects(line[key], key)
    for key in ("facts", "parts"):
        if not isinstance(line[key], dict):
            raise TypeError(f"{key}: expected an object, got a {type(line[key]).__name__}")
    for window in line["windows"]:
        _check_values(window, _WINDOW)
    return line


def _check_values(row: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    for name in _whole(tuple(row), tuple(map(type, row.values())), needed):
        if not -(2**63) <= row[name] < 2**63:
            raise ValueError(f"{name}: a number of more than 64 bits")


@lru_cache(maxsize=1024)
def _whole(names: tuple[str, ...], types: tuple[type, ...], needed: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the names have whole numbers; raises where a type is not its column's. A run has few kinds of rows."""
    found = {name: kind for name, kind in zip(names, types, strict=True) if kind is not NoneType}
    for name, kind in found.items():
        if name in _DTYPES and kind not in _PYTHON[_DTYPES[name]]:
            raise TypeError(f"{name}: expected {_DTYPES[name]}, got a {kind.__name__}")
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{missing[0]} is missing")
    return tuple(name for name, kind in found.items() if kind is int)
