"""The limit that ends a run first, and the device-hours that a run has spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.config.experiment import Experiment
from harness.plan.environment import spent_device_seconds
from harness.plan.feasibility import end_of

Make = Callable[..., Experiment]
PRICE = {"per_device_hour": 2.5, "currency": "USD"}


@pytest.mark.parametrize(
    ("limits", "spent_s", "name", "seconds"),
    [
        ({}, 0.0, None, None),
        ({"wall": 100.0}, 1e9, "limits.wall", 100.0),
        ({"device_hours": 4}, 0.0, "limits.device_hours", 1800.0),
        ({"device_hours": 4}, 3600.0, "limits.device_hours", 1350.0),
        ({"device_hours": 4}, 5 * 3600.0, "limits.device_hours", -450.0),
        ({"cost": 10}, 0.0, "limits.cost", 1800.0),
        ({"cost": 10, "device_hours": 2, "wall": "1h"}, 0.0, "limits.device_hours", 900.0),
        ({"cost": 1, "device_hours": 2, "wall": "1h"}, 0.0, "limits.cost", 180.0),
        ({"cost": 1, "device_hours": 2, "wall": "1m"}, 0.0, "limits.wall", 60.0),
    ],
)
def test_the_first_limit_ends_the_run_of_eight_devices(
    make_experiment: Make, limits: dict[str, Any], spent_s: float, name: str | None, seconds: float | None
) -> None:
    found = end_of(make_experiment(limits=limits, cost=PRICE), 8, spent_s)
    assert (found and found.name, found and found.seconds) == (name, seconds)


def test_the_reason_names_the_limit_and_how_to_go_on(make_experiment: Make) -> None:
    found = end_of(make_experiment(limits={"cost": 10}, cost=PRICE), 8)
    assert found
    assert found.reason == "time is up: limits.cost was reached (10 USD of the whole run; raise it to go on)"


def test_every_invocation_counts_with_its_own_devices_and_a_killed_one_until_its_last_record() -> None:
    group = {"invocation": 2, "started_at": 1000.0, "whole_s": 30.0}
    environment: Any = {
        "invocations": [
            {"started_at": 0.0, "wall_s": 100.0, "devices": 4},
            {"started_at": 500.0},
            {"started_at": 990.0},
            {"started_at": 2000.0},
        ],
        "groups": [group],
    }
    spent = spent_device_seconds(environment, {1: 520.0, 2: 1025.0}, 2)
    assert spent == 100 * 4 + 20 * 2 + 40 * 2
