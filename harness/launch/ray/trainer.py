"""fit() in a thread, what it adds that a worker group of ours has no use for, and what it may leave behind."""

from __future__ import annotations

import threading

import ray
from ray.train.torch import TorchTrainer
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

UNUSED = ("DatasetsCallback", "PlacementGroupCleanerCallback")
"""Of Ray's own: a manager of Ray Data's datasets, of which there are none, and one that gives back a reservation whose
controller died. That is done by Ray when the driver is gone, and by free_devices below while it lives."""


class Fit:
    """One fit() in a thread of its own, so that the main thread keeps Ctrl-C and its ears."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.error: BaseException | None = None
        self._trainer = trainer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # SystemExit too: Ray raises it when it is told to stop
            self.error = error


def free_devices() -> None:
    """Gives back what a fit() that failed still holds: Ray keeps it where its own shutdown failed too.

    Called while no fit() runs, so that every placement group of this driver's job is such a rest.
    """
    job = ray.get_runtime_context().get_job_id()
    for name, group in placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":  # an id ends with its job's
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(name)))
