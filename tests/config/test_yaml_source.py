"""Reading YAML: safe, one mapping, no duplicate key; an error names the line and what to do."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from harness.config import yaml_source
from harness.errors import ExperimentError


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a mapping such as 'name: scaling' at the top level, got an empty file"),
        ("- a\n- b\n", "expected a mapping such as 'name: scaling' at the top level, got a list"),
        ("just words", "expected a mapping such as 'name: scaling' at the top level, got a str"),
        ("1: 2\n", "keys must be text, got 1; put it in quotes"),
        ('a: "\\e[31m"', "not valid YAML: line 1: holds '\\x1b', which is not a printable character"),
        ('a: 1\nb: "\\ud800"', "not valid YAML: line 2: holds '\\ud800', which is not a printable character"),
        ("a: !!int ''", "not valid YAML: line 1: cannot read '' as int"),
        ("a: !!timestamp soon", "not valid YAML: line 1: cannot read 'soon' as timestamp"),
        ("a: !!map x", "not valid YAML: line 1: expected a mapping node, but found scalar"),
        ("a: " + "9" * 101, "not valid YAML: line 1: a number of 101 characters; at most 100 are allowed"),
        ("a: &a\n  - *a", "not valid YAML: line 2: nested more than 20 deep, or in itself"),
        ("a: " + "[" * 21 + "]" * 21, "not valid YAML: line 1: nested more than 20 deep"),
        ("a: [" + "1," * 200 + "]", "not valid YAML: line 1: more than 200 keys and values"),
        (
            "a: &a [x, x]\nb: &b [" + "*a," * 50 + "]\nc: [*b, *b]",
            "not valid YAML: line 3: more than 200 keys and values, those that aliases repeat",
        ),
    ],
    ids=lambda value: value[:30],
)
def test_yaml_other_than_one_mapping_is_refused(text: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_source, "MAX_NODES", 200)
    with pytest.raises(ExperimentError) as caught:
        yaml_source.parse_mapping(text, source="f.yaml")
    assert caught.value.problems[0].startswith(problem)


@pytest.mark.parametrize(
    ("text", "line", "problem", "hint"),
    [
        ("a: 1\ngrid:\n\tdevices: 2\n", 3, r"found character '\t'", "indent with spaces, not with tabs"),
        ("grid:\n  devices:[1, 2]\n  strategy: x\n", 3, "mapping values", "a space after its colon (in the line above"),
        ("a: [1, 2\nb: 3\n", 2, "which begins in line 1)", "close the bracket"),
        ("a: {b: 1\nc: 2\n", 2, "which begins in line 1)", "close the bracket"),
        ("a:\n  b: 1\n c: 2\n", 3, "expected <block end>", "begin in the same column"),
        ("a: 1\nb 2\nc: 3\n", 3, "could not find expected ':'", "a key ends in a colon and a space"),
        ("a: *b\n", 1, "found undefined alias 'b'", "put text that begins with * in quotes"),
        ("a: 1\nb: @home\n", 2, "found character '@'", "in quotes"),
        ("a: 1\nb: 'x\nc: 3\n", 4, "which begins in line 2)", "close the quotation mark"),
        ('a: "C:\\data"\n', 1, "found unknown escape character 'd'", "use single quotes"),
        ("a: 1\n---\nb: 2\n", 2, "expected a single document", "remove the line '---'"),
        ("a: !!python/object/apply:os.system [x]\n", 1, "could not determine a constructor", "write plain values"),
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


def test_305_bytes_of_nested_aliases_are_refused_before_anything_is_built() -> None:
    lists = "".join(f"{name}: &{name} [{','.join([f'*{last}'] * 9)}]\n" for last, name in pairwise("abcdefgh"))
    start = time.process_time()
    with pytest.raises(ExperimentError) as caught:
        yaml_source.parse_mapping("a: &a [x,x,x,x,x,x,x,x,x]\n" + lists, source="f.yaml")
    assert time.process_time() - start < 1
    (problem,) = caught.value.problems
    assert problem == "not valid YAML: line 5: more than 20000 keys and values, those that aliases repeat included"


def test_all_duplicates_are_reported_in_the_order_of_the_file() -> None:
    with pytest.raises(ExperimentError) as caught:
        yaml_source.parse_mapping("a: 1\na: {x: 1, x: 2}\nb: 1\nb: {y: 1,\n y: 2}\n", source="f.yaml")
    lines = ((2, "a"), (2, "x"), (4, "b"), (5, "y"))
    twice = [f"line {line}: the key {key!r} appears twice; keep one of them" for line, key in lines]
    assert list(caught.value.problems) == twice


def test_what_is_no_experiment_file(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "huge.yaml").write_bytes(b"a" * (yaml_source.MAX_BYTES + 1))
    for name, problem in {
        "none.yaml": "no such file; give the path of an experiment file",
        "": "is a folder",
        "binary.yaml": "not a text file in UTF-8",
        "huge.yaml": "not an experiment file",
    }.items():
        with pytest.raises(ExperimentError, match=problem):
            yaml_source.read_mapping(tmp_path / name)


def test_aliases_merges_nesting_and_numbers_up_to_the_limit_are_read() -> None:
    text = "base: &base {devices: [1, 2], batch: 8}\ncells: [*base, {<<: *base, batch: 16}]\n"
    content = yaml_source.parse_mapping(text, source="f.yaml")
    assert content["cells"] == [{"devices": [1, 2], "batch": 8}, {"devices": [1, 2], "batch": 16}]
    text = "first: &first {x: 1}\ndeep: [[&second {<<: *first, x: 2}]]\nthird: {<<: *second}\n"
    assert yaml_source.parse_mapping(text, source="f.yaml")["deep"] == [[{"x": 2}]]
    content = yaml_source.parse_mapping(f"a: {'[' * 18}{'9' * 100}{']' * 18}", source="f.yaml")
    assert str(content).count("9") == 100


@pytest.mark.parametrize("text", ["1e3", "83e1205", "-2E5", "1.5", "yes", "null", "x", "0x10", "12:30"])
def test_text_that_looks_like_a_number_is_text_again(text: str) -> None:
    content = {"name": text, "values": [text, 1000.0, 3]}
    assert yaml_source.parse_mapping(yaml_source.dump(content), source="x") == content


def test_numbers_of_numpy_and_paths_are_plain_values() -> None:
    content = {
        "seed": np.int64(3),
        "lr": [np.float32(0.5), np.float64(0.25)],
        "on": np.True_,
        "devices": np.arange(3),
        "data": Path("/data/images"),
    }
    plain = {"seed": 3, "lr": [0.5, 0.25], "on": True, "devices": [0, 1, 2], "data": "/data/images"}
    assert yaml_source.parse_mapping(yaml_source.dump(content), source="x") == plain


@pytest.mark.parametrize("value", [object(), np.longdouble(1), 3j])
def test_a_value_that_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(yaml.YAMLError, match="cannot represent an object"):
        yaml_source.dump({"a": value})
