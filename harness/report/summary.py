"""Sentences above the tables of the report: the size of the run, its configuration, its machines and invocations."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import pandas as pd

from harness.analysis.evidence import ENVIRONMENT_KEYS
from harness.analysis.results import Results
from harness.analysis.stats import LEAST_BLOCKS, LOOKS_SIGNIFICANCE
from harness.config.axes import AXES, LATER
from harness.config.experiment import Experiment
from harness.config.sections import LOOKS, Throughput
from harness.config.values import GIB, SECTION
from harness.plan.checks import places_of
from harness.plan.labels import TAGS, joined
from harness.plan.run_environment import Card, NodeEnvironment, RunEnvironment
from harness.report.row import plural, rate_unit
from harness.report.tables.text import counts, duration, span, speed, start_text
from harness.report.tables.trust import summary_line, usual_words


def size(results: Results) -> str:
    """Return the size of the run: trials by outcome, cells measured, wall time."""
    last = results.trials.drop_duplicates("trial_id", keep="last")
    wall = sum(float(invocation.get("wall_s") or 0) for invocation in results.environment.get("invocations", []))
    return joined(
        f"trials: {counts(sorted(last['outcome'].tolist()))}",
        f"{plural(len(results.cells), 'cell')} measured" if results.experiment.throughput else "",
        f"took {duration(wall)} until the report" if wall else "",
    )


def checks_words(results: Results) -> str:
    """Return a sentence on the share of the run that equivalence checks, preflight and links took."""
    ledger, trials = results.ledger, results.trials
    checks = trials["trial_id"][trials["purpose"].isin(["equivalence", "doctor", "links"])]
    total = float(ledger["seconds"].sum())
    if checks.empty or total <= 0:
        return ""
    spent = float(ledger["seconds"][(ledger["level"] == "trial") & ledger["trial_id"].isin(checks)].sum())
    return f"Equivalence checks, preflight and links took {100 * spent / total:.1f} % of the run."


def preflight_words(results: Results) -> str:
    """Return a sentence on the cells that the doctor examined, and its findings."""
    trials = results.trials
    examined = trials[trials["purpose"] == "doctor"]["trial_id"].nunique()
    if not examined:
        return ""
    line = summary_line(results.findings, examined)
    after = "after an error that stops every training, later trials are skipped; after others they are marked."
    return f"{line} Examinations come first in their worker group; {after}"


def asked(results: Results) -> list[tuple[str, str]]:
    """Return the configuration: each axis and option with its values, and the settings that are not defaults."""
    experiment, trials = results.experiment, results.trials
    trials = trials[trials["kind"] != "diagnostic"]
    asked = [("workload", experiment.workload)]
    for axis in AXES:
        if axis in ("workload", "options", "device", *TAGS):
            continue
        distinct = [value for value in trials[axis].drop_duplicates().tolist() if not pd.isna(value)]
        unused = axis in LATER and distinct == [LATER[axis]]
        if not distinct or unused or (axis == "global_batch_size" and trials["scaling"].eq("weak").all()):
            continue
        if all(isinstance(value, int | float) for value in distinct):
            distinct.sort()
        asked.append((axis.replace("_", " "), ", ".join(map(str, distinct))))
    options = [each for each in trials["options"] if isinstance(each, Mapping)]
    for name in dict.fromkeys(name for each in options for name in each):
        values = [each[name] for each in options if name in each]
        if len({json.dumps(value) for value in values}) > 1:
            texts = dict.fromkeys(str(value) for value in values if value is not None)
            asked.append((name.removeprefix("workload."), ", ".join(texts)))
    if chosen := experiment.training.model_dump(exclude_defaults=True):
        each = (f"{name} {', '.join(map(str, values))}" for name, values in chosen.items())
        asked.append(("training", "; ".join(each)))
    if t := experiment.throughput:
        words = (
            f"{_blocks(t, results.environment)}; warm-up in rounds of {t.warmup_steps} steps until steady, at most "
            f"{t.warmup_rounds}, then {t.windows} windows of at least {t.window_steps} steps and {t.window_seconds:g} s"
        )
        asked.append(("throughput", words))
    if c := experiment.convergence:
        asked.append(("convergence", f"{c.length}, seeds {', '.join(map(str, c.seeds))}"))
    return asked


def _blocks(settings: Throughput, environment: RunEnvironment) -> str:
    rule, blocks = settings.rule, settings.most_blocks
    if rule is None:
        planned = (invocation.get("blocks") for invocation in environment.get("invocations", []))
        first = next((n for n in planned if n), blocks)
        return plural(blocks, "block") + (f", {blocks - first} of them added later" if blocks > first else "")
    if rule == "decide":
        return f"{LOOKS[0]} blocks, or {' or '.join(map(str, LOOKS[1:]))} where a comparison was open"
    return f"{rule.at_least} to {rule.at_most} blocks, for intervals within {100 * rule.halfwidth:g} %"


def scaling_words(results: Results) -> str:
    scaling = results.scaling
    words = {
        "weak": "weak scaling: the per-device batch is fixed",
        "strong": "strong scaling: the global batch is fixed",
    }
    kinds = [words[kind] for kind in sorted(scaling["scaling"].unique())]
    bases = scaling.drop_duplicates("base_id")["base_throughput_per_s"]
    looks = (
        f"Looks after {', '.join(map(str, LOOKS))} blocks end a cell: intervals are those of "
        f"{100 * (1 - LOOKS_SIGNIFICANCE):g} % at a look, which hold in 95 % of runs over all looks. "
    )
    return (
        f"Against the base of the same setting ({span(speed, bases)} {rate_unit(scaling)} in absolute numbers), "
        f"{' and '.join(kinds)}. "
        "Efficiency is speedup over devices; ratios are paired by block, their 95 % interval is a t interval on the "
        f"logarithm over n blocks, each in fresh processes; below {LEAST_BLOCKS} blocks the range is given, with n. "
        "Italics: no claim about speed (emulated, oversubscribed, or measured despite an error that the doctor found). "
        f"{looks * (results.rule == 'decide')}{usual_words(results.trials)}"
    ).rstrip()


def memory_words(results: Results) -> str:
    """Return the sentences above the table of memory, whose peak is a device's on GPUs alone."""
    if (results.cells["device"] == "cuda").any():
        return (
            "Peak of the steps, on the rank with the most memory. The rest is what parameters, gradients and optimizer "
            "state leave of it, such as activations. Construction: peak while model and optimizer were built, on any "
            "rank."
        )
    return (
        "State of the model on the rank with the most memory. On a CPU a peak is that of a whole process, libraries "
        "included: tables/cells.csv has it."
    )


