"""Types of values in experiment files, and the variables of the environment that a file sets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar, overload

from pydantic import AfterValidator, BeforeValidator, Field, GetPydanticSchema, ValidationInfo
from typing_extensions import TypeAliasType

from harness.errors import nearest

USER_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""``package.module:ClassName``, the user's own class."""
MAX_DEVICES = 65_536
MAX_BATCH = 2**24
MAX_OPTIONS = 100
MAX_SECONDS = 365 * 86_400.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


PlainValue = TypeAliasType("PlainValue", "str | int | float | bool | Sequence[PlainValue] | None")
"""A value that YAML, JSON and a person read alike: text, a number, true, false, null, or a list of these."""


@overload
def as_axis(value: PlainValue) -> tuple[PlainValue, ...]: ...


@overload
def as_axis(value: object) -> tuple[object, ...]: ...


def as_axis(value: object) -> tuple[object, ...]:
    """Return a list as a tuple, and any other value as a tuple of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _seconds(value: object) -> object:
    """Return the seconds of '90s', '10m' or '2h'; a number is returned unchanged."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f"got {value!r}; allowed: a number of seconds, or '90s', '10m', '2h', '1d'")
    return float(match[1]) * _UNITS[match[2]]


def as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _name(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
        raise ValueError(
            f"got {repr(value)[:80]}; allowed: 1 to 64 letters, digits, '.', '_' and '-', not starting with a dot"
        )
    return value


def one_of(names: Collection[str], *, or_own: bool = False) -> Callable[[object], object]:
    """Return a validator that accepts these names and, with ``or_own``, package.module:ClassName of the user's own."""

    def check(value: object) -> object:
        if isinstance(value, str) and value not in names and not (or_own and USER_CLASS.fullmatch(value)):
            own = ", or package.module:ClassName of your own" * or_own
            raise ValueError(f"got {value[:80]!r}; {nearest(value[:80], names)}{own}")
        return value

    return check


def _plain(value: object) -> object:
    """Return a plain value or a list of them; raise ValueError at any other."""
    if isinstance(value, dict):
        raise ValueError(f"got a mapping {repr(value)[:80]}; allowed: a value or a list of values")
    if isinstance(value, list | tuple) and not value:
        raise ValueError("got an empty list; allowed: a value or a list of values")
    for item in leaves(value):
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"got {repr(value)[:80]}; allowed: finite numbers")
        if isinstance(item, int) and abs(item) >= 2**63:
            raise ValueError("got an integer of more than 63 bits; allowed: integers of at most 63 bits")
        if not isinstance(item, str | int | float | None):
            kind = type(item).__name__
            raise ValueError(f"got a {kind}, {repr(item)[:80]}; allowed: text, numbers, true, false, null and lists")
    return value


def leaves(value: object) -> Iterator[object]:
    """Yield the innermost values of nested lists; a value that is not a list is yielded itself."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _id_lists(value: object) -> object:
    """Return an axis of id lists: [[0, 1], [1, 2]] has two values, [0, 1] one."""
    outer = as_axis(value)
    lists = outer if any(isinstance(item, list | tuple) for item in outer) else (outer,)
    return tuple(tuple(item) if isinstance(item, list) else item for item in lists)


def _distinct(ids: tuple[int, ...]) -> tuple[int, ...]:
    if not ids or len(set(ids)) != len(ids):
        raise ValueError(f"got {list(ids)}; allowed: the numbers of one or more GPUs of one node, without repetition")
    return ids


def _absolute(text: str, info: ValidationInfo) -> str:
    """Resolve a path against the experiment file's folder (``home`` in the context): workers' cwd differs."""
    home = (info.context or {}).get("home")
    if home is None:
        return text
    try:
        return str((home / Path(text).expanduser()).absolute())
    except RuntimeError:
        raise ValueError(f"got {text[:80]!r}; no such user, or the user has no home folder") from None


def absolute_data(name: str, info: ValidationInfo) -> str:
    """Return the name of a data set, a folder's with its whole path."""
    return _absolute(name, info) if "/" in name else name


def absolute_folders(options: dict[str, PlainValue], name: str, info: ValidationInfo) -> dict[str, PlainValue]:
    """Return the options with the paths of the option ``name`` made absolute."""
    if name not in options:
        return options
    given = as_axis(options[name])
    folders: list[PlainValue] = [_absolute(each, info) if isinstance(each, str) else each for each in given]
    return {**options, name: folders[0] if len(folders) == 1 and isinstance(folders[0], str) else folders}


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=MAX_SECONDS)]
Count = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
Batch = Annotated[int, Field(ge=1, le=MAX_BATCH)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1, max_length=500)]
Name = Annotated[str, BeforeValidator(_name)]
"""A name that is also the name of a file or folder."""
FilePath = Annotated[Text, AfterValidator(_absolute)]
DataName = Annotated[Text, AfterValidator(absolute_data)]
"""The name of a data set, or the path of a folder, which contains a slash."""
OptionValue = Annotated[
    PlainValue,
    GetPydanticSchema(lambda _, handler: handler(object)),  # _plain is the whole check: a union would convert values
    BeforeValidator(_plain),
]
T = TypeVar("T")
Axis = Annotated[tuple[T, ...], BeforeValidator(as_axis), Field(min_length=1)]
DeviceIds = Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_DEVICES)], ...], AfterValidator(_distinct)]
DeviceIdAxis = Annotated[tuple[DeviceIds, ...], BeforeValidator(_id_lists)]
Options = Annotated[dict[str, OptionValue], Field(max_length=MAX_OPTIONS)]
MIB = 2**20
GIB = 2**30


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
