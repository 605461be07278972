"""The result of a recorded trial in a few words, for the console."""

from __future__ import annotations

from harness.plan.rows import RecordedTrial
from harness.report.tables.text import plural, speed


def trial_result(line: RecordedTrial) -> str:
    """Return its throughput, what took how long, or the reason of a failure."""
    from harness.analysis.trials import throughput

    if line["outcome"] != "ok":
        return str(line["reason"])
    if done := {"equivalence": "checked", "links": "measured", "profile": "profiled"}.get(line["purpose"]):
        return f"{done} in {line['steps_s']:.1f} s"
    if line["purpose"] == "doctor":
        found = line["facts"].get("findings", [])
        return f"examined in {line['steps_s']:.1f} s" + (f": {plural(len(found), 'finding')}" if found else "")
    if line["kind"] != "convergence":
        return f"{speed(throughput(line['windows']))} {line['unit']}/s"
    samples = line["facts"].get("training_samples")
    return f"trained{f' on {samples:,} samples' if samples else ''} in {line['steps_s']:.1f} s"
