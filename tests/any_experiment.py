"""Experiment files as hypothesis draws them: valid ones, and what mistakes and malice make of them."""

from __future__ import annotations

import datetime
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

WORDS = st.text("abcdefghij_-.0123456789", min_size=1, max_size=12)
NUMBERS = st.one_of(st.integers(1, 64), st.floats(1e-6, 10, allow_nan=False))


def axis(values: SearchStrategy[Any], most: int = 3) -> SearchStrategy[Any]:
    """A value, or a list of different ones."""
    return st.one_of(values, st.lists(values, min_size=1, max_size=most, unique_by=repr))


@st.composite
def grids(draw: DrawFn) -> dict[str, Any]:
    """A grid, weak or strong, with some of the optional axes."""
    batch = draw(st.sampled_from(["per_device_batch_size", "global_batch_size"]))
    optional = {
        "data": axis(st.sampled_from(["digits", "synthetic", "synthetic_device"])),
        "model": axis(st.sampled_from(["resnet8", "resnet14", "resnet18"])),
        "nodes": axis(st.integers(1, 3), 2),
        "precision": axis(st.sampled_from(["fp32", "tf32", "bf16", "fp16"])),
        "compile": axis(st.booleans(), 2),
        "compile_mode": axis(st.sampled_from(["default", "reduce-overhead"]), 2),
        "activation_checkpointing": axis(st.sampled_from(["none", "full"]), 2),
        "optimizer.lr": axis(st.sampled_from([0.1, 0.01, 1])),
        "ddp.bucket_cap_mb": axis(st.integers(1, 50)),
        "loader.workers": axis(st.integers(0, 4)),
        "training.accumulation": axis(st.integers(1, 4)),
        "training.clip_grad_norm": axis(st.one_of(st.none(), st.floats(0.1, 10))),
        "schedule.T_max": axis(st.integers(1, 9)),
    }
    return {
        "strategy": draw(axis(st.sampled_from(["single", "dp", "ddp", "fsdp"]), 4)),
        "devices": draw(axis(st.sampled_from([1, 2, 3, 4, 8, 16]))),
        batch: draw(axis(st.integers(1, 512))),
        **draw(st.fixed_dictionaries({}, optional=optional)),
    }


def experiments() -> SearchStrategy[dict[str, Any]]:
    """A valid experiment file, as a mapping. Its schedule is named, since the grid may give an option of it."""
    rule = st.fixed_dictionaries(
        {"at_least": st.integers(2, 3), "at_most": st.integers(3, 5), "halfwidth": st.floats(0.01, 0.9)}
    )
    blocks = st.one_of(st.integers(1, 5), rule)
    seeds = st.one_of(st.integers(0, 9), st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True))
    seconds = st.one_of(st.sampled_from(["90s", "10m", "2h"]), st.floats(1, 1000))
    required = {
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
        "grid": grids(),
        "schedule": st.just({"name": "CosineAnnealingLR", "T_max": 10}),
    }
    optional = {
        "cells": st.lists(grids(), max_size=2),
        "strategy_options": st.just(
            {"ddp": {"static_graph": [True, False]}, "fsdp": {"mesh": ["flat", "hybrid"], "backend": "nccl"}}
        ),
        "workload_options": st.fixed_dictionaries({}, optional={"width": axis(st.integers(1, 64)), "norm": WORDS}),
        "optimizer": st.fixed_dictionaries({"name": st.just("SGD"), "lr": axis(NUMBERS)}),
        "loader": st.fixed_dictionaries({}, optional={"workers": st.integers(0, 4), "pin_memory": st.booleans()}),
        "throughput": st.fixed_dictionaries({"blocks": blocks}, optional={"twin": st.booleans()}),
        "convergence": st.fixed_dictionaries({"epochs": st.integers(1, 9), "seeds": seeds}),
        "limits": st.fixed_dictionaries(
            {}, optional={"wall": seconds, "trial": seconds, "attempts": st.integers(1, 5)}
        ),
        "device": st.sampled_from(["auto", "cpu", "cuda"]),
        "launcher": axis(st.sampled_from(["ray", "torchrun"]), 2),
        "oversubscribe": st.booleans(),
        "equivalence": st.booleans(),
        "seed": st.integers(0, 2**31 - 1),
    }
    return st.fixed_dictionaries(required, optional=optional)


