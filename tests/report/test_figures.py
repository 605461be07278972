"""Each figure from a hand-made table: what it shows, and what it says when it cannot be drawn."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from harness.analysis import phases as phase_tables
from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.doubts import CountedDoubt
from harness.analysis.equivalence import Verdict, Verdicts
from harness.analysis.hardware import collectives, device_memory, links
from harness.analysis.results import Results
from harness.analysis.trials import convergence
from harness.analysis.waterfall import waterfall
from harness.config.load import parse_experiment
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.record.folder import RunFolder
from harness.record.schema import EPOCHS, PHASES, PREDICTION, TRAINING_STEPS, VERDICT, WATERFALL
from harness.report import figures
from harness.report.figures import FIGURES, Drawing, scaling, steps, style
from harness.report.figures.drawing import (
    COLOURS,
    MARKERS,
    TYPE_SIZE,
    Chart,
    figure_files,
    make_grid,
    merge_single_rows,
)
from harness.report.figures.scales import ARROWS
from harness.report.figures.steps import step_phases
from harness.report.tables.ratios import versus_table
from harness.report.tables.scaling import convergence_table, scaling_by_setting, scaling_table
from harness.report.tables.text import NO_BREAK
from tests.conftest import experiment_of
from tests.records import epochs_of, line, steps_of, with_set_ids

HATCH = "$////$"
NOT_EQUIVALENT = Verdict("not equivalent", "not equivalent to one device")


@pytest.fixture(scope="module", autouse=True)
def curves() -> Iterator[None]:
    """As on many numbers of devices, although these studies have two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "FEW_SIZES", 1)
        yield


class Computed(Results):
    """Results without a folder, of hand-made lines; each table is computed when it is asked for first."""

    def __getattr__(self, name: str) -> pd.DataFrame:
        makers = vars(self)["makers"]
        if name not in makers:
            return super().__getattr__(name)
        table = vars(self)[name] = makers[name]()
        return table


def results_of(
    lines: list[dict[str, Any]], epochs: pd.DataFrame | None = None, checked: Verdicts | None = None
) -> Results:
    steps = steps_of(lines)
    trials = trial_tables.trials(lines, steps)
    made = Computed(RunFolder(Path("/nonexistent")))
    makers: dict[str, Callable[[], pd.DataFrame]] = {
        "windows": lambda: trial_tables.windows(lines),
        "cells": lambda: trial_tables.cells(trials, steps),
        "scaling": lambda: ratios.scaling(trials, None, checked),
        "noise": lambda: ratios.noise(trials),
        "versus": lambda: ratios.versus(trials, None, checked),
        "parity": lambda: ratios.parity(trials, None, checked),
        "waterfall": lambda: waterfall(trials, made.windows, ratios.scaling(trials)),
        "phases": lambda: phase_tables.phases(trials, made.windows),
        "convergence": lambda: convergence(trials, made.epochs, None, checked),
        "device_memory": lambda: device_memory(trials, trial_tables.ranks(lines)),
        "links": lambda: links(lines),
        "verdict": lambda: VERDICT.frame([]),
        "collectives": lambda: collectives(lines),
        "prediction": lambda: PREDICTION.frame([]),
    }
    curves = EPOCHS.frame([]) if epochs is None else epochs
    vars(made).update(
        makers=makers, trials=trials, step_times=steps, epochs=curves, training_steps=TRAINING_STEPS.frame([])
    )
    vars(made)["experiment"] = parse_experiment({"name": "test", "grid": {"per_device_batch_size": 8}}, source="x.yaml")
    return made


def with_tables(results: Results | None = None, **tables: Any) -> Results:
    """Results without a folder, of these tables and the others of ``results``; a table that is missing raises."""
    made = Computed(RunFolder(Path("/nonexistent")))
    vars(made).update({"makers": {}, **(vars(results) if results else {}), **tables})
    return made


def test_every_function_that_draws_is_in_the_list() -> None:
    for module_info in pkgutil.iter_modules(figures.__path__, "harness.report.figures."):
        module = importlib.import_module(module_info.name)
        for name, value in inspect.getmembers(module, inspect.isfunction):
            own = value.__module__ == module.__name__ and not name.startswith("_")
            if own and inspect.signature(value).return_annotation == "Drawing":
                assert value in FIGURES.values(), (
                    f"FIGURES in harness/report/figures/__init__.py lacks {name} of {module.__name__}"
                )


class Drawings(dict[str, Drawing]):
    """Figures by name; each is drawn when a test asks for it and, if ``laid_out``, has the layout of a file."""

    def __init__(self, results: Results, *, laid_out: bool = False) -> None:
        super().__init__()
        self.results, self.laid_out = results, laid_out

    def __missing__(self, name: str) -> Drawing:
        with style():
            drawing = self[name] = FIGURES[name](self.results)
            if drawing.figure and self.laid_out:
                drawing.figure.draw_without_rendering()
        return drawing


def drawn(name: str, lines: list[dict[str, Any]], epochs: pd.DataFrame | None = None) -> Drawing:
    return Drawings(results_of(lines, epochs))[name]


@cache
def full_results() -> Results:
    """Results of the full study, for tests that only read them."""
    return results_of(full_study())


@cache
def full_drawings() -> Drawings:
    """Every figure of the full study, for tests that only look at them."""
    return Drawings(full_results(), laid_out=True)


