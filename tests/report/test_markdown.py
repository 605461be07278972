"""The verdict as Markdown; Holm's adjustment is explained where it is named first."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from harness.cli.commands import app
from harness.report.sentence import Sentence, with_holm_explained
from harness.report.verdict import Verdict, plain, verdict_lines

EXAMPLE = Path(__file__).parents[2] / "results" / "example" / "scaling-2-cpu-cores"


def test_holms_adjustment_is_explained_where_a_comparison_names_it_first() -> None:
    found = with_holm_explained(["No change.", "After Holm's adjustment over 3 cells.", "Holm's adjustment again."])
    assert found == [
        "No change.",
        "After Holm's adjustment, which keeps the chance of any false claim at 5 %, over 3 cells.",
        "Holm's adjustment again.",
    ]
    assert with_holm_explained(found) == found and with_holm_explained(["Nothing."]) == ["Nothing."]


# -- Markdown ---------------------------------------------------------------------------------------------------------


def test_text_is_no_markup_and_the_verdict_has_headings_sentences_and_commands() -> None:
    assert plain("a|b <i> [x](y) @you `c`") == r"a\|b \<i\> \[x\](y) @​you \`c\`".replace("\\u200b", "​")
    said = {
        "USE": [Sentence("fastest", "ddp x2", "fast.", command="run it")],
        "SURE": [Sentence("trust", "", "And 3 more.")],
    }
    assert list(verdict_lines("a_b", Verdict((), lines=said))) == [
        r"### a\_b",
        "",
        "**USE**",
        "- **ddp x2**: fast.",
        "  `run it`",
        "",
        "**SURE**",
        "- And 3 more.",
    ]


def test_the_command_prints_the_verdict_of_an_old_run_or_what_is_allowed() -> None:
    result = CliRunner().invoke(app, ["export", str(EXAMPLE), "--markdown"])
    assert result.exit_code == 0 and "**USE**" in result.stdout and "ddp on 2 devices" in result.stdout
    result = CliRunner().invoke(app, ["export", str(EXAMPLE)])
    assert result.exit_code == 2 and "allowed: --markdown" in result.output
