"""A safe YAML reader: one mapping, unique keys, plain values, bounded size; errors name the line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from harness.errors import ExperimentError

QUOTE = "put text that begins with such a character in quotes"
CLOSE = "close the bracket, or put a comma between its values"
HINTS = {
    r"found character '\t'": "indent with spaces, not with tabs",
    "mapping values are not allowed here": "put text with a colon in quotes; begin each key on a line of its own, "
    "indented as its neighbours, with a space after its colon (in the line above, too)",
    "sequence entries are not allowed here": "begin a list on the line below its key",
    "could not find expected ':'": "a key ends in a colon and a space, as in 'devices: [1, 2]'",
    "expected ',' or ']'": CLOSE,
    "expected ',' or '}'": CLOSE,
    "expected <block end>": "keys of one section begin in the same column, and so do the dashes of a list",
    "expected the node content": "a value is missing, or a bracket has no partner",
    "found undefined alias": "put text that begins with * in quotes",
    "that cannot start any token": QUOTE,
    "unexpected end of stream": "close the quotation mark",
    "unknown escape character": "use single quotes: in double quotes a backslash begins an escape",
    "expected a single document": "a file holds one experiment: remove the line '---'",
    "could not determine a constructor": "tags that begin with ! are not allowed: write plain values",
    "as timestamp": "put text that looks like a date in quotes",
    "special characters are not allowed": "remove the character",
}
"""Part of the parser's message -> what to do about it."""
MOST = 400
"""The maximum number of characters of the parser's message."""
MAX_BYTES = 100_000
MAX_NODES = 20_000
"""The maximum number of keys and values, counted with the repetitions of anchors; read in about a second."""
MAX_DEPTH = 20
MAX_DIGITS = 100
_NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates, which escapes such as "\\e" can produce; no name contains them."""


class _Loader(yaml.SafeLoader):
    """A SafeLoader that records duplicate keys, and stops at the limits of size and depth while it composes nodes.

    Nothing is constructed before: an alias counts as many nodes, and is as deep, as what it repeats.
    """

    def __init__(self, stream: str, most: int) -> None:
        super().__init__(stream)
        self.duplicates: list[tuple[int, str]] = []
        self._most, self._nodes, self._depth, self._deepest = most, 0, 0, 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}
        """The number of nodes, and of levels, of each composed node, itself included."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)  # type: ignore[no-untyped-call]
        before, deepest = self._nodes, self._deepest
        self._nodes, self._depth = before + (not is_alias), self._depth + 1
        self._deepest = self._depth
        self._check_limits(mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        assert node is not None
        if is_alias:
            nodes, levels = self._sizes.get(node, (0, MAX_DEPTH + 1))  # without a size it is not complete: in itself
            self._nodes, self._deepest = before + nodes, self._depth - 1 + levels
            self._check_limits(mark)
        self._sizes[node] = self._nodes - before, self._deepest - self._depth + 1
        self._depth, self._deepest = self._depth - 1, max(deepest, self._deepest)
        return node

    def _check_limits(self, mark: yaml.Mark) -> None:
        if self._deepest > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep, or in itself", problem_mark=mark)
        if self._nodes > self._most:
            problem = f"more than {self._most} keys and values, those that aliases repeat included"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)

    def compose_scalar_node(self, anchor: dict[object, yaml.Node]) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        problem = ""
        if found := _NO_TEXT.search(node.value):
            problem = f"holds {found[0]!r}, which is not a printable character"
        elif node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            problem = f"a number of {len(node.value)} characters; at most {MAX_DIGITS} are allowed"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def compose_mapping_node(self, anchor: dict[object, yaml.Node]) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                self.duplicates.append((line, f"line {line}: the key {key[:80]!r} appears twice; keep one of them"))
            seen.add(key)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # as !!int '' is an IndexError
            kind = node.tag.rpartition(":")[2]
            problem = f"cannot read {str(node.value)[:40]!r} as {kind}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes the text which the reader would take for a number.

    Scalars and arrays of numpy are written as plain values, and paths as text.
    """

    def represent_other(self, data: Any) -> yaml.Node:
        """Represent a value of a class that YAML does not know; raise RepresenterError if it has no plain value."""
        plain = os.fspath(data) if isinstance(data, os.PathLike) else data
        if type(data).__module__ == "numpy":  # which is not imported for this
            plain = data.tolist()
        if type(plain) is type(data):
            self.represent_undefined(data)
        return self.represent_data(plain)


_Dumper.add_multi_representer(object, _Dumper.represent_other)

for _each in (_Loader, _Dumper):  # 1e-3 is a number, as in YAML 1.2; PyYAML's YAML 1.1 reads it as a string
    _each.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def dump(content: object, *, width: int | None = None, flow: bool | None = False, allow_unicode: bool = False) -> str:
    """Return YAML text that this module reads as the same content. ``flow``: None for lists in one line."""
    return yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, default_flow_style=flow, width=width, allow_unicode=allow_unicode
    )


def read_mapping(path: Path) -> tuple[Mapping[str, object], list[str]]:
    """Return the file's top-level mapping and a problem for each key that appears twice; raise ExperimentError."""
    return _mapping(read_text(path, MAX_BYTES), str(path), MAX_NODES)