def full_study(
    blocks: int = 3, batches: Iterable[int] = (8, 16), strategies: Iterable[str] = ("ddp", "dp"), **columns: Any
) -> list[dict[str, Any]]:
    """Return trials of one device and of strategies on two, each with these batches; ``columns``: of ddp."""
    return [
        {**one, **(columns if one["strategy"] == "ddp" else {})}
        for block in range(blocks)
        for batch in batches
        for one in (
            study_line("single", batch, block, (100.0,)),
            study_line("ddp", batch, block, (80.0 + block, 85.0)),
            study_line("dp", batch, block, (60.0,)),
        )
        if one["strategy"] in ("single", *strategies)
    ]


def study_line(strategy: str, batch: int, block: int, rates: tuple[float, ...], **columns: Any) -> dict[str, Any]:
    devices = 1 if strategy == "single" else 2
    named = {"strategy": strategy, "base": f"single{batch}", "per_device_batch_size": batch, "devices": devices}
    cell = f"single{batch}" if strategy == "single" else f"{strategy}2x{batch}"
    return line(cell, block=block, rates=rates, **{**named, **columns})


def axes_of(figure: Figure | None) -> list[Any]:
    assert figure is not None
    return [axes for axes in figure.axes if axes.axison]


def marked(drawing: Drawing, marker: str) -> list[Any]:
    lines = [one for axes in axes_of(drawing.figure) for one in axes.get_lines()]
    return [one for one in lines if str(one.get_marker()) == marker]


def test_a_full_study_draws_all_but_convergence_and_without_measurements_captions_have_the_reason() -> None:
    drawings = full_drawings()
    shown = {name for name in FIGURES if drawings[name].figure}
    assert shown == {"throughput", "efficiency", "ratios", "batch_sizes", "step_times"}
    assert drawings["convergence"].caption.startswith("Left out: no training was recorded")
    assert drawings["training_steps"].caption == "Left out: no step of a training was recorded."
    drawings = Drawings(results_of([line("single", outcome="error")]))
    for name in FIGURES:
        assert drawings[name].figure is None and drawings[name].caption.startswith("Left out: ")


def test_throughput_is_logarithmic_with_an_ideal_line_from_the_base_and_hollow_markers_of_emulated_cells() -> None:
    drawing = full_drawings()["throughput"]
    axes = axes_of(drawing.figure)
    assert len(axes) == 2
    assert all(a.get_xscale() == "log" and a.get_yscale() == "log" for a in axes)
    ideal = [one for one in axes[0].get_lines() if one.get_linestyle() == "--"]
    assert [list(one.get_ydata()) for one in ideal] == [pytest.approx([100.0, 200.0])]
    assert axes[0].get_ylabel() == "throughput (samples/s)"
    assert {one.get_markerfacecolor() for one in marked(drawing, "s")} == {"white"}
    assert "Base: single on 1 device, 100 samples/s" in drawing.caption
    assert "DataParallel on CPU slots is emulated" in drawing.caption
    assert "not a claim about speed" in drawing.caption


def test_on_two_device_counts_a_cell_has_a_line_with_its_blocks_and_efficiency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "FEW_SIZES", 2)
    drawing = Drawings(full_results(), laid_out=True)["throughput"]
    axes = axes_of(drawing.figure)
    assert [panel.get_title() or panel.get_title("right") for panel in axes] == ["batch 8/device", "batch 16/device"]
    for panel in axes:
        assert panel.get_xscale() == "linear" and panel.get_xlim()[0] == 0
        assert [len(one.get_xdata()) for one in panel.get_lines() if one.get_marker() == "."] == [3, 3, 3]
        ideals = [one.get_xdata() for one in panel.get_lines() if one.get_linestyle() == "--"]
        assert np.ravel(ideals) == pytest.approx([200.0] * 4)
    labels = [label.get_text() for label in axes[0].get_yticklabels()]  # the second panel has the same
    assert sorted(labels) == ["ddp x2  81 %", "dp x2*  30 %", "single x1"]
    assert "percentages: scaling efficiency" in drawing.caption
    efficiency = Drawings(full_results())["efficiency"]
    assert efficiency.figure is None and "the figure of throughput has it" in efficiency.caption
    one = [line("single", block=block) for block in range(3)]
    assert drawn("throughput", one).figure is None


def test_the_caption_states_the_read_of_each_step_in_fp16_and_blocks_without_an_interval() -> None:
    read, few = "A step in fp16 includes the host's read of whether a gradient overflowed.", "none below 3 blocks"
    scaled = [{**each, "precision": "fp16"} for each in full_study(blocks=2)]
    captions = [full_drawings()["throughput"].caption, drawn("throughput", scaled).caption]
    assert [(read in caption, few in caption) for caption in captions] == [(False, False), (True, True)]


def test_colour_means_strategy_in_every_figure_and_its_marker_is_its_own_or_of_a_reserve() -> None:
    drawings = full_drawings()
    for name in ("throughput", "efficiency", "batch_sizes"):
        assert {one.get_color() for one in marked(drawings[name], "D")} == {COLOURS["ddp"]}, name
    count = len(BUILTIN_TRAITS)
    assert [*COLOURS][:count] == [*MARKERS][:count] == list(BUILTIN_TRAITS)
    first, ddp, second, again = (MARKERS[name] for name in ("mine:A", "ddp", "mine:B", "mine:A"))
    assert first == again != second and not {first, second} & {*BUILTIN_TRAITS, ddp}
    MARKERS.pop("mine:A"), MARKERS.pop("mine:B")
    markers = [traits.marker for traits in BUILTIN_TRAITS.values()]
    assert len({*markers}) == len(markers), "harness/config/strategy_traits.py: BUILTIN_TRAITS"


