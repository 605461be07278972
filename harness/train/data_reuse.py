"""Data sets that later trials of a process use again, if they are then the same; each trial has its own workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.utils.data import ConcatDataset, Subset, TensorDataset

from harness.config.builtin_workloads import BUILTIN_WORKLOADS
from harness.plan.cell import Cell
from harness.train import workloads
from harness.train.digests import pickle_digest
from harness.train.workloads import Datasets, Workload


@dataclass(frozen=True)
class SharedData:
    """The data sets of a workload, and the attributes that ``datasets()`` set or filled in it, such as a vocabulary.

    ``digest``: that of the data sets' pickle as they were built; None if they cannot be pickled, or an attribute from
    before them cannot. "" if nothing can change them: those of a built-in workload, and those of torch's own types.
    """

    datasets: Datasets
    attributes: Mapping[str, object]
    digest: str | None

    @classmethod
    def of(cls, cell: Cell, workload: Workload) -> SharedData:
        """Build the data sets of a new workload."""
        before = {name: (value, pickle_digest(value)) for name, value in _attributes(workload).items()}
        datasets = workload.datasets()
        after = _attributes(workload)
        same = {name for name, value in after.items() if name in before and before[name][0] is value}
        filled = {name for name in same if before[name][1] != pickle_digest(after[name])}
        found = {name: value for name, value in after.items() if name not in same - filled}
        if cell.workload in BUILTIN_WORKLOADS:
            return cls(datasets, found, "")
        if any(before[name][1] is None for name in same):  # it may have been filled
            return cls(datasets, found, None)
        return cls(datasets, found, "" if all(map(_is_constant, datasets)) else pickle_digest(datasets))

    @property
    def is_unchanged(self) -> bool:
        """Whether the data sets are as they were built."""
        return self.digest == "" or (self.digest is not None and pickle_digest(self.datasets) == self.digest)

    def new_workload(self, cell: Cell) -> Workload:
        """Build a workload as it is after ``datasets()``, whose data sets are these."""
        workload = workloads.build(cell)
        for name, value in self.attributes.items():
            setattr(workload, name, value)
        return workload


def _attributes(workload: Workload) -> dict[str, object]:
    return dict(getattr(workload, "__dict__", {}))


def _is_constant(dataset: object) -> bool:
    """Return whether a data set is of torch's own types alone, in which nothing changes as samples are read."""
    if type(dataset) is Subset:
        return _is_constant(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_constant, dataset.datasets))
    return type(dataset) is TensorDataset
