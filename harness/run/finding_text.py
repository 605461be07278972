"""The doctor's measurements and findings as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from rich.text import Text

from harness.plan.planner import Plan
from harness.report.tables.findings import finding_location, group_findings, places_text, seen_text, summary_line
from harness.system.sanitize import escape_control

SEVERITY_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def doctor_lines(findings: pd.DataFrame, figures: Mapping[str, Mapping[str, str]], plan: Plan) -> list[Text]:
    """Return the doctor's measurements and findings as text: observation, meaning, advice."""
    labels = {trial.id: plan.labels.of_cell(trial.cell) for trial in plan.trials if trial.id in figures}
    examined = sum(trial.purpose == "doctor" for trial in plan.trials)
    lines = [Text("")]
    for trial_id, values in figures.items():
        measured = "; ".join(f"{name} {value}" for name, value in values.items())
        lines.append(Text(f"{labels.get(trial_id, trial_id)}: {measured}", style="dim"))
    return [*lines, *finding_lines(findings), Text(""), Text(summary_line(findings, examined), style="bold")]


def finding_lines(findings: pd.DataFrame) -> list[Text]:
    """Return findings as text, each after an empty line: where, place, observation, meaning, advice."""
    lines = []
    for group in group_findings(findings):
        first = group.iloc[0]
        head = Text.assemble(
            (f"{first['severity']:<8}", SEVERITY_COLOURS[first["severity"]]), f"{escape_control(first['check'])}: "
        )
        lines += [Text(""), head.append(escape_control(finding_location(group)), style="bold")]
        texts = {"place": places_text(group), "observed": seen_text(group)}
        texts |= {"meaning": first["means"], "action": first["advice"]}
        for title, text in texts.items():
            if text:
                lines.append(Text(f"  {title:<8}  {escape_control(str(text))}"))
    return lines
