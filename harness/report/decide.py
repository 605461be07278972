"""``harness decide``: how many devices, for how long and at what price until the target is reached; text and figure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from harness.analysis.common import grouped
from harness.analysis.doubts import doubt_of
from harness.analysis.results import Results
from harness.analysis.time_to_target import LARGEST_PART, LEAST_BATCHES, LEAST_SEEDS, Work
from harness.analysis.trials import NO_METRIC
from harness.config.experiment import Experiment
from harness.config.script import ScriptExperiment
from harness.config.sections import Target
from harness.config.yaml_source import dump
from harness.plan.checks import join_names
from harness.plan.labels import devices_text, joined
from harness.report.causes import is_automatic, one_cell
from harness.report.figures.drawing import COLOURS, Drawing, Facet, add_legend, panels, write_figure
from harness.report.figures.scales import Limits, common_limits, log_limits, log_values
from harness.report.row import Row, is_missing, is_true, number, on_devices, plural, rows_of, setting_without_batch
from harness.report.tables.text import NO_BREAK, TextTable, decimal, duration, make_table, speed, with_ends, words
from harness.report.verdict import NextStep, run_file, scheduled
from harness.system.files import remove_all

PILOT = "pilot.yaml"
NEEDS_PRICE = "needs a price; give --price, or cost: {per_device_hour: 2.5, currency: USD} in the file"
MORE_SEEDS = 3
AUTOMATIC = "training.accumulation"
LARGE = 100
"""The multiple of the largest batch beyond which a critical batch is not told from none."""
EPOCHS = 10
"""The epochs of a pilot of a run that trained nothing."""


@dataclass(frozen=True)
class Wish:
    """What is asked for: the price of a device for an hour with its currency, the longest time and the most money."""

    price: float | None = None
    currency: str = ""
    within_s: float | None = None
    budget: float | None = None

    @property
    def money(self) -> str:
        """The column of money: price or, without one, device-hours."""
        return "price" if self.price else "device_hours"

    def cost(self, row: Row, end: str = "") -> str:
        """Return the price of a row with its currency or, without a price, its device-hours."""
        return f"{speed(number(row[f'{self.money}{end}']))} {self.unit}".strip()

    @property
    def unit(self) -> str:
        return self.currency if self.price else "device-hours"

    def fits(self, row: Row) -> bool:
        """Return whether time and money are enough at the upper ends of their intervals."""
        in_time = self.within_s is None or number(row.time_high_s) <= self.within_s
        return in_time and (self.budget is None or number(row[f"{self.money}_high"]) <= self.budget)


def decision_table(decision: pd.DataFrame, wish: Wish) -> TextTable:
    """Return a row for each setting with a time, the fastest first; "*" if no other is both faster and cheaper."""
    unit = (wish.currency or "price") if wish.price else "device-hours"
    several = decision["work"].nunique() > 1
    columns = (
        ("work", lambda row: row.work if several else "", words),
        ("setting", lambda row: _placed(row) + f", {row.source}" * (row.source != "measured"), words),
        ("batch", "global_batch_size", decimal("{:,.0f}")),
        ("time (95 %)", _time, words),
        (f"{unit} (95 %)", lambda row: _cost(row, wish), words),
        ("", lambda row: "*" if is_true(row.on_frontier) else "", words),
    )
    known = (row for row in rows_of(decision) if not is_missing(row.time_s))
    rows = sorted(known, key=lambda row: number(row.time_s))
    return make_table(columns, rows, lambda row: "base" if is_true(row.on_frontier) else "", ordered=True)


def _placed(row: Row) -> str:
    """Return 'ddp x2', or 'ddp x8 on 2 nodes'; of a setting whose strategy is not known '8 devices'."""
    if is_missing(row.strategy):
        return on_devices(row).removeprefix("on ")
    return joined(f"{row.strategy} x{devices_text(row)}", setting_without_batch(row), words(row.own_options))


def _left_out(rows: Sequence[Row], *, several: bool) -> Iterator[str]:
    """Yield why settings have no time, those of one work and reason together; ``several``: works are named."""
    by_reason = grouped((row for row in rows if is_missing(row.time_s)), lambda row: (row.work, row.reason))
    for (work, reason), group in by_reason.items():
        places = []
        for place, own in grouped(group, _placed).items():
            batches = sorted({int(row.global_batch_size) for row in own if not is_missing(row.global_batch_size)})
            at = f" at {'batch' if len(batches) == 1 else 'batches'} {', '.join(map(str, batches))}" if batches else ""
            places.append(f"{place}{at}")
        yield f"Without a time{f', {work}' * several}: {'; '.join(places)}: {reason}."


def _time(row: Row) -> str:
    return with_ends(duration, row.time_s, row.time_low_s, row.time_high_s)


def _cost(row: Row, wish: Wish) -> str:
    return with_ends(speed, *(row[f"{wish.money}{end}"] for end in ("", "_low", "_high")))


def decision_lines(
    decision: pd.DataFrame, works: Sequence[Work], wish: Wish, evaluation_s: float | None = None
) -> Iterator[str]:
    """Yield what to use for each work, what it rests on, or why nothing is said.

    ``evaluation_s``: the mean seconds of an epoch's evaluation.
    """
    every = rows_of(decision)
    if not works:
        yield "Nothing was measured that both has a throughput and trains: run the file, with a section convergence."
    evaluated = "" if evaluation_s is None else f", which took {duration(evaluation_s)} an epoch"
    if starts := [number(row.start_s) for row in every if not is_missing(row.time_s)]:
        yield (
            f"* No other is both faster and cheaper. Times include {duration(starts[0])} in which processes start, and "
            f"no evaluation{evaluated}."
        )
    yield from _left_out(every, several=len(works) > 1)
    for work in works:
        if work.refusal:
            yield f"{work.name}: {work.refusal}."
            continue
        yield f"{work.name}: {_samples(work)}."
        rows = [row for row in every if row.work == work.name and not is_missing(row.time_s)]
        if not rows:
            lacks = "measure the throughput of a setting at one of these batches"
            yield f"{work.name}: no setting has both a throughput and a batch whose samples are known; {lacks}."
        elif not (fitting := [row for row in rows if wish.fits(row)]):
            fastest = min(rows, key=lambda row: number(row.time_high_s))
            cheapest = min(rows, key=lambda row: number(row[f"{wish.money}_high"]))
            yield (
                f"{work.name}: nothing fits with 95 % certainty: the fastest takes up to "
                f"{duration(number(fastest.time_high_s))}, the cheapest up to {wish.cost(cheapest, '_high')}."
            )
        else:
            yield f"{work.name}: {_use(fitting, wish)}"
            doubted = dict.fromkeys(name for row in rows for name in work.loud.get(str(row.cell_id), ()))
            for name in doubted:
                cells = join_names([_setting(row) for row in rows if name in work.loud.get(str(row.cell_id), ())])
                yield f"Do not rely on the time of {cells}: {doubt_of(name).meaning}."


def _samples(work: Work) -> str:
    """Return what the trainings say of the samples to the target."""
    law, known = work.law, plural(len(work.samples), "training")
    if law is None:
        return f"{work.off_law}: each batch has the mean of its own trainings ({known} in all)"
    critical = (
        "no need of more was seen at larger ones"
        if law.critical > LARGE * law.trained[-1]
        else f"twice as many at about batch {law.critical:,.0f}"
    )
    at = ", ".join(map(str, law.trained))
    return (
        f"{speed(law.efficient)} samples at a small batch, {critical}; {known} at {at}, {law.spread:.0%} around the law"
    )


def chosen(rows: Sequence[Row], wish: Wish) -> Row:
    """Return the fastest of some rows if there is a budget alone, else the cheapest."""
    alone = wish.budget is not None and wish.within_s is None
    return min(rows, key=lambda row: number(row.time_s if alone else row[wish.money]))


def _use(rows: Sequence[Row], wish: Wish) -> str:
    row = chosen(rows, wish)
    cost = f"{_cost(row, wish)} {wish.unit}".strip()
    text = f"use {_setting(row)}: {_time(row)}, {cost}.".replace(NO_BREAK, " ")
    if wish.within_s is None and wish.budget is None:
        fastest = min(rows, key=lambda row: number(row.time_s))
        text = f"the cheapest is {text.removeprefix('use ')}"
        if fastest is not row:
            text += f" The fastest is {_setting(fastest)}: {duration(number(fastest.time_s))}, {wish.cost(fastest)}."
    return text


def _setting(row: Row) -> str:
    marks = [] if row.source == "measured" else [str(row.source)]
    marks += [] if is_true(row.trained) else ["batch not trained"]
    options = joined(setting_without_batch(row), words(row.own_options))
    named = ", ".join(filter(None, (f"{row.strategy} {on_devices(row)}", options)))
    return f"{named}, global batch {row.global_batch_size:,}{f' ({join_names(marks)})' * bool(marks)}"


def pilot(
    results: Results, target: Target, decision: pd.DataFrame, works: Sequence[Work], wish: Wish
) -> NextStep | None:
    """Return what to measure for an answer, or for a narrower one; None if nothing is known to help.

    It trains what was trained, and more, beside the throughput of the same settings, so that its run alone answers:
    three batches where there are fewer; more epochs if the target was not reached; what predicts other sizes if only
    those are asked for; else more seeds if most of the interval comes from the samples, more blocks if it comes from
    the throughput.
    """
    experiment, leading = results.experiment, rows_of(results.leaders)
    known = [row for row in rows_of(decision) if not is_missing(row.time_s)]
    row = chosen([row for row in known if wish.fits(row)] or known, wish) if known else None
    able = (one for one in works if one.measured and NO_METRIC not in (one.refusal or ""))
    work = next((one for one in able if row is None or one.name == row.work), None)
    own = [row for row in leading if work and row.cell_id in {setting.cell_id for setting in work.measured}]
    if isinstance(experiment, ScriptExperiment) or work is None or not own:
        return None
    settings = experiment.convergence
    why, epochs, seeds, blocks = _lacking(experiment, work, row)
    batches = {*work.missed, *(batch for batch, _ in work.reached), *([int(row.global_batch_size)] if row else [])}
    cell = max(own, key=lambda row: number(row.devices))
    batches |= set(_further(batches, cell, LEAST_BATCHES - len(batches), work))
    asked = {"epochs": epochs, "seeds": seeds, "target": target.model_dump(exclude_none=True)}
    devices = sorted({int(row.devices) for row in own})
    content = one_cell(experiment, cell, "pilot", {"devices": devices, "global_batch_size": sorted(batches)})
    if not is_automatic(cell):
        content["grid"].pop("per_device_batch_size", None)
        if max(batches) > min(devices) * int(cell.per_device_batch_size):  # which a device may not hold at once
            content["grid"] |= {"per_device_batch_size": [int(cell.per_device_batch_size)], AUTOMATIC: ["auto"]}
    if str(cell.data).startswith("synthetic"):
        why = f"{why}. Its data are noise, which reaches no target: name your own in the file"
    rule = "sqrt" if "adam" in str(cell.options.get("optimizer.name")).lower() else "linear"
    trained = [*work.missed, *(batch for batch, _ in work.reached)]  # at the rate that the file names
    rates = {"lr_scaling": rule, "lr_base_batch_size": min(trained, default=int(cell.global_batch_size))}
    content["training"] = {**rates, **content.get("training", {})}
    content["convergence"] = {**asked, "only": {"global_batch_size": sorted(batches)}}
    if settings:
        content |= scheduled(experiment, settings.epochs, epochs)
    if blocks:
        content["throughput"] = {**content.get("throughput", {}), "blocks": blocks}
    if row is None and content.get("throughput"):
        content["throughput"] = {**content["throughput"], "explain": True}
    return run_file(f"{why}, in a run of all of it:", dump(content, flow=None, width=100), results, PILOT)


def _lacking(experiment: Experiment, work: Work, row: Row | None) -> tuple[str, int, list[int], int]:
    """Return what an answer lacks, and the epochs and seeds that have it; the blocks, 0 for as many as now.

    ``row``: of the setting that is chosen, if there is one.
    """
    settings, timed = experiment.convergence, experiment.throughput
    epochs, seeds = (settings.epochs or EPOCHS, list(settings.seeds)) if settings else (EPOCHS, [])
    seeds += [number for number in range(2 * LEAST_SEEDS) if number not in seeds][: max(0, LEAST_SEEDS - len(seeds))]
    if row is None and work.refusal is None:
        why = "What is missing: a throughput of these devices, or the exchanges of a step, from which it is predicted"
        return why, epochs, seeds, 0
    if row is None and work.missed:
        return "The target was not reached by each training: twice the epochs", 2 * epochs, seeds, 0
    if row is None:
        return (
            f"What is missing: trainings at {LEAST_BATCHES} global batches, {LEAST_SEEDS} seeds each",
            epochs,
            seeds,
            0,
        )
    if timed and number(row.by_samples) < 0.5:
        why = "Most of the interval comes from the throughput: twice the blocks"
        return why, epochs, seeds, 2 * timed.most_blocks
    seeds += range(max(seeds) + 1, max(seeds) + 1 + MORE_SEEDS)
    return f"Most of the interval comes from the samples: {MORE_SEEDS} more seeds", epochs, seeds, 0


def _further(batches: Collection[int], cell: Row, count: int, work: Work) -> list[int]:
    """Return so many global batches beside those: powers of two of the smallest that the cell's devices divide.

    Larger ones, up to the part of the training set that answers may have, else smaller ones.
    """
    first = cell.devices * -(-min([*batches, int(cell.global_batch_size)]) // cell.devices)
    size = work.trainings[0].training_samples if work.trainings else None
    most = math.inf if not size else LARGEST_PART * size
    larger = [batch for power in range(2 * LEAST_BATCHES) if (batch := first * 2**power) <= most]
    smaller = [batch for power in range(1, 2 * LEAST_BATCHES) if (batch := first // 2**power) >= cell.devices]
    beyond = [first * 2**power for power in range(2 * LEAST_BATCHES)]
    return [batch for batch in dict.fromkeys((*larger, *smaller, *beyond)) if batch not in batches][: max(0, count)]


def write_decision(folder: Path, decision: pd.DataFrame, wish: Wish, target: str = "the target") -> list[Path]:
    """Write the figure of time against money into a folder; return its paths, none without a setting to draw.

    The figure of an earlier call is removed.
    """
    remove_all(folder.glob("decision.*"))
    return write_figure(folder, "decision", lambda: _drawing_of(decision, wish, f"Time and price to {target}"))


def _drawing_of(decision: pd.DataFrame, wish: Wish, title: str) -> Drawing:
    """Draw time against money, a panel for each work, with 95 % intervals; the frontier is a line."""
    known = decision[decision["time_s"].notna()]
    if known.empty:
        return Drawing(title, "Left out: nothing is known of any setting.", None)
    facets: list[Facet] = [(str(work), part.sort_values("time_s")) for work, part in known.groupby("work", sort=False)]
    limits = common_limits([log_limits(*_ends(part, "time", "_s")) for _, part in facets], log=True)
    of_money = log_limits(*_ends(known, wish.money, ""))

    def draw(axes: Axes, part: pd.DataFrame, ends: Limits) -> None:
        log_values(axes, "y", ends)
        log_values(axes, "x", of_money)
        best = part[part["on_frontier"].fillna(False).astype(bool)]
        axes.plot(best[wish.money].astype(float), best["time_s"].astype(float), color="0.6", linewidth=1)
        for row in rows_of(part):
            place, colour = (number(row[wish.money]), number(row.time_s)), COLOURS.get(str(row.strategy), "0.3")
            axes.plot([row[f"{wish.money}_low"], row[f"{wish.money}_high"]], [place[1]] * 2, color=colour, alpha=0.4)
            axes.plot([place[0]] * 2, [row.time_low_s, row.time_high_s], color=colour, alpha=0.4)
            filled = colour if row.source == "measured" else "white"
            axes.plot(*place, marker="o", markersize=5, color=colour, markerfacecolor=filled, label=str(row.strategy))
            if is_true(row.on_frontier):
                text = f"{plural(row.devices, 'device')}, batch {row.global_batch_size:,}"
                side, start = ("right", -4) if place[0] ** 2 > math.prod(of_money) else ("left", 4)  # of the log scale
                axes.annotate(text, place, xytext=(start, 4), textcoords="offset points", ha=side, fontsize=7)
        axes.set_ylabel("time to target (s)")
        axes.set_xlabel(" in ".join(filter(None, ("price", wish.currency))) if wish.price else "device-hours")

    figure = panels(facets, draw, limits, legend=())
    handles = {
        text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    add_legend(figure, list(handles.values()))
    return Drawing(title, "", figure)


def _ends(part: pd.DataFrame, name: str, of: str) -> tuple[list[float], list[float]]:
    """Return the values of a column, and the ends of their intervals."""
    low, high = (part[f"{name}{end}{of}"].astype(float).tolist() for end in ("_low", "_high"))
    return part[f"{name}{of}"].astype(float).tolist(), [*low, *high]
