"""Validation that reports every problem of a file at once.

pydantic checks how the keys of a section fit each other only after each is valid by itself. So the wrong keys are left
out and the rest is checked again, until nothing new is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from harness.config.problems import MOST, Place, describe_errors, places_of

Model = TypeVar("Model", bound=BaseModel)
MOST_PASSES = 6
STAND_INS = {"name": "x"}
"""Values of keys at the top that a file must have, while the rest is checked."""
ABSENT = object()


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
            given, now = _without(given, places_of(error))
            if now <= removed:
                break
            removed |= now
    return None, list(problems)


def _without(content: Mapping[str, object], places: list[Place]) -> tuple[Mapping[str, object], set[Place]]:
    """Return a copy without the innermost keys that hold these places, and the places of these keys."""
    kept = deepcopy(dict(content))
    keys = {key for place in places if (key := _innermost_key(kept, place))}
    for *above, last in keys:
        section: object = kept
        for part in above:
            section = _child(section, part)
        if isinstance(section, dict):
            section.pop(last, None)
    kept |= {name: value for name, value in STAND_INS.items() if name not in kept}
    return kept, keys | {(name,) for name in STAND_INS if name not in content}


def _innermost_key(content: Mapping[str, object], place: Place) -> Place:
    """Return the path of the innermost key along a place; a place has parts that the file lacks, as of one value."""
    found: Place = ()
    path: Place = ()
    node: object = content
    for part in place:
        child = _child(node, part)
        if child is ABSENT:
            continue
        node, path = child, (*path, part)
        if isinstance(part, str):
            found = path
    return found


def _child(node: object, part: int | str) -> object:
    """Return the value of a mapping at a key, or of a list at a position; ABSENT if it has none there."""
    if isinstance(node, Mapping):
        return node.get(part, ABSENT)
    if isinstance(node, list | tuple) and isinstance(part, int) and part < len(node):
        return node[part]
    return ABSENT
