"""Each figure from a hand-made table: what it shows, and what it says when it cannot be drawn."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from harness.analysis import phases as phase_tables
from harness.analysis import ratios
from harness.analysis import trials as trial_tables
from harness.analysis.convergence import convergence
from harness.analysis.doubts import CountedDoubt
from harness.analysis.equivalence import Verdict, Verdicts
from harness.analysis.hardware import collectives, device_memory, links
from harness.analysis.results import Results
from harness.analysis.waterfall import waterfall
from harness.config.strategy_traits import BUILTIN_TRAITS
from harness.record.folder import RunFolder
from harness.record.schema import EPOCHS, PHASES, PREDICTION, TRAINING_STEPS, VERDICT, WATERFALL
from harness.report import figures
from harness.report.figures import FIGURES, Drawing, style
from harness.report.figures.drawing import COLOURS, MARKERS, TYPE_SIZE, ByStrategy, Chart, merge_single_rows
from harness.report.figures.scales import ARROWS
from harness.report.figures.steps import step_phases
from harness.report.tables.ratios import versus_table
from harness.report.tables.scaling import convergence_table, scaling_by_setting, scaling_table
from harness.report.tables.text import NO_BREAK
from tests.records import epochs_of, line, steps_of, with_set_ids

HATCH = "$////$"
NOT_EQUIVALENT = Verdict("not equivalent", "not equivalent to one device")


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


class Drawings(Mapping[str, Drawing]):
    """Every figure by name; each is drawn and rendered when a test asks for it."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._rendered: dict[str, Drawing] = {}

    def __getitem__(self, name: str) -> Drawing:
        if name not in self._rendered:
            with style():
                drawing = self._rendered[name] = FIGURES[name](self._results)
                if drawing.figure:
                    drawing.figure.draw_without_rendering()
        return self._rendered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(FIGURES)

    def __len__(self) -> int:
        return len(FIGURES)


def draw_all(results: Results) -> Drawings:
    return Drawings(results)


@cache
def full_results() -> Results:
    """Results of the full study, for tests that only read them."""
    return results_of(full_study())


@cache
def full_drawings() -> Drawings:
    """Every figure of the full study, for tests that only look at them."""
    return draw_all(full_results())


def full_study(**columns: Any) -> list[dict[str, Any]]:
    return [
        one
        for block in range(3)
        for batch in (8, 16)
        for one in (
            line(f"single{batch}", strategy="single", block=block, base=f"single{batch}", per_device_batch_size=batch),
            line(
                f"ddp2x{batch}",
                strategy="ddp",
                block=block,
                base=f"single{batch}",
                rates=(80.0 + block, 85.0),
                per_device_batch_size=batch,
                **columns,
            ),
            line(
                f"dp2x{batch}",
                strategy="dp",
                block=block,
                base=f"single{batch}",
                rates=(60.0,),
                devices=2,
                per_device_batch_size=batch,
            ),
        )
    ]


def axes_of(figure: Figure | None) -> list[Any]:
    assert figure is not None
    return [axes for axes in figure.axes if axes.axison]


def test_a_full_study_draws_all_but_convergence() -> None:
    drawings = full_drawings()
    assert {name for name, drawing in drawings.items() if drawing.figure} == {
        "throughput",
        "efficiency",
        "ratios",
        "batch_sizes",
        "step_times",
    }
    assert drawings["convergence"].caption.startswith("Left out: no training was recorded")
    assert drawings["training_steps"].caption == "Left out: no step of a training was recorded."


def test_throughput_is_logarithmic_with_an_ideal_line_from_the_base() -> None:
    axes = axes_of(full_drawings()["throughput"].figure)
    assert len(axes) == 2
    assert all(a.get_xscale() == "log" and a.get_yscale() == "log" for a in axes)
    ideal = [one for one in axes[0].get_lines() if one.get_linestyle() == "--"]
    assert [list(one.get_ydata()) for one in ideal] == [pytest.approx([100.0, 200.0])]
    assert axes[0].get_ylabel() == "throughput (samples/s)"


def test_captions_state_the_base_and_emulated_cells() -> None:
    caption = full_drawings()["throughput"].caption
    assert "Base: single on 1 device, 100 samples/s" in caption
    assert "DataParallel on CPU slots is emulated" in caption
    assert "not a claim about speed" in caption


