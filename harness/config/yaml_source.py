"""A safe YAML reader: one mapping, unique keys, plain values, bounded size; errors name the line."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator, Mapping
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


def describe_yaml_error(error: Exception, text: str) -> str:
    """Return 'line 3: the problem; what to do', on one line of limited length."""
    problem = _problem(error)
    hint = next((f"; {hint}" for part, hint in HINTS.items() if part in problem), "")
    line = _line(error, text)
    where = f"line {line}: " if line else ""
    return f"{where}{problem[:MOST]}{hint}"


def _problem(error: Exception) -> str:
    """Return the parser's own words, without places."""
    if isinstance(error, ReaderError):
        character = error.character if isinstance(error.character, int) else ord(error.character)
        return f"unacceptable character #x{character:04x}: {error.reason}"
    if isinstance(error, yaml.MarkedYAMLError):
        problem = error.problem or error.context or ""
        if problem.startswith("but "):  # the second half of a sentence
            return f"{error.context}, {problem}"
        return f"{problem}{_opened(error)}"
    return " ".join(str(error).split()) or type(error).__name__


def _opened(error: yaml.MarkedYAMLError) -> str:
    """Return where the collection or text began whose end is missing; '' if in the same line."""
    first, last = error.context_mark, error.problem_mark
    if first is None or last is None or first.line == last.line or not error.context:
        return ""
    return f" ({error.context}, which begins in line {first.line + 1})"


def _line(error: Exception, text: str) -> int | None:
    """Return the number of the line, from 1; None if the message names it itself, or none is known."""
    if isinstance(error, ReaderError):
        return text.count("\n", 0, error.position) + 1
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        return None if mark is None else mark.line + 1
    return None


MAX_BYTES = 100_000
MAX_NODES = 20_000
"""The maximum number of keys and values, counted with the repetitions of anchors; read in about a second."""
MAX_DEPTH = 20
MAX_DIGITS = 100
_NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates, which escapes such as "\\e" can produce; no name contains them."""


class _Loader(yaml.SafeLoader):
    """A SafeLoader that records duplicate keys, and stops at the limits of depth and size."""

    def __init__(self, stream: str, most: int) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []
        self._most, self._nodes, self._depth = most, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes, self._depth = self._nodes + 1, self._depth + 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=mark)
        if self._nodes > self._most:
            raise yaml.MarkedYAMLError(problem=f"more than {self._most} keys and values", problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # as !!int '' is an IndexError
            kind = node.tag.rpartition(":")[2]
            problem = f"cannot read {str(node.value)[:40]!r} as {kind}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # an explicit tag may be wrong
            key = str(key_node.value)
            if key in seen:
                line = key_node.start_mark.line + 1
                self.duplicates.append(f"line {line}: the key {key[:80]!r} appears twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


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


def read_mapping(path: Path, *, times: int = 1) -> Mapping[str, object]:
    """Return the file's top-level mapping; raise ExperimentError if it has none.

    ``times``: a factor on the size limits of an experiment file.
    """
    return parse_mapping(read_text(path, times * MAX_BYTES), source=str(path), times=times)


def read_with_duplicates(path: Path) -> tuple[Mapping[str, object], list[str]]:
    """Return the file's top-level mapping and a problem for each key that appears twice; raise ExperimentError."""
    return _mapping(read_text(path, MAX_BYTES), str(path), MAX_NODES)


def parse_mapping(text: str, *, source: str, times: int = 1) -> Mapping[str, object]:
    """Return YAML text's top-level mapping with string keys; raise ExperimentError if it has none."""
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
    """Return the value and its duplicate keys. The size is checked before any value is built."""
    loader = None
    try:
        loader = _Loader(text, most)  # which checks every character
        node = loader.get_single_node()
        if node is None:
            return None, []
        _check_size(node, most)
        return loader.construct_document(node), loader.duplicates
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ExperimentError(source, [f"not valid YAML: {describe_yaml_error(error, text)}"]) from None
    finally:
        if loader:
            loader.dispose()


def _check_size(root: yaml.Node, most: int) -> None:
    """Raise ValueError if the value, aliases expanded, is too large or too deep, or a scalar is not acceptable.

    A node with an anchor is visited once, and counted once for each alias.
    """
    known: dict[int, tuple[int, int]] = {}

    def measure(node: yaml.Node, depth: int) -> tuple[int, int]:
        """Return the number of nodes, the given one included, and the depth below it."""
        line = node.start_mark.line + 1
        if depth + known.get(id(node), (0, 0))[1] > MAX_DEPTH:
            raise ValueError(f"line {line}: nested more than {MAX_DEPTH} deep, or in itself")
        if id(node) not in known:
            _check_scalar(node, line)
            below = [measure(child, depth + 1) for child in _children(node)]
            size = 1 + sum(nodes for nodes, _ in below)
            if size > most:
                raise ValueError(f"line {line}: holds {size} keys and values; at most {most} are allowed")
            known[id(node)] = size, 1 + max((height for _, height in below), default=0)
        return known[id(node)]

    measure(root, 0)


def _check_scalar(node: yaml.Node, line: int) -> None:
    if not isinstance(node.value, str):
        return
    if found := _NO_TEXT.search(node.value):
        raise ValueError(f"line {line}: holds {found[0]!r}, which is not a printable character")
    if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
        raise ValueError(f"line {line}: a number of {len(node.value)} characters; at most {MAX_DIGITS} are allowed")


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def read_text(path: Path, most: int) -> str:
    """Return the text of a file of at most this many bytes; raise ExperimentError if it is none."""
    try:
        if not path.exists():
            raise ExperimentError(str(path), ["no such file; give the path of an experiment file (YAML)"])
        if path.is_dir():
            raise ExperimentError(str(path), ["is a folder; give the path of an experiment file (YAML)"])
        if not path.is_file():
            raise ExperimentError(str(path), ["is not a regular file; give the path of an experiment file (YAML)"])
        if path.stat().st_size > most:
            raise ExperimentError(str(path), [f"larger than {most} bytes: not an experiment file"])
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ExperimentError(str(path), ["not a text file in UTF-8"]) from None
    except OSError as error:
        raise ExperimentError(str(path), [f"cannot be read: {error.strerror}"]) from None
