"""URIs of stores as text: which are refused, and that no message repeats a secret."""

from __future__ import annotations

import pytest

from harness.system.uri import below, is_uri, problem_of, run_in


def test_a_uri_is_known_from_a_folder() -> None:
    assert all(map(is_uri, ["s3://b", "s3:/b", "gs://b/c", "file:///x", "ftp://x"]))
    assert not any(map(is_uri, ["results", "/a/b", "./s3:x", "a:b", "C:/x", "auto"]))


AZURE = "account.dfs.core.windows.net/a"
ALLOWED = ["s3://bucket", "s3://bucket/a/b?region=eu-west-1&endpoint_override=127.0.0.1:9000&scheme=http"]
ALLOWED += ["gs://bucket/a", "gs://anonymous@bucket/a", "file:///tmp/a"]
ALLOWED += [f"abfs://container@{AZURE}", f"abfss://container@{AZURE}"]
SECRET = [
    "s3://AKIAXXXX:hunter2@bucket/a",
    "s3://hunter2@bucket/a",
    "s3://user:hunter2/x@bucket",
    "gs://hunter2@bucket",
]
SECRET += [f"abfs://container:hunter2@{AZURE}", f"abfs://container@{AZURE}?sig=hunter2", "s3://bucket?hunter2"]
SECRET += ["https://account.blob.core.windows.net/a?sig=hunter2", "gs://bucket/a?project_id=hunter2@x"]
SECRET += [f"s3://bucket/a?{name}=hunter2&region=x" for name in ("access_key", "secret_key", "session_token")]
SECRET += [f"s3://bucket/a?endpoint_override={host}" for host in ("http://user:hunter2@host", "user%3Ahunter2%40host")]


@pytest.mark.parametrize("uri", ALLOWED)
def test_allowed(uri: str) -> None:
    assert problem_of(uri) == ""


@pytest.mark.parametrize("uri", SECRET)
def test_credentials_are_refused_and_not_repeated(uri: str) -> None:
    assert problem_of(uri) and "hunter2" not in problem_of(uri)


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("ftp://host/a", "got 'ftp://host/a'; allowed: a folder, or a URI of s3, gs, abfs, abfss, file, such as "),
        ("s3:/bucket", "got 's3:/bucket'; allowed: s3://BUCKET/FOLDER"),
        ("file://a", "got 'file://a'; allowed: file:///FOLDER"),
        ("file:///", "got 'file:///'; allowed: file:///FOLDER"),
        ("s3://bucket/../a", "allowed: a path without '.', '..' and '#'"),
        ("s3://bucket/a?regoin=x", "got the option 'regoin'; allowed: region, endpoint_override, scheme"),
        ("file:///a?region=x", "got the option 'region'; allowed: none"),
        ("s3://[bucket", "got what is no URI"),
    ],
)
def test_refused(uri: str, problem: str) -> None:
    assert problem in problem_of(uri)


@pytest.mark.parametrize("uri", ["s3://bucket", "s3://bucket/a/b?region=x", "file:///tmp/a", "abfs://c@a.dfs.x/p"])
def test_the_uri_of_a_run_leads_back_to_its_folder_of_runs(uri: str) -> None:
    run = below(uri, "scaling", "20261124-120000-ab12")
    assert run_in(run) == (uri, "scaling", "20261124-120000-ab12")
    assert run.endswith(uri.partition("?")[2])

    for short in ("s3://bucket", "s3://bucket/one", "file:///a"):
        with pytest.raises(ValueError, match="allowed: the URI of a run"):
            run_in(short)