def test_emulated_cells_have_hollow_markers() -> None:
    axes = axes_of(full_drawings()["throughput"].figure)[0]
    faces = {one.get_markerfacecolor() for one in axes.get_lines() if one.get_marker() == "s"}
    assert faces == {"white"}


def test_the_caption_of_fp16_states_the_read_of_each_step() -> None:
    read = "A step in fp16 includes the host's read of whether a gradient overflowed."
    assert read not in draw_all(results_of(full_study()))["throughput"].caption
    scaled = [{**each, "precision": "fp16"} for each in full_study()]
    assert read in draw_all(results_of(scaled))["throughput"].caption


def test_blocks_without_an_interval_are_captioned_as_such() -> None:
    lines = [one for one in full_study() if one["block"] < 2]
    caption = draw_all(results_of(lines))["throughput"].caption
    assert "none below 3 blocks" in caption


def test_colour_means_strategy_in_every_figure() -> None:
    drawings = full_drawings()
    for name in ("throughput", "efficiency", "batch_sizes"):
        used = {
            one.get_color()
            for axes in axes_of(drawings[name].figure)
            for one in axes.get_lines()
            if one.get_marker() == "D"
        }
        assert used == {COLOURS["ddp"]}, name
    count = len(BUILTIN_TRAITS)
    assert [*COLOURS][:count] == [*MARKERS][:count] == list(BUILTIN_TRAITS)


def test_no_two_strategies_have_one_marker() -> None:
    markers = [traits.marker for traits in BUILTIN_TRAITS.values()]
    assert len({*markers}) == len(markers), "harness/config/strategy_traits.py: BUILTIN_TRAITS"


def test_a_strategy_of_the_users_own_has_a_colour_and_a_marker_of_a_reserve() -> None:
    looks = ByStrategy({"ddp": "D"}, ("v", "P"))
    assert [looks[name] for name in ("mine:A", "ddp", "mine:B", "mine:A")] == ["v", "D", "P", "v"]


def test_efficiency_is_left_out_on_one_device_count() -> None:
    drawing = draw_all(results_of([line("single")]))["efficiency"]
    assert drawing.figure is None
    assert drawing.caption == "Left out: nothing was measured on another device count than its base."


def test_batch_sizes_need_two_points_and_mark_failed_ones() -> None:
    one_size = draw_all(results_of([line("single"), line("ddp2", rates=(80.0, 80.0))]))["batch_sizes"]
    assert one_size.figure is None
    assert one_size.caption.startswith("Left out: only one batch size was measured")
    lines = [*full_study(), line("ddp2x32", strategy="ddp", outcome="oom", devices=2, per_device_batch_size=32)]
    failed = draw_all(results_of(lines))["batch_sizes"]
    crosses = [one for axes in axes_of(failed.figure) for one in axes.get_lines() if one.get_marker() == "x"]
    assert [list(one.get_xdata()) for one in crosses] == [[32]]
    assert "Crosses: 1 oom (trials)." in failed.caption


@pytest.mark.parametrize(("code", "crosses"), [("out_of_memory", 1), ("too_few_samples", 1), ("too_few_devices", 0)])
def test_batch_sizes_mark_cells_skipped_for_lack_of_memory_or_samples(code: str, crosses: int) -> None:
    skipped = line("ddp2x32", strategy="ddp", outcome="skipped", devices=2, per_device_batch_size=32, skip_code=code)
    figure = draw_all(results_of([*full_study(), skipped]))["batch_sizes"].figure
    assert len([one for axes in axes_of(figure) for one in axes.get_lines() if one.get_marker() == "x"]) == crosses


def test_learning_curves_hold_one_line_a_seed() -> None:
    lines = [line("ddp2", kind="convergence", rates=(1.0, 1.0), seed=seed, block=seed) for seed in (0, 1)]
    epochs = pd.concat([epochs_of(f"ddp2-s{seed}", [0.5, 0.8, 0.9]) for seed in (0, 1)], ignore_index=True)
    drawing = draw_all(results_of(lines, epochs))["convergence"]
    axes = axes_of(drawing.figure)
    assert [len(a.get_lines()) for a in axes] == [2, 2, 2, 2]
    assert axes[2].get_xlabel() == "training samples" and axes[0].get_xlabel() == ""
    assert {label.get_text()[-2:] for label in axes[2].get_yticklabels()} == {" %"}
    assert "2 seeds each" in drawing.caption


