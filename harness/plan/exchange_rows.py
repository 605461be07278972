"""The recorded times of the exchange of parameters and gradients, by strategy."""

from __future__ import annotations

from typing_extensions import TypedDict


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
