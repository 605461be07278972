"""Results in a notebook: figures as methods, shown with their captions, and the user's own plots left alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from harness.report.figures import FIGURES, Drawing
from harness.report.notebook import load
from tests.conftest import EXAMPLE, ROOT


def test_every_figure_of_the_report_is_a_method() -> None:
    results = harness.load(EXAMPLE)
    assert {name for name in dir(results.plot) if not name.startswith("_")} == set(FIGURES)
    assert all(f".{name}()" in repr(results.plot) for name in FIGURES)
    assert results.plot is results.plot
    with pytest.raises(AttributeError, match=r"no figure .Throughputs.; did you mean .throughput."):
        results.plot.Throughputs()


def test_a_figure_is_shown_with_its_caption_and_saved(tmp_path: Path) -> None:
    plot = harness.load(EXAMPLE).plot.ratios()
    assert plot.figure is not None and plot.caption in repr(plot)
    shown = plot._repr_html_()
    assert shown.startswith('<img src="data:image/png;base64,iVBOR') and "<p>" in shown
    plot.save(tmp_path / "e.svg")
    plot.save(str(tmp_path / "e.png"))
    assert b"<svg" in (tmp_path / "e.svg").read_bytes() and (tmp_path / "e.png").read_bytes()[1:4] == b"PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.png", "e.svg"]
    assert "<script>" not in Drawing("<script>", "a & b", None)._repr_html_()


def test_a_figure_that_is_left_out_says_why(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "run")
    (tmp_path / "out").mkdir()
    text = (tmp_path / "run" / "trials.jsonl").read_text()
    (tmp_path / "run" / "trials.jsonl").write_text(re.sub(r'"links": ?\[[^]]*\]', '"links": null', text))
    plot = load(tmp_path / "run").plot.links()
    assert plot.figure is None and plot._repr_html_().startswith("<p>") and "Left out: " in repr(plot)
    with pytest.raises(ValueError, match="Left out: "):
        plot.save(tmp_path / "out" / "x.png")
    assert not list((tmp_path / "out").iterdir())


SESSION = """
import sys
import harness
results = harness.load({example!r})
repr(results), results.efficiency, results.options
assert not {{"matplotlib", "seaborn", "torch", "ray"}} & set(sys.modules)
import matplotlib
matplotlib.use("svg")
matplotlib.rcParams["lines.linewidth"] = 7.5
results.plot.throughput()._repr_html_()
assert matplotlib.get_backend() == "svg" and matplotlib.rcParams["lines.linewidth"] == 7.5
assert not {{"torch", "ray"}} & set(sys.modules)
"""


@pytest.mark.slow
def test_tables_import_nothing_that_draws_and_figures_leave_the_session_s_settings() -> None:
    script = SESSION.format(example=str(EXAMPLE))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