def test_efficiency_needs_two_device_counts_and_batch_sizes_two_batches() -> None:
    efficiency = drawn("efficiency", [line("single")])
    assert efficiency.figure is None
    assert efficiency.caption == "Left out: nothing was measured on another device count than its base."
    one_size = drawn("batch_sizes", [line("single"), line("ddp2", rates=(80.0, 80.0))])
    assert one_size.figure is None and one_size.caption.startswith("Left out: only one batch size was measured")


@pytest.mark.parametrize(
    ("columns", "crosses"),
    [
        ({"outcome": "oom"}, [[32]]),
        ({"outcome": "skipped", "skip_code": "out_of_memory"}, [[32]]),
        ({"outcome": "skipped", "skip_code": "too_few_samples"}, [[32]]),
        ({"outcome": "skipped", "skip_code": "too_few_devices"}, []),
    ],
)
def test_crosses_mark_cells_that_lack_memory_or_samples(columns: dict[str, Any], crosses: list[list[int]]) -> None:
    study = full_study(blocks=1, strategies=["ddp"])
    drawing = drawn("batch_sizes", [*study, study_line("ddp", 32, 0, (1.0, 1.0), **columns)])
    assert [list(one.get_xdata()) for one in marked(drawing, "x")] == crosses
    assert ("Crosses: 1 oom (trials)." in drawing.caption) == (columns["outcome"] == "oom")


def training(name: str = "ddp2", **columns: Any) -> dict[str, Any]:
    """Return a training on two devices; that of a seed is in a block of its own."""
    fixed = {"kind": "convergence", "rates": (1.0, 1.0), "block": columns.get("seed", 0)}
    return line(name, **{**fixed, **columns})


def curves_of(lines: list[dict[str, Any]], *accuracies: list[float]) -> pd.DataFrame:
    """Return the epochs of these trainings: each with its own accuracies, or all with those that are given once."""
    each = accuracies if len(accuracies) > 1 else accuracies * len(lines)
    epochs = [epochs_of(one["trial_id"], of) for one, of in zip(lines, each, strict=True)]
    return pd.concat(epochs, ignore_index=True)


def test_learning_curves_hold_the_median_and_range_of_a_cell_s_seeds_and_a_row_a_setting() -> None:
    lines = [training(seed=seed) for seed in (0, 1, 2)]
    epochs = curves_of(lines, [0.5, 0.8, 0.9], [0.3, 0.6, 0.8], [0.4, 0.8, 0.95])
    drawing = drawn("convergence", lines, epochs)
    metric, loss = axes_of(drawing.figure)
    assert [[*one.get_ydata()] for one in metric.get_lines()] == [pytest.approx([0.4, 0.8, 0.9])]
    (band,) = metric.collections
    assert {*band.get_paths()[0].vertices[:, 1].round(3)} == {0.3, 0.5, 0.6, 0.8, 0.95}
    assert len(loss.get_lines()) == len(loss.collections) == 1
    assert (metric.get_xlabel(), loss.get_xlabel()) == ("training time (s)", "training samples")
    assert {label.get_text()[-2:] for label in metric.get_yticklabels()} == {" %"}
    assert drawing.caption.startswith("Median of 3 seeds, bands from the lowest to the highest: ddp on 2;")
    assert "Dashed" not in drawing.caption
    assert [one.text for one in drawing.figure.marks][:1] == ["ddp x2, epoch 1: 40.0 % (30.0 % to 50.0 %)"]
    losses = {0.1: [0.5, 0.8], 0.001: [0.1, 0.2, 0.3]}
    lines = [training(f"ddp{lr}", strategy="ddp", options={"optimizer.lr": lr}) for lr in losses]
    drawing = drawn("convergence", lines, curves_of(lines, *losses.values()))
    panels = axes_of(drawing.figure)
    assert [axes.get_title("left") for axes in panels[::2]] == ["lr=0.001", "lr=0.1"]
    assert [axes.get_xlabel() for axes in panels] == [""] * 2 + ["training time (s)", "training samples"]
    assert [axes.get_ylabel() for axes in panels[:2]] == ["validation accuracy", "training loss"]
    accuracy = [[*one.get_ydata()] for axes in panels[::2] for one in axes.get_lines()]
    assert accuracy == [pytest.approx(losses[0.001]), pytest.approx(losses[0.1])]
    assert panels[0].get_ylim() == panels[2].get_ylim() and drawing.caption.startswith("1 seed: ")


