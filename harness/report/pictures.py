"""Figures as files and as parts of the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure
from PIL import Image

from harness.analysis.results import Results
from harness.report.figures import Drawing
from harness.report.figures.drawing import Area, Chart
from harness.report.page import Parts

DPI, COLOURS = 144, 256
KINDS = ("png", "svg")
CSS_DPI = 96
"""Pixels of an inch on a page: every figure is shown at one scale, so that its type has one size."""


@dataclass(frozen=True)
class Picture:
    """A figure as the template takes it, and its files by name; without an image if it is left out or failed.

    ``width``: of the image on the page, in pixels; ``areas``: the values that show on hover.
    """

    name: str
    title: str
    caption: str = ""
    failure: str = ""
    image: str = ""
    width: int = 0
    areas: Sequence[Area] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def is_shown(self) -> bool:
        """Whether it has a place of its own on the page: if it is drawn, or failed."""
        return bool(self.image or self.failure)

    @property
    def anchor(self) -> str:
        """The anchor on the page, to which statements of the verdict refer."""
        return f"figure-{self.name}"


def make_picture(name: str, draw: Callable[[Results], Drawing], results: Results, parts: Parts) -> Picture:
    """Return the figure of a name; one that fails has a sentence in its place."""
    return parts.make(
        f"the figure {name}",
        lambda: _picture(name, draw(results)),
        lambda failure: Picture(name, name.replace("_", " ").capitalize(), failure=failure),
    )


def _picture(name: str, drawing: Drawing) -> Picture:
    if drawing.figure is None:
        return Picture(name, drawing.title, drawing.caption)
    files = files_of(name, drawing.figure)
    image = base64.b64encode(files[f"{name}.png"]).decode()
    width = round(CSS_DPI * drawing.figure.get_figwidth())
    areas = [*drawing.figure.areas()] if isinstance(drawing.figure, Chart) else []
    for position, figure in enumerate(drawing.more, start=2):
        files |= files_of(f"{name}_{position}", figure)
    return Picture(name, drawing.title, drawing.caption, image=image, width=width, areas=areas, files=files)


def files_of(name: str, figure: Figure) -> dict[str, bytes]:
    """Return the contents of the figure's files, NAME.png and NAME.svg."""
    drawn, png, svg = io.BytesIO(), io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(png, format="PNG")  # a third of the bytes; pages are sent
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return {f"{name}.png": png.getvalue(), f"{name}.svg": svg.getvalue()}
