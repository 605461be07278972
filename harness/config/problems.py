"""Validation that reports every problem of a file at once: its path in the file, the value got, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from harness.config.axes import BATCHES, OPTION_SECTIONS, batch_note
from harness.errors import closest, nearest

Model = TypeVar("Model", bound=BaseModel)
MOST_PASSES = 6
STAND_INS = {"name": "x"}
"""Values of keys at the top that a file must have, while the rest is checked."""
ABSENT = object()
Place = tuple[int | str, ...]
"""The path of a value in the file: keys, and positions in lists."""

CHOSEN, CHOICES = "blocks", ("number", "rule", "decide")
"""The key of a discriminated union, and the tags that follow it in pydantic's error paths but not in the file."""
TYPES = {
    "bool_type": "true or false",
    "dict_type": "a mapping, {key: value}",
    "int_type": "an integer",
    "string_type": "text (in quotes, if it looks like another type)",
    "too_short": "at least one value",
    "tuple_type": "a list",
}
"""Kinds of pydantic's errors -> what is allowed, in the words of YAML."""
MOST, MOST_TEXT = 50, 500
"""The maximum number of reported problems, and of characters of each."""


class Conflict(NamedTuple):
    """A broken rule about several keys of a section. ``keys``: if one of these is wrong too, nothing is known of it."""

    text: str
    keys: tuple[str, ...]


class Conflicts(ValueError):
    """The broken rules of one section, raised by its validator."""

    def __init__(self, broken: Sequence[Conflict]) -> None:
        self.broken = broken
        super().__init__("; ".join(conflict.text for conflict in broken))


def raise_conflicts(broken: Iterable[Conflict]) -> None:
    """Raise Conflicts if a rule is broken."""
    if found := tuple(broken):
        raise Conflicts(found)


def describe_errors(
    error: ValidationError, model: type[BaseModel], removed: Collection[Place] = frozenset()
) -> list[str]:
    """Return one line a problem, in the order of the file's keys.

    ``removed``: places of keys that were wrong and are left out of the validated content. What follows from their
    absence is no problem of the file.
    """
    problems, lines = [], dict[str, None]()
    for problem in error.errors(include_url=False):
        place, raised = _place(problem), problem.get("ctx", {}).get("error")
        below = [key for key in removed if key[: len(place)] == place]
        if isinstance(raised, Conflicts) or not below:
            problems.append((problem, place, raised, below))
    for problem, place, raised, below in problems[:MOST]:
        if isinstance(raised, Conflicts):
            where = f"{_dotted(place)}: " if place else ""
            lost = [str(key[len(place)]) for key in below if len(key) > len(place)]
            kept = [rule for rule in raised.broken if not any(closest(name, rule.keys) for name in lost)]
            found = [f"{where}{rule.text}" for rule in kept]
        else:
            found = [_line(problem, model)]
        lines |= dict.fromkeys(_cut(line, MOST_TEXT) for line in found)
    return [*lines, *[f"and {len(problems) - MOST} more"] * (len(problems) > MOST)]


def _place(problem: ErrorDetails) -> Place:
    """Return the place of a problem in the file."""
    loc = problem["loc"]
    return tuple(part for at, part in enumerate(loc) if not (part in CHOICES and at and loc[at - 1] == CHOSEN))


def _line(problem: ErrorDetails, model: type[BaseModel]) -> str:
    path = _place(problem)
    kind, got = problem["type"], _cut(repr(problem["input"]))
    where = _dotted(path) or "the file"
    if kind == "extra_forbidden":
        return f"{where}: unknown key; {_known_key(str(path[-1])[:80], path[:-1], model)}"
    if kind == "missing":
        return f"{where}: is missing"
    if kind in TYPES:
        return f"{where}: got {got}; allowed: {TYPES[kind]}"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']+)'", problem["ctx"]["expected"])
        return f"{where}: got {got}; {nearest(str(problem['input'])[:80], allowed)}"
    if kind == "value_error":
        text = problem["msg"].removeprefix("Value error, ")
        return f"{where}: {text}" if path else text
    if kind == "model_type":
        return f"{where}: got {got}; allowed: a mapping with keys such as {', '.join(_fields_at(model, path)[:4])}"
    text = problem["msg"].replace("Input should", "it should")
    return f"{where}: got {got}; {text[:1].lower()}{text[1:]}"


def _known_key(name: str, path: Place, model: type[BaseModel]) -> str:
    """Return the clause that offers keys for an unknown one: those of another section if it has this key."""
    allowed, top = _fields_at(model, path), model.model_fields
    others = {key: f"{part}.{key}" for part in reversed(top) for key in _fields_at(model, (part,)) if key not in top}
    section, _, option = name.partition(".")
    meant = closest(section, OPTION_SECTIONS) if option.isidentifier() else []
    if meant and meant[0] != section:
        return f"did you mean {f'{meant[0]}.{option}'!r}? (allowed: options of {', '.join(OPTION_SECTIONS)})"
    folded = name.casefold()
    close = closest(name, allowed)
    if (close and folded not in others) or folded in map(str.casefold, allowed):
        return f"{nearest(name, allowed)}{batch_note(close)}"
    near = closest(name, others)
    if not near:
        return nearest(name, allowed)
    near = [key for key in near if key in BATCHES] or near
    here = ", ".join(sorted(allowed)) or "nothing"
    return f"did you mean {' or '.join(others[key] for key in near)}? (allowed here: {here}){batch_note(near)}"


def _dotted(path: Place) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{_cut(part)}" if text else _cut(part)
    return text


def _fields_at(model: type[BaseModel], path: Place) -> list[str]:
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


def _cut(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def validate(
    model: type[Model], content: Mapping[str, object], context: Mapping[str, object]
) -> tuple[Model | None, list[str]]:
    """Return the validated content, or None and one line a problem."""
    given: Mapping[str, object] = dict(content)
    problems: dict[str, None] = {}
    removed: set[Place] = set()
    for _ in range(MOST_PASSES):
        try:
            found = model.model_validate(given, context=dict(context))
            return (None if problems else found), list(problems)
        except ValidationError as error:
            problems.update(dict.fromkeys(describe_errors(error, model, removed)))
            if error.error_count() > MOST:
                break
            given, now = _without(
                given, [_place(problem) for problem in error.errors(include_url=False, include_context=False)]
            )
            if now <= removed:
                break
            removed |= now
    return None, list(problems)


def _without(content: Mapping[str, object], places: list[Place]) -> tuple[Mapping[str, object], set[Place]]:
    """Return a copy without the innermost keys that hold these places, and the places of these keys.

    A place has parts that the file lacks, as the position of one value that may be a list.
    """
    kept = deepcopy(dict(content))
    holders: dict[Place, dict[str, object]] = {}
    for place in places:
        node: object = kept
        path: Place = ()
        innermost = None
        for part in place:
            if (child := _child(node, part)) is not ABSENT:
                path = (*path, part)
                if isinstance(node, dict) and isinstance(part, str):
                    innermost = path, node
                node = child
        if innermost:
            holders[innermost[0]] = innermost[1]
    for path, section in holders.items():
        section.pop(str(path[-1]), None)  # an alias is at several places
    kept |= {name: value for name, value in STAND_INS.items() if name not in kept}
    return kept, {*holders} | {(name,) for name in STAND_INS if name not in content}


def _child(node: object, part: int | str) -> object:
    """Return the value of a mapping at a key, or of a list at a position; ABSENT if it has none there."""
    if isinstance(node, Mapping):
        return node.get(part, ABSENT)
    if isinstance(node, list | tuple) and isinstance(part, int) and part < len(node):
        return node[part]
    return ABSENT
