"""What tests share: small experiments, machines that do not exist, hand-made records."""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

os.environ.pop("RAY_ADDRESS", None)

from harness.config import load as config
from harness.config.experiment import Experiment
from harness.plan.grid import OwnCode
from harness.plan.inventory import Inventory, Node
from harness.plan.planner import Plan, make_plan
from harness.system.user_code import CodeVersion

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "results" / "example" / "scaling-2-cpu-cores"
Make = Callable[..., Experiment]
"""The fixture ``make_experiment``."""
FEW_STEPS = {"blocks": 1, "warmup_steps": 2, "warmup_rounds": 2, "windows": 1, "window_steps": 4, "window_seconds": 0.0}
FEW_STEPS |= {"twin": False, "explain": False}
"""The section ``throughput`` of a run that is to be short."""


@atexit.register
def silence_unloading() -> None:
    """Silence libraries that print while the interpreter unloads them, after the summary: nanobind lists its leaks."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


SHARED = ("trained", "ray_cluster", "examined")
"""Fixtures of several modules that take long: with ``-n`` all of their tests are in one process."""
FIRST = ("ray_cluster", "test_interrupted slow", "test_two_nodes slow", "test_faults slow", "examined")
FIRST += ("test_run slow", "test_acceptance slow", "test_late_node slow", "trained", "test_ray_safety slow")
FIRST += ("test_mirrored slow", "test_variants slow", "test_injection slow", "test_scripts slow")
"""The longest groups of slow tests, the longest first, so that no process ends with them."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run fast tests first, then slow ones, and those that need the machine alone last: a mistake is seen early.

    With ``-n`` the tests of a module are in one process, which makes its fixtures once, and so are all tests that need
    the machine alone.
    """
    items.sort(key=_order)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _order(item: pytest.Item) -> tuple[bool, bool, int]:
    """Return what sorts a test: fast, slow by the place of its group in FIRST, alone."""
    alone, slow = (item.get_closest_marker(name) is not None for name in ("alone", "slow"))
    return alone, slow, [*FIRST, _group(item)].index(_group(item))


def _group(item: pytest.Item) -> str:
    """Return the group of a test: one process runs all tests of a group, one after the other."""
    if item.get_closest_marker("alone"):
        return "alone"
    if not item.get_closest_marker("slow"):
        return item.path.stem
    shared = (name for name in SHARED if name in getattr(item, "fixturenames", ()))
    return next(shared, f"{item.path.stem} slow")


def pytest_collection_finish() -> None:
    """Set torch, if a test has imported it, to one thread: on a busy machine several wait for each other."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Exclude what was imported and collected from garbage collection, of which each would take 0.3 s.

    For each module anew, since a training of the harness ends this.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Under pytest-xdist, run no other test beside one that is marked ``alone``.

    The wait is outside of pytest-timeout's limit. The lock is this file's, which every process of a session has.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with Path(__file__).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have the file open still


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw none: drawing takes most of the time of a report."""
    monkeypatch.setattr("harness.report.html.FIGURES", {})


@pytest.fixture
def content() -> dict[str, Any]:
    """The smallest experiment file, as a mapping."""
    return {"name": "test", "grid": {"per_device_batch_size": 32}}


def experiment_of(
    grid: Mapping[str, Any] | None = None, *, diagnostics: bool = False, throughput: Any = (), **sections: Any
) -> Experiment:
    """An experiment from a grid and any other section, by default without diagnostic trials."""
    given = {"per_device_batch_size": 32} if grid is None else grid
    checks = {} if diagnostics else {"equivalence": False, "preflight": False}
    trials = {} if diagnostics else {"twin": False, "explain": False}
    timed = None if throughput is None else {**trials, **dict(throughput)}
    content = {"name": "test", "grid": given, "throughput": timed, **checks, **sections}
    return config.parse_experiment(content, source="test.yaml")


@pytest.fixture(scope="session")
def make_experiment() -> Make:
    return experiment_of


def plan_of(grid: Mapping[str, Any] | None = None, inventory: Inventory | None = None, **sections: Any) -> Plan:
    """The plan of an experiment of these sections, by default on a laptop of two cores."""
    return make_plan(experiment_of(grid, **sections), inventory or laptop())


def laptop(cores: int = 2) -> Inventory:
    """One node without a GPU."""
    return Inventory((Node("n0", "127.0.0.1", "laptop", cores),))


def gpu_cluster(nodes: int = 1, gpus: int = 8) -> Inventory:
    """Nodes with GPUs that do not exist."""
    return Inventory.assume(nodes, gpus)


def variants(*names: str) -> dict[str, OwnCode]:
    """Versions of a user's module ``own`` in folders that do not exist."""
    codes = (CodeVersion(name, f"/code/{name}", f"{place:012x}", ("own",)) for place, name in enumerate(names))
    return {code.name: OwnCode(code, {}) for code in codes}


@pytest.fixture
def write_experiment(tmp_path: Path) -> Callable[[str], Path]:
    """An experiment file from its text."""

    def write(text: str, name: str = "experiment.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def no_group() -> Iterator[None]:
    """A process group of one, for code that needs one; destroyed afterwards."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str, str], list[float]]:
    """What 2, 1 and 3 real processes over gloo trained; each world finds the checkpoints of those before it."""
    import torch

    from tests.trained import main
    from tests.worlds import fork_ranks

    folder = tmp_path_factory.mktemp("trained")
    found: dict[tuple[str, int, str, str], list[float]] = {}
    for world_size in (2, 1, 3):
        found |= torch.load(fork_ranks(main, world_size, folder))
    return found