@pytest.mark.parametrize(
    ("target", "drawn_at"),
    [
        ({"metric": "val_accuracy", "at_least": 0.7}, [0.7]),
        ({"metric": "val_accuracy", "at_least": 0.95}, [0.95]),
        ({"metric": "val_loss", "at_most": 0.7}, [0.7]),
        (None, []),
    ],
)
def test_a_target_is_a_dashed_line_in_its_metric_s_panels(target: dict[str, Any] | None, drawn_at: list[float]) -> None:
    lines = [training()]
    experiment = experiment_of(convergence={"epochs": 2} | ({"target": target} if target else {}))
    results = with_tables(results_of(lines, curves_of(lines, [0.5, 0.8])), experiment=experiment)
    drawing = Drawings(results)["convergence"]
    metric, loss = axes_of(drawing.figure)
    assert [one.get_ydata()[0] for one in metric.get_lines() if one.get_linestyle() == "--"] == drawn_at
    low, high = metric.get_ylim()
    assert all(low < level < high for level in drawn_at), "also one that was not reached is on the axis"
    assert len(loss.get_lines()) == 1 and ("Dashed: the target." in drawing.caption) == bool(drawn_at)


def reports_of(lines: list[dict[str, Any]], **metrics: float) -> pd.DataFrame:
    """What scripts report: these metrics twice."""
    rows = [
        {"trial_id": one["trial_id"], "attempt": 1, "epoch": epoch, "train_s": float(epoch), **metrics}
        for one in lines
        for epoch in (1, 2)
    ]
    return EPOCHS.frame(rows)


@pytest.mark.parametrize(
    ("metrics", "panels"),
    [
        ({"val_loss": 2.0, "train_loss": 1.0}, ["validation loss", "training loss"]),
        ({"reported_f1": 0.5}, ["reported f1"]),
        ({"reported_f1": 0.5, "reported_loss": 0.5, "train_loss": 1.0}, ["reported loss", "training loss"]),
        ({"train_loss": 1.0}, ["training loss"]),
        ({"train_loss": 1.0, "samples": 10}, ["training loss", "training loss"]),
        ({"train_f1": 1.0}, ["training f1"]),
    ],
)
def test_what_scripts_report_is_drawn_against_time(metrics: dict[str, float], panels: list[str]) -> None:
    lines = [training(f"script{n}", strategy="script", devices=n, rates=(1.0,) * n) for n in (1, 2)]
    target = {"metric": "loss", "at_most": 0.1}
    grid = {"devices": [1, 2], "per_device_batch_size": [16]}
    content = {"name": "x", "script": "x.py", "grid": grid, "convergence": {"seeds": 0, "target": target}}
    experiment = parse_experiment(content, source="x.yaml")
    results = with_tables(results_of(lines, reports_of(lines, **metrics)), experiment=experiment)
    drawing = Drawings(results)["convergence"]
    axes = axes_of(drawing.figure)
    assert [one.get_ylabel() for one in axes] == panels
    clocks = ["training time (s)", "training samples" if "samples" in metrics else "training time (s)"]
    assert [one.get_xlabel() for one in axes] == clocks[: len(axes)]
    assert [text.get_text() for text in axes[0].texts] == ["x1", "x2"]  # lines of one colour
    assert "it contains evaluation, but no pauses" in drawing.caption
    dashed = [one for one in axes[0].get_lines() if one.get_linestyle() == "--"]
    assert len(dashed) == ("reported_loss" in metrics)


def test_a_median_ends_where_the_first_of_its_seeds_diverged() -> None:
    lines = [training(seed=seed, outcome="diverged" if seed == 2 else "ok") for seed in (0, 1, 2)]
    lines.append(training("fsdp2", seed=0))
    epochs = curves_of(lines, [0.4, 0.8, 0.9], [0.5, 0.6, 0.8], [0.3], [0.5, 0.6, 0.7])
    drawing = drawn("convergence", lines, epochs)
    ddp, fsdp = (len(one.get_xdata()) for one in axes_of(drawing.figure)[0].get_lines())
    assert (ddp, fsdp) == (1, 3)
    assert drawing.caption.startswith("Median of 1 to 3 seeds") and "first of its seeds diverged." in drawing.caption


def drawn_by_step(lines: list[dict[str, Any]], losses: Iterable[list[float]]) -> Drawing:
    """Return the figure of trainings with these losses."""
    steps = [
        {"trial_id": one["trial_id"], "attempt": 1, "epoch": 1, "step": step, "loss": loss, "learning_rate": 0.1 / step}
        for one, of in zip(lines, losses, strict=True)
        for step, loss in enumerate(of, start=1)
    ]
    return Drawings(with_tables(results_of(lines), training_steps=TRAINING_STEPS.frame(steps)))["training_steps"]


def test_losses_by_step_hold_one_line_a_seed_beside_their_rates_and_a_row_a_setting() -> None:
    drawing = drawn_by_step([training(seed=seed) for seed in (0, 1)], ([2.0, 1.0, 0.5], [4.0, 3.0, 2.0]))
    loss, rate = axes_of(drawing.figure)
    drawn = sorted(np.asarray(one.get_ydata()).round(6).tolist() for one in loss.get_lines())
    assert drawn == [[2.0, 1.0, 0.5], [4.0, 3.0, 2.0]]
    assert [list(one.get_xdata()) for one in loss.get_lines()] == [[1, 2, 3]] * 2
    assert list(rate.get_lines()[0].get_ydata()) == pytest.approx([0.1, 0.05, 0.1 / 3])
    assert rate.get_ylabel() == "learning rate" and "evenly spaced" not in drawing.caption
    rates = (0.1, 0.001, 0.05)
    lines = [training(f"ddp{lr}", strategy="ddp", options={"optimizer.lr": lr}) for lr in rates]
    panels = axes_of(drawn_by_step(lines, ([lr, 2 * lr] for lr in rates)).figure)
    assert [axes.get_title() for axes in panels[::2]] == ["lr=0.001", "lr=0.05", "lr=0.1"]
    drawn = [[*one.get_ydata()] for axes in panels[::2] for one in axes.get_lines()]
    assert drawn == [pytest.approx([lr, 2 * lr]) for lr in sorted(rates)]
    assert len({axes.get_ylim() for axes in panels[::2]}) == 1
    assert [axes.get_xlabel() for axes in panels] == ["", "", "", "", "step", "step"]