def convergence_words(results: Results) -> str:
    settings = results.experiment.convergence
    if settings is None:
        return ""
    resumed = int(results.trials["resumed_epoch"].notna().sum())
    length = settings.length[0].upper() + settings.length[1:]
    words = f"{length}; median over seeds, smallest and largest in brackets."
    if target := settings.target:
        bound = f"at least {target.at_least:g}" if target.at_least is not None else f"at most {target.at_most:g}"
        when = "at the end of each epoch" if settings.epochs else "at each report"
        words += (
            f" Target: {target.metric} {bound}, checked {when}; a seed that misses it counts as "
            f"infinite in the median. {settings.clock}"
        )
    return words + (f" {plural(resumed, 'training')} resumed from a checkpoint." if resumed else "")


NO_FACTS: dict[str, object] = {
    "started": "",
    "machine_line": "",
    "nodes": [],
    "environment_differs": "",
    "invocations_differ": [],
}


def facts(environment: RunEnvironment, experiment: Experiment) -> dict[str, object]:
    """Return the variables of the template that come from environment.jsonl, the machines and invocations."""
    seen = nodes(environment)
    options = [*experiment.option_axes(), *(name for grid in experiment.grids for name in grid.options)]
    sections = (option.partition(".") for option in options)
    own = {name for section, _, name in sections if section == SECTION}  # variables of cells, not of the machine
    started, machine = "not started", "no worker group started"
    if invocations := [invocation for invocation in environment.get("invocations", []) if "started_at" in invocation]:
        again = f", resumed {plural(len(invocations) - 1, 'time')}" if len(invocations) > 1 else ""
        commit = invocations[0].get("git_commit")
        started = f"{start_text(invocations[0]['started_at'])}{again}{f' · git {commit[:12]}' if commit else ''}"
    if seen:
        gpus = [device["model"] for device in seen[0]["devices"] if device["kind"] == "cuda"]
        what = gpus[0] if gpus else f"{seen[0]['cpu']}, {seen[0]['cores']} cores, no GPU used"
        machine = f"{plural(len(seen), 'node')}: {what} · torch {seen[0]['packages'].get('torch', '?')}"
    return {
        "started": started,
        "machine_line": machine,
        "nodes": [(node["host"], node_facts(node, own)) for node in seen],
        "environment_differs": difference(environment),
        "invocations_differ": [
            f"Invocation {number} differs from the one before: {'; '.join(invocation['differs'])}."
            for number, invocation in enumerate(environment.get("invocations", []))
            if invocation.get("differs")
        ],
    }


