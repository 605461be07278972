"""Schema of the columns that describe a cell: its axes, and its labels among the cells of its run."""

from __future__ import annotations

from harness.record.schema.table import column as _c

CELL_ID = _c("cell_id", "string", "hash of the cell's resolved content")
AXIS_COLUMNS = (
    _c("workload", "string", "built-in name or package.module:ClassName"),
    _c("data", "string", "data set"),
    _c("model", "string", "model size, by name"),
    _c("strategy", "string", "single, dp, ddp or fsdp"),
    _c("device", "string", "cpu or cuda"),
    _c("devices", "Int64", "number of GPUs, or of CPU slots"),
    _c("device_ids", "string", "GPU ids on the node, if the experiment file names them"),
    _c(
        "link",
        "string",
        "links between its GPUs, as in nvidia-smi topo -m, best first: NV12, PIX, PXB, PHB, NODE, SYS",
    ),
    _c("nodes", "Int64", "number of nodes (machines)"),
    _c("scaling", "string", "weak (per-device batch fixed) or strong (global batch fixed)"),
    _c("per_device_batch_size", "Int64", "batch size of one device", "samples"),
    _c("global_batch_size", "Int64", "batch size summed over all devices", "samples"),
    _c("precision", "string", "fp32 (TF32 off), tf32, bf16 or fp16 (with a loss scale)"),
    _c("compile", "boolean", "true if the model is compiled with torch.compile"),
    _c("launcher", "string", "launcher of the processes: ray, or torchrun as the control"),
    _c("oversubscribed", "boolean", "true if several ranks share a device: a functional test, no claim about speed"),
    _c(
        "emulated",
        "boolean",
        "true for DataParallel on CPU slots, and with emulated_compute: a functional test, no claim about speed",
    ),
    _c(
        "faulty",
        "boolean",
        "true if such cells are measured despite an error of the doctor: no claim about speed; `<NA>` without one",
    ),
    _c("emulated_compute", "boolean", "true if layers wait instead of computing (workload emulated_compute)"),
    _c("options", "mapping", "options of strategy, workload, optimizer, schedule, training and loader"),
    _c("variant", "string", "name of the version of the user's code; `<NA>` if the experiment file has no variants"),
)

LABEL_COLUMNS = (
    _c("label", "string", "label of the cell: strategy, devices, and the axes and options that vary in the run"),
    _c("setting", "string", "part of the label that cells of several strategies can share; empty if nothing varies"),
    _c("own_options", "string", "part of the label that only cells of its strategy can have; empty if nothing varies"),
)
CELL_COLUMNS = (*LABEL_COLUMNS, *AXIS_COLUMNS)