def test_losses_by_step_are_thinned_to_the_last_step_and_end_where_they_are_not_finite() -> None:
    drawing = drawn_by_step([training()], [[5000.0 - step for step in range(1800)]])
    (curve,) = axes_of(drawing.figure)[0].get_lines()
    assert len(curve.get_xdata()) == 451 and curve.get_xdata()[[0, 1, -1]].tolist() == [1, 5, 1800]
    assert "At most 500 evenly spaced steps of each training are drawn." in drawing.caption
    drawing = drawn_by_step([training()], [[2.0, 3000.0, float("inf"), float("nan")]])
    (curve,) = axes_of(drawing.figure)[0].get_lines()
    assert [*curve.get_xdata()] == [1, 2] and "A line ends where the loss is not finite." in drawing.caption


def lines_of(drawing: Drawing, strategy: str) -> list[Any]:
    """Return the lines of a strategy's colour that join several places."""
    lines = [one for axes in axes_of(drawing.figure) for one in axes.get_lines()]
    return [one for one in lines if one.get_color() == COLOURS[strategy] and len({*one.get_xdata()}) > 1]


def test_a_training_despite_an_error_of_the_doctor_is_drawn_apart() -> None:
    lines = [training(f"{name}2", faulty=name == "ddp") for name in ("ddp", "fsdp")]
    drawing = drawn("convergence", lines, curves_of(lines, [0.5, 0.8]))
    assert {one.get_linestyle() for one in lines_of(drawing, "ddp")} == {":"}
    assert {one.get_linestyle() for one in lines_of(drawing, "fsdp")} == {"-"}
    assert "faulty cells have an error of the doctor" in drawing.caption


@pytest.mark.parametrize("name", ["efficiency", "batch_sizes"])
def test_no_line_joins_faulty_cells_with_others(name: str) -> None:
    four = {"base": "single8", "per_device_batch_size": 8}
    study = full_study() + [line("ddp4x8", strategy="ddp", block=b, rates=(70.0,) * 4, **four) for b in range(3)]
    healthy, mixed = (
        Drawings(results_of([{**one, "faulty": one["cell_id"] in faulty} for one in study]))[name]
        for faulty in ((), ("ddp2x8",))
    )
    assert lines_of(healthy, "ddp") and not lines_of(mixed, "ddp")


def part_rows(cell: str, strategy: str = "ddp", options: dict[str, Any] | None = None, **shares: Any) -> list[Any]:
    """Return the rows of a cell; ``shares``: of each part, or with the ends of its interval."""
    named = {name: full_study()[0][name] for name in ("scaling", "per_device_batch_size", "global_batch_size")}
    fixed = {"devices": 2, "emulated": strategy == "dp", "oversubscribed": False, "blocks": 3, "options": options or {}}
    return [
        {**named, **fixed, "strategy": strategy, "cell_id": cell, "label": cell, "part": part.replace("_", " ")}
        | dict(zip(("share", "low", "high"), share if isinstance(share, tuple) else (share,), strict=False))
        for part, share in shares.items()
    ]


def waterfall_of(*rows: dict[str, Any], leading: str = "") -> Drawing:
    """Return the figure of these rows; ``leading``: the cell that the verdict names."""
    verdict = VERDICT.frame([{"topic": "loss", "code": "largest", "cell_id": leading}] if leading else [])
    return Drawings(with_tables(full_results(), waterfall=WATERFALL.frame(rows), verdict=verdict))["waterfall"]


def test_waterfalls_have_their_interval_and_withheld_ones_are_named_and_not_drawn() -> None:
    shares = {"ideal": (0.6, 0.55, 0.65), "rest": 0.4}
    drawing = waterfall_of(*part_rows("a", **shares))
    (panel,) = axes_of(drawing.figure)
    assert [0.55, 0.65] in [[float(x) for x in one.get_xdata()] for one in panel.get_lines()]
    assert "n = 3 blocks" in drawing.caption and "find_unused_parameters" not in drawing.caption
    searching = waterfall_of(*part_rows("a", options={"ddp.find_unused_parameters": True}, **shares))
    assert (
        "With find_unused_parameters its search of the graph is in exposed communication, or the exchange"
        in searching.caption
    )
    shown = part_rows("ddp x2", ideal=0.6, wrapper=0.3, rest=0.1)
    apart = part_rows("ddp x4", ideal=0.3, rest=0.7)
    apart[1]["reason"] = "not shown"
    drawing, alone = waterfall_of(*shown, *apart), waterfall_of(*apart)
    assert len(axes_of(drawing.figure)) == 1
    assert drawing.caption.endswith("Withheld, since their parts leave over 20 % of the step unexplained: ddp x4.")
    assert alone.figure is None and alone.caption.startswith("Left out: Withheld, since their parts leave")
    assert "Withheld" not in waterfall_of(*shown).caption
    shown[1]["reason"] = "by one clock; by another 2 %"
    assert " wrapper of ddp x2, 30 %: by one clock; by another 2 %." in waterfall_of(*shown).caption


