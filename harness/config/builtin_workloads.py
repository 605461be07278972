"""The built-in workloads by name: their classes, data and models, known without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.errors import nearest

SYNTHETIC = ("synthetic", "synthetic_device")
"""Data made up on the host; with the second, one batch stays on the device, and loading costs nothing."""
SIZES = ("small", "medium", "large")


class BuiltinWorkload(NamedTuple):
    """A built-in workload: ``module:ClassName``, data and models; a grid that names none has the first data, ``model``.

    ``folders``: whether data may be the path of a folder, too; ``decodes``: whether each sample of that is a file to
    decode. ``emulated``: whether its layers wait instead of computing.
    """

    location: str
    summary: str
    model: str
    data_names: Sequence[str]
    models: Sequence[str]
    folders: bool = False
    decodes: bool = False
    emulated: bool = False

    @property
    def data(self) -> str:
        """The data of a grid that names none."""
        return self.data_names[0]

    def unknown(self, data: Sequence[str], models: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield the axis and the problem of each name that the workload does not have."""
        for model in models:
            if model not in self.models:
                yield "model", f"got {model[:80]!r}; {nearest(model[:80], self.models)}"
        path = ", or a folder's path, with a slash" if self.folders else ""
        for name in data:
            if name not in self.data_names and not (self.folders and "/" in name):
                yield "data", f"got {name[:80]!r}; {nearest(name[:80], self.data_names)}{path}"


BUILTIN_WORKLOADS: Mapping[str, BuiltinWorkload] = {
    "image_classification": BuiltinWorkload(
        "harness.train.workloads.image_classification:ImageClassification",
        "ResNets on images: small ones for a CPU, and torchvision's",
        "resnet18",
        ("digits", "cifar10", *SYNTHETIC),
        (
            *("resnet8", "resnet14", "resnet20", "resnet32", "resnet44", "resnet56"),
            *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
        ),
        folders=True,
        decodes=True,
    ),
    "conv_stack": BuiltinWorkload(
        "harness.train.workloads.conv_stack:ConvStack",
        "convolutions that remove noise from images: much arithmetic, few parameters",
        "small",
        ("digits", *SYNTHETIC),
        SIZES,
    ),
    "mlp": BuiltinWorkload(
        "harness.train.workloads.mlp:Mlp",
        "a wide multilayer perceptron: many parameters, little arithmetic",
        "medium",
        ("digits", *SYNTHETIC),
        SIZES,
    ),
    "padded_sequences": BuiltinWorkload(
        "harness.train.workloads.padded_sequences:PaddedSequences",
        "passages of code of unequal length, padded: batches of unequal work",
        "small",
        ("stdlib", *SYNTHETIC),
        SIZES,
        folders=True,
    ),
    "language_model": BuiltinWorkload(
        "harness.train.workloads.language_model:LanguageModel",
        "a GPT on bytes of text, up to the size of GPT-2 small",
        "nano",
        ("stdlib", *SYNTHETIC),
        ("nano", "micro", "mini", "small", "gpt2"),
        folders=True,
    ),
    "segmentation": BuiltinWorkload(
        "harness.train.workloads.segmentation:Segmentation",
        "a small U-Net that finds digits on photographs, pixel by pixel",
        "small",
        ("digits", *SYNTHETIC),
        SIZES,
    ),
    "emulated_compute": BuiltinWorkload(
        "harness.train.workloads.emulated_compute:EmulatedCompute",
        "layers that wait instead of computing: many ranks on few cores, a rehearsal",
        "small",
        ("synthetic",),
        SIZES,
        emulated=True,
    ),
}
"""A new workload is its file and an entry here. A user's class has its own defaults."""


def emulates_compute(workload: str) -> bool:
    """Return whether the layers of the workload of this name wait instead of computing."""
    return workload in BUILTIN_WORKLOADS and BUILTIN_WORKLOADS[workload].emulated
