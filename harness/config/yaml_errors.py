"""Errors of the YAML parser as one line for the user: the line of the file, the problem, a hint."""

from __future__ import annotations

import yaml
from yaml.reader import ReaderError

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
