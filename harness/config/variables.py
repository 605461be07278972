"""Environment variables of worker processes as options ``env.NAME``: which names are free, and which values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from harness.config.values import PlainValue, as_axis

SECTION = "env"
TAKEN: Mapping[str, str] = {
    r"(CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER": "the launcher places ranks on devices by it",
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|"
    r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "the launcher connects the ranks by it",
    r"(OMP|MKL)_NUM_THREADS": "every rank of a run has the same number of threads",
    r"PYTHON(PATH|SAFEPATH)": "the launcher finds the code by it",
    r"TEARDOWN_CUPTI": "it ends the profiler after a profile",
    r"(RAY|HARNESS)_.*": "it is of the launcher",
}
"""Patterns of the names that break a run or its measurements, each with the reason."""


def problems_of(place: str, options: Mapping[str, PlainValue]) -> Iterator[str]:
    """Yield what is wrong with variables by name, each a value or a list of values: an axis."""
    for name, values in options.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"{place}: got {name[:80]!r}; allowed: names of letters, digits and '_'"
        for pattern, why in TAKEN.items():
            if re.fullmatch(pattern, name):
                yield f"{place}.{name}: is set by harness: {why}; leave it out"
        for value in as_axis(values):
            if isinstance(value, bool) or not isinstance(value, str | int | float | None):
                yield f'{place}.{name}: got {value!r}; allowed: a text such as "1", a number, or null: as it is'
            elif "$" in str(value):
                text = "Ray would put a variable's value in its place, torchrun would not; write the value itself"
                yield f"{place}.{name}: got a value with '$'; {text}"


def variables_of(options: Mapping[str, PlainValue]) -> tuple[tuple[str, str], ...]:
    """Return the variables of a cell in order of their names; those that are null stay as they are."""
    return tuple((name, str(value)) for name, value in sorted(options.items()) if value is not None)
