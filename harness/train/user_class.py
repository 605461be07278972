"""Import of the user's own classes, named ``package.module:ClassName``."""

from __future__ import annotations

import importlib
import inspect
import sys

from harness.errors import HarnessError, WorkloadError, nearest


def load_user_class(what: str, name: str, *, builtin: bool = False) -> type:
    """Import a module and return its class; raise WorkloadError, whose message begins with ``what``.

    Unless the class is ``builtin``, the message of a failed import names the folder that comes first on the import
    path: the experiment file's or, with variants, that of the version.
    """
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except HarnessError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: importing a module must not end the command
        hint = "" if builtin else f" (first on the import path: {sys.path[0]})"
        raise WorkloadError(
            f"{what}: importing {module_name} failed with {type(error).__name__}: {error}{hint}"
        ) from error
    found = vars(module).get(class_name)
    if not inspect.isclass(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value) and not key.startswith("__")]
        known = nearest(class_name, classes) if classes else "it has no class at all"
        raise WorkloadError(f"{what}: {module_name} has no class {class_name!r}; {known}")
    return found
