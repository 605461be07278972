"""results/README.md, generated from the schema: ``python -m harness.report.schema_page > results/README.md``."""

from __future__ import annotations

from collections import Counter

from harness.analysis.doubts import DOUBTS
from harness.record.schema import COMPARED, DECISION, DERIVED, RECORDED, Column, Table

SHARED = 10
"""A column that this many tables have alike is described once."""

HEAD = """# Results

Each run has one folder, `results/<experiment>/<time>-<id>/`. This page is generated from `harness/record/schema/`.

| file | content |
|---|---|
| `experiment.yaml`, `experiment.resolved.yaml` | the experiment: the user's file, and the same with every default |
| `plan.json` | the plan: machine, worker groups and their order, skipped trials and impossible cells, with reasons |
| `environment.jsonl` | each worker group's nodes (hardware, versions, threads, variables), and the run's invocations |
| `trials.jsonl` | one line per attempt at a trial, written at its end: a trial is finished once its line is on disk |
| `raw/<trial>-<attempt>-ranks.json` | one trial's ranks and windows; its line has their numbers |
| `raw/<trial>-<attempt>.parquet` | one trial's steps, its epochs, or its equivalence check's update |
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
    tables = [*RECORDED, *DERIVED, *COMPARED, DECISION]
    known = Counter(_row(column) for table in tables for column in table.columns)
    shared = frozenset(row for row, count in known.items() if count >= SHARED)
    names = [row for row in known if row in shared]  # in the order of the first table
    parts = [HEAD, f"\n## Columns that many tables have\n\n{_listed(names)}"]
    parts += ["\n## Recorded\n", *(_section(table, shared) for table in RECORDED)]
    parts += ["\n## Derived\n", *(_section(table, shared) for table in DERIVED)]
    parts += [
        "\n## Over several runs\n\n`harness compare --json` has these tables but `history`, which is ",
        "`harness.load_history(folder)`.\n",
        *(_section(table, shared) for table in COMPARED),
    ]
    parts += ["\n## Of harness decide\n", _section(DECISION, shared)]
    parts += ["\n## Doubts\n\n| doubt | meaning |\n|---|---|\n"]
    parts += [f"| {name} | {doubt.meaning} |\n" for name, doubt in DOUBTS.items()]
    return "".join(parts)


def _section(table: Table, shared: frozenset[str]) -> str:
    """Return the description of a table, which only names the columns of other tables that it has alike."""
    rows = {column.name: _row(column) for column in table.columns}
    has = dict.fromkeys(row for row in rows.values() if row in shared)
    if 2 * len(has) > len(shared):
        but = ", ".join(sorted(row.split()[1] for row in shared - has.keys()))
        beside = f" It has the columns that many tables have{f', but {but}' if but else ''}, and:"
    else:
        beside = f" Of the columns that many tables have: {', '.join(row.split()[1] for row in has)}." if has else ""
    return f"\n### {table.name}\n\nOne row: {table.row}.{beside}\n\n{_listed([*rows.values()], shared)}"


def _row(column: Column) -> str:
    return f"| `{column.name}` | {column.dtype} | {column.unit or '-'} | {column.meaning} |"


def _listed(rows: list[str], without: frozenset[str] = frozenset()) -> str:
    head = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *(row for row in rows if row not in without)]) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
