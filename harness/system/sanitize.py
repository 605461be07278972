"""Takes keys, tokens and passwords out of what is recorded: results are shown to others."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import IO, Any

import yaml

MARK = "<redacted>"  # a plain word in YAML too
LEAST = 8
"""Characters of a variable's value: a shorter one, such as a flag, would be taken out of words that it stands in."""
OFTEN = 2000
MARGIN = 1 << 14
"""Bytes that are read before the end of a text that is wanted: longer than any key, so that none is cut in two."""
FREE_TEXT = ("workload", "data", "model", "options", "reason", "error_type", "facts")
"""The columns of a trial that may hold what a user or an exception wrote, and so a secret."""

_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE", re.IGNORECASE)
_SECRET_NAME = re.compile(
    r"(^|[_.-])((api|access|auth|private|secret|signing|encryption)[_-]?key|secret|passw(or)?d|passphrase|credentials?|"
    r"(api|access|auth|bearer|hf|hub|wandb|github|session|refresh|security)[_-]?token)s?$"
    r"|(^|\.)token$|^sig$|-signature$",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"""
      (?P<url>\b[a-z][a-z0-9+.-]{1,20}://)[^\s/@:'"\\]*:[^\s/@'"\\]+(?=@)         # user:password in a URL
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | \b(AKIA|ASIA)[A-Z0-9]{16}\b                                                 # AWS
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,}                         # GitHub
    | \bglpat-[\w-]{16,}                                                          # GitLab
    | \bhf_[A-Za-z0-9]{20,}                                                       # Hugging Face
    | \b[sr]k[-_](?=[\w-]{0,60}\d)[\w-]{20,}                                    # OpenAI, Anthropic, Stripe
    | \bxox[abeoprs]-[A-Za-z0-9-]{10,}                                            # Slack
    | \bAIza[\w-]{30,} | \bya29\.[\w-]{20,}                                       # Google
    | \bnpm_[A-Za-z0-9]{30,} | \bpypi-[\w-]{40,}                                  # npm, PyPI
    | \beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+                                        # JSON Web Token
    | (?P<scheme>\b(Bearer|Basic)[ ])[A-Za-z0-9._~+/=-]{16,}                      # an HTTP header
    """,
    re.VERBOSE | re.DOTALL,
)
_LINE_END = re.compile(r"[\r\n]")
_KEY_BEGINS = "-----BEGIN "
_KEY_ENDS = re.compile(r"-----END[ ][A-Z ]*PRIVATE[ ]KEY-----")
_ASSIGNED = re.compile(
    r"""(?P<name>[A-Za-z0-9_.-]{1,64})(?P<between>["']?\s?[=:]\s?["']?)(?!<redacted)[^\s"'\\,;&)\]}]{6,}"""
)
"""name=value or name: value, quoted or not; whether it is a secret is for the name to say."""


def redact_text(said: str) -> str:
    """The text without what looks like a secret, and without the values of variables that are named like one."""
    return _text(said, _secret_values())


def redacted_tail(file: IO[bytes], most: int) -> str:
    """The last so many characters of an open file at most, what looks like a secret taken out before they are cut off.

    Read from a line's beginning: the end of a secret alone does not look like one.
    """
    number = file.fileno()
    start = max(0, os.fstat(number).st_size - most - MARGIN)
    read = os.pread(number, most + MARGIN, start).decode(errors="replace")
    if not start:
        return redact_text(read)[-most:]
    read = _after_a_key(read)
    cut = _LINE_END.search(read)
    if cut is None:  # one line: what of a secret may stand at its beginning goes when those that are whole are out
        return redact_text(read)[MARGIN:][-most:]
    key = read.find(_KEY_BEGINS, 0, cut.end())  # which goes on over the next lines
    return redact_text(read[key:] if key >= 0 else read[cut.end() :])[-most:]