def parse_mapping(text: str, *, source: str, times: int = 1) -> Mapping[str, object]:
    """Return YAML text's top-level mapping with string keys; raise ExperimentError if it has none.

    ``times``: a factor on the size limits of an experiment file.
    """
    value, duplicates = _mapping(text, source, times * MAX_NODES)
    if duplicates:
        raise ExperimentError(source, duplicates)
    return value


def _mapping(text: str, source: str, most: int) -> tuple[Mapping[str, object], list[str]]:
    value, duplicates = _parse(text, source, most)
    if not isinstance(value, dict):
        got = "an empty file" if value is None else f"a {type(value).__name__}"
        example = "expected a mapping such as 'name: scaling' at the top level"
        raise ExperimentError(source, [*duplicates, f"{example}, got {got}"])
    if bad := [key for key in value if not isinstance(key, str)]:
        raise ExperimentError(source, [*duplicates, f"keys must be text, got {repr(bad[0])[:80]}; put it in quotes"])
    return value, duplicates


def parse_value(text: str, *, source: str) -> Any:
    """Return the YAML value in a text; raise ExperimentError if the text is not valid."""
    value, problems = _parse(text, source, MAX_NODES)
    if problems:
        raise ExperimentError(source, problems)
    return value


def _parse(text: str, source: str, most: int) -> tuple[object, list[str]]:
    """Return the value, and a problem for each key that appears twice, in the order of the lines."""
    try:
        loader = _Loader(text, most)  # which checks every character
        value = loader.get_single_data()
        return value, [problem for _, problem in sorted(loader.duplicates)]
    except yaml.YAMLError as error:
        raise ExperimentError(source, [f"not valid YAML: {_described(error, text)}"]) from None


def _described(error: yaml.YAMLError, text: str) -> str:
    """Return 'line 3: the problem; what to do', on one line of limited length."""
    line, problem = 0, " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ReaderError):
        character = error.character if isinstance(error.character, int) else ord(error.character)
        line, problem = (
            text.count("\n", 0, error.position) + 1,
            f"unacceptable character #x{character:04x}: {error.reason}",
        )
    elif isinstance(error, yaml.MarkedYAMLError):
        first, last = error.context_mark, error.problem_mark
        line = mark.line + 1 if (mark := last or first) else 0
        problem = error.problem or error.context or ""
        if problem.startswith("but "):  # the second half of a sentence
            problem = f"{error.context}, {problem}"
        elif first and last and first.line != last.line and error.context:  # of a collection or text without its end
            problem += f" ({error.context}, which begins in line {first.line + 1})"
    hint = next((f"; {hint}" for part, hint in HINTS.items() if part in problem), "")
    return f"{f'line {line}: ' if line else ''}{problem[:MOST]}{hint}"


def read_text(path: Path, most: int) -> str:
    """Return the text of a file of at most this many bytes; raise ExperimentError if it is none."""
    try:
        if not path.is_file():
            problem = "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "no such file"
            raise ExperimentError(str(path), [f"{problem}; give the path of an experiment file (YAML)"])
        if path.stat().st_size > most:
            raise ExperimentError(str(path), [f"larger than {most} bytes: not an experiment file"])
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ExperimentError(str(path), ["not a text file in UTF-8"]) from None
    except OSError as error:
        raise ExperimentError(str(path), [f"cannot be read: {error.strerror}"]) from None
