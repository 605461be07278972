"""Validation errors of pydantic as lines for the user: path in the file, value got, values allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from harness.errors import nearest

CHOICES = ("number", "rule")
"""Tags of discriminated unions, which stand in pydantic's error paths but not in the file."""
MOST, MOST_TEXT = 50, 500
"""The maximum number of reported problems, and of characters of each."""


def describe_errors(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return one line a problem, in the order of the file's keys."""
    problems = error.errors(include_url=False)
    lines = list(dict.fromkeys(_cut(_line(problem, model), MOST_TEXT) for problem in problems[:MOST]))
    return lines + [f"and {len(problems) - MOST} more"] * (len(problems) > MOST)


def _line(problem: ErrorDetails, model: type[BaseModel]) -> str:
    path = tuple(part for part in problem["loc"] if part not in CHOICES)
    kind, got = problem["type"], problem["input"]
    where = _dotted(path) or "the file"
    if kind == "extra_forbidden":
        allowed = _fields_at(model, path[:-1])
        return f"{where}: unknown key; {nearest(str(path[-1])[:80], allowed)}"
    if kind == "missing":
        return f"{where}: is missing"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']+)'", problem["ctx"]["expected"])
        return f"{where}: got {_short(got)}; {nearest(str(got)[:80], allowed)}"
    if kind == "value_error":
        text = problem["msg"].removeprefix("Value error, ")
        return f"{where}: {text}" if path else text
    if kind == "model_type":
        return f"{where}: got {_short(got)}; allowed: a mapping with keys such as {_examples(model, path)}"
    return f"{where}: got {_short(got)}; {_lower_first(problem['msg'].replace('Input should', 'it should'))}"


def _dotted(path: tuple[int | str, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{_cut(part)}" if text else _cut(part)
    return text


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are allowed at this path of the file."""
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return list(model.model_fields)


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _examples(model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    return ", ".join(_fields_at(model, path)[:4])


def _short(value: object) -> str:
    return _cut(repr(value))


def _cut(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