def _after_a_key(said: str) -> str:
    """Without the rest of a private key that begins before this text."""
    end = _KEY_ENDS.search(said)
    return said[end.end() :] if end and said.find(_KEY_BEGINS, 0, end.start()) < 0 else said


def plain(value: Any) -> Any:
    """The same for every text in mappings and lists, and for a text whose key says that it is secret."""
    return _plain(value, _secret_values())


def redact_row(trial: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a trial, the same done to those of free text."""
    values = _secret_values()
    told = {name: trial[name] for name in FREE_TEXT if name in trial}
    if isinstance(options := told.get("options"), str):
        told["options"] = _options(options, values)
    return {**trial, **_plain(told, values)}


def source(given: str, content: Any) -> str:
    """The text of an experiment file; anew from its content where a key in it is named like a secret.

    A text has too many ways to write the value down: in quotes, over lines, behind an anchor.
    """
    if not any(_secrets(content, short=True)):
        return redact_text(given)
    written = yaml.safe_dump(plain(content), sort_keys=False, allow_unicode=True)
    for value in sorted(_secrets(content), key=len, reverse=True):  # it may stand under another key too
        written = written.replace(value, MARK)
    return f"# written anew, without what looks like a secret\n{written}"


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """These variables, but for those that are named like a secret, without what looks like one."""
    return {name: redact_text(value) for name, value in environment.items() if not _SECRET_VARIABLE.search(name)}


def _text(said: str, values: tuple[str, ...]) -> str:
    return _repeated(said, values) if len(said) < OFTEN else _without(said, values)


def _without(said: str, values: tuple[str, ...]) -> str:
    said = said.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair cannot be written
    for value in values:
        said = said.replace(value, MARK)
    said = _SHAPES.sub(lambda found: (found["url"] or found["scheme"] or "") + MARK, said)
    return _ASSIGNED.sub(_assigned, said)


_repeated = lru_cache(maxsize=4096)(_without)
"""Most texts of a run stand in every row of it."""


@lru_cache(maxsize=4096)
def _options(said: str, values: tuple[str, ...]) -> str:
    """A JSON object, each value by its key: in the text a value may end at a space."""
    return json.dumps(_plain(json.loads(said), values), sort_keys=True)


def _secrets(content: Any, name: str = "", *, short: bool = False) -> Iterator[str]:
    """The values whose key is named like a secret; those that are ``short`` may stand in any word."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _secrets(value, name if _SECRET_NAME.search(name) else str(key), short=short)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _secrets(value, name, short=short)
    elif content is not None and _SECRET_NAME.search(name) and (short or len(str(content)) >= LEAST):
        yield str(content)


def _assigned(found: re.Match[str]) -> str:
    return found["name"] + found["between"] + MARK if _SECRET_NAME.search(found["name"]) else found[0]


def _plain(value: Any, values: tuple[str, ...], name: str = "") -> Any:
    if isinstance(value, str):
        return MARK if value and _SECRET_NAME.search(name) else _text(value, values)
    if isinstance(value, int | float) and not isinstance(value, bool) and _SECRET_NAME.search(name):
        return MARK
    if isinstance(value, Mapping):
        below = name if _SECRET_NAME.search(name) else ""  # secret too, whatever its own keys
        return {key: _plain(item, values, below or str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, values, name) for item in value]
    return value


@lru_cache(maxsize=4096)
def _is_secret(variable: str) -> bool:
    return bool(_SECRET_VARIABLE.search(variable))


def _secret_values() -> tuple[str, ...]:
    """The longest first, since one may hold another. A path is no secret: what it names may be."""
    named = {os.environ[name] for name in os.environ if _is_secret(name) and len(os.environ[name]) >= LEAST}
    return tuple(sorted((value for value in named if not os.path.exists(value)), key=lambda v: (-len(v), v)))


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but tab and newline: controls, marks that turn the direction of writing, halves of surrogate pairs."""


def escape_control(text: str) -> str:
    """The text with its control characters spelt out: on a terminal they could hide, colour or rewrite other text."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
