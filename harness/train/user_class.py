"""Import of the user's own classes, named ``package.module:ClassName``."""

from __future__ import annotations

import importlib
import inspect

from harness.errors import HarnessError, WorkloadError, nearest


def load_user_class(what: str, name: str, hint: str = " (the experiment file's folder is on the import path)") -> type:
    """Import a module and return its class; raise WorkloadError, whose message begins with ``what``."""
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except HarnessError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: importing a module must not end the command
        raise WorkloadError(
            f"{what}: importing {module_name} failed with {type(error).__name__}: {error}{hint}"
        ) from error
    found = vars(module).get(class_name)
    if not inspect.isclass(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise WorkloadError(f"{what}: {module_name} has no class {class_name!r}; {nearest(class_name, classes)}")
    return found
