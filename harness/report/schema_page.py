"""results/README.md from the schema: ``python -m harness.report.schema_page > results/README.md``."""

from __future__ import annotations

from harness.analysis.doubts import DOUBTS
from harness.record.schema import DERIVED, RECORDED, Table

HEAD = """# Results

One folder a run: `results/<experiment>/<time>-<id>/`. This page is made from `harness/record/schema/`.

| file | what it holds |
|---|---|
| `experiment.yaml`, `experiment.resolved.yaml` | the experiment as given, and with every default |
| `plan.json` | the plan: machine, worker groups, order, what was skipped and why |
| `environment.json` | each worker group's nodes (hardware, versions, threads, variables), and the run's invocations |
| `trials.jsonl` | one line a trial, written when it ended: a trial is finished when its line is on disk |
| `raw/<trial>-<attempt>.parquet` | every rank's steps, the epochs or the check's update of one trial |
| `steps.parquet`, `epochs.parquet`, `checks.parquet` | the same, gathered from `raw/` |
| `tables/*.csv`, `figures/*.png`, `*.svg`, `report.html` | rebuilt by `python -m harness.report RUN_FOLDER` |
| `checkpoints/<trial>/epoch-<n>/` | with `checkpoint:`, what the training goes on from; or under its `folder` |
| `logs/` | the whole traceback of each trial that failed |

`harness.load(run_folder)` gives every table below as a DataFrame. A missing value is `<NA>`, never 0.
"""


def as_markdown() -> str:
    """Return the page: files of a run folder, then every table with its columns, units and meanings."""
    parts = [HEAD, "\n## Recorded\n", *map(_section, RECORDED), "\n## Derived\n", *map(_section, DERIVED)]
    parts += ["\n## Doubts\n\n| doubt | what it means |\n|---|---|\n"]
    parts += [f"| {name} | {doubt.meaning} |\n" for name, doubt in DOUBTS.items()]
    return "".join(parts)


def _section(table: Table) -> str:
    rows = [f"| `{c.name}` | {c.dtype} | {c.unit or '-'} | {c.meaning} |" for c in table.columns]
    head = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    return "\n".join([f"\n### {table.name}\n", f"One row: {table.row}.\n", *head, *rows]) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
