"""Recorded files -> tables, figures and one self-contained report.html. Needs neither torch nor ray."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from harness.analysis.results import TABLES, Results, load
from harness.errors import HarnessError, InternalError, WriteError, cause_of
from harness.record.folder import RunFolder
from harness.record.schema import RAW, empty_table
from harness.report import summary
from harness.report.figures import FIGURES, style
from harness.report.figures.drawing import FILE_KINDS, Drawing, figure_files
from harness.report.page import Failure, Parts, failed, render
from harness.report.row import rows_of
from harness.report.summary import NO_FACTS, facts
from harness.report.table_sections import APPENDIX, DETAILS, RANKED, SCALING, make_pages
from harness.report.verdict import NEXT_FILE, NO_VERDICT, Verdict, make_verdict
from harness.system.files import remove_all, replace_all, replace_text, writing

CSS_DPI = 96
"""Pixels of an inch on a page: every figure is shown at one scale, so that its type has one size."""

LEADING = ("throughput", "waterfall")
"""The figures of the first screen: how the training scales, and why not better."""
WITHOUT_THROUGHPUT = ("convergence",)
"""The figures of the first screen of a run that has none of LEADING."""

APPENDIX_FIGURES = ("phases", "training_steps", "device_memory", "links")


class IncompleteReport(InternalError):
    """Parts of a report failed by errors of the harness; all others are written.

    ``results``: the tables, without rows for those that failed.
    """

    def __init__(self, message: str, results: Results) -> None:
        super().__init__(message)
        self.results = results


def write_report(run_folder: Path) -> Results:
    """Rebuild tables/, figures/ and report.html of a run folder.

    Raises RunFolderError if it is none, or a file of it is damaged; IncompleteReport if parts failed, once all others
    are written.
    """
    return build_report(load(run_folder))


def build_report(results: Results) -> Results:
    """Write the report of results that are open already."""
    folder, parts = results.folder, Parts()
    remedy = (
        "Every recorded result is kept. Please report the error with its traceback; then, with a mended version: "
        f"python -m harness.report {folder.path}"
    )
    try:  # everything is made before anything is written
        folder.check()
        recorded = {table.name: getattr(results, table.name) for table in RAW}
        tables = {
            name: parts.make(f"the table {name}", partial(getattr, results, name), lambda _: None) for name in TABLES
        }
        with style():
            pictures = [
                parts.make(f"the figure {name}", partial(_picture, name, draw, results), partial(_failed_picture, name))
                for name, draw in FIGURES.items()
            ]
        verdict = parts.make("the verdict", lambda: make_verdict(results), lambda _: NO_VERDICT)
        html = _html(results, verdict, pictures, parts)
    except HarnessError:  # such as a damaged file's
        raise
    except Exception as error:
        failure = Failure("the report", error)
        try:
            where = f"traceback: {folder.write_log(Parts.log, failure.trace)}"
        except WriteError as unwritten:
            where = f"no log: {cause_of(unwritten)}"
        said = failed([failure.part], failure.cause)
        raise InternalError(f"{folder.path}: {said} ({where}). {remedy}") from error
    folder.compact(recorded, results.lines)
    for name, table in tables.items():
        if table is None or table.empty:
            remove_all([folder.tables / f"{name}.csv"])  # of an earlier report
        else:
            folder.write_table(name, table)
    _write_figures(folder, pictures)
    replace_text(folder.path / NEXT_FILE, verdict.next_file)
    replace_text(folder.report, html)
    if not parts.failures:
        return results
    vars(results).update({name: empty_table(name) for name, table in tables.items() if table is None})
    log = folder.write_log(parts.log, parts.tracebacks)
    lines = "\n".join(f"  - {line}" for line in parts.lines)
    message = f"{folder.report}: written without the parts that failed:\n{lines}\nTracebacks: {log}. {remedy}"
    raise IncompleteReport(message, results)


@dataclass(frozen=True)
class Picture:
    """A figure as the template takes it, and its files by name; without an image if it is left out or failed.

    ``width``: of the image on the page, in pixels; ``areas``: the values that show on hover; ``links``: addresses in
    the run folder, and their text.
    """

    name: str
    title: str
    caption: str = ""
    failure: str = ""
    width: int = 0
    areas: Sequence[tuple[str, str]] = ()
    links: Sequence[tuple[str, str]] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def image(self) -> str:
        """The figure as PNG in base64; empty without a figure."""
        return self._png(self.name)

    @property
    def folded(self) -> str:
        """The second figure, which the page folds, as PNG in base64; empty without one."""
        return self._png(f"{self.name}_2")

    def _png(self, name: str) -> str:
        return base64.b64encode(self.files.get(f"{name}.png", b"")).decode()

    @property
    def is_shown(self) -> bool:
        """Whether it has a place of its own on the page: if it is drawn, failed, or has links in its place."""
        return bool(self.files or self.failure or self.links)

    @property
    def is_appended(self) -> bool:
        """Whether it stands in the appendix, which is folded."""
        return self.name in APPENDIX_FIGURES

    @property
    def anchor(self) -> str:
        """The anchor on the page, to which statements of the verdict refer."""
        return f"figure-{self.name}"


def _picture(name: str, draw: Callable[[Results], Drawing], results: Results) -> Picture:
    drawing = draw(results)
    links = trace_links(results) if name == "waterfall" else []
    if drawing.figure is None:
        return Picture(name, drawing.title, drawing.caption, links=links)
    files = figure_files(name, drawing.figure)
    areas = [*drawing.figure.areas()]  # as it was drawn for its files
    for position, figure in enumerate(drawing.more, start=2):
        files |= figure_files(f"{name}_{position}", figure)
    width = round(CSS_DPI * drawing.figure.get_figwidth())
    return Picture(name, drawing.title, drawing.caption, width=width, areas=areas, links=links, files=files)


def _failed_picture(name: str, failure: str) -> Picture:
    return Picture(name, name.replace("_", " ").capitalize(), failure=failure)


def trace_links(results: Results) -> list[tuple[str, str]]:
    """Return links to the traces of the base and the best cell, if the run kept them."""
    cells = {row.cell_id: row for row in rows_of(results.trials)}
    return [
        (path, f"{cells[cell_id].label}, rank {rank}" if cells[cell_id].devices > 1 else str(cells[cell_id].label))
        for cell_id, paths in results.folder.traces().items()
        for rank, path in paths.items()
        if cell_id in cells
    ]


def _write_figures(folder: RunFolder, pictures: Sequence[Picture]) -> None:
    with writing(folder.figures):
        folder.figures.mkdir(exist_ok=True)
    files = {name: content for picture in pictures for name, content in picture.files.items()}
    patterns = [
        f"{picture.name}{more}.{kind}" for picture in pictures for kind in FILE_KINDS for more in ("", "_[0-9]*")
    ]
    earlier = {path.name for pattern in patterns for path in folder.figures.glob(pattern)}
    remove_all(folder.figures / name for name in earlier - {*files})
    replace_all((folder.figures / name, content) for name, content in files.items())


def _html(results: Results, verdict: Verdict, pictures: Sequence[Picture], parts: Parts) -> str:
    leading = [picture for picture in pictures if picture.is_shown and picture.name in LEADING]
    leading = leading or [picture for picture in pictures if picture.is_shown and picture.name in WITHOUT_THROUGHPUT]
    others = [picture for picture in pictures if picture not in leading]
    every = (RANKED, SCALING, DETAILS, APPENDIX)
    ranked, above, below, last = (make_pages(sections, results, parts) for sections in every)
    between = (picture for picture in others if picture.files and not picture.is_appended)
    drawn = next((picture.anchor for picture in between), None)
    appended = [picture.title for picture in pictures if picture.is_shown and picture.is_appended]
    appended += [page.title for page in last]
    content = {
        "name": results.experiment.name,
        **parts.make("the environment", lambda: facts(results.environment, results.experiment), lambda _: NO_FACTS),
        "size": parts.make("the size of the run", lambda: summary.size(results), lambda _: ""),
        "verdict": verdict,
        "contents": [
            *((page.anchor, page.title) for page in above),
            *([(drawn, "Figures")] if drawn else []),
            *((page.anchor, page.title) for page in below),
            *([("appendix", "Appendix")] if appended else []),
            ("configuration", "Configuration"),
            ("environment", "Environment"),
        ],
        "anchors": {
            *(page.anchor for page in (*ranked, *above, *below, *last)),
            *(picture.anchor for picture in pictures if picture.is_shown),
        },
        "asked": parts.make("the configuration", lambda: summary.asked(results), lambda _: []),
        "experiment_text": results.folder.source_text(),
        "above": above,
        "leading": leading,
        "ranked": ranked,
        "figures": others,
        "below": below,
        "appendix": last,
        "appended": appended,
    }
    return render("template.html", **content, failures=parts.lines)
