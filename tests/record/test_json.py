"""encode_json and decode_json agree with Python's json module."""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

import numpy as np
import pytest

from harness.record.reading import decode_json, encode_json

VALUES: dict[str, Any] = {
    "nothing": None,
    "flags": [True, False],
    "numbers": [0, -1, 2**62, 2**70, 0.1, -0.0, 1e22, 1e-7, 5e-324, 1.7976931348623157e308],
    "texts": ["", 'a "quoted" \\ line\n', "Ünïcödé \U0001f600", "\x00\x1f\u2028"],
    "tuples are lists": (1, (2, 3)),
    "objects": {"a": {"b": []}, "": {}},
    "numbers of numpy that are Python's": np.float64(0.1),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_our_json_and_pythons_read_each_other(value: Any) -> None:
    expected = json.loads(json.dumps(value))
    assert json.loads(encode_json(value)) == expected
    assert decode_json(json.dumps(value).encode()) == expected
    assert "\n" not in encode_json(value)


def test_every_bit_of_a_number_is_kept() -> None:
    draw = random.Random(0)
    numbers = [struct.unpack("d", draw.randbytes(8))[0] for _ in range(5_000)]
    numbers += [draw.lognormvariate(0, 1) for _ in range(5_000)]
    finite = [number for number in numbers if math.isfinite(number)]
    assert decode_json(encode_json(finite).encode()) == finite
    assert json.loads(encode_json(finite)) == decode_json(json.dumps(finite).encode()) == finite


def test_non_finite_numbers_are_written_as_by_python_and_half_a_pair_as_a_question_mark() -> None:
    text = encode_json([math.nan, math.inf, -math.inf])
    assert text == "[NaN,Infinity,-Infinity]"
    first, *others = decode_json(text.encode())
    assert math.isnan(first) and others == [math.inf, -math.inf]
    half = encode_json({"said": "half \ud83d, whole \U0001f600"})  # a surrogate of no pair
    assert decode_json(half.encode()) == {"said": "half ?, whole \U0001f600"}


@pytest.mark.parametrize("data", [b"", b'{"a": 1', b"[1,]", b'{"a": 1}x', b"\xff", b"1" * 10_000, b"[" * 100_000])
def test_invalid_json_and_values_that_it_cannot_represent_are_refused(data: bytes) -> None:
    for value in (object(), np.int64(1), {"a": b"\xff"}):
        with pytest.raises(TypeError):
            encode_json(value)
    with pytest.raises((ValueError, RecursionError)):
        decode_json(data)
