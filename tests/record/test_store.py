"""Objects in a folder and in pyarrow's file system in memory."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyarrow import fs

from harness.errors import StoreError
from harness.record import store as module
from harness.record.store import Store, open_store
from tests.stores import folder_store


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(f"file://{tmp_path}/a/b")
    return Store(fs._MockFileSystem(datetime.now(UTC)), "bucket/below", "mock://bucket/below")


def test_an_object_is_written_listed_read_and_removed(store: Store) -> None:
    store.check()
    assert store.list() == []
    store.put("a/b/c.json", b"1")
    store.put("a/d.json", b"22")
    store.put("a/d.json", b"23")
    assert [one.name for one in store.list("a")] == ["a/b/c.json", "a/d.json"]
    assert [one.name for one in store.list("a", recursive=False)] == ["a/b", "a/d.json"]
    assert all(one.written for one in store.list("a"))
    assert store.get_all(["a/d.json", "a/b/c.json"]) == [b"23", b"1"]
    store.remove("a/d.json")
    assert [one.name for one in store.list("a")] == ["a/b/c.json"] and store.list("nowhere") == []


def test_reading_is_tried_again_and_what_is_not_there_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder_store(tmp_path)
    store.put("a", b"1")
    (tmp_path / "c.partial").write_bytes(b"half")
    assert [one.name for one in store.list()] == ["a"], "what is being written is no object"
    pauses: list[float] = []
    monkeypatch.setattr("harness.record.store.time.sleep", pauses.append)
    failures = iter([OSError("reset"), OSError("reset")])

    def work() -> str:
        if error := next(failures, None):
            raise error
        return "read"

    assert store._again(work) == "read" and pauses == [0.5, 1.0]
    with pytest.raises(StoreError, match="is not there"):
        store.get("b")
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("said", "uri", "expected"),
    [
        ("AWS Error ACCESS_DENIED during ListObjectsV2", "s3://b", "no access: .*from AWS_ACCESS_KEY_ID"),
        ("AWS Error NO_SUCH_BUCKET during PutObject", "s3://b", "is not there: "),
        ("curlCode: 7, Could not connect to server", "s3://b", "does not answer as it should: "),
        ("Could not create a OAuth2 access token", "gs://b", "no access: .*GOOGLE_APPLICATION_CREDENTIALS"),
        ("Failed to get token from DefaultAzureCredential", "abfs://c@a.x", "no access: .*AZURE_TENANT_ID"),
        ("signed with AKIAABCDEFGHIJKLMNOP", "s3://b", "signed with <redacted>"),
    ],
)
def test_an_error_is_one_line_with_what_to_do(said: str, uri: str, expected: str) -> None:
    text = module._explained(OSError(said), uri)
    assert re.search(expected, text) and "\n" not in text


def test_s3_has_one_short_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store("s3://bucket/a/b?endpoint_override=127.0.0.1:9&scheme=http")
    assert store.root == "bucket/a/b" and store.filesystem.type_name == "s3" and store.filesystem.region == "us-east-1"
    with pytest.raises(StoreError, match="does not answer as it should"):
        store.put("x", b"")
