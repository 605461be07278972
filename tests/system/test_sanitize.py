"""What is taken out of texts, and what stays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import torch
import yaml

from harness.launch.worker import failure
from harness.measure.environment import VARIABLES, capture_environment
from harness.system import sanitize
from tests.conftest import plan_of

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7\nabc\n-----END RSA PRIVATE KEY-----"
TOKENS = ("AKIAIOSFODNN7EXAMPLE", "xoxb-123456789012-abcdefghijkl", JWT, "sk-proj-" + "aB3_" * 10)
TOKENS += (*(f"{name}{'aB3' * 12}" for name in ("ghp_", "hf_", "AIza", "npm_")), "github_pat_" + "aB3_" * 10)
TOKENS += ("glpat-" + "aB3-" * 5, "sk-ant-" + "aB3-" * 10)


@pytest.mark.parametrize("token", TOKENS)
def test_known_token_formats_are_redacted(token: str) -> None:
    for output in (f"failed with {token}: no", f"'{token}'", f"https://host/{token}/x", f"a={token}", f"{token}\n"):
        shown = sanitize.redact_text(output)
        assert token not in shown and sanitize.MARK in shown


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("postgres://me:secret@db:5432/x", "postgres://<redacted>@db:5432/x"),
        ("https://user:p%40ss@host and https://host:80/a@b", "https://<redacted>@host and https://host:80/a@b"),
        ("Authorization: Bearer abcdefghijklmnop.qrst", "Authorization: Bearer <redacted>"),
        (f"key {KEY} end", "key <redacted> end"),
        ("login(api_key='abcdef123', user='me')", "login(api_key='<redacted>', user='me')"),
        ('{"password": "hunter2hunter2", "a": 1}', '{"password": "<redacted>", "a": 1}'),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY=<redacted>"),
        ("--auth-token=abcdefgh", "--auth-token=<redacted>"),
        ("https://h/x?a=1&sig=abcdefg%3D&b=2", "https://h/x?a=1&sig=<redacted>&b=2"),
    ],
)
def test_secrets_in_sentences_are_redacted(output: str, shown: str) -> None:
    assert sanitize.redact_text(output) == shown
    assert sanitize.redact_text(shown) == shown


@pytest.mark.parametrize(
    "output",
    [
        "ValueError on rank 0: 4,944 tokens/s, unit: tokens",
        "optimizer.lr=0.1, max_tokens=100000, pad_token='<|endoftext|>'",
        "KeyError: 'accuracy'",
        "too few devices: needs 16 on one node, has 8 + 8 GPUs",
        "5df1d8684bf9-b0",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "git@github.com:someone/something.git",
        'File "/home/me/task-force-one-and-a-half/risk-management-of-something.py", line 3',
        "sort_keys=True, key=lambda row: row['x']",
        "CosineAnnealingLR, resnet18, synthetic_device",
    ],
)
def test_other_text_is_unchanged(output: str) -> None:
    assert sanitize.redact_text(output) == output
    assert sanitize.redact_text(f"{output} \udcff.txt").encode().endswith(b" \\udcff.txt"), "it can be written"


PARTS = ("sk-", "a", "a:", "http://", "://a:b", "password=", "eyJaaaaaaaaa.", "-----BEGIN A PRIVATE KEY-----")


@pytest.mark.parametrize("part", PARTS)
def test_a_long_message_costs_no_more_than_its_length(part: str) -> None:
    """A pattern that looks back and forth over it would take minutes."""
    start = time.process_time()
    sanitize.redact_text(part * (100_000 // len(part)))
    assert time.process_time() - start < 30.0


def test_values_of_secret_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("LONGER_SECRET", "0123456789abcdef-and-more")
    monkeypatch.setenv("DEBUG_TOKEN", "on")
    monkeypatch.setenv("SSH_KEY_FILE", str(tmp_path))
    monkeypatch.setenv("EDITOR", "some-editor")
    output = f"0123456789abcdef, 0123456789abcdef-and-more, on, {tmp_path}, some-editor"
    assert sanitize.redact_text(output) == f"<redacted>, <redacted>, on, {tmp_path}, some-editor"


def test_plain_values_keep_their_shape() -> None:
    value = {"lr": 0.1, "api_key": "abc", "hf_token": "", "betas": [0.9, 0.999], "deep": {"password": "x", "n": None}}
    expected = {**value, "api_key": sanitize.MARK, "deep": {"password": sanitize.MARK, "n": None}}
    assert sanitize.plain(value) == expected
    assert sanitize.plain(expected) == expected
    row = sanitize.redact_row({"options": {"workload.password": "correct horse", "width": 8}})
    assert row["options"] == {"width": 8, "workload.password": "<redacted>"}


@pytest.mark.parametrize("name", ["MYTOKEN", "COMET_KEY", "DB_PASS", "NETRC_TOKEN"])
def test_variables_of_a_file_with_secret_names_are_redacted_wherever_they_stand(name: str) -> None:
    secret = "correct-horse"
    content = {"env": {name: secret, "NCCL_ALGO": "x"}, "grid": {f"env.{name}": [secret, None]}, "cells": [{name: 1}]}
    kept = sanitize.plain(content)
    assert kept["env"] == {name: sanitize.MARK, "NCCL_ALGO": "x"}
    assert kept["grid"] == {f"env.{name}": [sanitize.MARK, None]} and kept["cells"] == content["cells"]
    assert sanitize.redact_row({"options": {f"env.{name}": secret}})["options"] == {f"env.{name}": sanitize.MARK}
    assert secret not in sanitize.source(yaml.safe_dump(content), content)
    assert sanitize.plain({"env": {"TOKENIZERS_PARALLELISM": "false"}})["env"] == {"TOKENIZERS_PARALLELISM": "false"}
    grid = {"strategy": "single", "devices": 1, "per_device_batch_size": 8, f"env.{name}": [secret, None]}
    plan = plan_of(grid, env={"OWN": 1})
    texts = {str(group) for group in plan.groups} | {plan.labels.of_trial(trial) for trial in plan.trials}
    assert not any(secret in text for text in texts) and any(f"{name}={sanitize.MARK}" in text for text in texts), texts


def test_the_environment_holds_known_variables_but_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    monkeypatch.setenv("NCCL_SOME_SECRET", "1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    variables = capture_environment("n", [torch.device("cpu")])["variables"]
    assert variables["NCCL_DEBUG"] == "WARN"
    assert all(name.startswith(VARIABLES) for name in variables)
    assert "NCCL_SOME_SECRET" not in variables and len(variables) < len(os.environ)
    given = {"NCCL_DEBUG": "INFO", "TORCH_HUB_TOKEN": "abc", "GLOO_X": "redis://a:b@c/d"}
    assert sanitize.variables(given) == {"NCCL_DEBUG": "INFO", "GLOO_X": "redis://<redacted>@c/d"}


def test_a_worker_redacts_secrets_of_its_own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "correct-horse-battery")
    try:
        raise ValueError("cannot log in with correct-horse-battery")
    except ValueError as error:
        result = failure("t-b0", 0, error)
    assert result.reason == "ValueError on rank 0: cannot log in with <redacted>"
    assert "correct-horse" not in result.detail and "<redacted>" in result.detail


@pytest.mark.parametrize(
    "text",
    [
        "workload_options:\n  hub_token:     abc123def456\n",
        "workload_options:\n  password: |\n    abc123def456\n    more\n",
        "workload_options:\n  password: &a abc123def456\n  other: *a\n",
        "workload_options: {password: 'correct abc123def456'}\n",
        "workload_options:\n  api_key: [1, abc123def456]\n",
        "workload_options: {password: 123}\n",
        "workload_options: {secret: abc}\n",
        "workload_options: {credentials: {user: abc, lines: [123]}}\n",
    ],
)
def test_a_value_goes_by_its_key_however_the_file_writes_it(text: str) -> None:
    result = sanitize.source(text, yaml.safe_load(text))
    assert not any(part in result for part in ("abc", "123", "correct"))
    assert "<redacted>" in result and "workload_options" in result
    plain = "name: x  # why\ngrid: {devices: [1]}\n"
    assert sanitize.source(plain, yaml.safe_load(plain)) == plain, "without a secret it stays as it was written"


def tail_of(printed: str, most: int) -> str:
    with TemporaryFile() as file:
        file.write(printed.encode())
        file.flush()
        return sanitize.redacted_tail(file, most)


def test_many_keys_leave_no_line_of_any_and_a_short_file_is_read_whole() -> None:
    body = "\n".join(f"{number:02}Zm9vYmFyZm9vYmFyZm9v" for number in range(90))
    printed = "".join(KEY.replace("abc", body) + "\n" for _ in range(30))
    for shift in range(0, 4000, 97):  # wherever in a key the part that is read begins
        end = tail_of(printed + "." * shift + "\nthe end", 4000)
        assert end.endswith("the end") and "Zm9v" not in end
    assert tail_of("all of it", 100) == "all of it"


def test_of_one_endless_line_nothing_is_kept_that_may_be_the_rest_of_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "MARGIN", 1 << 10)
    token = "hf_" + "abcdefghij" * 5
    others = " hf_" + "0123456789" * 30  # with these taken out, all that was read is shorter than what is asked for
    for length in (sanitize.MARGIN + 400 - 30 - shift for shift in range(60)):
        end = tail_of("x" * 50 + token + "." * length, 400)
        assert end and set(end) == {"."}
        end = tail_of("x" * 50 + token + (others * 5)[:length], 400)
        assert not [at for at in range(len(token) - 8) if token[at : at + 8] in end]


@pytest.mark.parametrize("output", ["said ", "said\n", "\u2588\r"])
@pytest.mark.parametrize("shown", [70, 90])
@pytest.mark.parametrize(
    ("before", "secret"),
    [("", "ghp_" + "a1B2" * 9), ("password=", "hunter2" * 5), ("", KEY.replace("abc", "Zm9vYmFy\n" * 200))],
)
def test_the_end_of_a_file_begins_with_no_rest_of_a_secret(before: str, secret: str, shown: int, output: str) -> None:
    end = tail_of(output * 9000 + before + secret + "\n" + "." * (shown - 1), 100)
    assert len(end) <= 100 and end.endswith("." * (shown - 1))
    assert not [at for at in range(len(secret) - 8) if secret[at : at + 8] in end]
