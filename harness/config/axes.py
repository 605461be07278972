"""The axes of a cell, each declared once: type, meaning, and where it counts; and filters over them.

The columns of the tables, the plain axes of a grid, the sets of cells that are compared, and labels follow from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NotRequired, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ValidationInfo
from typing_extensions import TypedDict

from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.config.values import SECTION, OptionValue, PlainValue, absolute_data, as_axis
from harness.errors import closest, nearest

SHARED_SECTIONS = {
    "optimizer": "optimizer",
    "schedule": "schedule",
    "training": "training",
    "workload": "workload_options",
    "loader": "loader",
    SECTION: "env",
}
"""The sections of options that every strategy has, each with the attribute of an experiment and a cell that has it."""
OPTION_SECTIONS = (*SHARED_SECTIONS, *BUILTIN_TRAITS)
"""The sections of the file whose options are axes too."""
PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]
OwnPrecision = Literal["precision of the script"]
OWN_PRECISION: OwnPrecision = "precision of the script"
"""The precision of a script's cells if the file names none."""
LauncherName = Literal["ray", "torchrun"]
Checkpointing = Literal["none", "full"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]


@dataclass(frozen=True)
class Meaning:
    """The meaning and the unit of a column; the unit is empty for texts, flags and numbers without one."""

    text: str
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Axis(Meaning):
    """The meaning of an axis, and where it counts.

    ``default``: the value of a cell whose file does not give it. ``plain``: a key of a grid whose value a cell takes
    unchanged. ``named``: files, filters and --by may name it. ``found``: the trial finds it, such as a link; the cell
    does not choose it. ``work``: cells that differ in it do different work, and are not ranked among each other.
    ``size``: it sets the size of the problem, and is no choice.
    ``placement``: the devices, which every label names. ``tag``: named beside the strategy in a label if true.
    ``silent``: a label's constants omit its default. ``follows``: the axes with which it may differ since it follows
    from them. ``later``: its default is left out of a cell's id, so that cells keep the ids from before the axis.
    """

    default: object = None
    plain: bool = False
    named: bool = True
    found: bool = False
    work: bool = False
    size: bool = False
    placement: bool = False
    tag: bool = False
    silent: bool = False
    follows: tuple[str, ...] = ()
    later: bool = False


class TrialAxes(TypedDict):
    """A cell's value on each axis, and what its trial found about its devices."""

    workload: Annotated[str, Axis("built-in name or package.module:ClassName", work=True)]
    data: Annotated[str | None, Axis("data set", work=True, size=True)]
    model: Annotated[str | None, Axis("model size, by name", work=True, size=True)]
    strategy: Annotated[str, Axis("single, dp, ddp or fsdp")]
    device: Annotated[str, Axis("cpu or cuda", work=True)]
    devices: Annotated[int, Axis("number of GPUs, or of CPU slots", placement=True, size=True)]
    device_ids: Annotated[
        str | None, Axis("GPU ids on the node, if the experiment file names them", placement=True, follows=("devices",))
    ]
    link: NotRequired[
        Annotated[
            str,
            Axis(
                "links between its GPUs, as in nvidia-smi topo -m, best first: NV12, PIX, PXB, PHB, NODE, SYS",
                found=True,
                named=False,
            ),
        ]
    ]
    nodes: Annotated[int, Axis("number of nodes (machines)", placement=True, follows=("devices",))]
    scaling: Annotated[str, Axis("weak (per-device batch fixed) or strong (global batch fixed)", named=False)]
    per_device_batch_size: Annotated[
        int | None, Axis("batch size of one device", "samples", size=True, follows=("global_batch_size",))
    ]
    global_batch_size: Annotated[
        int, Axis("batch size summed over all devices", "samples", size=True, follows=("per_device_batch_size",))
    ]
    precision: Annotated[
        PrecisionName | OwnPrecision,
        Axis("fp32 (TF32 off), tf32, bf16 or fp16 (with a loss scale)", default="fp32", plain=True, work=True),
    ]
    compile: Annotated[
        bool, Axis("true if the model is compiled with torch.compile", default=False, plain=True, silent=True)
    ]
    compile_mode: Annotated[
        CompileMode,
        Axis(
            "mode of torch.compile: reduce-overhead and max-autotune use CUDA graphs, the latter times kernels too",
            default="default",
            plain=True,
            silent=True,
            later=True,
        ),
    ]
    activation_checkpointing: Annotated[
        Checkpointing,
        Axis(
            "full: only the inputs of shard units are kept for backward, which computes each unit once more; or none",
            default="none",
            plain=True,
            silent=True,
            later=True,
        ),
    ]
    launcher: Annotated[
        LauncherName, Axis("launcher of the processes: ray, or torchrun as the control", default="ray", silent=True)
    ]
    oversubscribed: Annotated[
        bool,
        Axis(
            "true if several ranks share a device: a functional test, no claim about speed",
            named=False,
            tag=True,
            follows=("strategy", "devices"),
        ),
    ]
    emulated: Annotated[
        bool,
        Axis(
            "true for DataParallel on CPU slots, and with emulated_compute: a functional test, no claim about speed",
            named=False,
            tag=True,
            follows=("strategy", "devices"),
        ),
    ]
    emulated_compute: NotRequired[
        Annotated[bool, Axis("true if layers wait instead of computing (workload emulated_compute)", named=False)]
    ]
    faulty: NotRequired[
        Annotated[
            bool,
            Axis(
                "true if such cells are measured despite an error of the doctor: no claim about speed; `<NA>` if not",
                found=True,
                named=False,
                tag=True,
            ),
        ]
    ]
    ingest: NotRequired[
        Annotated[
            bool,
            Axis(
                "true if a loop's batches were consumed without training (mode: ingest): no speed of training; `<NA>` "
                "if not",
                found=True,
                named=False,
                tag=True,
            ),
        ]
    ]
    options: Annotated[
        Mapping[str, PlainValue],
        Axis("options of strategy, workload, optimizer, schedule, training, loader and env", named=False),
    ]
    variant: NotRequired[
        Annotated[
            str | None, Axis("name of the version of the user's code; `<NA>` if the experiment file has no variants")
        ]
    ]


