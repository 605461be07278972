"""Which package of harness/ imports which, from the files themselves: ``python -m tests.import_graph`` prints it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "harness"
FILES = sorted(PACKAGE.rglob("*.py"))
FOUNDATION = ("errors", "probe", "system", "config", "plan")
LEFT = ("train", "measure", "doctor", "launch")
RIGHT = ("record", "analysis", "report")
TOP = ("run", "cli")
"""The packages, lowest first. A wing stands on the foundation, and neither wing imports the other."""


def package_of(path: Path) -> str:
    """The package, or the module at the top, that a file belongs to; entry points belong to cli."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "cli" if parts[-1] == "__main__" or parts == ("__init__",) else parts[0]


def allowed_imports(package: str) -> set[str]:
    """The packages that a package may import, itself among them."""
    for names in ((*FOUNDATION, *LEFT), (*FOUNDATION, *RIGHT), (*FOUNDATION, *LEFT, *RIGHT, *TOP)):
        if package in names:
            return set(names[: names.index(package) + 1])
    raise ValueError(f"{package} has no place; the packages are {FOUNDATION + LEFT + RIGHT + TOP}")


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, also inside functions; imports for types are no arrows."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ([f"harness.{a.name}" for a in node.names] if node.module == "harness" else [node.module])
        elif not isinstance(node, ast.expr):
            yield from imports_of(node)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_packages(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports_of(tree_of(path)) if name.startswith("harness.")}


def arrows() -> Counter[tuple[str, str]]:
    """How many files of the first package import the second."""
    return Counter(
        (package_of(path), other) for path in FILES for other in imported_packages(path) if other != package_of(path)
    )


def main() -> None:
    """Print a line a package, the highest first: its lines, and what it imports in how many of its files."""
    counted = arrows()
    for package in reversed((*FOUNDATION, *LEFT, *RIGHT, *TOP)):
        below = ", ".join(f"{other} {n}" for (one, other), n in sorted(counted.items()) if one == package)
        lines = sum(len(path.read_text().splitlines()) for path in FILES if package_of(path) == package)
        print(f"{package:<9} {lines:>5} lines  -> {below or '-'}")
    wrong = [f"{one} -> {other}" for one, other in counted if other not in allowed_imports(one)]
    print("All imports point down." if not wrong else f"Imports that point up: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
