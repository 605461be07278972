"""The recorded exchanges of a step, and the times of the exchange of parameters and gradients, by strategy."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]


class ExchangeRow(TypedDict):
    """One collective of a step on one rank, in the order in which they are called.

    ``size_bytes``: of the whole tensor, as in LinkRow. ``ready_s``, ``needed_s``: seconds of computation from the start
    of the forward pass, all waiting for exchanges excluded, until it can begin, and until what follows needs it.
    """

    position: int
    operation: Collective
    size_bytes: int
    ready_s: float
    needed_s: float


class ExchangeSeconds(TypedDict, total=False):
    """Seconds a step of the parts of an exchange, each known for one strategy; None if a profile did not show it."""

    dp_replicate_s: float | None
    dp_scatter_s: float | None
    dp_gather_s: float | None
    dp_reduce_s: float | None
    fsdp_all_gather_s: float | None
    fsdp_reduce_scatter_s: float | None
    fsdp_shard_copy_s: float | None
    dp_replicate_exposed_s: float | None
    dp_scatter_exposed_s: float | None
    dp_gather_exposed_s: float | None
    dp_reduce_exposed_s: float | None
    fsdp_all_gather_exposed_s: float | None
    fsdp_reduce_scatter_exposed_s: float | None
    fsdp_shard_copy_exposed_s: float | None
    dp_threads_s: float
    dp_side_by_side_s: float
    ddp_communication_s: float
    ddp_exposed_s: float
