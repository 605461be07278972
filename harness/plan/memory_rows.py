"""The types of the sizes from which peak memory is estimated, and of what a trace of it found."""

from __future__ import annotations

from typing_extensions import TypedDict


class ActivationBytes(TypedDict):
    """Tensors that a forward pass keeps for backward, without parameters: a constant part, and one for each sample."""

    fixed: int
    per_sample: int


class ModelBytes(TypedDict):
    """The sizes of a model, in bytes.

    ``unit_bytes``: parameters of the largest unit that fsdp shards; ``root_bytes``: of those in no unit. ``on_meta``:
    the model is built without memory.
    """

    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    unit_bytes: int
    root_bytes: int
    on_meta: bool


class MemoryFacts(ModelBytes):
    """The sizes from which the peak memory of cells with one model is estimated, in bytes.

    ``activations``: by precision, 'bf16', or 'bf16 compiled'. ``process_bytes``: resident memory of a rank without the
    model. ``device_bytes``, ``host_bytes``: of the smallest device and node.
    """

    activations: dict[str, ActivationBytes]
    process_bytes: int
    device_bytes: int
    host_bytes: int


class TracedPeak(TypedDict):
    """The traced peak of a step on one device, in bytes; ``without_gradients_bytes``: of all but gradients.

    Both may be at different moments of the step.
    """

    peak_bytes: int
    without_gradients_bytes: int


class Examination(TypedDict):
    """What the trace of a cell found. ``process_bytes``: resident memory of the process without the model.

    ``sizes``: None if the model cannot be built; ``peak``: None if it cannot be traced. ``alone``: the peak is that of
    one device, for the cell's strategy cannot be traced. ``reason``: why something is missing.
    """

    sizes: ModelBytes | None
    process_bytes: int
    peak: TracedPeak | None
    alone: bool
    reason: str
