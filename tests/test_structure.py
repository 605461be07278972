"""The house itself: its arrows, and how long its functions and modules are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "harness"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES, MOST_FUNCTION_LINES = 300, 40

FLOORS = [
    line.split()
    for line in """
code_files errors frames garbage interrupts json_text lifeline numa stacks stats
files printable redact inventory schema labels config_values yaml_source cell messages peaks scratch topology
config_problems config_sections schema_text present traces analyse placement ranks environment loader reading refusal
config present_belief present_cost present_doctor feasible optimizers plots strategies mailbox socket_mailbox watch
guard parquet grid reach workloads trial
diagnostics training
plan checkpoint ray_session job
plan_rows events failures resume blocks preflight measure
trial_record node doctor lock
record
scenarios premises
results recorder worker ray_backend ray_callbacks cluster console reopen sitting
launch ray_trainer ray_worker torchrun_worker report_content report_environment
ray_watch execute torchrun_processes
report ray_launcher torchrun_launcher
stage
diagnose run
cli
""".strip().splitlines()
]
"""Rooms from the ground up: a module imports from floors below its own, or from its own package."""

WITHOUT_TORCH_OR_RAY = """
analyse
blocks
cell
config
config_problems
config_sections
config_values
console
diagnostics
errors
events
failures
feasible
files
frames
garbage
grid
interrupts
inventory
json_text
job
labels
lock
mailbox
messages
parquet
peaks
placement
plan
plan_rows
plots
present
present_belief
present_cost
present_doctor
printable
reading
record
recorder
redact
reopen
report
report_content
report_environment
results
resume
schema
schema_text
scratch
socket_mailbox
stacks
stats
topology
traces
trial
trial_record
watch
yaml_source
"""


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0] if parts[0] != "__init__" else ""


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, also inside functions; entry lines and types are no arrows."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ("__main__" in ast.unparse(node.test) or "TYPE_CHECKING" in ast.unparse(node)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ([f"harness.{a.name}" for a in node.names] if node.module == "harness" else [node.module])
        else:
            yield from imports_of(node)


def rooms_imported(path: Path) -> set[str]:
    names = imports_of(ast.parse(path.read_text()))
    return {name.split(".")[1] for name in names if name.startswith("harness.")}


def test_every_room_has_its_floor() -> None:
    assert {room_of(path) for path in FILES} - {""} == {room for floor in FLOORS for room in floor}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(path: Path) -> None:
    height = {room: level for level, floor in enumerate(FLOORS) for room in floor}
    room = room_of(path)
    above = {other for other in rooms_imported(path) if room and other != room and height[other] >= height[room]}
    assert not above, f"{room} (floor {height.get(room)}) imports {sorted(above)}, which stand as high or higher"


def test_what_needs_neither_torch_nor_ray_imports_neither() -> None:
    script = (
        "import sys, importlib\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'torchvision', 'ray'):\n"
        "            raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"for name in {WITHOUT_TORCH_OR_RAY.split()!r}:\n"
        "    importlib.import_module('harness.' + name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_ray_s_controller_imports_leaves_torch_alone() -> None:
    """It starts anew for every worker group, which waits for it: torch takes as long as all the rest."""
    script = "import sys, harness.job, harness.ray_backend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=ROOT).returncode == 0


def test_ray_is_imported_where_the_seam_is() -> None:
    def roots(path: Path) -> set[str]:
        return {name.split(".")[0] for name in imports_of(ast.parse(path.read_text()))}

    users = {room_of(path) for path in FILES if "ray" in roots(path)}
    seam = ("backend", "callbacks", "launcher", "session", "trainer", "watch", "worker")
    assert users == {"cluster", *(f"ray_{name}" for name in seam)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_opens_with_a_sentence(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc and doc.split("\n")[0].rstrip().endswith((".", "``."))


def test_the_top_level_is_as_agreed() -> None:
    done = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in done.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= {
        "harness",
        "experiments",
        "results",
        "tests",
        "pyproject.toml",
        "README.md",
    }


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_nobody_prints_but_the_console_and_the_command() -> None:
    def prints(path: Path) -> bool:
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        return any(isinstance(function, ast.Name) and function.id == "print" for function in calls)

    assert {room_of(path) for path in FILES if prints(path)} <= {"schema_text"}