def test_learning_curves_of_each_setting_have_a_row_of_their_own() -> None:
    of_all: dict[str, Any] = {"strategy": "ddp", "kind": "convergence", "rates": (1.0, 1.0)}
    losses = {0.1: [0.5, 0.8], 0.001: [0.1, 0.2, 0.3]}
    lines = [line(f"ddp{lr}", **of_all, options={"optimizer.lr": lr}) for lr in losses]
    epochs = pd.concat(
        [epochs_of(one["trial_id"], losses[lr]) for one, lr in zip(lines, losses, strict=True)], ignore_index=True
    )
    panels = axes_of(draw_all(results_of(lines, epochs))["convergence"].figure)
    assert [axes.get_title("left") for axes in panels[::4]] == ["lr=0.001", "lr=0.1"]
    assert [axes.get_xlabel() for axes in panels] == [""] * 4 + ["training samples", "training time (s)"] * 2
    assert [axes.get_ylabel() for axes in panels[:4]] == ["training loss", "", "validation accuracy", ""]
    accuracy = [[*one.get_ydata()] for axes in panels[2::4] for one in axes.get_lines()]
    assert accuracy == [pytest.approx(losses[0.001]), pytest.approx(losses[0.1])]
    assert panels[2].get_ylim() == panels[6].get_ylim()


def training_steps_of(trial_id: str, losses: list[float]) -> pd.DataFrame:
    return TRAINING_STEPS.frame(
        {"trial_id": trial_id, "attempt": 1, "epoch": 1, "step": step, "loss": loss, "learning_rate": 0.1 / step}
        for step, loss in enumerate(losses, start=1)
    )


def drawn_by_step(losses: Mapping[int, list[float]]) -> Drawing:
    """Return the figure of trainings with these losses, by seed."""
    lines = [line("ddp2", kind="convergence", rates=(1.0, 1.0), seed=seed, block=seed) for seed in losses]
    steps = pd.concat([training_steps_of(f"ddp2-s{seed}", values) for seed, values in losses.items()])
    return draw_all(with_tables(results_of(lines), training_steps=steps.reset_index(drop=True)))["training_steps"]


def test_losses_by_step_hold_one_line_a_seed_beside_their_rates() -> None:
    drawing = drawn_by_step({0: [2.0, 1.0, 0.5], 1: [4.0, 3.0, 2.0]})
    loss, rate = axes_of(drawing.figure)
    drawn = sorted(np.asarray(one.get_ydata()).round(6).tolist() for one in loss.get_lines())
    assert drawn == [[2.0, 1.0, 0.5], [4.0, 3.0, 2.0]]
    assert [list(one.get_xdata()) for one in loss.get_lines()] == [[1, 2, 3]] * 2
    assert list(rate.get_lines()[0].get_ydata()) == pytest.approx([0.1, 0.05, 0.1 / 3])
    assert rate.get_ylabel() == "learning rate" and "evenly spaced" not in drawing.caption


def test_losses_by_step_of_each_setting_have_a_row_of_their_own() -> None:
    rates = (0.1, 0.001, 0.05)
    of_all: dict[str, Any] = {"strategy": "ddp", "kind": "convergence", "rates": (1.0, 1.0)}
    lines = [line(f"ddp{lr}", **of_all, options={"optimizer.lr": lr}) for lr in rates]
    steps = pd.concat([training_steps_of(one["trial_id"], [lr, 2 * lr]) for one, lr in zip(lines, rates, strict=True)])
    results = with_tables(results_of(lines), training_steps=steps.reset_index(drop=True))
    panels = axes_of(draw_all(results)["training_steps"].figure)
    assert [axes.get_title() for axes in panels[::2]] == ["lr=0.001", "lr=0.05", "lr=0.1"]
    drawn = [[*one.get_ydata()] for axes in panels[::2] for one in axes.get_lines()]
    assert drawn == [pytest.approx([lr, 2 * lr]) for lr in sorted(rates)]
    assert len({axes.get_ylim() for axes in panels[::2]}) == 1
    assert [axes.get_xlabel() for axes in panels] == ["", "", "", "", "step", "step"]


def test_losses_by_step_thin_a_long_training_and_keep_its_last_step() -> None:
    drawing = drawn_by_step({0: [5000.0 - step for step in range(1800)]})
    (drawn,) = axes_of(drawing.figure)[0].get_lines()
    assert len(drawn.get_xdata()) == 451 and drawn.get_xdata()[[0, 1, -1]].tolist() == [1, 5, 1800]
    assert "At most 500 evenly spaced steps of each training are drawn." in drawing.caption


