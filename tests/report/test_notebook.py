"""Results in a notebook: figures as methods, shown with their captions, and the user's own plots left alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import harness
from harness.report.figures import FIGURES
from harness.report.notebook import load
from tests.conftest import EXAMPLE, ROOT


def test_every_figure_of_the_report_is_a_method() -> None:
    results = harness.load(EXAMPLE)
    assert {name for name in dir(results.plot) if not name.startswith("_")} == set(FIGURES)
    assert all(f".{name}()" in repr(results.plot) for name in FIGURES)
    assert results.plot is results.plot
    with pytest.raises(AttributeError, match=r"no figure .Throughputs.; did you mean .throughput."):
        results.plot.Throughputs()


def test_a_figure_is_one_of_matplotlib_with_its_caption(tmp_path: Path) -> None:
    figure = harness.load(EXAMPLE).plot.ratios()
    assert isinstance(figure, Figure) and "95 %" in figure.caption and repr(figure) == figure.caption
    assert figure._repr_png_()[1:4] == b"PNG"
    further = harness.load(EXAMPLE).plot.waterfall().more
    assert [len(each.axes) for each in further] == [2]  # of four cells
    figure.savefig(tmp_path / "e.svg")
    assert b"<svg" in (tmp_path / "e.svg").read_bytes()


def test_a_figure_that_is_left_out_says_why(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "run")
    text = (tmp_path / "run" / "trials.jsonl").read_text()
    (tmp_path / "run" / "trials.jsonl").write_text(re.sub(r'"links": ?\[[^]]*\]', '"links": null', text))
    with pytest.raises(ValueError, match="Left out: "):
        load(tmp_path / "run").plot.links()


SESSION = """
import sys
import harness
results = harness.load({example!r})
repr(results), results.summary, results.best, results.options
assert not {{"matplotlib", "seaborn", "torch", "ray"}} & set(sys.modules)
import matplotlib
matplotlib.use("svg")
matplotlib.rcParams["lines.linewidth"] = 7.5
results.plot.throughput()._repr_png_()
assert matplotlib.get_backend() == "svg" and matplotlib.rcParams["lines.linewidth"] == 7.5
assert not {{"torch", "ray"}} & set(sys.modules)
"""


@pytest.mark.slow
def test_tables_import_nothing_that_draws_and_figures_leave_the_session_s_settings() -> None:
    script = SESSION.format(example=str(EXAMPLE))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
