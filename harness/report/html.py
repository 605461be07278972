"""Recorded files -> tables, figures and one self-contained report.html. Needs neither torch nor ray."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jinja2
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from harness.analysis.results import TABLES, Results, load
from harness.errors import RunFolderError
from harness.record.folder import RunFolder
from harness.report import environment as environment_page
from harness.report import summary
from harness.report.figures import FIGURES, Drawing, style
from harness.report.sections import DETAILS, SCALING, make_pages
from harness.system.files import replace_all, replace_text, writing
from harness.system.process import no_garbage_collection

DPI = 144
PALETTE = 128


def write_report(run_folder: Path) -> Results:
    """Rebuilds tables/, figures/ and report.html of a run folder; raises RunFolderError where it is none."""
    return build_report(load(run_folder))


def build_report(results: Results) -> Results:
    """The same of results that are open already."""
    folder = results.folder
    with no_garbage_collection(), _one_error(folder):  # everything is made before anything is written
        tables = {name: getattr(results, name) for name in TABLES}
        recorded = {"steps": results.steps, "epochs": results.epochs, "checks": results.checks}
        with style():
            drawings = [draw(results) for draw in FIGURES]
        pictures = {drawing.name: _picture(drawing.figure) for drawing in drawings if drawing.figure}
        html = _html(results, drawings, {name: png for name, (png, _) in pictures.items()})
    with ThreadPoolExecutor(1) as pool:  # one beside the other: Arrow leaves Python alone for both
        compacted = pool.submit(folder.compact, recorded)
        for name, table in tables.items():
            folder.write_table(name, table)
        compacted.result()
    with writing(folder.figures):
        folder.figures.mkdir(exist_ok=True)
    both = [
        (name, kind, data) for name, two in pictures.items() for kind, data in zip(("png", "svg"), two, strict=True)
    ]
    replace_all((folder.figures / f"{name}.{kind}", data) for name, kind, data in both)
    replace_text(folder.report, html)
    return results


@contextmanager
def _one_error(folder: RunFolder) -> Iterator[None]:
    """Recorded files that are well formed and yet cannot be understood; raises RunFolderError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RunFolderError(f"{folder.path}: the recorded files are damaged or incomplete ({said})") from error


def _picture(figure: Figure) -> tuple[bytes, bytes]:
    """The figure as PNG and as SVG."""
    svg = io.BytesIO()
    layout = figure.get_layout_engine()
    assert layout
    figure.dpi = DPI
    with style():
        layout.execute(figure)
        figure.set_layout_engine(None)  # laid out once: while it has one, savefig does it again and draws twice for it
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.set_dpi(DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # type: ignore[no-untyped-call]
        drawn = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    return _smaller(drawn), svg.getvalue()


def _smaller(drawn: Image.Image) -> bytes:
    """A PNG of a palette: a quarter of the size, and no eye sees the difference in flat colours."""
    out = io.BytesIO()
    image = drawn.convert("RGB")
    # this method takes an eighth of the usual one's time
    image = image.quantize(PALETTE, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    image.save(out, format="png", compress_level=6)
    return out.getvalue()


def _html(results: Results, drawings: Sequence[Drawing], images: Mapping[str, bytes]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("template.html").render(
        name=results.experiment.name,
        **environment_page.facts(environment_page.run_environment(results.environment)),
        cards=summary.cards(results),
        findings=summary.findings(results),
        asked=summary.asked(results),
        experiment_text=results.folder.source_text(),
        above=make_pages(SCALING, results),
        figures=[_figure(drawing, images) for drawing in drawings],
        below=make_pages(DETAILS, results),
    )


def _figure(drawing: Drawing, images: Mapping[str, bytes]) -> dict[str, str | None]:
    image = base64.b64encode(images[drawing.name]).decode() if drawing.name in images else None
    return {"name": drawing.name, "title": drawing.title, "caption": drawing.caption, "image": image}
