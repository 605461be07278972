"""The words of the verdict, each explained where it is used first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from harness.report.sentence import Sentence

WORDS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "block": (re.compile(r"\d+ (?:more )?blocks?\b"), "repetitions of the whole grid"),
    "A/A test": (re.compile(r"A/A test\b"), "the base, which ratios are against, measured twice"),
    "base": (re.compile(r"\bbase\b"), "which ratios are against"),
    "doubt": (re.compile(r"\bdoubts\b"), "reasons to distrust a number"),
    "efficiency": (re.compile(r"\befficiency\b"), "throughput per device over the base's"),
    "exposed communication": (re.compile(r"^exposed communication\b"), "exchange that no computation hides"),
    "cell": (re.compile(r"(?:\d+|its) cells?\b"), "points of the grid"),
    "trial": (re.compile(r"\d+ planned trials?\b"), "one cell in one block each"),
}
"""Each word of the verdict: where a sentence uses it, and what it means."""


def explained(sentences: Iterable[Sentence]) -> Iterator[Sentence]:
    """Yield the sentences in the order of the page, with the meaning of a word in brackets after its first use.

    Sentences on failures are left as they are: they quote messages of errors.
    """
    known: set[str] = set()
    for sentence in sentences:
        if sentence.topic == "failed":
            yield sentence
            continue
        lead = _explained(sentence.lead, known) if sentence.topic == "open" else sentence.lead  # else a label
        yield replace(sentence, lead=lead, text=_explained(sentence.text, known))


def _explained(text: str, known: set[str]) -> str:
    """Return text with the meaning of each word that is not known yet; adds these words to ``known``."""
    found = {word: use for word, (pattern, _) in WORDS.items() if word not in known and (use := pattern.search(text))}
    added = 0
    for word, use in sorted(found.items(), key=lambda item: item[1].end()):
        if word not in known:  # the meaning of an earlier word may have named it
            meaning = f" ({WORDS[word][1]})"
            place = use.end() + added
            text, added = f"{text[:place]}{meaning}{text[place:]}", added + len(meaning)
            known.update({word}, (other for other, (pattern, _) in WORDS.items() if pattern.search(meaning)))
    return text
