"""Any file at all is a plan, or one message and exit code 2: never a traceback, never more than 2 s or 500 MB."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.cli.arguments import BAD_INPUT
from harness.config import yaml_source
from harness.config.load import load_experiment, parse_experiment
from harness.errors import ExperimentError, HarnessError
from harness.plan.feasibility import reason_to_skip
from harness.plan.inventory import Inventory
from harness.plan.planner import Plan, make_plan
from harness.run.prepare import make_checked_plan
from harness.run.request import Request
from tests.any_experiment import ANYTHING, broken, experiments, mistaken, optimizers, schedules
from tests.conftest import ROOT, gpu_cluster, laptop

FEW, MANY = 20, 125
SECONDS, MEGABYTES = 2.0, 500
TOO_MUCH = re.compile(r"at most [0-9,]+ are allowed")
INVENTORIES = st.sampled_from([laptop(2), laptop(64), gpu_cluster(1, 8), gpu_cluster(3, 4)])


def examples(count: int) -> Any:
    """The same examples at every run. Their time is the processor's: a machine may do other things too."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    phases = [Phase.explicit, Phase.generate]
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=quiet, phases=phases
    )


def check_valid(content: dict[str, Any], inventory: Inventory) -> None:
    text = yaml.safe_dump(content)
    experiment = parse_experiment(yaml_source.parse_mapping(text, source="f"), source="f")
    try:
        plan = make_plan(experiment, inventory)
    except ExperimentError as error:  # a file without a mistake may ask for too much
        assert TOO_MUCH.search(str(error))
        return
    ids = [trial.id for trial in plan.trials]
    assert len(set(ids)) == len(ids)
    assert plan.trials or plan.skips or plan.impossible
    cells = {trial.cell for trial in plan.trials if trial.purpose != "equivalence"}  # whose shares may be uneven
    assert not [plan.labels.of_cell(cell) for cell in cells if reason_to_skip(cell, plan.machine)]
    assert all(group.trials and len({trial.block for trial in group.trials}) == 1 for group in plan.groups)
    resolved = yaml.safe_dump(experiment.model_dump(mode="json"))
    assert parse_experiment(yaml_source.parse_mapping(resolved, source="f"), source="f") == experiment
    assert make_plan(experiment, inventory) == plan


def outcome(content: bytes, folder: Path) -> tuple[Plan | None, str, float]:
    """The plan of a file, or the error, and the seconds of processor time; nothing else may be raised.

    Looked at as the command does before it starts anything: its workloads, optimizers and target are tried, too.
    """
    file = folder / "e.yaml"
    file.write_bytes(content)
    start = time.process_time()
    try:
        plan, output = make_checked_plan(Request(file), load_experiment(file), gpu_cluster()), ""
    except HarnessError as error:
        plan, output = None, str(error)
    return plan, output, time.process_time() - start


