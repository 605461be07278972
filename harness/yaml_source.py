"""Reads YAML safely: one mapping, no duplicate keys, no objects, every problem with its line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from harness.errors import ExperimentError

MAX_BYTES = 1_000_000


class _Loader(yaml.SafeLoader):
    """SafeLoader that notes each duplicate key instead of keeping the last one silently."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                line = key_node.start_mark.line + 1
                self.duplicates.append(f"line {line}: the key {key!r} stands twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


# 1e-3 is a number, as in YAML 1.2; PyYAML's YAML 1.1 reads it as a word
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def read_mapping(path: Path) -> dict[str, Any]:
    """The file's top-level mapping; raises ExperimentError where there is none."""
    return parse_mapping(_read_text(path), source=str(path))


def parse_mapping(text: str, *, source: str) -> dict[str, Any]:
    """Parses YAML text whose top level is a mapping with string keys; raises ExperimentError."""
    try:
        loader = _Loader(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
        json.dumps(value, default=str, skipkeys=True)  # raises where a value holds itself through an anchor
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ExperimentError(source, [f"not valid YAML: {_one_line(error)}"]) from None
    problems = list(loader.duplicates)
    if not isinstance(value, dict):
        got = "an empty file" if value is None else f"a {type(value).__name__}"
        problems.append(f"expected a mapping such as 'name: scaling' at the top level, got {got}")
    elif bad := [key for key in value if not isinstance(key, str)]:
        problems.append(f"keys must be strings, got {bad[0]!r}")
    if problems:
        raise ExperimentError(source, problems)
    assert isinstance(value, dict)
    return value


def _read_text(path: Path) -> str:
    try:
        if not path.exists():
            raise ExperimentError(str(path), ["no such file; give the path of an experiment file (YAML)"])
        if path.is_dir():
            raise ExperimentError(str(path), ["is a folder; give the path of an experiment file (YAML)"])
        if not path.is_file():
            raise ExperimentError(str(path), ["is no regular file; give the path of an experiment file (YAML)"])
        if path.stat().st_size > MAX_BYTES:
            raise ExperimentError(str(path), [f"larger than {MAX_BYTES} bytes: not an experiment file"])
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ExperimentError(str(path), ["not a text file in UTF-8"]) from None
    except OSError as error:
        raise ExperimentError(str(path), [f"cannot be read: {error.strerror}"]) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
