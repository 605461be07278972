"""The words of the verdict are explained once, where they are used first; the verdict as Markdown."""

from __future__ import annotations

from dataclasses import replace

from typer.testing import CliRunner

from harness.analysis.results import load
from harness.cli.commands import app
from harness.report.sentence import WORDS, Sentence, explained, with_holm_explained
from harness.report.verdict import Verdict, make_verdict, plain, verdict_lines
from tests.conftest import EXAMPLE

FAST = Sentence("fastest", "ddp x2 · 3 blocks", "fast over 3 blocks.")


def texts(*sentences: Sentence) -> list[str]:
    return [sentence.text for sentence in explained(sentences)]


def test_a_word_is_explained_at_its_first_use_alone_and_not_in_a_label() -> None:
    assert texts(FAST, FAST) == ["fast over 3 blocks (repetitions of the whole grid).", "fast over 3 blocks."]
    (found,) = explained([FAST])
    assert found.lead == FAST.lead


def test_words_are_explained_in_the_order_of_the_text_or_where_the_list_has_them() -> None:
    (found,) = texts(Sentence("scaling", "ddp x2", "efficiency 75 % over 3 blocks: below the threshold of 80 %."))
    assert found == (
        "efficiency (throughput per device) 75 % over 3 blocks (repetitions of the whole grid): "
        "below the threshold of 80 % (from which this report counts devices as well used)."
    )
    (found,) = texts(Sentence("loss", "", "exposed communication. Against exposed communication, try more."))
    assert found.count("(gradient exchange that no computation hides)") == 1
    assert found.startswith("exposed communication (")


def test_what_a_ratio_is_over_stands_once() -> None:
    base, other = " (strategy single, same batch per device)", " (strategy single, same global batch)"
    same, different = f"twice 1 device{base}.", f"twice 1 device{other}."
    found = texts(*(Sentence("fastest", "ddp x2", text) for text in (same, same, different)))
    assert found == [same, "twice 1 device.", different]


def test_a_message_of_an_error_is_left_as_it_is_and_what_is_open_is_explained_in_its_lead() -> None:
    failed = Sentence("failed", "error", "2 trials of ddp x2: RuntimeError: 3 blocks at base.")
    assert texts(failed, replace(failed, topic="trust"))[0] == failed.text
    (found,) = explained([Sentence("open", "18 cells on 4, 8 devices", "this machine has too few.")])
    assert found.lead == "18 cells (points of the grid) on 4, 8 devices"


def test_holms_adjustment_is_explained_where_a_comparison_names_it_first() -> None:
    found = with_holm_explained(["No change.", "After Holm's adjustment over 3 cells.", "Holm's adjustment again."])
    assert found == [
        "No change.",
        "After Holm's adjustment, which keeps the chance of any false claim at 5 %, over 3 cells.",
        "Holm's adjustment again.",
    ]
    assert with_holm_explained(found) == found and with_holm_explained(["Nothing."]) == ["Nothing."]


def test_the_verdict_of_a_run_explains_each_of_its_words_once() -> None:
    sentences = [one for found in make_verdict(load(EXAMPLE)).by_heading.values() for one in found]
    text = " ".join(f"{one.lead}: {one.text}" for one in sentences)
    for word in ("block", "efficiency", "threshold", "exposed communication", "cell"):
        assert text.count(f"({WORDS[word][1]})") == 1, word


# -- Markdown ---------------------------------------------------------------------------------------------------------


def test_text_is_no_markup_and_the_verdict_has_headings_sentences_and_commands() -> None:
    assert plain("a|b <i> [x](y) @you `c`") == r"a\|b \<i\> \[x\](y) @​you \`c\`".replace("\\u200b", "​")
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


def test_the_command_prints_the_verdict_of_an_old_run_or_what_is_allowed() -> None:
    result = CliRunner().invoke(app, ["export", str(EXAMPLE), "--markdown"])
    assert result.exit_code == 0 and "**What to use**" in result.stdout and "ddp on 2 devices" in result.stdout
    result = CliRunner().invoke(app, ["export", str(EXAMPLE)])
    assert result.exit_code == 2 and "allowed: --markdown" in result.output
