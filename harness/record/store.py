"""Objects of a store (S3, Google Cloud Storage, Azure, or a folder) by pyarrow.fs: put, get, list, remove.

One attempt of a request is short, so that whoever waits for it waits seconds; callers decide when to try again. An
object appears whole or not at all: S3, Google Cloud Storage and Azure show it once it is complete, and in a folder it
is renamed when it is.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

import pyarrow as pa

from harness.errors import StoreError
from harness.system.files import PARTIAL
from harness.system.sanitize import redact_text
from harness.system.uri import CREDENTIALS, options_of, problem_of

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

T = TypeVar("T")
REQUEST_S, CONNECT_S = 5.0, 3.0
"""Timeouts of one attempt at a request to S3: without any byte, and until it is connected."""
GCS_S = 10
"""The time limit of Google Cloud Storage, of all attempts together."""
ATTEMPTS, PAUSE_S = 4, 0.5
"""How often a request is tried for which the command waits, and the pause after the first attempt, which doubles."""
AT_ONCE = 8
"""Objects that are read at the same time."""
WITHOUT_FOLDERS = ("s3", "gcs", "abfs")
"""The file systems of pyarrow in which an object needs no folder, and appears only once it is whole."""
_NO_ACCESS = ("access_denied", "credential", "invalid_access_key", "signature", "oauth2", "authentication", "forbidden")
_NOT_THERE = ("no_such_bucket", "not found", "does not exist", "containernotfound")


class Stored(NamedTuple):
    """An object: its name below the store's address, and when it was written, by the store's clock."""

    name: str
    written: datetime | None


@dataclass(frozen=True)
class Store:
    """The objects below one address. ``root``: the same place in the file system's own terms."""

    filesystem: FileSystem
    root: str
    address: str

    def put(self, name: str, content: bytes) -> None:
        """Write an object, in one attempt; raises StoreError."""
        self._once(lambda: self._put(name, content))

    def _put(self, name: str, content: bytes) -> None:
        with_folders = self.filesystem.type_name not in WITHOUT_FOLDERS
        path = self._path(name)
        partial = f"{path}{PARTIAL}" if with_folders else path
        if with_folders:
            self.filesystem.create_dir(path.rpartition("/")[0])
        with self.filesystem.open_output_stream(partial) as stream:
            stream.write(content)
        if with_folders:
            self.filesystem.move(partial, path)

    def get(self, name: str) -> bytes:
        """Return the content of an object; raises StoreError, after some attempts."""

        def read() -> bytes:
            with self.filesystem.open_input_stream(self._path(name)) as stream:
                return bytes(stream.read())

        return self._again(read)

    def get_all(self, names: Iterable[str]) -> list[bytes]:
        """Return the contents of objects, in order; raises StoreError."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self.get, names))

    def list(self, folder: str = "", *, recursive: bool = True) -> list[Stored]:
        """Return what is below a folder, by name: objects, or with ``recursive=False`` objects and folders."""
        from pyarrow.fs import FileSelector, FileType

        where = FileSelector(self._path(folder), allow_not_found=True, recursive=recursive)
        found = self._again(lambda: self.filesystem.get_file_info(where))
        wanted = [one for one in found if one.type == FileType.File or not recursive]
        start = len(self.root.rstrip("/")) + 1
        named = [Stored(one.path[start:], one.mtime) for one in wanted]
        return sorted(one for one in named if not one.name.endswith(PARTIAL))

    def check(self) -> None:
        """Write, list and remove an object; raises StoreError if the store cannot be used."""
        name = f".harness-{secrets.token_hex(8)}"
        self._again(lambda: self._put(name, b""))
        self.list("", recursive=False)
        self.remove(name)

    def remove(self, name: str) -> None:
        """Remove an object; raises StoreError."""
        self._once(lambda: self.filesystem.delete_file(self._path(name)))

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self.root.rstrip("/"), name) if part)

    def _once(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"{self.address}: {_explained(error, self.address)}") from error

    def _again(self, work: Callable[[], T]) -> T:
        for number in range(ATTEMPTS - 1):
            try:
                return self._once(work)
            except StoreError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    raise
            time.sleep(PAUSE_S * 2**number)
        return self._once(work)


def open_store(uri: str) -> Store:
    """Return the store at an address; connects to nothing yet. Raises StoreError."""
    if problem := problem_of(uri):
        raise StoreError(problem)
    from pyarrow import fs

    parts = urlsplit(uri)
    try:
        if parts.scheme == "s3":
            return Store(_s3(uri), f"{parts.netloc}{parts.path}".rstrip("/"), uri)
        known = options_of(uri)
        if parts.scheme == "gs":
            known.setdefault("retry_limit_seconds", str(GCS_S))
        filesystem, root = fs.FileSystem.from_uri(parts._replace(query=urlencode(known)).geturl())
    except (OSError, ValueError, pa.ArrowException) as error:
        raise StoreError(f"{uri}: {_explained(error, uri)}") from error
    return Store(filesystem, root, uri)


def _s3(uri: str) -> FileSystem:
    from pyarrow import fs

    known = options_of(uri)
    anywhere = any(os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION"))
    elsewhere = known.get("endpoint_override") or any(name.startswith("AWS_ENDPOINT_URL") for name in os.environ)
    region = known.get("region")
    if region is None and elsewhere:
        region = None if anywhere else "us-east-1"
    elif region is None:
        region = fs.resolve_s3_region(urlsplit(uri).netloc)
    return fs.S3FileSystem(
        region=region,
        scheme=known.get("scheme"),
        endpoint_override=known.get("endpoint_override"),
        request_timeout=REQUEST_S,
        connect_timeout=CONNECT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        allow_delayed_open=True,  # a small object is one request
        background_writes=False,
    )


def _explained(error: BaseException, uri: str) -> str:
    """Return one line on what a store answered, with what to do about it."""
    said = redact_text(" ".join(str(error).split()))[:300]
    lower, scheme = said.lower(), urlsplit(uri).scheme
    if isinstance(error, FileNotFoundError) or any(sign in lower for sign in _NOT_THERE):
        return f"is not there: {said}"
    if scheme in CREDENTIALS and any(sign in lower for sign in _NO_ACCESS):
        return f"no access: {said}. Credentials are taken from {CREDENTIALS[scheme]}"
    return f"does not answer as it should: {said}"
