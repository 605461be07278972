"""Markdown for a pull request: the verdict, and text that is no markup."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from harness.cli.commands import app
from harness.report.sentence import Sentence
from harness.report.verdict import Verdict, plain, verdict_lines

EXAMPLE = Path(__file__).parents[2] / "results" / "example" / "scaling-2-cpu-cores"


def test_text_is_no_markup() -> None:
    assert plain("a|b <i> [x](y) @you `c`") == r"a\|b \<i\> \[x\](y) @​you \`c\`".replace("\\u200b", "​")


def test_the_verdict_has_headings_sentences_and_commands() -> None:
    said = (Sentence("fastest", "ddp x2", "fast.", command="run it"), Sentence("trust", "", "And 3 more."))
    assert list(verdict_lines("a_b", Verdict(said))) == [
        r"### a\_b",
        "",
        "**What to use**",
        "- **ddp x2**: fast.",
        "  `run it`",
        "",
        "**How sure**",
        "- And 3 more.",
    ]


def test_the_command_prints_the_verdict_of_an_old_run() -> None:
    result = CliRunner().invoke(app, ["export", str(EXAMPLE), "--markdown"])
    assert result.exit_code == 0 and "**What to use**" in result.stdout and "ddp on 2 devices" in result.stdout


def test_without_a_format_it_is_one_error() -> None:
    result = CliRunner().invoke(app, ["export", str(EXAMPLE)])
    assert result.exit_code == 2 and "allowed: --markdown" in result.output
