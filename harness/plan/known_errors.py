"""Well-known errors of torch's wrappers and loaders, each with the option or the change that mends it here."""

from __future__ import annotations

import re
from collections.abc import Mapping

STATIC_GRAPH = "ddp.static_graph: [true] in the grid, or checkpoint(..., use_reentrant=False)"
UNUSED_PARAMETERS = (
    "ddp.find_unused_parameters: [true] in the grid if steps or ranks use different parameters, as experts without "
    "tokens, else freeze or remove those that the loss never uses"
)
KNOWN_ERRORS: Mapping[str, str] = {
    # re-entrant checkpointing, or a parameter that several parts of the graph share
    r"marked? (?:a variable|as) ready (?:only once|twice)|_set_static_graph": STATIC_GRAPH,
    r"torch\.utils\.checkpoint: .*(?:recomput|different)": (
        "a checkpointed part that computes the same the second time: no branch in it by Python's random, by a state or "
        "by the rank"
    ),
    r"expected to have finished reduction in the prior iteration": UNUSED_PARAMETERS,
    r"modified by an inplace operation": (
        "if it occurs under ddp alone, a second forward pass in loss() broadcasts buffers that the first saved: one "
        "forward pass of both inputs together, or ddp.broadcast_buffers: [false] in the grid"
    ),
    r"training graph has changed in this iteration": (
        "ddp.static_graph: [false] in the grid: it is for steps that use the same parameters"
    ),
    r"expects same model across all ranks": "a model that depends on neither the rank nor an unseeded draw",
    r"does not support deepcopy": (
        "a copy of the weights, as of an average, that is made in build_model(), before the model is sharded"
    ),
    r"does not support parameters with no gradients|mixed torch\.tensor and dtensor": (
        "fsdp gathers the parameters of a unit in the unit's forward: use them there only, or return the modules "
        "that are used together from shard_units(model)"
    ),
    r"expects? uniform (?:original parameter )?dtype": (
        "parameters of one dtype in each module of shard_units(model); precision: [bf16] trains with float32 weights"
    ),
    r"re-initialize cuda in forked": (
        "tensors of a data set on the CPU: the harness moves each batch; or loader.workers: [0] in the grid"
    ),
    r"too many open files|received 0 items of ancdata": (
        "ulimit -n 65536 before the command, or torch.multiprocessing.set_sharing_strategy('file_system') in the "
        "module of the workload"
    ),
    r"insufficient shared memory|bus error|unable to (?:open|write|allocate).*shared mem|/torch_\d+\S*: no space": (
        "more shared memory in the container (docker run --shm-size=8g; Kubernetes: an emptyDir of medium Memory at "
        "/dev/shm), or loader.workers: [0] in the grid"
    ),
    r"stack expects each tensor to be equal size|default_collate: batch must contain|not resizable"
    r"|each element in list of batch should be of equal size": (
        "a method collate(samples) of the workload that pads samples of different shape, or takes those that torch's "
        "default cannot stack"
    ),
    r"default process group has not been initialized": (
        "collectives in loss() and forward only if torch.distributed.is_initialized(): single and dp need no group"
    ),
    r"expected more than 1 value per channel": (
        "a larger per_device_batch_size, sync_batch_norm of ddp or fsdp, or GroupNorm"
    ),
    r"device-side assert": "device: cpu shows the line; often a label is beyond the number of classes",
    r"torch\._dynamo|backendcompilerfailed|inductorerror": "compile: [false] measures the cell uncompiled",
    r"dataloader worker .*(?:exited unexpectedly|killed by signal)": (
        "more memory, or fewer loader.workers; loader.workers: [0] in the grid shows an error of the data set itself"
    ),
    r"duplicate gpu detected": "oversubscribe: true lets several ranks share a GPU, with gloo",
}
"""Patterns that are searched for in the message of an error, in lower case, with what follows the words 'remedy:'.

The first that matches counts.
"""


def remedy(message: str) -> str:
    """Return what mends an error with this message; empty if it is not known."""
    text = " ".join(message.lower().split())
    return next((known for pattern, known in KNOWN_ERRORS.items() if re.search(pattern, text)), "")


def advice_on(message: str) -> str:
    """Return the remedy of an error of the workload with this message, or where to look for one."""
    return remedy(message) or "run it on one device first, outside of this benchmark if it fails there too"


def with_remedy(text: str, message: str) -> str:
    """Return a text about an error, which may be cut, with the remedy for the whole message, if there is one."""
    found = remedy(message)
    return f"{text}; remedy: {found}" if found else text