@pytest.fixture(scope="module", autouse=True)
def torch_is_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All of it: the first step of an optimizer in a process takes seconds, which no file is to blame for."""
    plan, output, _ = outcome(b"name: x\ngrid: {global_batch_size: 8}\n", tmp_path_factory.mktemp("first"))
    assert plan and not output


def check_any(content: bytes | str, folder: Path) -> None:
    """Check that a file is a plan, or one message that counts its problems or says where the one is; in time."""
    encoded = content if isinstance(content, bytes) else content.encode("utf-8", errors="surrogatepass")
    plan, output, seconds = outcome(encoded, folder)
    first, *more = output.splitlines() or [""]
    located = output.startswith(("workload", "grid.", "optimizer", "schedule", "conv"))
    assert plan or (len(output) < 30_000 and (located or (more and "problem" in first)))
    assert seconds < SECONDS


SLOW = pytest.mark.slow


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY // 2, marks=SLOW)])
def test_a_valid_file_is_a_valid_plan(count: int) -> None:
    examples(count)(given(experiments(), INVENTORIES)(check_valid))()


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=SLOW)])
@pytest.mark.parametrize(
    "drawn", [mistaken(), st.one_of(broken(), broken(), st.binary(max_size=2000))], ids=["mistakes", "bytes"]
)
def test_any_file_is_a_plan_or_one_message(drawn: st.SearchStrategy[Any], count: int, tmp_path: Path) -> None:
    examples(count)(given(drawn)(lambda content: check_any(content, tmp_path)))()


@examples(2 * FEW)
@given(optimizer=optimizers(), schedule=schedules(), target=ANYTHING)
def test_optimizers_schedules_and_targets_of_any_kind(
    optimizer: Any, schedule: Any, target: Any, tmp_path: Path
) -> None:
    sections = {"optimizer": optimizer, "schedule": schedule, "convergence": {"epochs": 1, "target": target}}
    content = {"name": "x", "grid": {"global_batch_size": 8}, **sections}
    check_any(str(yaml.safe_dump(content, allow_unicode=True, sort_keys=False)), tmp_path)


def laughs(levels: int, line: str) -> str:
    """Each line holds the one before nine times."""
    lines = ["a0: &a0 {x: 1}"] + [line.format(n=n + 1, items=", ".join([f"*a{n}"] * 9)) for n in range(levels)]
    return "\n".join(lines) + "\n"


GRID = "name: x\ngrid: {global_batch_size: 8}\n"
BATCHES = ", ".join(str(n) for n in range(1, 4001))
WORST = {
    "a billion laughs": laughs(40, "a{n}: &a{n} [{items}]"),
    "a billion laughs as keys": laughs(10, "a{n}: &a{n} {{? [{items}] : 1}}"),
    "merged laughs": laughs(40, "a{n}: &a{n} {{<<: [{items}]}}"),
    "a list in itself": "a: &a [*a, *a, [*a, *a]]\n",
    "a chain of anchors": "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}]\n" for n in range(3000)),
    "nested lists": "a: " + "[" * 49_000 + "]" * 49_000,
    "nested mappings": "{a: " * 24_000,
    "nested blocks": "- " * 49_000,
    "a nested block mapping": "\n".join(" " * n + "a:" for n in range(430)),
    "as many keys as fit": "".join(f"k{n}: {{}}\n" for n in range(9990)),
    "as many wrong values as fit": "name: x\ngrid: {devices: [" + "x," * 19_900 + "], global_batch_size: 8}\n",
    "more values than are read": "a: [" + "1," * 49_000 + "]\n",
    "a number of 90,000 digits": GRID + "seed: " + "9" * 90_000 + "\n",
    "a hexadecimal number": GRID + "seed: 0x" + "f" * 90_000 + "\n",
    "a number to the base of 60": GRID + "seed: 1" + ":59" * 30_000 + "\n",
    "a fraction to the base of 60": GRID + "seed: 1" + ":59" * 30_000 + ".5\n",
    "a key of 90,000 characters": GRID + "? " + "k" * 90_000 + "\n: 1\n",
    "escapes": 'a: "' + "\\x41" * 24_000 + '"\n',
    "more than a file may hold": "#" * 2_000_000,
    "a grid of a billion cells": "name: x\ngrid: {devices: [BB], global_batch_size: [BB], optimizer.lr: [BB]}\n",
    "a billion trials": "name: x\ngrid: {global_batch_size: [BB]}\nthroughput: {blocks: 1000}\n",
    "a million seeds": "name: x\ngrid: {global_batch_size: [BB]}\nconvergence: {epochs: 1, seeds: [BB]}\n",
    "axes of options": GRID + "workload_options: {" + ", ".join(f"o{n}: [1, 2]" for n in range(90)) + "}\n",
    "options by the thousand": GRID + "workload_options: {" + ", ".join(f"o{n}: 1" for n in range(6000)) + "}\n",
    "one option of thousands of values": "name: x\ngrid: {global_batch_size: [BB]}\nworkload_options: {w: [[BB]]}\n",
    "one long option": "name: x\ngrid: {global_batch_size: [BB]}\nworkload_options: {w: " + "x" * 70_000 + "}\n",
    "many cells": "name: x\nthroughput: {blocks: 25}\ncells:\n" + "- {global_batch_size: [1, 2, 3]}\n" * 2800,
    "many aliased cells": "name: x\ncells: [&c {global_batch_size: [BB]}, *c, *c, *c]\nthroughput: {blocks: 1000}\n",
    "many exclusions": "name: x\ngrid: {global_batch_size: [BB]}\nexclude: [" + "{devices: 4}," * 3900 + "]\n",
    "an exclusion of many": "name: x\ngrid: {global_batch_size: [BB]}\nexclude: [{devices: [BB]}]\n",
}
LARGEST = {
    "the most cells": "name: x\ngrid: {global_batch_size: [BB], devices: [1, 2, 4]}\nthroughput: {blocks: 1}\n",
    "the most trials": "name: x\ngrid: {global_batch_size: [BB]}\nthroughput: {blocks: 7}\n",
}
"""Not refused, and within the same limits."""


LIMITED = """
import contextlib, io, resource, sys, time
from pathlib import Path
from harness.cli.arguments import exit_code_of
from harness.config.load import load_experiment
from harness.plan.inventory import Inventory
from harness.plan.planner import make_plan
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
for name in sys.argv[2:]:
    start = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = exit_code_of(lambda: len(make_plan(load_experiment(Path(name)), Inventory.assume(1, 8)).trials) and 0)
    assert "Traceback" not in said.getvalue()
    print(code, time.process_time() - start, len(said.getvalue()), flush=True)
"""


def limited(folder: Path, texts: dict[str, str]) -> list[tuple[float, ...]]:
    """Exit code, processor time and length of the message of each, in one process that may have 500 MB."""
    files = []
    for number, text in enumerate(texts.values()):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(text.replace("BB", BATCHES))
    command = [sys.executable, "-c", LIMITED, str(MEGABYTES * 10**6), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return [tuple(map(float, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("texts", "expected"), [(WORST, BAD_INPUT), (LARGEST, 0)], ids=["worst", "largest"])
def test_refused_and_planned_files_stay_within_the_limits(tmp_path: Path, texts: dict[str, str], expected: int) -> None:
    for name, (code, seconds, length) in zip(texts, limited(tmp_path, texts), strict=True):
        assert code == expected and seconds < SECONDS and length < 30_000, name


@pytest.mark.slow
def test_the_limit_of_memory_is_one(tmp_path: Path) -> None:
    """So that the test above can fail: without our checks the same file does not fit."""
    script = (
        "import resource, sys, yaml; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))\n"
        "str(yaml.safe_load(open(sys.argv[2])))"
    )
    file = tmp_path / "e.yaml"
    file.write_text(WORST["a billion laughs"].replace("{x: 1}", "x" * 1000))  # long words, for a short test
    command = [sys.executable, "-c", script, str(MEGABYTES * 10**6), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0 and "MemoryError" in done.stderr
