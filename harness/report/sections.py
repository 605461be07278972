"""The sections of the report that show a table: title, table and words of each, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.analysis.results import Results
from harness.report import summary
from harness.report.tables.cost import (
    communication_table,
    compute_table,
    gpu_table,
    unexplained_table,
    waterfall_table,
)
from harness.report.tables.evidence import (
    doubt_table,
    equivalence_table,
    ledger_table,
    memory_table,
    noise_table,
    parity_table,
    versus_table,
)
from harness.report.tables.findings import findings_table
from harness.report.tables.scaling import convergence_table, failure_table, missing_table, outcome_table, scaling_table
from harness.report.tables.text import TextTable


@dataclass(frozen=True)
class Section:
    """A table of the report under its title. A section without rows is left out, unless ``empty`` returns a sentence.

    ``words`` stand above the table; ``folded`` is the line to click if the table is long.
    """

    title: str
    table: Callable[[Results], TextTable]
    words: str | Callable[[Results], str] = ""
    empty: Callable[[Results], str] = lambda results: ""
    level: int = 2
    folded: str = ""


@dataclass(frozen=True)
class Page:
    """A section with its table made, as the template takes it."""

    title: str
    table: TextTable
    words: str
    level: int
    folded: str


def make_pages(sections: Sequence[Section], results: Results) -> list[Page]:
    """Return the sections that have rows, or a sentence instead of rows."""
    pages = []
    for section in sections:
        table = section.table(results)
        words = section.words if isinstance(section.words, str) else section.words(results)
        if not table.rows:
            words = section.empty(results)
        if table.rows or words:
            pages.append(Page(section.title, table, words, section.level, section.folded))
    return pages


SCALING = (
    Section(
        "Throughput and scaling",
        lambda results: scaling_table(results.scaling),
        lambda results: summary.scaling_words(results.scaling),
        empty=lambda results: "No throughput was measured.",
    ),
    Section(
        "Noise floor",
        lambda results: noise_table(results.noise),
        lambda results: summary.noise_words(results.noise),
        level=3,
    ),
    Section(
        "Strategies against each other",
        lambda results: versus_table(results.versus),
        "On the same devices at the same batch, paired by block. Rows whose interval excludes 1 are shaded; rows in "
        "italics are rehearsals.",
        level=3,
    ),
    Section(
        "What Ray costs",
        lambda results: parity_table(results.parity),
        "The same worker code on the same cells under Ray and under torchrun, the control, interleaved by block: the "
        "ratio of their throughputs is paired by block. Rows whose interval excludes 1 are shaded.",
        level=3,
    ),
    Section(
        "Preflight",
        lambda results: findings_table(results.findings),
        summary.preflight_words,
        empty=summary.preflight_words,
        level=3,
    ),
    Section(
        "Do they train the same thing?",
        lambda results: equivalence_table(results.equivalence),
        "A few steps in fp32 from the same start on the same global batches, batch statistics frozen and no dropout, "
        "against one device: the difference of the two updates over the size of one device's.",
        level=3,
    ),
    Section("Doubts", lambda results: doubt_table(results.trials), level=3),
)
"""Above the figures."""

DETAILS = (
    Section(
        "Convergence",
        lambda results: convergence_table(results.convergence),
        summary.convergence_words,
    ),
    Section(
        "Where the efficiency goes, in numbers",
        lambda results: waterfall_table(results.waterfall),
        "Of two ranks the faster one is the usual one, so that the slower one's cost is whole. Cells that lack a part, "
        "such as those whose profiled steps failed, have no rows.",
        folded="Every part of every cell",
    ),
    Section("Not explained", lambda results: unexplained_table(results.trials), level=3),
    Section(
        "Communication of ddp",
        lambda results: communication_table(results.waterfall, results.trials),
        "By taking it away: steps together less the slowest rank's steps alone. It holds what DDP's own clocks leave "
        "out, such as copying gradients into buckets and, on a CPU, the cores that the exchange itself takes; a GPU's "
        "two figures should be close.",
    ),
    Section(
        "Compute",
        lambda results: compute_table(results.cells),
        "Matrix products, convolutions and attention of forward and backward, counted from shapes.",
    ),
    Section(
        "Memory",
        lambda results: memory_table(results.cells, results.ranks, results.trials),
        "Of the fullest rank of each cell; on a CPU the peak is the whole process, libraries included.",
    ),
    Section(
        "GPUs",
        lambda results: gpu_table(results.gpus),
        "As NVML tells of them right after the timed windows, over all blocks; clocks that were held down are told by "
        "counters over the windows. Energy is counted over 10 s and more, where nobody shares the GPU.",
    ),
    Section("Where the run's time went", lambda results: ledger_table(results.ledger), summary.checks_words),
    Section(
        "What became of the trials",
        lambda results: outcome_table(results.outcomes),
        empty=lambda results: "No trial has ended.",
    ),
    Section("Trials that failed", lambda results: failure_table(results.trials), level=3),
    Section("Planned, without a result", lambda results: missing_table(results.missing), level=3),
)
"""Below the figures."""
