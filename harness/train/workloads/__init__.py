"""Workloads: their protocol, their classes by name, their construction from a cell, and what loss() returns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.errors import Collected, HarnessError, WorkloadError, nearest
from harness.plan.cell import Cell, Options
from harness.system.user_code import load_from

Collate = Callable[[list[object]], object]
"""Samples -> batch."""


class SizedDataset(Protocol):
    """A map-style data set: with a length, indexed by integers from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


Datasets = tuple[SizedDataset, SizedDataset]
"""Training and validation data."""


class Workload(Protocol):
    """A model and its data, independent of devices, ranks and time.

    Optional: ``collate(samples)``, or ``collate(samples, training)`` if validation is batched otherwise;
    ``metrics(model, batch) -> {name: (sum, weight)}``;
    ``evaluate(model, loader) -> {name: value}``, for metrics of the whole validation set that are no means over its
    samples: ``loader`` has all of it, in batches of one size on the device, for every strategy and rank alike;
    ``derived(means) -> {name: value}``, computed from the means of the loss and of the metrics, such as a
    perplexity; ``metric_names``, the names that these return, so that a target is checked before anything runs;
    ``optimizer(model, options)``, built after wrapping, and ``schedule(optimizer, options)``, in place of the classes
    that the file names (whose name memory is estimated from); ``after_step(model, step)``, inside the step's time, such
    as an average of weights, whose state is in checkpoints only if the model's buffers hold it;
    ``tokens_per_sample``, if it is the same of all samples and the unit is tokens: the weight of a global batch is then
    known before its backward pass, without an exchange and without a later pass over the gradients;
    ``shard_units(model)``, the modules that fsdp shards one by one; ``init_weights(model)``, if ``build_model`` builds
    on the meta device: it sets every parameter and buffer in place, as torch.nn.init does, also where they are sharded.
    Without it each process of a node first holds the whole model in the node's memory.

    Each trial makes a new object. ``datasets()`` is called once a process, and again if the data sets are no longer as
    they were built: by their pickle, if they are not of torch's own types (``data_reuse.py``). Later objects have the
    attributes that it set or filled.
    """

    unit: str
    """The unit of throughput: "samples" or "tokens"."""

    def build_model(self) -> nn.Module: ...

    def datasets(self) -> Datasets: ...

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses over the batch, and its weight: its number of samples or tokens."""
        ...


class Wrapper:
    """A workload around another one, ``inner``, for checks; what it does not define it takes from ``inner``."""

    def __init__(self, inner: Workload) -> None:
        self.inner = inner
        self.unit = inner.unit

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while an object is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)


def innermost(workload: Workload) -> Workload:
    """Return the user's own workload, without wrappers."""
    return innermost(workload.inner) if isinstance(workload, Wrapper) else workload


def collate_of(workload: Workload, *, training: bool = True) -> Collate | None:
    """Return the workload's own ``collate`` for training or validation; None if torch's default is to be used."""
    collate: Callable[..., object] | None = getattr(workload, "collate", None)
    if collate is None or "training" not in inspect.signature(collate).parameters:  # further options are its own
        return collate
    return partial(collate, training=training)


def module_of(name: str) -> str:
    """Return the module of a built-in workload or of ``package.module:ClassName``."""
    return _location(name).partition(":")[0]


def _location(name: str) -> str:
    return BUILTIN_WORKLOADS[name].location if name in BUILTIN_WORKLOADS else name


def load_class(name: str) -> type:
    """Return the class of a built-in workload or of ``package.module:ClassName``; raise WorkloadError."""
    found: type = load_from(_location(name), "class", what=f"workload {name!r}", builtin=name in BUILTIN_WORKLOADS)
    missing = [method for method in ("build_model", "datasets", "loss") if not callable(getattr(found, method, None))]
    if missing:
        raise WorkloadError(f"workload {name!r}: the class lacks {', '.join(missing)}; see README, 'Your own workload'")
    return found


def build(cell: Cell) -> Workload:
    """Return the workload with a cell's data, model and options; raise WorkloadError if it does not accept them."""
    found = load_class(cell.workload)
    named = {key: value for key, value in (("data", cell.data), ("model", cell.model)) if value is not None}
    arguments = {**named, **cell.workload_options}
    _check_arguments(cell.workload, found, arguments)
    try:
        workload: Workload = found(**arguments)
    except HarnessError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise WorkloadError(f"workload {cell.workload}({given}): {type(error).__name__}: {error}") from error
    if getattr(workload, "unit", None) not in ("samples", "tokens"):
        raise WorkloadError(f"workload {cell.workload}: unit must be 'samples' or 'tokens'")
    each = getattr(workload, "tokens_per_sample", None)
    if each is not None and not (isinstance(each, int | float) and 0 < each < math.inf):
        raise WorkloadError(f"workload {cell.workload}: tokens_per_sample: got {each!r}, not a positive number")
    return workload


def _check_arguments(name: str, found: type, arguments: Options) -> None:
    parameters = inspect.signature(found).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    problems = Collected()
    for key in arguments:
        if key not in parameters:
            place = f"grid.{key}" if key in ("data", "model") else f"workload_options.{key}"
            problems.add(WorkloadError(f"{place}: {name} has no parameter {key!r}; {nearest(key, parameters)}"))
    problems.raise_all()
    if builtin := BUILTIN_WORKLOADS.get(name):
        data, models = ([str(arguments[axis])] if axis in arguments else [] for axis in ("data", "model"))
        for axis, problem in builtin.unknown(data, models):
            raise WorkloadError(f"grid.{axis}: {problem}")


def as_loss(returned: object) -> tuple[Tensor, Tensor]:
    """Return the sum and weight that loss() returned; raise WorkloadError if it returned anything else."""
    pair = returned if isinstance(returned, tuple | list) and len(returned) == 2 else None
    if pair:
        total, weight = pair
        counts = weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, int | float)
        if isinstance(total, Tensor) and total.numel() == 1 and counts:
            return total, weight
    got = f"({', '.join(map(describe, pair))})" if pair else describe(returned)
    raise WorkloadError(
        "loss() must return (sum, weight): the sum of the losses of the batch, a tensor of one number, and the number "
        f"of its samples or tokens; got {got}"
    )


def as_datasets(returned: object) -> Datasets:
    """Return the data sets that datasets() returned; raise WorkloadError if they are no pair, or one is a stream."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise WorkloadError(f"datasets() must return (training, validation); got {describe(returned)}")
    for name, dataset in zip(("training", "validation"), returned, strict=True):
        missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
        if missing or isinstance(dataset, IterableDataset):
            what = f"has no {' and no '.join(missing)}" if missing else "is an IterableDataset"
            raise WorkloadError(
                f"the {name} set of datasets(), {describe(dataset)}, {what}: streams are not measured as a "
                "workload, of which each rank reads its share of a global batch by index: return a data set with "
                "__len__ and __getitem__, or have the training measured as it is, with script: or loop:"
            )
    training, validation = returned
    return training, validation


def describe(value: object) -> str:
    """Return a value in a few words: 'a float', 'a tensor of shape (64,)', 'a tuple of 3 items'."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.ndim else "a tensor without dimensions"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} items"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
