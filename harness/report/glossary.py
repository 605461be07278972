"""The words of the verdict, each explained where it is used first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from harness.report.sentence import Sentence

WORDS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "block": (re.compile(r"\d+ (?:more )?blocks?\b"), "repetitions of the whole grid"),
    "efficiency": (re.compile(r"\befficiency(?= \d)"), "throughput per device"),
    "threshold": (re.compile(r"threshold of \d+ %"), "from which this report counts devices as well used"),
    "exposed communication": (
        re.compile(r"(?<!against )\bexposed communication\b"),
        "gradient exchange that no computation hides",
    ),
    "slow each other": (
        re.compile(r"devices that slow each other down\b"),
        "they share memory bandwidth, caches or power; side by side in figures",
    ),
    "wrapper": (re.compile(r"the strategy's own work on each device\b"), "wrapper in figures"),
    "cell": (re.compile(r"(?:\d+|its) cells?\b"), "points of the grid"),
    "trial": (re.compile(r"\d+ planned trials?\b"), "one cell in one block each"),
}
"""Each word of the verdict: where a sentence uses it, and what it means."""
BASE = re.compile(r" \(strategy [^()]*, same [a-z ]+\)")
"""What a ratio is over, as base_words has it."""
COUNTED = ("incomplete", "open")
"""The topics whose sentences begin with a number of cells or trials."""


def explained(sentences: Iterable[Sentence]) -> Iterator[Sentence]:
    """Yield the sentences in the order of the page, with the meaning of a word in brackets after its first use.

    Sentences on failures are left as they are: they quote messages of errors.
    """
    known: set[str] = set()
    for sentence in sentences:
        if sentence.topic == "failed":
            yield sentence
            continue
        lead = _explained(sentence.lead, known) if sentence.topic in COUNTED else sentence.lead  # else a label
        yield replace(sentence, lead=lead, text=_explained(_without_repeated_bases(sentence.text, known), known))


def _without_repeated_bases(text: str, known: set[str]) -> str:
    """Return text without the strategy and batch of a base that an earlier sentence had; adds its own to ``known``."""
    found = BASE.findall(text)
    for base in found:
        if base in known:
            text = text.replace(base, "")
    known.update(found)
    return text


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


HOLM = re.compile(r"Holm's adjustment")
HOLM_MEANING = ", which keeps the chance of any false claim at 5 %,"


def with_holm_explained(texts: Sequence[str]) -> list[str]:
    """Return the texts of a comparison with Holm's adjustment explained where it is named first."""
    found = [*texts]
    first = next((at for at, text in enumerate(found) if HOLM.search(text)), None)
    if first is not None and not any(HOLM_MEANING in text for text in found):
        found[first] = HOLM.sub(lambda use: f"{use[0]}{HOLM_MEANING}", found[first], count=1)
    return found
