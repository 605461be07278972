"""The user's own code: one version of it, as a process imports it, and its classes by name."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from harness.errors import HarnessError, WorkloadError, nearest
from harness.system.files import PACKAGE_FOLDER, code_hash
from harness.system.import_path import path_without

STANDARD, INSTALLED = "/lib/python", "/site-packages/"
"""Parts of the path of every file of the standard library and of installed packages; of installed packages alone."""
SHIPPED = "harness_variants"
"""The folder beside this package in which a cluster's nodes have the versions, each below its name."""


def is_the_users(file: str) -> bool:
    """Return whether code in this file is the user's own: neither the harness's nor a library's."""
    return not file.startswith((f"{PACKAGE_FOLDER}/", "<")) and STANDARD not in file and INSTALLED not in file


@dataclass(frozen=True)
class CodeVersion:
    """A version of the user's code.

    ``folder``: its path, or, on a cluster, its path below the folder that holds this package. ``code``: the hash of its
    Python files. ``modules``: those of the user's workload and strategies. ``hidden``: folders in which no module may
    be found: of other versions, of the experiment file, and the command's current one.
    """

    name: str
    folder: str
    code: str
    modules: tuple[str, ...]
    hidden: tuple[str, ...] = ()

    @property
    def place(self) -> Path:
        """The version's folder in this process."""
        return PACKAGE_FOLDER.parent / self.folder

    def import_path(self) -> list[str]:
        """Return the import path of a process that imports this version."""
        return [str(self.place), *path_without(*self.hidden, str(self.place))]

    def use(self) -> None:
        """Make this the version that this process imports."""
        sys.path[:] = self.import_path()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Import this version inside; the modules that are imported stay."""
        before = list(sys.path)
        self.use()
        try:
            yield
        finally:
            sys.path[:] = before

    def check(self) -> None:
        """Raise WorkloadError if the files are not those that were planned, or a module was imported from elsewhere."""
        if (now := code_hash(self.place)) != self.code:
            raise WorkloadError(
                f"variants.{self.name}: its code changed since the run was planned: its hash was {self.code} and is "
                f"{now}. Restore it and resume, or start a new run; a git worktree of its own keeps a version as it is"
            )
        for module in self.modules:
            found = getattr(sys.modules.get(module), "__file__", None)
            if found and not Path(found).resolve().is_relative_to(self.place.resolve()):
                raise WorkloadError(
                    f"variants.{self.name}: {module} is imported from {found}, not from {self.place}: another module "
                    "of this name comes first. Rename it"
                )


def module_file(name: str, path: list[str]) -> Path | None:
    """Return the file that importing a module would execute, without importing it; None if there is none."""
    importlib.invalidate_caches()
    try:
        for part in name.split("."):
            spec = PathFinder.find_spec(part, path)  # by the whole name it would ask for an imported parent
            if spec is None:
                return None
            path = list(spec.submodule_search_locations or ())
        return Path(spec.origin).resolve() if spec and spec.has_location and spec.origin else None
    except (ImportError, KeyError, OSError, ValueError):  # a package that only an import can find
        return None


def load_from(name: str, kind: Literal["class", "function"], *, what: str, builtin: bool = False) -> Any:
    """Import a module and return its class or function, ``package.module:name``; raise WorkloadError.

    The message begins with ``what``. Unless the module is ``builtin``, the message of a failed import names the folder
    that comes first on the import path: the experiment file's or, with variants, that of the version.
    """
    module_name, _, inner = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (HarnessError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: importing a module must not end the command
        hint = "" if builtin else f" (first on the import path: {sys.path[0]})"
        raise WorkloadError(
            f"{what}: importing {module_name} failed with {type(error).__name__}: {error}{hint}"
        ) from error
    found, is_kind = vars(module).get(inner), inspect.isclass if kind == "class" else inspect.isroutine
    if not is_kind(found):
        names = [key for key, value in vars(module).items() if is_kind(value) and not key.startswith("__")]
        known = nearest(inner, names) if names else f"it has no {kind} at all"
        raise WorkloadError(f"{what}: {module_name} has no {kind} {inner!r}; {known}")
    return found