def test_a_line_of_losses_ends_where_they_are_not_finite() -> None:
    drawing = drawn_by_step({0: [2.0, 3000.0, float("inf"), float("nan")]})
    (drawn,) = axes_of(drawing.figure)[0].get_lines()
    assert [*drawn.get_xdata()] == [1, 2] and "A line ends where the loss is not finite." in drawing.caption


def lines_of(drawing: Drawing, strategy: str) -> list[Any]:
    """Return the lines of a strategy's colour that join several places."""
    lines = [one for axes in axes_of(drawing.figure) for one in axes.get_lines()]
    return [one for one in lines if one.get_color() == COLOURS[strategy] and len({*one.get_xdata()}) > 1]


def test_a_training_despite_an_error_of_the_doctor_is_drawn_apart() -> None:
    of = {
        name: line(f"{name}2", strategy=name, kind="convergence", rates=(1.0, 1.0), faulty=name == "ddp")
        for name in ("ddp", "fsdp")
    }
    epochs = pd.concat([epochs_of(one["trial_id"], [0.5, 0.8]) for one in of.values()], ignore_index=True)
    drawing = draw_all(results_of([*of.values()], epochs))["convergence"]
    assert {one.get_linestyle() for one in lines_of(drawing, "ddp")} == {":"}
    assert {one.get_linestyle() for one in lines_of(drawing, "fsdp")} == {"-"}
    assert "faulty cells have an error of the doctor" in drawing.caption


@pytest.mark.parametrize("name", ["throughput", "efficiency", "batch_sizes"])
def test_no_line_joins_faulty_cells_with_others(name: str) -> None:
    study = full_study()
    study += [
        line("ddp4x8", strategy="ddp", block=block, base="single8", rates=(70.0,) * 4, per_device_batch_size=8)
        for block in range(3)
    ]
    healthy, mixed = (
        draw_all(results_of([{**one, "faulty": one["cell_id"] in faulty} for one in study]))[name]
        for faulty in ((), ("ddp2x8",))
    )
    assert lines_of(healthy, "ddp") and not lines_of(mixed, "ddp")


def test_the_efficiency_under_a_waterfall_has_its_interval() -> None:
    named = dict(full_study()[0])
    axes = {
        name: named[name] for name in ("strategy", "scaling", "per_device_batch_size", "global_batch_size", "options")
    }
    common = {**axes, "cell_id": "a", "devices": 2, "emulated": False, "oversubscribed": False, "blocks": 3}
    parts = [("ideal", 0.6, 0.55, 0.65), ("rest", 0.4, None, None)]
    rows = [{**common, "part": part, "share": s, "low": low, "high": high} for part, s, low, high in parts]
    results = with_tables(full_results(), waterfall=WATERFALL.frame(rows))
    drawing = draw_all(results)["waterfall"]
    (panel,) = axes_of(drawing.figure)
    assert [0.55, 0.65] in [[float(x) for x in one.get_xdata()] for one in panel.get_lines()]
    assert "n = 3 blocks" in drawing.caption and "find_unused_parameters" not in drawing.caption
    rows = [{**row, "options": {"ddp.find_unused_parameters": True}} for row in rows]
    searching = draw_all(with_tables(results, waterfall=WATERFALL.frame(rows)))["waterfall"]
    assert "With find_unused_parameters its search of the graph is in exposed communication." in searching.caption


def test_a_cell_whose_parts_are_withheld_is_named_and_not_drawn() -> None:
    named = dict(full_study()[0])
    axes = {
        name: named[name] for name in ("strategy", "scaling", "per_device_batch_size", "global_batch_size", "options")
    }
    common = {**axes, "devices": 2, "emulated": False, "oversubscribed": False, "blocks": 3, "low": None, "high": None}
    shown = [
        {**common, "cell_id": "a", "label": "ddp x2", "part": part, "share": share}
        for part, share in (("ideal", 0.6), ("wrapper", 0.3), ("rest", 0.1))
    ]
    apart = [
        {**common, "cell_id": "b", "label": "ddp x4", "part": "ideal", "share": 0.3},
        {**common, "cell_id": "b", "label": "ddp x4", "part": "rest", "share": 0.7, "reason": "not shown"},
    ]
    drawn = draw_all(with_tables(full_results(), waterfall=WATERFALL.frame([*shown, *apart])))["waterfall"]
    assert len(axes_of(drawn.figure)) == 1
    assert drawn.caption.endswith("Withheld, since their parts leave over 20 % of the step unexplained: ddp x4.")
    alone = draw_all(with_tables(full_results(), waterfall=WATERFALL.frame(apart)))["waterfall"]
    assert alone.figure is None and alone.caption.startswith("Left out: Withheld, since their parts leave")
    assert (
        "Withheld" not in draw_all(with_tables(full_results(), waterfall=WATERFALL.frame(shown)))["waterfall"].caption
    )


