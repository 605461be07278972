"""What Ray reserves for one worker: the examples of the docstrings and their limits."""

from __future__ import annotations

import pytest

from harness.launch.ray.launcher import own_resources, resources_of_named_gpus, shared_resources
from harness.plan.cell import Placement


def test_a_worker_has_all_of_its_devices_and_named_gpus_take_the_whole_node() -> None:
    assert own_resources(Placement(1, 1, 2), 4, on_gpus=True) == {"CPU": 8, "GPU": 2.0}
    assert own_resources(Placement(1, 2, 1), 1, on_gpus=False) == {"CPU": 1}
    assert resources_of_named_gpus(Placement(1, 2, 1, (1, 2)), 4, gpus=8) == {"CPU": 4, "GPU": 4.0}
    assert resources_of_named_gpus(Placement(1, 1, 2, (1, 2)), 4, gpus=8) == {"CPU": 8, "GPU": 8.0}


@pytest.mark.parametrize(
    ("placement", "cores", "gpus", "resources"),
    [
        (Placement(1, 4, 1), 2, 0, {"CPU": 0.5}),
        (Placement(1, 3, 1), 2, 0, {"CPU": 0.66}),  # never more than there is: Ray would wait
        (Placement(1, 4, 1), 8, 2, {"CPU": 2, "GPU": 0.5}),
        (Placement(1, 3, 1), 8, 1, {"CPU": 2, "GPU": 0.3333}),
        (Placement(1, 3, 1), 8, 2, {"CPU": 2, "GPU": 0.5}),
        (Placement(1, 1, 4), 8, 2, {"CPU": 8, "GPU": 2.0}),  # one process drives both
        (Placement(1, 2, 1), 8, 2, {"CPU": 4, "GPU": 1.0}),
    ],
)
def test_workers_that_share_devices_share_the_node(
    placement: Placement, cores: int, gpus: int, resources: dict[str, float]
) -> None:
    assert shared_resources(placement, cores, gpus) == resources
