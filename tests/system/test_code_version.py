"""One version of the user's code on the import path, without the others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from harness.errors import WorkloadError
from harness.system.files import PACKAGE_FOLDER, code_hash
from harness.system.import_path import path_without
from harness.system.user_code import CodeVersion, module_file


@pytest.fixture
def version(tmp_path: Path) -> CodeVersion:
    """The version of a module in ``after``; ``before`` is another."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "harness_own.py").write_text(f"NAME = {name!r}\n")
    after = tmp_path / "after"
    return CodeVersion("after", str(after), code_hash(after), ("harness_own",), (str(tmp_path / "before"), str(after)))


def test_one_version_is_on_sys_path(version: CodeVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "before")
    before = ["", str(tmp_path / "before"), str(tmp_path / "link"), *sys.path, version.folder]
    monkeypatch.setattr(sys, "path", list(before))
    with version.used():
        assert sys.path[0] == version.folder
        assert sys.path.count(version.folder) == 1
        assert not {"", str(tmp_path / "before"), str(tmp_path / "link")} & set(sys.path)
    assert sys.path == before


def test_this_package_stays_with_relative_ones_beside_it(version: CodeVersion, monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(PACKAGE_FOLDER.parent)
    monkeypatch.setattr(sys, "path", [home, "/elsewhere"])
    assert path_without(home, "/elsewhere") == [home]
    assert replace(version, folder="harness_variants/after").place == PACKAGE_FOLDER.parent / "harness_variants/after"
    assert version.place == Path(version.folder)


def test_foreign_modules_and_changed_code_are_refused(version: CodeVersion, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("harness_own")
    monkeypatch.setitem(sys.modules, "harness_own", module)
    module.__file__ = f"{version.folder}/harness_own.py"
    version.check()
    module.__file__ = "/elsewhere/harness_own.py"
    with pytest.raises(WorkloadError, match=r"harness_own is imported from /elsewhere/harness_own\.py, not from"):
        version.check()
    monkeypatch.delitem(sys.modules, "harness_own")
    version.check()
    (Path(version.folder) / "harness_own.py").write_text("NAME = 'later'\n")
    with pytest.raises(WorkloadError, match=r"variants\.after: its code changed since the run was planned: its"):
        version.check()


@pytest.mark.parametrize("change", ["content", "name", "place", "another"])
def test_the_hash_follows_the_python_files(tmp_path: Path, change: str) -> None:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "a.py"
    file.write_text("x = 1\n")
    before = code_hash(tmp_path)
    (tmp_path / "data.csv").write_text("1\n")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.py").write_text("")
    assert code_hash(tmp_path) == before
    assert len(before) == 12
    if change == "content":
        file.write_text("x = 2\n")
    elif change == "name":
        file.rename(tmp_path / "package" / "b.py")
    elif change == "place":
        file.rename(tmp_path / "a.py")
    else:
        (tmp_path / "b.py").write_text("")
    assert code_hash(tmp_path) != before


def test_a_module_is_found_in_a_folder_without_being_imported(tmp_path: Path) -> None:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "inner" / "own.py").write_text("raise SystemExit\n")
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "empty").mkdir()
    places = [str(tmp_path)]
    assert module_file("package.inner.own", places) == tmp_path / "package" / "inner" / "own.py"
    assert module_file("package", places) == tmp_path / "package" / "__init__.py"
    for name in ("package.other", "empty", "json", "package.inner.own.more", "nowhere", "sys"):
        assert module_file(name, places) is None
    assert module_file("package", [str(tmp_path / "missing")]) is None