def declared(row: type) -> dict[str, tuple[object, Meaning]]:
    """Return the type and the meaning of each field of a type of rows that has a ``Meaning``, in order."""
    found = {}
    for name, hint in get_type_hints(row, include_extras=True).items():
        field = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        if get_origin(field) is Annotated:
            kind, meaning = get_args(field)[:2]
            found[name] = (kind, meaning)
    return found


AXES: Mapping[str, Axis] = {name: axis for name, (_, axis) in declared(TrialAxes).items() if isinstance(axis, Axis)}
"""Every axis by name, in the order of the tables."""
CELL_AXES = tuple(name for name, axis in AXES.items() if not axis.found)
"""The axes that are chosen by the cell."""
NAMED_AXES = tuple(name for name, axis in AXES.items() if axis.named)
"""The axes that can be named; options have names of their own, the others follow from the file."""
WORK_AXES = tuple(name for name, axis in AXES.items() if axis.work)
"""The axes that cells which do the same work share."""
LATER = {name: axis.default for name, axis in AXES.items() if axis.later}
"""The axes whose default is no part of a cell's id, with this default."""
SIZES = frozenset(name for name, axis in AXES.items() if axis.size)
"""The axes that set the size of the problem, which is no choice: throughput.blocks asks no width of their intervals."""
PLAIN_AXES = {name: (kind, AXES[name].default) for name, (kind, _) in declared(TrialAxes).items() if AXES[name].plain}
"""The type and the default of the axes that a cell takes from its grid unchanged."""
BATCHES = ("global_batch_size", "per_device_batch_size")


def batch_axis(scaling: object) -> str:
    """Return the axis of the batch size that the scaling, weak or strong, holds fixed."""
    return "global_batch_size" if scaling == "strong" else "per_device_batch_size"


def is_option_axis(key: object) -> bool:
    """Return whether a key such as ``optimizer.lr`` names an option of a known section."""
    section, dot, option = str(key).partition(".")
    return bool(dot) and section in OPTION_SECTIONS and option.isidentifier()


def options_in(options: Mapping[str, PlainValue], section: str) -> dict[str, PlainValue]:
    """Return the options of one section by their own names."""
    prefix = f"{section}."
    return {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}


def check_axis(name: str) -> str:
    """Return the name of an axis or option; raise ValueError if it is unknown."""
    if name not in NAMED_AXES and not is_option_axis(name):
        note = batch_note(closest(name, NAMED_AXES))
        hint = nearest(name, NAMED_AXES)
        raise ValueError(f"unknown axis {name!r}; {hint}, or an option such as optimizer.lr{note}")
    return name


def check_filter(value: dict[str, PlainValue]) -> dict[str, PlainValue]:
    """Return the filter, a mapping of axes to the accepted values; raise ValueError at an unknown axis."""
    for key in value:
        check_axis(str(key))
    return value


def batch_note(offered: Sequence[str]) -> str:
    """Return what each kind of batch size means, if the offered names are both; else ''."""
    both = set(offered) >= set(BATCHES)
    return "; global: fixed over device counts (strong scaling), per device: fixed on each (weak scaling)" * both


def _with_whole_paths(wanted: dict[str, PlainValue], info: ValidationInfo) -> dict[str, PlainValue]:
    """Return the filter with the paths of data sets as grids have them."""
    if "data" not in wanted:
        return wanted
    data = [absolute_data(each, info) if isinstance(each, str) else each for each in as_axis(wanted["data"])]
    return {**wanted, "data": data if isinstance(wanted["data"], list | tuple) else data[0]}


Filter = Annotated[dict[str, OptionValue], AfterValidator(check_filter), AfterValidator(_with_whole_paths)]