def test_the_waterfall_of_a_confirmation_has_the_cell_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*part_rows("as it is", ideal=0.4, communication=0.6), *part_rows("workers 2", ideal=0.9, communication=0.1)]
    confirmed = with_tables(full_results(), waterfall=WATERFALL.frame(rows))
    steps = [("screening", full_results()), ("confirmation", confirmed)]
    monkeypatch.setattr(figures, "improving_runs", lambda folder: [("a", step, run) for step, run in steps])
    drawing = FIGURES["improved"](full_results())
    assert "before and after" in drawing.title and drawing.figure
    assert {"as it is", "workers 2"} <= {text.get_text() for text in drawing.figure.findobj(Text)}
    monkeypatch.setattr(figures, "improving_runs", lambda folder: [("a", *steps[0])])
    assert FIGURES["improved"](full_results()).figure is None


def test_points_that_were_not_steady_are_named_in_the_captions_of_speed() -> None:
    scaling = full_results().scaling
    both = (CountedDoubt("wide spread", 1, 3), CountedDoubt("no steady state", 2, 3))
    doubts = [both if cell == "ddp2x8" else () for cell in scaling["cell_id"]]
    drawings = Drawings(with_tables(full_results(), scaling=scaling.assign(unusual=doubts)))
    for name in ("throughput", "efficiency"):
        assert " Some trials were not steady when they were timed: ddp on 2." in drawings[name].caption
        assert "Not steady" not in full_drawings()[name].caption


def test_intervals_of_one_devices_throughput_are_the_cells_over_its_devices() -> None:
    rates = [*enumerate((90.0, 100.0, 110.0))]
    lines = [study_line("ddp", batch, block, (rate, rate)) for batch in (16, 32) for block, rate in rates]
    results = results_of(lines)
    drawing = Drawings(results)["batch_sizes"]
    speed = axes_of(drawing.figure)[0]
    wanted = [(low / 2, high / 2) for low, high in zip(results.cells["low"], results.cells["high"], strict=True)]
    upright = [one for one in speed.get_lines() if len({*one.get_xdata()}) == 1 and len(one.get_xdata()) == 2]
    seen = [tuple(map(float, one.get_ydata())) for one in upright]
    assert seen == [pytest.approx(ends) for ends in wanted] and speed.get_ylim()[1] > max(high for _, high in wanted)
    assert "n = 3 blocks; bars are 95 % intervals of its throughput;" in drawing.caption


def test_non_equivalent_trainings_are_named_in_the_caption() -> None:
    lines = [training(f"{name}2", seed=seed, check_id=f"check-{name}") for name in ("ddp", "fsdp") for seed in (0, 1)]
    epochs = curves_of(lines, [0.5, 0.8])
    differs = {"check-fsdp": NOT_EQUIVALENT, "check-ddp": Verdict("equivalent")}
    results = results_of(lines, epochs, checked=differs)
    drawing, healthy = (Drawings(each)["convergence"] for each in (results, results_of(lines, epochs)))
    assert "Not equivalent to one device, and hatched: fsdp on 2." in drawing.caption
    hatched = [[str(one.get_marker()) for one in axes.get_lines()].count(HATCH) for axes in axes_of(drawing.figure)]
    assert hatched == [1, 1]
    assert "Not equivalent" not in healthy.caption
    assert not marked(healthy, HATCH)
    shown = [row.cells[0] for row in convergence_table(results.convergence).rows]
    assert shown == ["ddp x2", "fsdp x2 (not equivalent)"]


@pytest.mark.parametrize("columns", [{"oversubscribed": True}, {"nodes": 2}, {"scaling": "strong"}, {"model": None}])
def test_unusual_studies_are_drawn(columns: dict[str, Any]) -> None:
    study = results_of(full_study(batches=[8], **columns))
    assert Drawings(study, laid_out=True)["throughput"].figure is not None


def test_many_settings_are_truncated_with_a_note() -> None:
    drawing = drawn("throughput", full_study(blocks=1, batches=range(1, 16), strategies=["ddp"]))
    assert [len(axes_of(figure)) for figure in (drawing.figure, *drawing.more)] == [3, 9]
    assert "The first 12 settings are drawn" in drawing.caption


def test_the_noise_floor_is_a_band_in_both_figures_of_ratios() -> None:
    rates = ((batch, *one) for batch in (8, 16) for one in enumerate((90.0, 100.0, 110.0)))
    bases = [study_line("single", batch, block, (rate,)) for batch, block, rate in rates]
    twin = {"kind": "diagnostic", "purpose": "twin"}
    twins = [{**base, **twin, "trial_id": f"{base['trial_id']}t"} for base in bases]
    results = results_of([*full_study(), *twins])
    drawings = Drawings(results)
    low, high = results.noise.loc[0, ["low", "high"]].astype(float)
    assert low < 1 < high
    for name, across in (("efficiency", lambda box: (box.y0, box.y1)), ("ratios", lambda box: (box.x0, box.x1))):
        for axes in axes_of(drawings[name].figure):
            assert len(axes.patches) == (2 if name == "ratios" else 1)  # that of the row's own base
            for band in axes.patches:
                ends = across(band.get_path().get_extents(band.get_patch_transform()))
                assert ends == pytest.approx((low, high)), name
        assert "Grey band: the A/A test" in drawings[name].caption
    without = full_drawings()["ratios"]
    assert not any(axes.patches for axes in axes_of(without.figure)) and "band" not in without.caption


