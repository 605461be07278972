"""Validation of environment.json and plan.json, whose content the tables are made from."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from harness.plan.environment import NodeFacts, RunEnvironment


class _LaunchedGroup(TypedDict):
    group_id: str
    invocation: int
    whole_s: float
    nodes: list[NodeFacts]


class _Environment(TypedDict, total=False):
    groups: list[_LaunchedGroup]


class _Group(TypedDict):
    trials: list[str]
    block: int


class _CannotRun(TypedDict):
    cell_id: str
    strategy: str
    devices: int
    per_device_batch_size: int | None
    global_batch_size: int


class _Impossible(_CannotRun):
    reason: str


class _Plan(TypedDict):
    groups: list[_Group]
    skipped: list[_CannotRun]
    impossible: list[_Impossible]


_ENVIRONMENT = TypeAdapter(_Environment)
_PLAN = TypeAdapter(_Plan)


def check_environment(content: RunEnvironment) -> None:
    """Raise ValueError if environment.json lacks what tables and report take from it."""
    _check(_ENVIRONMENT, content)


def check_plan(content: Mapping[str, object]) -> None:
    """Raise ValueError if plan.json lacks what the tables take from it."""
    _check(_PLAN, content)


def _check(adapter: TypeAdapter[_Environment] | TypeAdapter[_Plan], content: object) -> None:
    try:
        adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
