"""The structure of harness/: its packages, which way imports go, and how long functions and modules are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_graph import FILES, PACKAGE, RIGHT, ROOT, allowed_imports, imported_packages, imports_of, package_of

MOST_LINES, MOST_FUNCTION_LINES = 500, 60

TOP_LEVEL = {"harness", "experiments", "results", "tests", "pyproject.toml", "README.md"}
WITHOUT_TORCH_OR_RAY = ("errors", "system", "config", "plan", *RIGHT, "cli")
ALSO_WITHOUT_TORCH_OR_RAY = ("launch.protocol", "run.console", "run.events", "run.request")
WITHOUT_TORCH = ("harness.launch.protocol", "harness.launch.ray.controller")
PRINTS = {"report/schema_page.py"}


def each_file(function: object) -> object:
    return pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))(function)


@each_file
def test_imports_point_down(path: Path) -> None:
    wrong = imported_packages(path) - allowed_imports(package_of(path))
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}, which are not below {package_of(path)}"


def modules_below(name: str) -> list[str]:
    found = [path for path in FILES if package_of(path) == name and path.stem != "__main__"]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in found]


def run_without(blocked: tuple[str, ...], modules: list[str]) -> str:
    """Return what importing these modules prints, in a process in which others cannot be imported."""
    script = (
        "import sys, importlib, contextlib\n"
        "from pytest import skip\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {blocked!r}:\n"
        "            raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"for name in {modules!r}:\n"
        "    with contextlib.suppress(skip.Exception):\n"  # of a test module that lacks what it needs
        "        importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stderr[-2000:]


def test_packages_without_torch_and_ray_import_neither() -> None:
    """Nor do their tests, so that their loop takes seconds. One process: importing pandas and seaborn takes longest."""
    modules = [module for package in WITHOUT_TORCH_OR_RAY for module in modules_below(package)]
    assert len(modules) > 60
    folders = [ROOT / "tests" / package for package in ("config", "plan", *RIGHT)]
    tests = [f"tests.{path.parent.name}.{path.stem}" for folder in folders for path in sorted(folder.glob("test_*.py"))]
    assert len(tests) > 30
    blocked = ("torch", "torchvision", "ray")
    also = [f"harness.{name}" for name in ALSO_WITHOUT_TORCH_OR_RAY]
    assert run_without(blocked, [*modules, *also, "tests.conftest", *tests]) == ""


def test_ray_s_controller_imports_no_torch() -> None:
    """It starts anew for every worker group, which waits for it: torch takes as long as all the rest."""
    assert run_without(("torch", "torchvision"), list(WITHOUT_TORCH)) == ""


def test_ray_is_imported_in_one_package() -> None:
    users = {
        path for path in FILES if "ray" in {name.split(".")[0] for name in imports_of(ast.parse(path.read_text()))}
    }
    assert users
    assert {path.parent.relative_to(PACKAGE).as_posix() for path in users} == {"launch/ray"}


@each_file
def test_a_module_is_short_as_its_functions_are_and_opens_with_a_sentence(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    doc = ast.get_docstring(ast.parse(text))
    assert doc and doc.split("\n")[0].rstrip().endswith((".", "``."))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_the_top_level_is_as_agreed_and_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    done = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in done.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_only_the_console_and_the_command_print() -> None:
    def prints(path: Path) -> bool:
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        return any(isinstance(function, ast.Name) and function.id == "print" for function in calls)

    assert {path.relative_to(PACKAGE).as_posix() for path in FILES if prints(path)} <= PRINTS
