"""TorchTrainer without the helpers that a worker group of ours has no work for, each a process of its own."""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchTrainer

UNUSED = ("DatasetsCallback", "PlacementGroupCleanerCallback")
"""Of Ray's own: a manager of Ray Data's datasets, of which there are none, and one that gives back a reservation whose
controller died. That is done by Ray when the driver is gone, and by harness.ray_watch.free_devices while it lives."""


class LeanTrainer(TorchTrainer):
    """Comes up sooner, with two processes less, and tells when it asks for resources.

    Where Ray has callbacks by other names, it is a TorchTrainer.
    """

    def __init__(self, *arguments: Any, mailbox: Any, launch: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._mailbox, self._launch = mailbox, launch

    def _create_default_callbacks(self) -> list[Any]:
        given = [callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in UNUSED]
        try:
            from harness.ray_callbacks import AsksForResources
        except ImportError:
            return given
        return [*given, AsksForResources(self._mailbox, self._launch)]