def test_ratios_are_drawn_with_their_intervals_and_n() -> None:
    own = ({name: f"{one[name]}t" for name in ("cell_id", "trial_id")} for one in full_study())
    controls = [
        with_set_ids({**one, **ids, "launcher": "torchrun"}) for one, ids in zip(full_study(), own, strict=True)
    ]
    results = results_of(full_study() + controls)
    drawing = Drawings(results)["ratios"]
    axes = axes_of(drawing.figure)[0]
    launched = [f"Ray / torchrun: {cell}" for cell in ("single x1", "dp x2*", "ddp x2")]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ddp x2 / dp x2*", *launched]
    points = [one.get_xdata()[0] for one in axes.get_lines() if one.get_marker() in MARKERS.values()]
    assert points[1:] == [1.0, 1.0, 1.0] and points[0] > 1.2
    first = results.versus.iloc[0]
    assert (first["low"], first["high"]) in [tuple(one.get_xdata()) for one in marked(drawing, "None")]
    assert "n = 3 blocks" in drawing.caption and "DataParallel on CPU slots is emulated" in drawing.caption


def test_non_equivalent_cells_are_hatched_and_keep_their_ratio_and_their_phases_are_marked() -> None:
    lines = [one | {"check_id": f"check-{one['strategy']}"} for one in full_study()]
    results = results_of(lines, checked={"check-ddp": NOT_EQUIVALENT})
    drawings = Drawings(results)
    for name in ("throughput", "efficiency", "batch_sizes", "ratios"):
        assert len(marked(drawings[name], HATCH)) == 2, name
    boxes = [box.get_hatch() for axes in axes_of(drawings["step_times"].figure) for box in axes.patches]
    assert sorted(boxes, key=str) == ["////", "////", None, None, None, None]
    for name in ("throughput", "efficiency", "batch_sizes", "step_times", "ratios"):
        assert "Hatched: not equivalent to one device." in drawings[name].caption, name
    whole = Drawings(results_of(lines))
    assert not any("Hatched: " in whole[name].caption for name in ("throughput", "step_times"))
    axes = results.scaling[[name for name in results.scaling if name in PHASES.names]]
    drawing = step_phases(with_tables(results, phases=PHASES.typed(axes.assign(step_s=0.1, forward_s=0.1))))
    labels = [label.get_text() for one in axes_of(drawing.figure) for label in one.get_yticklabels()]
    assert labels == ["single x1", "dp x2*", "ddp x2 (not equivalent)"]  # of both panels


def test_ratios_without_a_verdict_are_marked_and_named() -> None:
    lines = [one | {"check_id": "check" if one["strategy"] == "ddp" else None} for one in full_study()]
    results = results_of(lines, checked={"check": Verdict("unknown", "unknown: the check ended as oom")})
    terminal = [row.cells for _, part in scaling_by_setting(results.scaling) for row in part.rows]
    report = [row.cells for row in scaling_table(results.scaling).rows]
    for rows, strategy, ratios_of in ((terminal, 0, (2, 3)), (report, 1, (4, 5))):
        for row in rows:
            assert {row[column].endswith(f"{NO_BREAK}!") for column in ratios_of} == {row[strategy].startswith("ddp")}
    for row in versus_table(results.versus).rows:
        assert row.cells[4].endswith(f"{NO_BREAK}!") == ("ddp" in row.cells[0])
    drawings = Drawings(results)
    for name in ("throughput", "efficiency", "ratios"):
        assert "Equivalence to one device unknown: ddp on 2." in drawings[name].caption, name


def test_every_text_of_every_figure_has_one_size() -> None:
    for name in FIGURES:
        if figure := full_drawings()[name].figure:
            texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
            assert {text.get_fontsize() for text in texts} == {TYPE_SIZE}, name


def test_panels_that_are_compared_have_the_same_axes_and_efficiency_is_in_per_cent() -> None:
    for name in ("throughput", "efficiency", "step_times"):
        axes = axes_of(full_drawings()[name].figure)
        assert len(axes) == 2
        assert len({(*one.get_xlim(), *one.get_ylim()) for one in axes}) == 1, name
    shares = axes_of(full_drawings()["efficiency"].figure)[0]
    assert {label.get_text() for label in shares.get_yticklabels()} >= {"0 %", "20 %", "100 %"}


def test_an_interval_that_goes_on_beyond_the_axis_has_an_arrow() -> None:
    def arrows(rates: tuple[float, ...]) -> list[str]:
        lines = [line("single", block=block) for block in range(3)]
        lines += [line("ddp2", block=block, rates=(rate, rate)) for block, rate in enumerate(rates)]
        (axes,) = axes_of(drawn("throughput", lines).figure)
        return [str(one.get_marker()) for one in axes.get_lines() if one.get_marker() in ARROWS["y"]]

    assert arrows((80.0, 81.0, 82.0)) == []
    assert arrows((10.0, 80.0, 640.0)) == ["v", "^"]


