"""The structure of harness/: its packages, which way imports go, and how long functions and modules are."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_graph import (
    FILES,
    PACKAGE,
    RIGHT,
    ROOT,
    allowed_imports,
    imported_packages,
    imports_of,
    package_of,
    tree_of,
)
from tests.processes import run_without

MOST_LINES, MOST_FUNCTION_LINES = 500, 60

TOP_LEVEL = {"harness", "experiments", "results", "tests", "pyproject.toml", "README.md"}
WITHOUT_TORCH_OR_RAY = ("errors", "system", "config", "plan", *RIGHT, "cli")
ALSO_WITHOUT_TORCH_OR_RAY = ("launch.protocol", "run.console", "run.events", "run.request")
WITHOUT_TORCH = ("harness.launch.protocol", "harness.launch.ray.controller")
PRINTS = {"report/schema_page.py"}


def test_imports_point_down_and_ray_is_imported_in_one_package() -> None:
    found = {path: imported_packages(path) - allowed_imports(package_of(path)) for path in FILES}
    wrong = [f"{path.relative_to(ROOT)} imports {sorted(names)}" for path, names in found.items() if names]
    assert not wrong, "which are not below the package of the file"
    users = {path for path in FILES if "ray" in {name.split(".")[0] for name in imports_of(tree_of(path))}}
    assert users
    assert {path.parent.relative_to(PACKAGE).as_posix() for path in users} == {"launch/ray"}


IMPORT = """
import contextlib, importlib
from pytest import skip
for name in {modules!r}:
    with contextlib.suppress(skip.Exception):  # of a test module that lacks what it needs
        importlib.import_module(name)
"""


def import_without(blocked: tuple[str, ...], modules: list[str]) -> str:
    return run_without(blocked, IMPORT.format(modules=modules)).stderr[-2000:]


@pytest.mark.slow
def test_packages_without_torch_and_ray_import_neither() -> None:
    """Nor do their tests, so that their loop takes seconds. One process: importing pandas and seaborn takes longest."""
    files = [path for path in FILES if package_of(path) in WITHOUT_TORCH_OR_RAY and path.stem != "__main__"]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    assert len(modules) > 60
    folders = [ROOT / "tests" / package for package in ("config", "plan", *RIGHT)]
    tests = [f"tests.{path.parent.name}.{path.stem}" for folder in folders for path in sorted(folder.glob("test_*.py"))]
    assert len(tests) > 30
    blocked = ("torch", "torchvision", "ray")
    also = [f"harness.{name}" for name in ALSO_WITHOUT_TORCH_OR_RAY]
    assert import_without(blocked, [*modules, *also, "tests.conftest", *tests]) == ""


@pytest.mark.slow
def test_ray_s_controller_imports_no_torch() -> None:
    """It starts anew for every worker group, which waits for it: torch takes as long as all the rest."""
    assert import_without(("torch", "torchvision"), list(WITHOUT_TORCH)) == ""


def test_a_module_is_short_as_its_functions_are_opens_with_a_sentence_and_prints_only_if_allowed() -> None:
    for path in FILES:
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        assert len(text.splitlines()) <= MOST_LINES, name
        doc = ast.get_docstring(tree := tree_of(path))
        assert doc and doc.split("\n")[0].rstrip().endswith((".", "``.")), name
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= MOST_FUNCTION_LINES, f"{name}: {node.name} has {length} lines"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert name in PRINTS, name


@pytest.mark.slow
@pytest.mark.parametrize("how", ["import harness", "import sys; sys.path.append(''); import harness"])
def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path: Path, how: str) -> None:
    """As in the folder that holds a clone of this repository, beside a training script."""
    (tmp_path / "harness").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = f"{how}; print(harness.__file__, harness.load_history.__name__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.stdout.split() == [str(PACKAGE / "__init__.py"), "load_history"], done.stderr


def test_the_top_level_is_as_agreed_and_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    done = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in done.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL
