"""``--resume RUN`` alone: the recorded file is used only if it, and the user's modules, are as they were."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.config.experiment import load_experiment
from harness.errors import RunFolderError
from harness.run.provenance import file_to_resume, source_facts

OWN = "name: x\nworkload: my_model:Net\ngrid: {strategy: [ddp, 'pkg.mine:Zero'], per_device_batch_size: 8}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An experiment file with a module and a package beside it, which fail if something imports them."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "results" / "run").mkdir(parents=True)
    for name in ("my_model.py", "pkg/__init__.py", "pkg/mine.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported')\n")
    (tmp_path / "e.yaml").write_text(OWN)
    return tmp_path / "e.yaml"


def recorded(file: Path) -> dict[str, Any]:
    facts = source_facts(file, load_experiment(file), sys.path)
    return json.loads(json.dumps(facts))  # type: ignore[no-any-return]


def resume(file: Path, facts: object, run: Path | None = None) -> Path:
    return file_to_resume(run or file.parent / "results" / "run", [{"source": facts}, {}], sys.path)  # type: ignore[list-item]


def test_file_and_modules_are_recorded_by_path_and_hash_and_found_again_without_an_import(file: Path) -> None:
    facts = recorded(file)
    assert facts["file"] == str(file) and len(facts["sha256"]) == 64
    assert {name: Path(one["file"]).relative_to(file.parent).as_posix() for name, one in facts["modules"].items()} == {
        "my_model": "my_model.py",
        "pkg": "pkg/__init__.py",
        "pkg.mine": "pkg/mine.py",
    }
    assert "raise" not in json.dumps(facts)
    assert resume(file, facts) == file and not {"my_model", "pkg"} & set(sys.modules)
    run = file.parent / "results" / "run"  # the last invocation that names a file counts
    assert file_to_resume(run, [{"source": {"file": "/nowhere"}}, {"source": facts}, {}], sys.path) == file


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("e.yaml", "# edited", "e.yaml has changed since the run"),
        ("my_model.py", "# edited", "the module my_model .*my_model.py has changed since the run"),
        ("pkg/__init__.py", "# edited", "the module pkg .*__init__.py has changed since the run"),
        ("pkg/mine.py", "# edited", "the module pkg.mine .*mine.py has changed since the run"),
        ("my_model/__init__.py", "", "my_model.py is not what would be imported now"),
        ("e.yaml", None, "e.yaml is no longer there"),
        ("pkg/mine.py", None, "mine.py is no longer there"),
    ],
)
def test_a_changed_file_or_module_is_asked_for(name: str, text: str | None, reason: str, file: Path) -> None:
    facts = recorded(file)
    path = file.parent / name
    path.parent.mkdir(exist_ok=True)
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(RunFolderError, match=reason) as caught:
        resume(file, facts)
    assert f"Give the file: harness run FILE --resume {file.parent / 'results' / 'run'}" in str(caught.value)


def test_nothing_inside_the_run_folder_is_used(file: Path) -> None:
    facts = recorded(file)
    with pytest.raises(RunFolderError, match="lies inside the run folder, of which nothing is executed"):
        resume(file, facts, run=file.parent)
    (file.parent / "link").symlink_to(file.parent / "pkg")
    for run in ("pkg", "link"):
        with pytest.raises(RunFolderError, match=r"the module pkg .*lies inside the run folder"):
            resume(file, facts, run=file.parent / run)


@pytest.mark.parametrize(
    "facts", [None, 3, [], {}, {"file": 3}, {"file": "/dev/null", "sha256": "x"}, {"file": "a\0b", "sha256": []}]
)
def test_a_run_without_a_record_or_with_a_damaged_one_asks(facts: object, file: Path) -> None:
    with pytest.raises(RunFolderError, match="Give the file"):
        resume(file, facts)
    for modules in (None, 3, {}, {"my_model": 3}):
        with pytest.raises(RunFolderError, match="the module my_model is not recorded"):
            resume(file, {**recorded(file), "modules": modules})


def test_the_module_of_every_variant_is_as_it_was(file: Path) -> None:
    for name in ("before", "after"):
        (file.parent / name).mkdir()
        (file.parent / name / "my_model.py").write_text(f"raise RuntimeError({name!r})\n")
    (file.parent / "my_model.py").unlink()
    grid = "grid: {per_device_batch_size: 8}"
    file.write_text(f"name: x\nworkload: my_model:Net\nvariants: {{before: before, after: after}}\n{grid}\n")
    facts = recorded(file)
    assert list(facts["modules"]) == ["my_model of before", "my_model of after"]
    assert resume(file, facts) == file
    (file.parent / "after" / "my_model.py").write_text("")
    with pytest.raises(RunFolderError, match=r"the module my_model of after .* has changed since the run"):
        resume(file, facts)