HOSTILE = ("../x", "/etc/passwd", "~nobody_here/x", "a\0b", "\x1b[2J", "\u202e", "x" * 5000, "os:system", "$HOME")
INTEGERS = st.one_of(st.integers(), st.sampled_from([0, -1, 2**31, 2**63, 10**100, 10**4000]))
TEXTS = st.one_of(st.text(max_size=30), st.sampled_from(HOSTILE), st.binary(max_size=20))
TIMES = st.one_of(st.dates(), st.datetimes(timezones=st.sampled_from([None, datetime.UTC])))
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), TEXTS, TIMES)
"""What nobody means to write where an experiment file has a value."""
ANYTHING = st.recursive(
    st.one_of(SCALARS, st.sets(st.integers(), max_size=3)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SCALARS, inner, max_size=4),
    max_leaves=8,
)


def named(names: list[str], options: list[str]) -> SearchStrategy[dict[str, Any]]:
    """One of these names with some of these options, of some kind."""
    given = st.dictionaries(st.sampled_from(options), ANYTHING)
    return st.builds(lambda name, options: {"name": name, **options}, st.sampled_from(names), given)


def optimizers() -> SearchStrategy[dict[str, Any]]:
    names = ["SGD", "Adam", "AdamW", "LBFGS", "lr_scheduler", "__name__", "os:system", ""]
    return named(names, ["lr", "momentum", "betas", "params", "foreach"])


def schedules() -> SearchStrategy[dict[str, Any]]:
    names = ["CosineAnnealingLR", "StepLR", "LambdaLR", "MultiStepLR", "ReduceLROnPlateau"]
    return named(names, ["T_max", "step_size", "milestones", "lr_lambda", "gamma"])


@st.composite
def mistaken(draw: DrawFn) -> str:
    """The text of a valid file in which one to three values or keys are replaced, repeated or gone."""
    content = draw(experiments())
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = content
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], dict | list) and draw(st.booleans()):
                holder = holder[key]
                continue
            _change(draw, holder, key)
            break
    return str(yaml.safe_dump(content, allow_unicode=draw(st.booleans()), sort_keys=False))


def _change(draw: DrawFn, holder: Any, key: Any) -> None:
    match draw(st.sampled_from(["value", "gone", "key", "deeper", "many"])):
        case "value":
            holder[key] = draw(ANYTHING)
        case "gone":
            del holder[key]
        case "key" if isinstance(holder, dict):
            holder[draw(st.one_of(WORDS, SCALARS))] = holder.pop(key)
        case "deeper":
            holder[key] = {"a": [holder[key]]}
        case _:
            holder[key] = [holder[key]] * draw(st.sampled_from([2, 30]))


TAGS = ("!!int ", "!!binary ", "!!set ", "!!timestamp ", "!!python/object/apply:os.system ", "&a ", "*a", "<<: *a\n")
MARKS = ("!x ", "? ", ": ", "- ", "|\n", ">\n", "  ", "---\n", "...\n", *"{}[],'\"\n\t#@`")
ODDITIES = ("%YAML 9.9\n", "\0", "\x1b", "\ufeff", "\u2028", "\x85", "\ud800", '"\\ud800"', "~", "=", "<<")
VALUES = ("1e999", "0x", "0x" + "f" * 99, "1:1:1", ".nan", "2020-13-45")
SNIPPETS = st.sampled_from(TAGS + MARKS + ODDITIES + VALUES)


@st.composite
def broken(draw: DrawFn) -> bytes:
    """The bytes of a valid file in which characters are put in, taken out or repeated; or any bytes at all."""
    text = str(
        yaml.safe_dump(draw(experiments()), sort_keys=False, default_flow_style=draw(st.sampled_from([None, True])))
    )
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        until = min(len(text), at + draw(st.integers(0, 12)))
        text = text[:at] + draw(st.one_of(SNIPPETS, st.just(text[at:until] * 2))) + text[until:]
    encoding = draw(st.sampled_from(["utf-8"] * 6 + ["utf-16", "utf-32-le", "latin-1", "utf-8-sig"]))
    return text.encode(encoding, errors="surrogatepass" if encoding.startswith("utf") else "replace")
