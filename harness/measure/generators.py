"""Random generators of a process and of a workload's objects, found by a search, and those that a block draws from."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.system.user_code import is_the_users
from harness.train.loader import value_digest

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
SEEDED_GENERATORS = ("torch's", "torch's on the device")
"""The generators that the harness seeds, differently on each rank."""
PROCESS_GENERATORS = (*SEEDED_GENERATORS, "NumPy's", "Python's")
"""The names of a process's own generators."""
UNKNOWN = "unknown"
"""In place of the digest of a generator whose state cannot be read or set."""
DRAWS = 97
"""Draws before a block: another number than a block is likely to draw after it has seeded a generator."""
OWN = frozenset(vars(nn.Module()))
"""The attributes of every module."""
LEAVES = (Tensor, np.ndarray, str, bytes, int, float, complex, type, ModuleType, type(None))
"""Types of values in which nothing is searched."""
DEPTH, MOST_ITEMS, MOST_OBJECTS = 4, 64, 20_000
"""Levels of attributes and items that are searched, first items of each container, and objects in all."""


def parts_of(owners: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the values in attributes and items of the owners, once each, the nearest first: ('drop.noise[0]', value).

    Of a module every part is searched, of other objects DEPTH levels.
    """
    waiting = deque((name, owner, 0) for name, owner in owners.items())
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        name, value, depth = waiting.popleft()
        if isinstance(value, LEAVES):
            yield name, value
        elif id(value) not in seen:
            seen.add(id(value))
            yield name, value
            if depth < DEPTH:
                is_module = isinstance(value, nn.Module)
                waiting += ((n, v, depth + (not (is_module and isinstance(v, nn.Module)))) for n, v in _in(name, value))


def _in(name: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield the values that an object holds, with their names."""
    dot = f"{name}." if name else ""
    if isinstance(value, nn.Module):
        yield from ((dot + key, part) for key, part in value.named_children())
        yield from ((dot + key, part) for key, part in vars(value).items() if key not in OWN)
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in islice(value.items(), MOST_ITEMS))
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from ((f"{name}[{number}]", part) for number, part in enumerate(islice(value, MOST_ITEMS)))
    elif isinstance(value, FunctionType):
        with suppress(ValueError):  # a variable that has no value yet
            held = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from [(dot + key, cell.cell_contents) for key, cell in held]
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield name, value.__self__
    elif isinstance(value, partial):
        yield from ((name, part) for part in (value.func, *value.args, *value.keywords.values()))
    elif not isinstance(value, KINDS):
        slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
        named = chain.from_iterable([each] if isinstance(each, str) else each for each in slots)
        yield from ((dot + key, getattr(value, key)) for key in named if key[:2] != "__" and hasattr(value, key))
        yield from ((dot + key, part) for key, part in getattr(value, "__dict__", {}).items())


def module_of_the_user(kind: type) -> ModuleType | None:
    """Return the module of a class of the user's own, None of another class."""
    module = sys.modules.get(kind.__module__)
    return module if is_the_users(getattr(module, "__file__", None) or "<") else None


def generators_of(*owners: object) -> dict[str, Any]:
    """Return the generators of the process, those that the owners hold, and those of modules with the owners' code."""
    own: list[Any] = [torch.default_generator, np.random.random, random.random]  # bound methods of the two others'
    found = dict(
        zip(("torch's", "NumPy's", "Python's"), (getattr(each, "__self__", each) for each in own), strict=True)
    )
    parts = [*parts_of({"" if isinstance(each, nn.Module) else type(each).__name__: each for each in owners})]
    for module in dict.fromkeys(module_of_the_user(type(part)) for _, part in parts):
        parts += [(f"{module.__name__}.{key}", value) for key, value in vars(module).items()] if module else []
    known = set(map(id, found.values()))
    for name, part in parts:
        if isinstance(part, KINDS) and id(part) not in known:
            known.add(id(part))
            found[name] = part
    return found


class State:
    """The state of a generator at construction; ``digest`` is UNKNOWN if it cannot be read or set."""

    def __init__(self, generator: Any) -> None:
        self.generator, self.digest = generator, UNKNOWN
        self.value: Any = None
        with suppress(Exception):  # whatever a class of the user raises
            self.value = _read(generator)
            self.put_back()
            self.digest = value_digest(self.value)

    def put_back(self) -> None:
        """Set the generator to this state."""
        if isinstance(self.generator, np.random.Generator):
            self.generator.bit_generator.state = self.value
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(self.value)
        else:
            self.generator.set_state(self.value)

    def advance(self, draws: int = DRAWS) -> None:
        """Set the generator to the state after some draws from this one."""
        if self.digest == UNKNOWN:
            return
        self.put_back()
        for _ in range(draws):
            if isinstance(self.generator, torch.Generator):
                torch.empty(1, device=self.generator.device).uniform_(generator=self.generator)
            else:
                self.generator.random()


def _read(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def digests_of(*owners: object) -> dict[str, str]:
    """Return digests of the states of the generators, see ``generators_of``, and of torch's on other devices."""
    found = {name: State(generator).digest for name, generator in generators_of(*owners).items()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["torch's on the device"] = value_digest(torch.cuda.get_rng_state_all())
    return found


@contextmanager
def drawing(*owners: object) -> Iterator[Callable[[], dict[str, str]]]:
    """Yield a function that returns, after the block, digests of the generators that it drew from, by their names.

    All but torch's own, which the harness seeds, draw DRAWS numbers before the block, so that one that it seeds has
    another state than before; those that it leaves alone are put back. One of an UNKNOWN state counts as drawn from.
    """
    states = {name: State(each) for name, each in generators_of(*owners).items() if name not in SEEDED_GENERATORS}
    for state in states.values():
        state.advance()
    before, drawn = digests_of(*owners), dict[str, str]()
    try:
        yield lambda: drawn
    finally:
        after = digests_of(*owners)
        drawn |= {name: new for name, new in after.items() if new == UNKNOWN or before.get(name) != new}
        for name, state in states.items():
            if name in after and name not in drawn:
                state.put_back()
