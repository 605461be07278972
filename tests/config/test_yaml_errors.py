"""Errors of YAML: the line, the problem, and what to do."""

from __future__ import annotations

import pytest

from harness.config import yaml_source
from harness.errors import ExperimentError


@pytest.mark.parametrize(
    ("text", "line", "problem", "hint"),
    [
        ("a: 1\ngrid:\n\tdevices: 2\n", 3, r"found character '\t'", "indent with spaces, not with tabs"),
        (
            "grid:\n  devices:[1, 2]\n  strategy: ddp\n",
            3,
            "mapping values",
            "a space after its colon (in the line above",
        ),
        ("a: [1, 2\nb: 3\n", 2, "which begins in line 1)", "close the bracket"),
        ("a: {b: 1\nc: 2\n", 2, "which begins in line 1)", "close the bracket"),
        ("a:\n  b: 1\n c: 2\n", 3, "expected <block end>", "begin in the same column"),
        ("a: 1\nb 2\nc: 3\n", 3, "could not find expected ':'", "a key ends in a colon and a space"),
        ("a: *b\n", 1, "found undefined alias 'b'", "put text that begins with * in quotes"),
        ("a: 1\nb: @home\n", 2, "found character '@'", "in quotes"),
        ("a: 1\nb: 'x\nc: 3\n", 4, "which begins in line 2)", "close the quotation mark"),
        ('a: "C:\\data"\n', 1, "found unknown escape character 'd'", "use single quotes"),
        ("a: 1\n---\nb: 2\n", 2, "expected a single document", "remove the line '---'"),
        ("a: !!python/name:os.system\n", 1, "could not determine a constructor", "write plain values"),
        ("a: 1\nb: \0\n", 2, "unacceptable character #x0000", "remove the character"),
        ("a: 2020-13-45\n", 1, "cannot read '2020-13-45' as timestamp", "put text that looks like a date in quotes"),
        ("a: - b\n", 1, "sequence entries are not allowed here", "on the line below its key"),
        ("a: ]\n", 1, "expected the node content", "a bracket has no partner"),
    ],
)
def test_an_error_names_the_line_and_what_to_do(text: str, line: int, problem: str, hint: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        yaml_source.parse_mapping(text, source="f.yaml")
    (found,) = caught.value.problems
    assert found.startswith(f"not valid YAML: line {line}: ") and "\n" not in found
    assert problem in found and hint in found.partition("; ")[2]
