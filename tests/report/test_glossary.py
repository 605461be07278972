"""The words of the verdict are explained once, where they are used first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.analysis.results import load
from harness.report.sentence import WORDS, Sentence, explained, with_holm_explained
from harness.report.verdict import make_verdict

EXAMPLE = Path(__file__).parents[2] / "results" / "example" / "scaling-2-cpu-cores"
FAST = Sentence("fastest", "ddp x2 · 3 blocks", "fast over 3 blocks.")


def texts(*sentences: Sentence) -> list[str]:
    return [sentence.text for sentence in explained(sentences)]


def test_a_word_is_explained_at_its_first_use_alone() -> None:
    assert texts(FAST, FAST) == ["fast over 3 blocks (repetitions of the whole grid).", "fast over 3 blocks."]


def test_a_label_is_left_as_it_is() -> None:
    (found,) = explained([FAST])
    assert found.lead == FAST.lead


def test_words_are_explained_in_the_order_of_the_text() -> None:
    (found,) = texts(Sentence("scaling", "ddp x2", "efficiency 75 % over 3 blocks: below the threshold of 80 %."))
    assert found == (
        "efficiency (throughput per device) 75 % over 3 blocks (repetitions of the whole grid): "
        "below the threshold of 80 % (from which this report counts devices as well used)."
    )


def test_a_word_that_advice_names_is_explained_where_the_list_has_it() -> None:
    (found,) = texts(Sentence("loss", "", "exposed communication. Against exposed communication, try more."))
    assert found.count("(gradient exchange that no computation hides)") == 1
    assert found.startswith("exposed communication (")


def test_what_a_ratio_is_over_stands_once() -> None:
    base, other = " (strategy single, same batch per device)", " (strategy single, same global batch)"
    same, different = f"twice 1 device{base}.", f"twice 1 device{other}."
    found = texts(*(Sentence("fastest", "ddp x2", text) for text in (same, same, different)))
    assert found == [same, "twice 1 device.", different]


def test_a_message_of_an_error_is_left_as_it_is() -> None:
    failed = Sentence("failed", "error", "2 trials of ddp x2: RuntimeError: 3 blocks at base.")
    assert texts(failed, replace(failed, topic="trust"))[0] == failed.text


def test_what_is_open_is_explained_in_its_lead() -> None:
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
