"""Variants: what their folders must hold, and processes that import one version each."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.config.load import load_experiment
from harness.errors import ExperimentError, WorkloadError
from harness.plan.planner import make_plan
from harness.record.folder import RunFolder
from harness.run.prepare import prepare
from harness.run.provenance import invocation_facts
from harness.run.request import Request, check_no_user_code, read_experiment
from harness.run.resume import OtherMeasuresError, check_variants, reopen
from harness.run.variants import in_each, on_nodes, only_version, own_codes, shipped_folders
from harness.system.user_code import CodeVersion
from tests.conftest import laptop, variants

FILE = """
name: versions
workload: harness_own:Own
variants: {before: before, after: after}
grid: {strategy: [single, ddp], devices: [1, 2], per_device_batch_size: 8}
throughput: {blocks: 2, twin: false, explain: false}
equivalence: false
preflight: false
"""
MODULE = """
import harness_helper
import torch


class Own:
    unit = "samples"

    def __init__(self, width: int = 4):
        self.width = width

    def build_model(self):
        return torch.nn.Linear(self.width, harness_helper.OUT)

    def datasets(self):
        data = torch.utils.data.TensorDataset(torch.zeros(64, self.width))
        return data, data

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), torch.tensor(len(batch[0]))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An experiment file beside two versions of a module and of its helper."""
    for place, name in enumerate(("before", "after")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "harness_own.py").write_text(MODULE)
        (tmp_path / name / "harness_helper.py").write_text(f"OUT = {1 + place}\n")
    (tmp_path / "versions.yaml").write_text(FILE)
    return tmp_path / "versions.yaml"


def test_every_folder_is_there_and_holds_the_module_and_no_harness(file: Path) -> None:
    assert list(read_experiment(Request(file)).variants) == ["before", "after"]
    assert "harness_own" not in sys.modules
    with pytest.raises(ExperimentError) as caught:
        check_no_user_code(load_experiment(file), file)
    assert "variants: with --no-user-code nothing that the file names is imported" in caught.value.problems[1]
    file.write_text(FILE + "env: {LD_PRELOAD: /tmp/any.so}\n")
    with pytest.raises(ExperimentError) as caught:
        check_no_user_code(load_experiment(file), file)
    assert "env: with --no-user-code no variable is set" in caught.value.problems[-1]
    (file.parent / "after" / "harness_own.py").unlink()
    (file.parent / "before" / "harness").mkdir()
    (file.parent / "before" / "harness" / "__init__.py").write_text("")
    file.write_text(FILE.replace("after: after", "after: after, other: nowhere"))
    with pytest.raises(ExperimentError) as caught:
        read_experiment(Request(file))
    before, after, other = caught.value.problems
    assert before.startswith("variants.before: got ") and "it has a module harness" in before
    assert "/after'; it has no module harness_own: give what is to be first on the import path" in after
    assert other == f"variants.other: got '{file.parent}/nowhere'; allowed: a folder that is there"


def versions_of(file: Path) -> dict[str, CodeVersion]:
    return {name: own.version for name, own in own_codes(load_experiment(file), file.parent).items()}


def test_each_process_imports_its_version_and_nothing_of_the_others(file: Path) -> None:
    versions = versions_of(file)
    code = dict.fromkeys(versions, "__import__('harness_helper').OUT")
    assert in_each(versions, eval, code) == {"before": 1, "after": 2}
    assert "harness_helper" not in sys.modules
    (file.parent / "before" / "harness_helper.py").rename(file.parent / "harness_helper.py")
    code["before"] = "'harness_helper' if __import__('importlib.util').util.find_spec('harness_helper') else None"
    assert in_each(versions_of(file), eval, code)["before"] is None


def test_the_errors_of_all_processes_are_one_and_of_the_users_own_class_are_text(file: Path) -> None:
    raises = "(_ for _ in ()).throw(__import__('harness.errors').errors.WorkloadError('not like this'))"
    with pytest.raises(WorkloadError) as caught:
        in_each(versions_of(file), eval, {"before": raises, "after": "__import__('os')._exit(3)"})
    assert str(caught.value).splitlines() == [
        "2 problems",
        "  - variants.before: not like this",
        "  - variants.after: the process that imports it ended with exit code 3: it printed nothing",
    ]
    (file.parent / "before" / "harness_helper.py").write_text(
        "from harness.errors import HarnessError\nclass Own(HarnessError):\n    def __init__(self, a, b):\n"
        "        super().__init__(f'{a} and {b}')\ndef fail():\n    raise Own(1, 2)\n"
    )
    with pytest.raises(WorkloadError, match=r"^variants.before: 1 and 2$"):
        in_each(versions_of(file), eval, {"before": "__import__('harness_helper').fail()"})


@pytest.mark.slow
def test_both_versions_are_checked_without_being_imported_here(file: Path) -> None:
    plan = prepared(file)
    assert {trial.cell.variant for trial in plan.trials} == {"before", "after"}
    assert not {"harness_own", "harness_helper"} & set(sys.modules)
    (file.parent / "before" / "harness_helper.py").unlink()
    with pytest.raises(WorkloadError) as caught:
        prepared(file)
    assert str(caught.value) == (
        "variants.before: workload 'harness_own:Own': importing harness_own failed with ModuleNotFoundError: "
        f"No module named 'harness_helper' (first on the import path: {file.parent / 'before'})"
    )


def prepared(file: Path, **request: Any) -> Any:
    given = Request(file, dry_run=True, **request)
    with ExitStack() as stack:
        return prepare(given, read_experiment(given), stack, lambda event: None).plan


@pytest.mark.slow
def test_a_debugger_runs_one_variant(file: Path) -> None:
    experiment = load_experiment(file)
    plan = make_plan(experiment, laptop(), variants=own_codes(experiment, file.parent))
    with pytest.raises(ExperimentError, match="got the variants after, before; one process imports one"):
        only_version(plan)
    request = Request(file, inline=True, only={"variant": ["after"]})
    with ExitStack() as stack:
        prepare(request, read_experiment(request), stack, lambda event: None)
        assert sys.path[0] == str(file.parent / "after")
        assert str(file.parent) not in sys.path
    assert sys.path[0] != str(file.parent / "after")


def test_a_cluster_gets_each_variant_in_a_folder_of_its_own_and_the_environment_its_code(file: Path) -> None:
    experiment = load_experiment(file)
    assert shipped_folders(experiment, file.parent) == {
        "harness_variants/before": file.parent / "before",
        "harness_variants/after": file.parent / "after",
    }
    there = on_nodes(variants("before", "after"))
    assert (there["after"].folder, there["after"].code) == ("harness_variants/after", "0" * 11 + "1")
    alone = experiment.model_copy(update={"variants": {}})
    assert shipped_folders(alone, file.parent) == {"": file.parent}

    found = own_codes(experiment, file.parent)
    facts = invocation_facts(make_plan(experiment, laptop(), variants=found), file.parent)
    assert facts["variants"] == {name: {"code": own.version.code, "git_commit": None} for name, own in found.items()}
    assert facts["workload_code"] is None
    assert len({own.version.code for own in found.values()}) == 2


def test_a_run_goes_on_from_other_folders_but_not_with_other_code(file: Path, tmp_path: Path) -> None:
    experiment = load_experiment(file)
    found = own_codes(experiment, file.parent)
    plan = make_plan(experiment, laptop(), variants=found)
    folder = RunFolder.create(tmp_path / "out", experiment, plan, FILE)
    assert folder.experiment() == experiment
    (file.parent / "after").rename(file.parent / "moved")
    file.write_text(FILE.replace("after: after", "after: moved"))
    moved = load_experiment(file)
    _, going_on = reopen(folder.path, file, moved)
    again = make_plan(going_on, laptop(), variants=own_codes(going_on, file.parent))
    check_variants(folder, again)
    assert {trial.id for trial in again.trials} == {trial.id for trial in plan.trials}
    (file.parent / "moved" / "harness_helper.py").write_text("OUT = 3\n")
    changed = make_plan(going_on, laptop(), variants=own_codes(going_on, file.parent))
    with pytest.raises(OtherMeasuresError, match=r"was made with other code of the variants after \(.* -> .*\)"):
        check_variants(folder, changed)
