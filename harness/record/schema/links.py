"""Schema of the tables of links and collectives, which the trials of a placement measure."""

from __future__ import annotations

from harness.plan.rows import LinkRow
from harness.record.schema.table import Table, columns_of
from harness.record.schema.table import column as _c

_PLACEMENT = (
    _c("trial_id", "string", "trial that measured the placement"),
    _c("device", "string", "cpu or cuda"),
    _c("device_model", "string", "product name of the devices"),
    _c("device_ids", "string", "GPU ids on the node, if the experiment file names them"),
    _c("devices", "Int64", "number of devices of the placement (n)"),
    _c("nodes", "Int64", "number of nodes (machines) of the placement"),
    _c("backend", "string", "gloo or nccl between processes; cuda for copies inside a process"),
)
_TIMES = (
    *columns_of(LinkRow),
    _c("algorithm_bytes_per_s", "Float64", "size_bytes over time_s", "bytes/s"),
    _c(
        "bus_bytes_per_s",
        "Float64",
        "bus bandwidth of nccl-tests: algorithm bandwidth, times 2(n-1)/n for all_reduce, (n-1)/n for all_gather and "
        "reduce_scatter",
        "bytes/s",
    ),
)

LINKS = Table(
    "links",
    "one message size between two devices of one placement; the smallest size shows the latency",
    (
        *_PLACEMENT,
        _c("operation", "string", "send_receive: half of a message's return trip between two ranks; copy: one process"),
        _c("source", "Int64", "number of the sending device in the placement: its rank, if each rank has one device"),
        _c("target", "Int64", "number of the receiving device in the placement"),
        _c("tier", "string", "inside a node, or between nodes"),
        _c("link", "string", "link between the two GPUs, as in nvidia-smi topo -m: NV12, PIX, PXB, PHB, NODE, SYS"),
        _c("size_bytes", "Int64", "size of the message", "bytes"),
        *_TIMES,
    ),
)

COLLECTIVES = Table(
    "collectives",
    "one size of one collective of all ranks of one placement; the smallest size shows the latency",
    (
        *_PLACEMENT,
        _c("operation", "string", "all_reduce (ddp), all_gather or reduce_scatter (fsdp)"),
        _c("tier", "string", "between nodes if its ranks are on several nodes, else inside a node"),
        _c(
            "size_bytes",
            "Int64",
            "size of the whole tensor, of which ranks hold parts in all_gather and reduce_scatter",
            "bytes",
        ),
        *_TIMES,
    ),
)
