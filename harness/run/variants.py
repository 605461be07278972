"""The variants of an experiment: versions of the user's code, each imported in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.config.experiment import Experiment
from harness.config.strategy_traits import NoOptions, StrategyTraits
from harness.errors import Collected, ExperimentError, WorkloadError
from harness.launch.ray.session import has_working_dir
from harness.plan.grid import OwnCode, Variants
from harness.plan.planner import Plan
from harness.run.child_process import Answer, Given, checked, child_process
from harness.system.files import code_hash
from harness.system.import_path import path_without
from harness.system.user_code import SHIPPED, CodeVersion
from harness.train.strategies import load_strategy_class


def own_codes(experiment: Experiment, home: Path) -> Variants:
    """Return the user's code in each variant, as it is on this machine now; raises WorkloadError.

    ``home``: the experiment file's folder.
    """
    others = (*experiment.variants.values(), str(home), os.getcwd())
    versions = {
        name: CodeVersion(name, folder, code_hash(Path(folder)), experiment.own_modules, others)
        for name, folder in experiment.variants.items()
    }
    asked = dict.fromkeys(versions, experiment) if experiment.own_strategies else {}
    traits = in_each(versions, own_traits, asked)
    return {name: OwnCode(version, traits.get(name, {})) for name, version in versions.items()}


def with_own_code(function: Callable[[Plan], None], plan: Plan) -> None:
    """Call a function of the plan that imports the user's code; with variants in a process for the part of each."""
    if not plan.variants:
        function(plan)
        return
    versions = {name: own.version for name, own in plan.variants.items()}
    parts = {name: _only(name, plan) for name in versions}
    in_each(versions, function, {name: part for name, part in parts.items() if part.trials})


def _only(variant: str, plan: Plan) -> Plan:
    return plan.keeping(lambda trial: trial.cell.variant == variant)


def on_nodes(versions: Variants) -> dict[str, CodeVersion]:
    """Return each variant's version as the nodes of a cluster at an address have it; in a Ray job, where it is here."""
    if has_working_dir():
        return {name: own.version for name, own in versions.items()}
    return {name: replace(own.version, folder=f"{SHIPPED}/{name}") for name, own in versions.items()}


def own_folder_on_nodes(experiment: Experiment, home: Path) -> str | None:
    """Return the folder of the user's code that the nodes of such a cluster import it from; None if it is shipped."""
    return str(home) if has_working_dir() and experiment.own_modules and not experiment.variants else None


def shipped_folders(experiment: Experiment, home: Path) -> dict[str, Path]:
    """Return the folders of the user's code by their path on such nodes, beside this package."""
    if experiment.variants:
        return {f"{SHIPPED}/{name}": Path(folder) for name, folder in experiment.variants.items()}
    return {"": home} if experiment.own_modules else {}


def only_version(plan: Plan) -> AbstractContextManager[None]:
    """Import the plan's one version of the user's code inside, in this process; raise ExperimentError at several."""
    names = sorted({trial.cell.variant for trial in plan.trials if trial.cell.variant})
    if len(names) > 1:
        problem = f"got the variants {', '.join(names)}; one process imports one: add --only variant={names[0]}"
        raise ExperimentError("--inline", [problem])
    return plan.variants[names[0]].version.used() if names else nullcontext()


def in_each(
    versions: Mapping[str, CodeVersion], function: Callable[[Given], Answer], arguments: Mapping[str, Given]
) -> dict[str, Answer]:
    """Return the function's value for each variant's argument, from a new process that imports this version.

    The processes run side by side. Raises WorkloadError with the errors of all of them.
    """
    found, values = Collected(), dict[str, Any]()
    with ExitStack() as stack:
        children = {}
        for name, argument in arguments.items():
            version = versions[name]
            job = child_process(partial(checked, version, function), [argument], version, path_without(*version.hidden))
            children[name] = stack.enter_context(job)
        for name, child in children.items():
            answer = next(child.answers(), None)
            values[name], messages = answer or (None, [f"the process that imports it {child.end}"])
            for message in messages:
                found.add(WorkloadError(f"variants.{name}: {message}"))
    found.raise_all()
    return values


def own_traits(experiment: Experiment, found: Collected | None = None) -> dict[str, StrategyTraits]:
    """Import the user's own strategies and return their traits, for the planner.

    Without the class of their options, which the processes that the plan is handed to need not be able to import.
    ``found`` gets the WorkloadError of each that cannot be used, whose place in the plan is then a stand-in's; without
    it they are raised.
    """
    wrong = Collected() if found is None else found
    traits = dict.fromkeys(experiment.own_strategies, StrategyTraits())
    for name in experiment.own_strategies:
        with wrong.also():
            traits[name] = replace(load_strategy_class(name).traits, options=NoOptions)
    if found is None:
        wrong.raise_all()
    return traits
