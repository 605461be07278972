"""What fake NVMLs share."""

from __future__ import annotations

from typing import Any


class FakeError(Exception):
    """Stands for NVMLError."""


def answer(value: Any) -> Any:
    """The value, or the exception in its place."""
    if isinstance(value, Exception):
        raise value
    return value


class FakeNvml:
    """Counts its users; without a driver nobody can become one."""

    NVMLError = FakeError

    def __init__(self, *, driver: bool = True) -> None:
        self.driver, self.users = driver, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise FakeError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1