def test_points_that_were_not_steady_are_named_in_the_captions_of_speed() -> None:
    steady = full_results()
    doubts: list[tuple[CountedDoubt, ...]] = [()] * len(steady.scaling)
    here = steady.scaling.index[(steady.scaling["strategy"] == "ddp") & (steady.scaling["devices"] == 2)][0]
    doubts[list(steady.scaling.index).index(here)] = (
        CountedDoubt("wide spread", 1, 3),
        CountedDoubt("no steady state", 2, 3),
    )
    drawings = draw_all(with_tables(steady, scaling=steady.scaling.assign(unusual=doubts)))
    for name in ("throughput", "efficiency"):
        assert " Not steady when the windows began: ddp on 2." in drawings[name].caption
        assert "Not steady" not in full_drawings()[name].caption


def test_intervals_of_one_devices_throughput_are_the_cells_over_its_devices() -> None:
    lines = [
        line(f"ddp2x{batch}", strategy="ddp", block=block, rates=(rate, rate), per_device_batch_size=batch)
        for batch in (16, 32)
        for block, rate in enumerate((90.0, 100.0, 110.0))
    ]
    results = results_of(lines)
    drawing = draw_all(results)["batch_sizes"]
    speed = axes_of(drawing.figure)[0]
    wanted = [(low / 2, high / 2) for low, high in zip(results.cells["low"], results.cells["high"], strict=True)]
    upright = [one for one in speed.get_lines() if len({*one.get_xdata()}) == 1 and len(one.get_xdata()) == 2]
    seen = [tuple(map(float, one.get_ydata())) for one in upright]
    assert seen == [pytest.approx(ends) for ends in wanted] and speed.get_ylim()[1] > max(high for _, high in wanted)
    assert "n = 3 blocks; bars are 95 % intervals of its throughput;" in drawing.caption


def test_non_equivalent_trainings_are_named_in_the_caption() -> None:
    pairs = [(strategy, seed) for strategy in ("ddp", "fsdp") for seed in (0, 1)]
    lines = [
        line(f"{strategy}2", kind="convergence", rates=(1.0, 1.0), seed=seed, block=seed, check_id=f"check-{strategy}")
        for strategy, seed in pairs
    ]
    epochs = pd.concat([epochs_of(one["trial_id"], [0.5, 0.8]) for one in lines], ignore_index=True)
    differs = {"check-fsdp": NOT_EQUIVALENT, "check-ddp": Verdict("equivalent")}
    results = results_of(lines, epochs, checked=differs)
    drawing, healthy = (draw_all(each)["convergence"] for each in (results, results_of(lines, epochs)))
    assert "Not equivalent to one device, and hatched: fsdp on 2." in drawing.caption
    hatched = [[str(one.get_marker()) for one in axes.get_lines()].count(HATCH) for axes in axes_of(drawing.figure)]
    assert hatched == [2, 2, 2, 2]
    assert "Not equivalent" not in healthy.caption
    assert not any(str(one.get_marker()) == HATCH for axes in axes_of(healthy.figure) for one in axes.get_lines())
    assert [row.cells[0] for row in convergence_table(results.convergence).rows] == [
        "ddp x2",
        "fsdp x2 (not equivalent)",
    ]


def test_without_measurements_the_caption_has_the_reason() -> None:
    for drawing in draw_all(results_of([line("single", outcome="error")])).values():
        assert drawing.figure is None
        assert drawing.caption.startswith("Left out: ")


@pytest.mark.parametrize("columns", [{"oversubscribed": True}, {"nodes": 2}, {"scaling": "strong"}, {"model": None}])
def test_unusual_studies_are_drawn(columns: dict[str, Any]) -> None:
    assert draw_all(results_of(full_study(**columns)))["throughput"].figure is not None


