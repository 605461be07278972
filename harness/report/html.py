"""Recorded files -> tables, figures and one self-contained report.html. Needs neither torch nor ray."""

from __future__ import annotations

import base64
import io
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jinja2
from matplotlib.figure import Figure
from PIL import Image

from harness.analysis.results import TABLES, Results, load
from harness.errors import HarnessError, InternalError, WriteError, cause_of
from harness.record.folder import RunFolder
from harness.report import environment as environment_page
from harness.report import summary
from harness.report.figures import FIGURES, Drawing, style
from harness.report.sections import DETAILS, SCALING, make_pages
from harness.system.files import replace_all, replace_text, writing

DPI, COLOURS = 144, 256


def write_report(run_folder: Path) -> Results:
    """Rebuild tables/, figures/ and report.html of a run folder; raise RunFolderError if it is none."""
    return build_report(load(run_folder))


def build_report(results: Results) -> Results:
    """Write the report of results that are open already."""
    folder = results.folder
    with _internal_error(folder):  # everything is made before anything is written
        folder.check()
        tables = {name: getattr(results, name) for name in TABLES}
        recorded = {"steps": results.steps, "epochs": results.epochs, "checks": results.checks}
        with style():
            drawings = [draw(results) for draw in FIGURES]
            pictures = [_files(drawing.name, drawing.figure) for drawing in drawings if drawing.figure]
        files = {name: content for picture in pictures for name, content in picture.items()}
        html = _html(results, drawings, files)
    folder.compact(recorded)
    for name, table in tables.items():
        folder.write_table(name, table)
    with writing(folder.figures):
        folder.figures.mkdir(exist_ok=True)
    replace_all((folder.figures / name, content) for name, content in files.items())
    replace_text(folder.report, html)
    return results


@contextmanager
def _internal_error(folder: RunFolder) -> Iterator[None]:
    """Raise InternalError, with a log, for any exception but the harness's own errors, such as a damaged file's."""
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        try:
            log = f"traceback: {folder.write_log('report', ''.join(traceback.format_exception(error)))}"
        except WriteError as unwritten:
            log = f"no log: {cause_of(unwritten)}"
        raise InternalError(
            f"{folder.path}: the report failed by an error of the harness: {found}, in {Path(place.filename).name} "
            f"line {place.lineno} ({log}). Every recorded result is kept. Please report the error with its traceback; "
            f"then, with a mended version: python -m harness.report {folder.path}"
        ) from error


def _files(name: str, figure: Figure) -> dict[str, bytes]:
    """Return the contents of the figure's files, NAME.png and NAME.svg."""
    drawn, png, svg = io.BytesIO(), io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(png, format="PNG")  # a third of the bytes; pages are sent
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return {f"{name}.png": png.getvalue(), f"{name}.svg": svg.getvalue()}


def _html(results: Results, drawings: Sequence[Drawing], files: Mapping[str, bytes]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("template.html").render(
        name=results.experiment.name,
        **environment_page.facts(results.environment),
        cards=summary.cards(results),
        findings=summary.findings(results),
        asked=summary.asked(results),
        experiment_text=results.folder.source_text(),
        above=make_pages(SCALING, results),
        figures=[_figure(drawing, files) for drawing in drawings],
        below=make_pages(DETAILS, results),
    )


def _figure(drawing: Drawing, files: Mapping[str, bytes]) -> dict[str, str | None]:
    image = files.get(f"{drawing.name}.png")
    encoded = base64.b64encode(image).decode() if image else None
    return {"name": drawing.name, "title": drawing.title, "caption": drawing.caption, "image": encoded}
