"""URIs of object stores, as text: which are allowed, and the URI of a run in a folder of runs.

Credentials never stand in a URI: a command is in the shell's history and in the list of processes. Imports no pyarrow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

_AZURE = ("enable_tls", "blob_storage_authority", "dfs_storage_authority")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "s3": ("region", "endpoint_override", "scheme"),
    "gs": ("endpoint_override", "scheme", "project_id", "retry_limit_seconds"),
    "abfs": _AZURE,
    "abfss": _AZURE,
    "file": (),
}
"""The schemes, each with the options that may follow its path: ?NAME=VALUE&NAME=VALUE."""
_AZURES = "AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, az login, or a managed identity"
CREDENTIALS: Mapping[str, str] = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or a role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, gcloud's own, or the machine's service account",
    "abfs": _AZURES,
    "abfss": _AZURES,
}
"""Where the credentials of each kind of store are looked for."""
_SECRET = re.compile(r"key|secret|token|sig|passw|credential|^se$|^sp$", re.IGNORECASE)


def is_uri(text: str) -> bool:
    """Return whether a text is a URI and no path; also s3:/bucket, to which a path shortens s3://bucket."""
    return re.match("[A-Za-z][A-Za-z0-9+.-]+:/", text) is not None


def problem_of(uri: str) -> str:
    """Return why a URI is refused; '' if it is allowed. The text quotes nothing that may be a secret."""
    try:
        parts = urlsplit(uri)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        _ = parts.port
    except ValueError:  # whose text may quote a password
        return "got what is no URI; allowed: a folder, or a URI such as s3://BUCKET/FOLDER"
    if _has_secret(parts, query):
        place = f": {CREDENTIALS[parts.scheme]}" if parts.scheme in CREDENTIALS else ""
        return f"got a URI with a user, a password or a key; allowed: one without. Set them in the environment{place}"
    if parts.scheme not in OPTIONS:
        return f"got {uri!r}; allowed: a folder, or a URI of {', '.join(OPTIONS)}, such as s3://BUCKET/FOLDER"
    if not (parts.netloc if parts.scheme != "file" else parts.path.startswith("/") and parts.path.strip("/")):
        named = "file:///FOLDER" if parts.scheme == "file" else f"{parts.scheme}://BUCKET/FOLDER"
        return f"got {uri!r}; allowed: {named}"
    if parts.fragment or {".", ".."} & set(parts.path.split("/")):
        return f"got {uri!r}; allowed: a path without '.', '..' and '#'"
    allowed = OPTIONS[parts.scheme]
    if unknown := [name for name, _ in query if name not in allowed]:
        return f"got the option {unknown[0]!r}; allowed: {', '.join(allowed) or 'none'}"
    return ""


def _has_secret(parts: SplitResult, query: list[tuple[str, str]]) -> bool:
    """Return whether a user, a password or a key is given; the 'user' of abfs is the name of its container.

    Also before the host of an endpoint: http://USER:PASSWORD@HOST.
    """
    user = parts.username if parts.scheme not in ("abfs", "abfss") else None
    anonymous = parts.scheme == "gs" and user == "anonymous"
    in_options = any(_SECRET.search(name) or "@" in value for name, value in query)
    return bool((user and not anonymous) or parts.password or in_options)


def options_of(uri: str) -> dict[str, str]:
    """Return the options after the path of an allowed URI."""
    return dict(parse_qsl(urlsplit(uri).query))


def below(uri: str, *names: str) -> str:
    """Return the URI of what lies below a folder: its options stay last."""
    parts = urlsplit(uri)
    path = "/".join([parts.path.rstrip("/"), *names])
    return _joined(parts, path)


def run_in(uri: str) -> tuple[str, str, str]:
    """Return a run's folder of runs, experiment and name; raises ValueError unless the URI ends with both names."""
    parts = urlsplit(uri)
    *folder, experiment, name = ["", "", *parts.path.strip("/").split("/")]
    if not re.fullmatch(r"[\w.-]+", experiment) or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"got {uri!r}; allowed: the URI of a run, as URI/<experiment>/<time>-<id>")
    path = "/".join(folder).strip("/")
    return _joined(parts, f"/{path}" if path else ""), experiment, name


def _joined(parts: SplitResult, path: str) -> str:
    """Return the URI with another path; urlunsplit drops the slashes of file:///FOLDER in some versions."""
    text = urlunsplit(parts._replace(path=path))
    return f"file://{path}" if parts.scheme == "file" else text