def test_many_settings_are_truncated_with_a_note() -> None:
    lines = [
        one
        for batch in range(1, 16)
        for one in (
            line(f"single{batch}", strategy="single", base=f"single{batch}", per_device_batch_size=batch),
            line(f"ddp2x{batch}", strategy="ddp", base=f"single{batch}", rates=(9.0, 9.0), per_device_batch_size=batch),
        )
    ]
    drawing = draw_all(results_of(lines))["throughput"]
    assert len(axes_of(drawing.figure)) == 12
    assert "The first 12 settings are drawn" in drawing.caption


def twin_of(batch: int, block: int, rate: float) -> dict[str, Any]:
    base = line(f"single{batch}", strategy="single", block=block, rates=(rate,), per_device_batch_size=batch)
    return base | {"trial_id": f"{base['trial_id']}t", "kind": "diagnostic", "purpose": "twin"}


def with_twins() -> list[dict[str, Any]]:
    twins = [twin_of(batch, block, rate) for batch in (8, 16) for block, rate in enumerate((90.0, 100.0, 110.0))]
    return [*full_study(), *twins]


def test_the_noise_floor_is_a_band_in_both_figures_of_ratios() -> None:
    results = results_of(with_twins())
    drawings = draw_all(results)
    low, high = results.noise.loc[0, ["low", "high"]].astype(float)
    assert low < 1 < high
    for name, across in (("efficiency", lambda box: (box.y0, box.y1)), ("ratios", lambda box: (box.x0, box.x1))):
        for axes in axes_of(drawings[name].figure):
            assert len(axes.patches) == (2 if name == "ratios" else 1)  # that of the row's own base
            for band in axes.patches:
                ends = across(band.get_path().get_extents(band.get_patch_transform()))
                assert ends == pytest.approx((low, high)), name
        assert "Grey band: noise floor (A/A test" in drawings[name].caption
    without = full_drawings()["ratios"]
    assert not any(axes.patches for axes in axes_of(without.figure)) and "band" not in without.caption