def test_a_panel_of_one_point_is_a_row_of_the_table_and_rows_that_are_alone_share_a_panel() -> None:
    lines = full_study(blocks=1, strategies=["ddp"])
    lonely = drawn("efficiency", lines)
    assert lonely.figure is None and lonely.caption.startswith("Left out: each setting has a single point")
    drawing = drawn("efficiency", [*lines, study_line("fsdp", 8, 0, (8.0, 8.0))])
    assert len(axes_of(drawing.figure)) == 1
    assert "In the table alone, as a single point: batch 16/device." in drawing.caption
    one, other, several = (pd.DataFrame({"label": ["a / b"] * count}) for count in (1, 1, 2))
    facets = merge_single_rows([("x", one), ("y", several), ("z", other)])
    assert [name for name, _ in facets] == ["y", "other settings"]
    assert facets[1][1]["label"].tolist() == ["a / b · x", "a / b · z"]
    assert [name for name, _ in merge_single_rows([("x", one), ("y", several)])] == ["y", "x"]


def losing(count: int, strategy: str = "ddp", part: str = "exposed communication") -> list[dict[str, Any]]:
    """Return the rows of cells ddp0, ddp1 ..., each with a larger loss than the one before."""
    losses = [0.1 + 0.02 * number for number in range(count)]
    shares = [{"ideal": 1 - loss, part: loss, "rest": 0.0} for loss in losses]
    return [row for number, of in enumerate(shares) for row in part_rows(f"{strategy}{number}", strategy, **of)]


def titles_of(figure: Figure | None) -> list[str]:
    return [axes.get_title() for axes in axes_of(figure)]


def test_two_waterfalls_lead_and_others_follow_by_importance_with_equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = waterfall_of(*losing(2, "dp", "replicate"), *losing(6), leading="ddp1")
    assert titles_of(drawing.figure) == ["ddp1", "ddp5"]
    assert [titles_of(figure) for figure in drawing.more] == [["ddp4", "ddp3", "ddp2", "ddp0", "dp1*", "dp0*"]]
    assert " of 8 cells" not in drawing.caption and drawing.figure and drawing.figure.get_figwidth() < 4
    drawing = waterfall_of(*losing(9))
    assert [len(axes_of(figure)) for figure in drawing.more] == [6, 1]
    assert "The first 8 of 9 cells" in drawing.caption
    monkeypatch.setattr(steps, "MOST_FIGURES", 2)
    assert [len(axes_of(figure)) for figure in waterfall_of(*losing(13)).more] == [6]
    drawing = waterfall_of(*losing(1, "dp", "replicate"), *losing(1))
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in axes_of(drawing.figure)]
    assert labels == [["communication", "unexplained", "efficiency"]] * 2
    assert "(dp: replicate; ddp: exposed communication)" in drawing.caption


def test_the_memory_of_the_devices_is_drawn_and_of_each_gpu_in_their_order() -> None:
    studies = ([{**one, "device": device} for one in full_study()] for device in ("cpu", "cuda"))
    on_cpu, on_gpu = (drawn("batch_sizes", study) for study in studies)
    assert [len(axes_of(drawing.figure)) for drawing in (on_cpu, on_gpu)] == [1, 2]
    assert "peak memory" in on_gpu.title and "peak memory" not in on_cpu.title
    peaks = f"{3 * 2**30}, {2**30}"
    rank = {"rank": 0, "devices": "cuda:0, cuda:1", "allocated_by_device": peaks, "reserved_by_device": peaks}
    lines = [line("dp2", rates=(100.0,), devices=2, device="cuda", emulated=False) | {"ranks": [rank]}]
    results = results_of(lines)
    table = device_memory(results.trials, trial_tables.ranks(lines))
    figure = Drawings(with_tables(results, device_memory=table))["device_memory"].figure
    assert isinstance(figure, Chart)
    marks = [mark.text for mark in figure.marks]
    assert marks == ["dp x2, GPU 0 (cuda:0): 3 GiB", "dp x2, GPU 1 (cuda:1): 1 GiB"]
    of_one = with_tables(results, device_memory=table[table["gpu"] == 0].assign(devices=1))
    assert FIGURES["device_memory"](of_one).caption.startswith("Left out: ")


def test_the_values_that_show_on_hover_are_those_of_the_table() -> None:
    figure = full_drawings()["efficiency"].figure
    assert isinstance(figure, Chart)
    areas = [*figure.areas()]
    assert len(areas) == 4
    table = scaling_table(full_results().scaling)
    column = [heading.title for heading in table.columns].index("efficiency")
    shown = [row.cells[column] for row in table.rows if row.kind != "base"]
    assert sorted(text.partition(": ")[2] for _, text in areas) == sorted(shown)
    for css, _ in areas:
        left, top, width, height = (float(number) / 100 for number in re.findall(r"[-0-9.]+(?=%)", css))
        assert 0 <= left < left + width <= 1.001 and 0 <= top < top + height <= 1.001


def test_the_files_of_a_figure_have_one_layout_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Figure] = []
    execute = ConstrainedLayoutEngine.execute
    monkeypatch.setattr(
        ConstrainedLayoutEngine, "execute", lambda engine, figure: (computed.append(figure), execute(engine, figure))
    )
    with style():
        figure, _ = make_grid(1, 1)
        assert {*figure_files("name", figure)} == {"name.png", "name.svg"}
    assert computed == [figure]
