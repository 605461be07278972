"""The type of a recorded size of a link or a collective."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

LinkOperation = Literal["copy", "send_receive", "all_reduce", "all_gather", "reduce_scatter"]
"""copy: between two GPUs of one process; send_receive: between two processes; the others are of all ranks."""
LinkTier = Literal["inside a node", "between nodes"]


class LinkRow(TypedDict):
    """One size of one operation between two devices (copy, send_receive) or of all ranks (the collectives).

    ``source``, ``target``: numbers of the devices in the placement, which are the ranks if each has one device; None
    for a collective.
    """

    operation: LinkOperation
    backend: str
    tier: LinkTier
    source: int | None
    target: int | None
    link: str | None
    size_bytes: int
    repetitions: int
    calls: int
    time_s: float
    min_s: float
    max_s: float
