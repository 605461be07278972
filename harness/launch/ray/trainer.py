"""fit() in a thread, the callbacks of Ray Train that are left out, and reservations that a failed fit() leaves."""

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
    """Runs trainer.fit() in a thread, so that the main thread can handle signals and messages."""

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
        except BaseException as error:  # SystemExit too, which Ray raises when it is stopped
            self.error = error


def free_devices() -> None:
    """Free the resources that a failed fit() still holds: Ray keeps them if its own shutdown failed too.

    Called while no fit() runs: every placement group of this driver's job is a leftover.
    """
    job = ray.get_runtime_context().get_job_id()
    for name, group in placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":  # an id ends with its job's
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(name)))
