"""results/README.md, generated from the schema: ``python -m harness.report.schema_page > results/README.md``."""

from __future__ import annotations

from harness.analysis.doubts import DOUBTS
from harness.record.schema import COMPARED, DECISION, DERIVED, RECORDED, Table

HEAD = """# Results

Each run has one folder, `results/<experiment>/<time>-<id>/`. This page is generated from `harness/record/schema/`.

| file | content |
|---|---|
| `experiment.yaml`, `experiment.resolved.yaml` | the experiment: the user's file, and the same with every default |
| `plan.json` | the plan: machine, worker groups and their order, skipped trials and impossible cells, with reasons |
| `environment.jsonl` | each worker group's nodes (hardware, versions, threads, variables), and the run's invocations |
| `trials.jsonl` | one line per attempt at a trial, written at its end: a trial is finished once its line is on disk |
| `raw/<trial>-<attempt>-ranks.json` | one trial's ranks and windows; its line has their numbers |
| `raw/<trial>-<attempt>.parquet` | one trial's steps of every rank, its epochs, or its equivalence check's update |
| `steps.parquet`, `epochs.parquet`, `checks.parquet` | the rows of all trials, gathered from `raw/` |
| `by_rank.jsonl` | the ranks and windows of all trials, gathered from `raw/` |
| `tables/*.csv`, `figures/`, `report.html` | rebuilt by `harness report RUN_FOLDER`; a table without rows has no file |
| `checkpoints/<trial>/epoch-<n>/` | checkpoints to resume from, with `checkpoint:`; or below its `folder` |
| `traces/<cell>-rank<n>.json.gz` | five profiled steps of the best cell and its base, in Chrome's format |
| `logs/` | full traceback or stacks of each failed trial, and what scripts and loops printed |

`harness.load(run_folder)` returns every table below as a DataFrame. A missing value is `<NA>`, never 0. A list
is a tuple there, and text in a file, joined by "; "; a mapping is a dictionary there, and JSON in a file.
"""


def as_markdown() -> str:
    """Return the page: the files of a run folder, every table with its columns, units and meanings, and the doubts."""
    parts = [HEAD, "\n## Recorded\n", *map(_section, RECORDED), "\n## Derived\n", *map(_section, DERIVED)]
    parts += [
        "\n## Over several runs\n\n`harness compare --json` has these tables but `history`, which is ",
        "`harness.load_history(folder)`.\n",
        *map(_section, COMPARED),
    ]
    parts += ["\n## Of harness decide\n", _section(DECISION)]
    parts += ["\n## Doubts\n\n| doubt | meaning |\n|---|---|\n"]
    parts += [f"| {name} | {doubt.meaning} |\n" for name, doubt in DOUBTS.items()]
    return "".join(parts)


def _section(table: Table) -> str:
    rows = [f"| `{c.name}` | {c.dtype} | {c.unit or '-'} | {c.meaning} |" for c in table.columns]
    head = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    return "\n".join([f"\n### {table.name}\n", f"One row: {table.row}.\n", *head, *rows]) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