def test_ratios_are_drawn_with_their_intervals_and_n() -> None:
    own = ("cell_id", "trial_id")
    controls = [
        with_set_ids(one | {name: f"{one[name]}t" for name in own} | {"launcher": "torchrun"}) for one in full_study()
    ]
    lines = full_study() + controls
    results = results_of(lines)
    drawing = draw_all(results)["ratios"]
    axes = axes_of(drawing.figure)[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [
        "ddp x2 / dp x2*",
        "Ray / torchrun: single x1",
        "Ray / torchrun: dp x2*",
        "Ray / torchrun: ddp x2",
    ]
    points = [one.get_xdata()[0] for one in axes.get_lines() if one.get_marker() in MARKERS.values()]
    assert points[1:] == [1.0, 1.0, 1.0] and points[0] > 1.2
    ends = [
        tuple(one.get_xdata()) for one in axes.get_lines() if one.get_marker() == "None" and len(one.get_xdata()) == 2
    ]
    first = results.versus.iloc[0]
    assert (first["low"], first["high"]) in ends
    assert "n = 3 blocks" in drawing.caption and "DataParallel on CPU slots is emulated" in drawing.caption


def test_non_equivalent_cells_are_hatched_and_keep_their_ratio() -> None:
    lines = [one | {"check_id": f"check-{one['strategy']}"} for one in full_study()]
    drawings = draw_all(results_of(lines, checked={"check-ddp": NOT_EQUIVALENT}))
    hatched = {
        name: [
            line for axes in axes_of(drawings[name].figure) for line in axes.get_lines() if "////" in line.get_marker()
        ]
        for name in ("throughput", "efficiency", "batch_sizes", "ratios")
    }
    assert [len(lines) for lines in hatched.values()] == [2, 2, 2, 2]
    boxes = [box.get_hatch() for axes in axes_of(drawings["step_times"].figure) for box in axes.patches]
    assert sorted(boxes, key=str) == ["////", "////", None, None, None, None]
    for name in ("throughput", "efficiency", "batch_sizes", "step_times", "ratios"):
        assert "Hatched: not equivalent to one device." in drawings[name].caption, name
    whole = draw_all(results_of(lines))
    assert not any("Hatched: " in whole[name].caption for name in ("throughput", "step_times"))


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
    drawings = draw_all(results)
    for name in ("throughput", "efficiency", "ratios"):
        assert "Equivalence to one device unknown: ddp on 2." in drawings[name].caption, name


def test_phases_of_non_equivalent_cells_are_marked() -> None:
    lines = [one | {"check_id": f"check-{one['strategy']}"} for one in full_study()]
    results = results_of(lines, checked={"check-ddp": NOT_EQUIVALENT})
    axes = results.scaling[[name for name in results.scaling if name in PHASES.names]]
    drawing = step_phases(with_tables(results, phases=PHASES.typed(axes.assign(step_s=0.1, forward_s=0.1))))
    labels = [label.get_text() for one in axes_of(drawing.figure) for label in one.get_yticklabels()]
    assert labels == ["single x1", "dp x2*", "ddp x2 (not equivalent)"]  # of both panels


def test_every_text_of_every_figure_has_one_size() -> None:
    for name, drawing in full_drawings().items():
        if drawing.figure:
            texts = [text for text in drawing.figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
            assert {text.get_fontsize() for text in texts} == {TYPE_SIZE}, name


def test_panels_that_are_compared_have_the_same_axes() -> None:
    for name in ("throughput", "efficiency", "step_times"):
        axes = axes_of(full_drawings()[name].figure)
        assert len(axes) == 2
        assert len({(*one.get_xlim(), *one.get_ylim()) for one in axes}) == 1, name


def test_efficiency_is_in_per_cent() -> None:
    axes = axes_of(full_drawings()["efficiency"].figure)[0]
    assert {label.get_text() for label in axes.get_yticklabels()} >= {"0 %", "20 %", "100 %"}


def test_an_interval_that_goes_on_beyond_the_axis_has_an_arrow() -> None:
    def arrows(rates: tuple[float, ...]) -> list[str]:
        lines = [
            one
            for block, rate in enumerate(rates)
            for one in (line("single", block=block), line("ddp2", block=block, rates=(rate, rate)))
        ]
        (axes,) = axes_of(draw_all(results_of(lines))["throughput"].figure)
        return [str(one.get_marker()) for one in axes.get_lines() if one.get_marker() in ARROWS["y"]]

    assert arrows((80.0, 81.0, 82.0)) == []
    assert arrows((10.0, 80.0, 640.0)) == ["v", "^"]


def test_a_panel_of_one_point_is_a_row_of_the_table() -> None:
    lines = [
        one
        for batch in (8, 16)
        for one in (
            line(f"single{batch}", strategy="single", base=f"single{batch}", per_device_batch_size=batch),
            line(f"ddp2x{batch}", strategy="ddp", base=f"single{batch}", rates=(9.0, 9.0), per_device_batch_size=batch),
        )
    ]
    lonely = draw_all(results_of(lines))["efficiency"]
    assert lonely.figure is None and lonely.caption.startswith("Left out: each setting has a single point")
    third = line("fsdp2x8", strategy="fsdp", base="single8", rates=(8.0, 8.0), per_device_batch_size=8)
    drawing = draw_all(results_of([*lines, third]))["efficiency"]
    assert len(axes_of(drawing.figure)) == 1
    assert "In the table alone, as a single point: batch 16/device." in drawing.caption


def test_rows_that_are_alone_in_their_setting_share_a_panel() -> None:
    one, other, several = (pd.DataFrame({"label": ["a / b"] * count}) for count in (1, 1, 2))
    facets = merge_single_rows([("x", one), ("y", several), ("z", other)])
    assert [name for name, _ in facets] == ["y", "other settings"]
    assert facets[1][1]["label"].tolist() == ["a / b · x", "a / b · z"]
    assert [name for name, _ in merge_single_rows([("x", one), ("y", several)])] == ["y", "x"]


def waterfall_rows(count: int, *, strategy: str = "ddp", part: str = "exposed communication") -> list[dict[str, Any]]:
    """The rows of cells c0, c1 ..., each with a larger loss than the one before."""
    named = dict(full_study()[0])
    axes = {name: named[name] for name in ("scaling", "per_device_batch_size", "global_batch_size", "options")}
    common = {
        **axes,
        "strategy": strategy,
        "devices": 2,
        "emulated": strategy == "dp",
        "oversubscribed": False,
        "blocks": 3,
    }
    return [
        {**common, "cell_id": f"{strategy}{number}", "label": f"{strategy}{number}", "part": name, "share": share}
        for number in range(count)
        for loss in (0.1 + 0.02 * number,)
        for name, share in (("ideal", 1 - loss), (part, loss), ("rest", 0.0))
    ]


def titles_of(figure: Figure | None) -> list[str]:
    return [axes.get_title() for axes in axes_of(figure)]


def test_waterfalls_stand_in_the_order_of_their_importance_and_six_are_in_the_report() -> None:
    rows = [*waterfall_rows(2, strategy="dp", part="replicate"), *waterfall_rows(6)]
    named = VERDICT.frame([{"topic": "loss", "code": "largest", "cell_id": "ddp1"}])
    results = with_tables(full_results(), waterfall=WATERFALL.frame(rows), verdict=named)
    drawing = FIGURES["waterfall"](results)
    assert titles_of(drawing.figure) == ["ddp1", "ddp5", "ddp4", "ddp3", "ddp2", "ddp0"]
    assert [titles_of(figure) for figure in drawing.more] == [["dp1*", "dp0*"]]
    assert "The first 6 of 8 cells" in drawing.caption


def test_the_waterfalls_of_all_strategies_have_the_same_rows() -> None:
    rows = [*waterfall_rows(1, strategy="dp", part="replicate"), *waterfall_rows(1)]
    drawing = FIGURES["waterfall"](with_tables(full_results(), waterfall=WATERFALL.frame(rows)))
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in axes_of(drawing.figure)]
    assert labels == [["communication", "rest", "efficiency"], []]  # those of the panel to the left
    assert "(dp: replicate; ddp: exposed communication)" in drawing.caption


def test_many_cells_have_a_limited_number_of_waterfalls() -> None:
    results = with_tables(full_results(), waterfall=WATERFALL.frame(waterfall_rows(40)))
    drawing = FIGURES["waterfall"](results)
    assert len(drawing.more) == 4 and all(len(axes_of(figure)) == 6 for figure in drawing.more)


def test_memory_is_drawn_where_it_is_the_devices() -> None:
    lines = {device: [{**one, "device": device} for one in full_study()] for device in ("cpu", "cuda")}
    on_cpu, on_gpu = (draw_all(results_of(lines[device]))["batch_sizes"] for device in ("cpu", "cuda"))
    assert [len(axes_of(drawing.figure)) for drawing in (on_cpu, on_gpu)] == [1, 2]
    assert "peak memory" in on_gpu.title and "peak memory" not in on_cpu.title


def test_the_memory_of_each_gpu_is_drawn_in_order_of_the_gpus() -> None:
    peaks = ("3221225472, 1073741824", "3221225472, 1073741824")
    rank = {"rank": 0, "devices": "cuda:0, cuda:1", "allocated_by_device": peaks[0], "reserved_by_device": peaks[1]}
    lines = [line("dp2", rates=(100.0,), devices=2, device="cuda", emulated=False) | {"ranks": [rank]}]
    results = results_of(lines)
    table = device_memory(results.trials, trial_tables.ranks(lines))
    with style():
        drawn = FIGURES["device_memory"](with_tables(results, device_memory=table))
    assert isinstance(drawn.figure, Chart)
    assert [mark.text for mark in drawn.figure.marks] == [
        "dp x2, GPU 0 (cuda:0): 3 GiB",
        "dp x2, GPU 1 (cuda:1): 1 GiB",
    ]
    of_one = with_tables(results, device_memory=table[table["gpu"] == 0].assign(devices=1))
    assert FIGURES["device_memory"](of_one).caption.startswith("Left out: ")


def test_the_values_that_show_on_hover_are_those_of_the_table() -> None:
    with style():
        figure = FIGURES["efficiency"](full_results()).figure
        assert isinstance(figure, Chart)
        figure.draw_without_rendering()
    areas = [*figure.areas()]
    assert len(areas) == 4
    table = scaling_table(full_results().scaling)
    column = [heading.title for heading in table.columns].index("efficiency")
    shown = [row.cells[column] for row in table.rows if row.kind != "base"]
    assert sorted(area.text.partition(": ")[2] for area in areas) == sorted(shown)
    assert all(0 <= area.left < area.left + area.width <= 1 for area in areas)
    assert all(0 <= area.top < area.top + area.height <= 1 for area in areas)
