"""The words of the verdict are explained once, where they are used first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.analysis.results import load
from harness.report.glossary import WORDS, explained
from harness.report.sentence import Sentence
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


def test_a_word_that_an_explanation_names_is_not_explained_again() -> None:
    (found,) = texts(Sentence("trust", "Low", "the A/A test differs by 9 %; doubts about its base: drift."))
    assert found == (
        "the A/A test (the base, which ratios are against, measured twice) differs by 9 %; "
        "doubts (reasons to distrust a number) about its base: drift."
    )


def test_the_base_alone_is_explained() -> None:
    assert texts(Sentence("trust", "Low", "few blocks at the base.")) == [
        "few blocks at the base (which ratios are against)."
    ]


def test_words_are_explained_in_the_order_of_the_text() -> None:
    (found,) = texts(Sentence("scaling", "ddp x2", "efficiency 75 % over 3 blocks"))
    assert (
        found == "efficiency (throughput per device over the base's) 75 % over 3 blocks (repetitions of the whole grid)"
    )


def test_a_message_of_an_error_is_left_as_it_is() -> None:
    failed = Sentence("failed", "error", "2 trials of ddp x2: RuntimeError: 3 blocks at base.")
    assert texts(failed, replace(failed, topic="trust"))[0] == failed.text


def test_what_is_open_is_explained_in_its_lead() -> None:
    (found,) = explained([Sentence("open", "18 cells on 4, 8 devices", "this machine has too few.")])
    assert found.lead == "18 cells (points of the grid) on 4, 8 devices"


def test_the_verdict_of_a_run_explains_each_of_its_words_once() -> None:
    sentences = [one for found in make_verdict(load(EXAMPLE)).by_heading.values() for one in found]
    text = " ".join(f"{one.lead}: {one.text}" for one in sentences)
    for word in ("block", "A/A test", "doubt", "efficiency", "exposed communication", "cell"):
        assert text.count(f"({WORDS[word][1]})") == 1, word
