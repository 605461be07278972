"""The sections of the report that show a table: title, table and words of each, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from harness.analysis.improvements import CONFIRMING_BLOCKS
from harness.analysis.results import Results
from harness.report import summary
from harness.report.page import Part, Parts
from harness.report.tables import cost, links, prediction, preview, published, ratios, scaling, trust
from harness.report.tables.text import TextTable, impossible_lines


@dataclass(frozen=True)
class Section:
    """A part of the report with what makes its table and the words above it.

    A section without rows is left out, unless ``empty`` returns a sentence.
    """

    part: Part
    table: Callable[[Results], TextTable]
    words: str | Callable[[Results], str] = ""
    empty: str | Callable[[Results], str] = ""


def make_pages(sections: Sequence[Section], results: Results, parts: Parts) -> list[Part]:
    """Return the sections that have rows, or a sentence instead of rows."""

    def make(section: Section) -> Part:
        table = section.table(results)
        words = section.words if table.rows else section.empty
        shown = words if isinstance(words, str) else words(results)
        return replace(section.part, table=table.without_constants(), words=shown)

    def failed(section: Section, failure: str) -> Part:
        return replace(section.part, failure=failure)

    made = [parts.make(f"the section {one.part.title}", partial(make, one), partial(failed, one)) for one in sections]
    return [part for part in made if part.table.rows or part.words or part.failure]


RANKED = (
    Section(
        Part("Fastest first", "ranked", level=3),
        lambda results: scaling.ranked_table(results.scaling, results.significance),
    ),
)
"""On the first screen."""

SCALING = (
    Section(
        Part("Throughput and scaling", "scaling"),
        lambda results: scaling.scaling_table(results.scaling, results.significance),
        summary.scaling_words,
        empty=lambda results: "No throughput was measured." if results.experiment.throughput else "",
    ),
    Section(
        Part("Fastest settings", "leaders", level=3),
        lambda results: ratios.leaders_table(results.leaders),
        "Settings that train the same model on the same data, in the same precision, on the same devices and at the "
        "same global batch, each against the fastest, paired by block. p: two-sided t test of the log ratio, adjusted "
        "by Holm's method, which keeps the chance of any false claim in a group below the level; cannot be told apart: "
        "p above the level, which is 5 %, 2 % with blocks: decide, or 2.5 % if blocks can be added, and 5 % / "
        "(j (j + 1)) at look j, when blocks were added j - 1 times. Left out: settings that are emulated, "
        "oversubscribed, not equivalent, or measured despite an error that the doctor found.",
    ),
    Section(
        Part("Comparison along each axis", "versus", level=3),
        lambda results: ratios.versus_table(results.versus),
        "Ratio of the throughputs of two cells that differ in one axis, paired by block: neighbouring values, and the "
        "last against the first; of placements (device_ids), which have no order, each against the first of the file. "
        "Cells on several CPU slots also against their base in one process with the threads of all slots. "
        "Shaded: the interval excludes 1. Italics: emulated, oversubscribed or faulty.",
    ),
    Section(
        Part("Options tried", "improvements", level=3),
        lambda results: ratios.improvements_table(results.improvements),
        "The cell to improve beside the same cell with other options, in worker groups of their own, paired by block. "
        "Screening and combination choose what to measure and claim nothing. The one setting that is left is confirmed "
        f"in at least {CONFIRMING_BLOCKS} blocks of fresh processes, whose interval is that of one comparison. Each "
        "step is a run of its own, with its report, in the folder improve/.",
    ),
    Section(
        Part("Overhead of Ray", "parity", level=3),
        lambda results: ratios.parity_table(results.parity),
        "Ratio of throughputs of the same cell under Ray and under torchrun (the control), with the same worker code, "
        "paired by block. Shaded: the interval excludes 1.",
    ),
    Section(
        Part("Preflight", "preflight", level=3),
        lambda results: trust.findings_table(results.findings),
        summary.preflight_words,
        empty=summary.preflight_words,
    ),
)
"""Above the figures."""

DETAILS = (
    Section(
        Part("Convergence", "convergence"),
        lambda results: scaling.convergence_table(results.convergence),
        summary.convergence_words,
    ),
    Section(
        Part("Trainings by epoch", "epochs", level=3, folded="Every training, epoch by epoch"),
        lambda results: scaling.epochs_table(results.epochs, results.trials),
        "Training loss: mean over the steps of the epoch. Learning rate: of its last step; a script's are those that "
        f"it reports, a row a report of validation. At most {scaling.MOST_EPOCHS} epochs of a training are shown, "
        "evenly spaced; epochs.parquet has all, training_steps.parquet their steps.",
    ),
    Section(
        Part("Published and measured", "published"),
        lambda results: published.published_table(results.published),
        lambda results: published.published_words(results.published),
    ),
    Section(
        Part("Predicted steps", "prediction"),
        lambda results: prediction.prediction_table(results.prediction),
        lambda results: prediction.prediction_words(results.prediction),
        empty=lambda results: " ".join(prediction.refusals(results.prediction)),
    ),
    Section(
        Part("Efficiency loss not explained", "unexplained"),
        lambda results: cost.unexplained_table(results.trials, results.waterfall),
    ),
    Section(
        Part("A/A test", "noise"),
        lambda results: ratios.noise_table(results.noise),
        "The base is measured twice in every block, the second time in other processes. The ratio of both should be 1. "
        "Other ratios are to the geometric mean of both, or to the one that a block has.",
    ),
    Section(Part("Doubts", "doubts"), lambda results: trust.doubt_table(results.trials)),
    Section(
        Part("Stalls", "stalls", level=3),
        lambda results: trust.stalls_table(results.stalls),
        "Windows with a step of over 10 times the trial's median and over 2 s. The trials count with them.",
    ),
    Section(
        Part("Compute", "compute"),
        lambda results: cost.compute_table(results.cells),
        "FLOPs of matrix products, convolutions and attention, forward and backward, counted from shapes. Without "
        "training.cudnn_benchmark and training.channels_last figures of convolutions are a lower bound of those that "
        "a GPU reaches. Compiling: the time of torch.compile in a trial's first steps, longest over blocks; no part "
        "of the timed steps, nor of the warm-up.",
    ),
    Section(
        Part("GPUs", "gpus"),
        lambda results: cost.gpu_table(results.gpus),
        "NVML's readings right after the timed windows, over all blocks. Busy: the time of a profiled step in which "
        "the least busy GPU runs a kernel or copies, over the timed step; a kernel of NCCL that waits is busy. "
        "Throttling is read from counters over the windows; a power limit (sw power cap, held by power) is a GPU's "
        "usual state under load. Energy is measured over at least 10 s, if no other process uses the GPU.",
    ),
    Section(
        Part("Trial outcomes", "outcomes"),
        lambda results: scaling.outcome_table(results.outcomes),
        lambda results: " ".join(impossible_lines(results.impossible)),
        empty="No trial has ended.",
    ),
    Section(Part("Failed trials", "failed", level=3), lambda results: scaling.failure_table(results.trials)),
    Section(
        Part("Trials without a result", "missing", level=3), lambda results: scaling.missing_table(results.missing)
    ),
)
"""Below the figures."""

APPENDIX = (
    Section(
        Part("Equivalence of strategies", "equivalence", level=3),
        lambda results: trust.equivalence_table(results.equivalence),
        "From the same initial parameters on the same global batches, with frozen batch statistics and no dropout, "
        "against one device: the gradient of one step, its update at the recipe's learning rate, and the update of two "
        "steps whose first has a thousandth of the parameters' norm; norm of the difference over the norm of one "
        "device's. In 16 bits, of updates the part along one device's.",
    ),
    Section(
        Part("Efficiency loss by part, in numbers", "waterfall-table", level=3),
        lambda results: cost.waterfall_table(results.waterfall),
        "With two ranks, the faster one is the typical rank, so that the slower one's loss is counted in full. A "
        "collective whose profile is missing is in the unexplained part. Parts have t intervals over blocks, the ideal "
        "that of its efficiency.",
    ),
    Section(
        Part("Communication of ddp", "communication", level=3),
        lambda results: cost.communication_table(results.waterfall, results.trials),
        "By difference: the time of a step on all devices less that of the slowest rank without gradient exchange. It "
        "includes costs outside DDP's timers: copies of gradients into buckets and, on a CPU, the cores that the "
        "exchange occupies. On GPUs both numbers should be close.",
    ),
    Section(
        Part("Links and collectives", "collectives", level=3),
        lambda results: links.collectives_table(results.collectives, results.links),
        lambda results: links.links_words(results.trials),
        empty=lambda results: links.links_failed(results.trials),
    ),
    Section(
        Part("Links between devices", "links-table", level=3),
        lambda results: links.links_table(results.links),
        "Bandwidth of the largest size, latency of the smallest and, between GPUs, the link as in nvidia-smi topo -m.",
    ),
    Section(
        Part("Topology of each node", "topology", level=3),
        lambda results: links.topology_table(results.environment),
        "Links between the GPUs of a node by NVML, as nvidia-smi topo -m names them: NV4: four NVLinks; PIX: one PCIe "
        "switch; PXB: several; PHB: a host bridge; NODE: within a NUMA node; SYS: between them; X: the GPU itself.",
    ),
    Section(
        Part("Memory", "memory", level=3),
        lambda results: trust.memory_table(results.cells, results.ranks, results.trials),
        summary.memory_words,
    ),
    Section(
        Part("Memory of each GPU", "device-memory", level=3),
        lambda results: cost.device_memory_table(results.device_memory),
        "Peak memory allocated in the steps, of cells on several GPUs. Under dp the first GPU also holds the outputs "
        "and the gradients that it gathers from the others, and the optimizer's state.",
    ),
    Section(
        Part("Estimated and actual time", "preview", level=3),
        lambda results: preview.preview_table(results.preview, results.experiment.cost),
        lambda results: preview.preview_words(results.folder),
    ),
    Section(
        Part("Run time by part", "ledger", level=3),
        lambda results: trust.ledger_table(results.ledger),
        summary.checks_words,
    ),
)
"""Folded, below all others."""
