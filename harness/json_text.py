"""JSON of the lines of a run, which are many: by pydantic's encoder and parser, which take half of Python's time."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json


def encode(value: Any) -> str:
    """In one line; NaN and Infinity as Python's own has them. Raises TypeError for what JSON cannot hold."""
    try:
        return to_json(value, inf_nan_mode="constants").decode()
    except PydanticSerializationError:  # half a surrogate pair, perhaps, which JSON can hold and UTF-8 cannot
        return json.dumps(value)


def decode(data: bytes) -> Any:
    """What a JSON text holds, with ``?`` in place of half a surrogate pair, which no table can hold.

    Raises ValueError, or RecursionError.
    """
    try:
        return from_json(data)
    except ValueError:
        content = json.loads(data)
        return json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
