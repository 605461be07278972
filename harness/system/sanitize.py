"""Text that is safe to store and to show: without keys, tokens and passwords, without control characters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import IO, Any

import yaml

MARK = "<redacted>"  # a plain word in YAML too
LEAST = 8
"""Least characters of a secret variable's value: a shorter one, such as a flag, may be part of ordinary words."""
OFTEN = 2000
"""Characters of a text that is cached: shorter texts of a run stand in many of its rows."""
MARGIN = 1 << 14
"""Bytes that are read before a wanted tail: longer than any key, so that no key is cut in two."""
FREE_TEXT = ("workload", "data", "model", "options", "reason", "error_type", "facts")
"""The columns of a trial with text from a user or an exception, which may contain a secret."""

_SECRET_VARIABLE = re.compile(
    r"KEY|TOKEN(?!IZE)|SECRET|PASSW|PASSPHRASE|(?<!BY)PASS(_|$)|CREDENTIAL|PRIVATE", re.IGNORECASE
)
_SECRET_NAME = re.compile(
    r"(^|[_.-])((api|access|auth|private|secret|signing|encryption)[_-]?key|secret|passw(or)?d|passphrase|credentials?|"
    r"(api|access|auth|bearer|hf|hub|wandb|github|session|refresh|security)[_-]?token)s?$"
    r"|(^|\.)token$|^sig$|-signature$",
    re.IGNORECASE,
)
_VARIABLES = "env."
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
"""name=value or name: value, quoted or not; the name decides whether the value is a secret."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, direction marks, lone surrogates."""


def redact_text(said: str) -> str:
    """Return the text without anything that looks like a secret, and without the values of secret variables."""
    return _text(said, _secret_values())


def redacted_tail(file: IO[bytes], most: int) -> str:
    """Return at most the last ``most`` characters of an open file, redacted before they are cut.

    Redaction starts at the beginning of a line: the second half of a secret does not look like one.
    """
    number = file.fileno()
    start = max(0, os.fstat(number).st_size - most - MARGIN)
    read = os.pread(number, most + MARGIN, start).decode(errors="replace")
    if not start:
        return redact_text(read)[-most:]
    end = _KEY_ENDS.search(read)
    if end and read.find(_KEY_BEGINS, 0, end.start()) < 0:  # of a private key that began before
        read = read[end.end() :]
    cut = _LINE_END.search(read)
    if cut is None:  # a single line: the margin, which may begin inside a secret, is dropped after redaction
        return redact_text(read)[MARGIN:][-most:]
    key = read.find(_KEY_BEGINS, 0, cut.end())  # a key goes on over the next lines
    return redact_text(read[key:] if key >= 0 else read[cut.end() :])[-most:]


def plain(value: Any) -> Any:
    """Redact every text in nested mappings and lists, and every value whose key names a secret."""
    return _plain(value, _secret_values())


def redact_row(trial: Mapping[str, object]) -> dict[str, object]:
    """Redact the free-text columns of a trial."""
    values = _secret_values()
    return {**trial, **{name: _plain(trial[name], values, name) for name in FREE_TEXT if name in trial}}


def source(given: str, content: object) -> str:
    """Return the text of an experiment file, written anew from its content if a key names a secret.

    In YAML the value may be quoted, folded over lines, or an alias, so it cannot be replaced in the text.
    """
    secrets = list(_secrets(content))
    if not secrets:
        return redact_text(given)
    written = yaml.safe_dump(plain(content), sort_keys=False, allow_unicode=True)
    for value in sorted(secrets, key=len, reverse=True):  # the same value may stand under another key
        written = written.replace(value, MARK) if len(value) >= LEAST else written
    return f"# written anew, without what looks like a secret\n{written}"


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names are no secret, with redacted values."""
    return {name: redact_text(value) for name, value in environment.items() if not _SECRET_VARIABLE.search(name)}


def variable_text(name: str, value: str) -> str:
    """Return NAME=value for a message, without the value of a secret variable."""
    return f"{name}={_plain(value, _secret_values(), _VARIABLES + name)}"


def _text(said: str, values: tuple[str, ...]) -> str:
    return _repeated(said, values) if len(said) < OFTEN else _without(said, values)


def _without(said: str, values: tuple[str, ...]) -> str:
    said = said.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be encoded
    for value in values:
        said = said.replace(value, MARK)
    said = _SHAPES.sub(lambda found: (found["url"] or found["scheme"] or "") + MARK, said)
    return _ASSIGNED.sub(
        lambda found: found["name"] + found["between"] + MARK if _names_secret(found["name"]) else found[0], said
    )


_repeated = lru_cache(maxsize=4096)(_without)
"""Cached: most texts of a run stand in each of its rows."""


def _secrets(content: object, name: str = "") -> Iterator[str]:
    """Yield the values whose key names a secret."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _secrets(value, name if _names_secret(name) else _below(name, key))
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _secrets(value, name)
    elif content is not None and _names_secret(name):
        yield str(content)


def _plain(value: object, values: tuple[str, ...], name: str = "") -> object:
    if isinstance(value, str):
        return MARK if value and _names_secret(name) else _text(value, values)
    if isinstance(value, int | float) and not isinstance(value, bool) and _names_secret(name):
        return MARK
    if isinstance(value, Mapping):
        below = name if _names_secret(name) else ""  # everything below a secret key is secret
        return {key: _plain(item, values, below or _below(name, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, values, name) for item in value]
    return value


def _below(name: str, key: object) -> str:
    """Return the name of a key in a mapping of this name: ``env.KEY`` in the section of variables."""
    return f"{_VARIABLES}{key}" if f"{name}." == _VARIABLES else str(key)


def _names_secret(name: str) -> bool:
    """Return whether the value of a key is a secret; of a variable ``env.NAME``, as of one of this process."""
    return bool(_SECRET_NAME.search(name)) or (name.startswith(_VARIABLES) and _is_secret(name))


@lru_cache(maxsize=4096)
def _is_secret(variable: str) -> bool:
    return bool(_SECRET_VARIABLE.search(variable))


def _secret_values() -> tuple[str, ...]:
    """Return the values of secret variables, the longest first, since one may contain another. Paths are left out."""
    named = {os.environ[name] for name in os.environ if _is_secret(name) and len(os.environ[name]) >= LEAST}
    return tuple(sorted((value for value in named if not os.path.exists(value)), key=lambda v: (-len(v), v)))


def escape_control(text: str) -> str:
    """Return the text with control characters escaped: on a terminal they could hide or rewrite other text."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