def nodes(environment: RunEnvironment) -> list[NodeEnvironment]:
    """Return each node once, as first recorded."""
    nodes: dict[str, NodeEnvironment] = {}
    for group in environment.get("groups", []):
        for node in group["nodes"]:
            nodes.setdefault(node["node_id"], node)
    control = nodes.pop("torchrun", None)  # this machine, which Ray knows by an id
    if control and control["host"] not in {node["host"] for node in nodes.values()}:
        nodes["torchrun"] = control
    return list(nodes.values())


def node_facts(node: NodeEnvironment, own: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return the facts of a node with their names, without the ``own`` variables of cells."""
    packages = ", ".join(f"{name} {version}" for name, version in node["packages"].items())
    topology = node.get("topology")
    models = [
        f"{device['model']} {device['uuid'] or ''}".strip() for device in node["devices"] if device["kind"] == "cuda"
    ]
    facts = [
        ("processor", f"{node['cpu']}, {node['cores']} cores, {node['logical_cpus']} logical"),
        ("memory", f"{node['memory_bytes'] / GIB:.1f} GiB"),
        ("GPUs", ", ".join(models) or "none used"),
        *(("each GPU", text) for text in [cards_text(topology.get("cards", []) if topology else [])] if text),
        *(("RDMA adapters", places_of(node, each)) for each in [node.get("adapters")] if each),
        ("system", node["system"]),
        ("software", f"Python {node['python']}, {packages}, CUDA {node['cuda'] or 'none'}"),
        ("threads per device", str(node["threads"])),
    ]
    if node.get("niceness"):
        facts.append(("niceness", f"{node['niceness']}: the ranks yield to other processes"))
    if variables := [f"{name}={value}" for name, value in node["variables"].items() if name not in own]:
        facts.append(("variables", ", ".join(variables)))
    return facts


def cards_text(cards: Sequence[Card]) -> str:
    """Return power limit, ECC state and PCIe link of a node's GPUs, once if all are alike; empty if none is known."""
    texts = []
    for card in cards:
        limit, lanes = card["power_limit_w"], card["pcie_width"]
        generation, ecc = card["pcie_generation"], card["ecc"]
        link = f"PCIe{f' {generation}.0' * bool(generation)}{f' x{lanes}' * bool(lanes)}"
        known = [f"power limit {limit:.0f} W"] if limit else []
        known += [] if ecc is None else [f"ECC {'on' if ecc else 'off'}"]
        texts.append(", ".join([*known, *([link] if generation or lanes else [])]))
    if len({*texts}) == 1:
        return texts[0]
    return "; ".join(f"GPU {gpu}: {text or 'unknown'}" for gpu, text in enumerate(texts))


def difference(environment: RunEnvironment) -> str:
    """Return a sentence if worker groups recorded different hardware or versions on the same node."""
    keys = (*ENVIRONMENT_KEYS, "memory_bytes")
    seen: dict[str, set[str]] = {}
    for group in environment.get("groups", []):
        for node in group["nodes"]:
            seen.setdefault(node["host"], set()).add(json.dumps([node.get(key) for key in keys], sort_keys=True))
    different = [host for host, versions in seen.items() if len(versions) > 1]
    return f"Worker groups saw different hardware or software on {', '.join(different)}." if different else ""
