"""A run folder in an object store: its objects, and the copy of it in a local folder.

Below <experiment>/<time>-<id>/ the store holds the run's files under their own names, and:

    claims/<writer>.json          a writer: one invocation of the command. It states the lines that it follows
    trials/<writer>/<n>.json      the writer's n-th line of trials.jsonl, with the hashes of the line's files
    trials/<writer>/raw/...       these files (logs/... too), sent before

A trial is in the store once the object of its line is. trials.jsonl itself is sent at the end, for those who copy the
folder with other tools; the copy that is made here is put together from the lines. A writer sends in order and states
how many lines of each earlier writer it follows: a line that an earlier one sends after that, late, does not count, so
that no trial counts twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from harness.errors import RunFolderError, StoreError
from harness.plan.rows import Json
from harness.record.by_rank import by_rank_name
from harness.record.folder import RunFolder
from harness.record.lines import raw_name
from harness.record.reading import object_of
from harness.record.schema import RAW
from harness.record.store import Store, open_store
from harness.system.files import replace_all, writing
from harness.system.uri import is_uri, problem_of, run_in

LINES, PLAN = "trials.jsonl", "plan.json"
HEAD = ("experiment.yaml", "experiment.resolved.yaml", "environment.jsonl", "estimate.json", PLAN)
"""The files that a resume needs besides the trials; the plan last, since it makes a folder that of a run."""
WRITER = ".writer"
"""The file of a local run folder that names the last writer which sent it; it stays there."""
CLAIMS, TRIALS = "claims", "trials"
_OWN = (CLAIMS, TRIALS)
"""The folders of a run in the store that a run folder does not have."""


class Claim(NamedTuple):
    """A writer. ``follows``: how many lines of each earlier writer count; None until the writer may write."""

    writer: str
    holder: Json
    released: bool
    follows: Mapping[str, int] | None
    written: datetime | None


class Line(NamedTuple):
    """A line of trials.jsonl in the store. ``files``: the hash of each file of the trial, by its path in the folder."""

    writer: str
    text: str
    files: Mapping[str, str]


class Copied(NamedTuple):
    """What a copy of a run in a local folder added to it: lines, and files that are no trial's."""

    lines: int
    files: int


def recorded_lines(folder: Path) -> list[str]:
    """Return the complete lines of a run folder's trials.jsonl, as they stand there."""
    file = folder / LINES
    if not file.exists():
        return []
    return file.read_bytes().decode("utf-8", errors="surrogateescape").split("\n")[:-1]


def files_of(folder: Path, line: str) -> list[str]:
    """Return the paths of a trial's own files, relative to the run folder; a line that a crash cut short has none."""
    try:
        row = object_of(line.encode("utf-8", errors="surrogateescape"))
        name = f"{row['trial_id']}-{row['attempt']}"
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    paths = [*(f"raw/{raw_name(table, name)}.parquet" for table in RAW), by_rank_name(name), row.get("log")]
    return [path for path in dict.fromkeys(paths) if path and (folder / path).is_file()]


def line_object(text: str, files: Mapping[str, str]) -> bytes:
    """Return the object of a line. Its last byte closes the JSON, so that no part of it passes for the whole."""
    return json.dumps({"line": text, "files": files}).encode()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_claims(store: Store, run: str) -> list[Claim]:
    """Return every claim of a run; raises StoreError. One that is gone, or is not whole, is not among them."""
    claims = []
    for name, written in store.list(f"{run}/{CLAIMS}"):
        try:
            content = object_of(store.get(name))
            follows = content["follows"]
            claims.append(
                Claim(
                    PurePosixPath(name).stem,
                    dict(content["holder"]),
                    bool(content["released"]),
                    None if follows is None else {str(writer): int(count) for writer, count in follows.items()},
                    written,
                )
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return claims


def newest_writer(store: Store, run: str, claims: Sequence[Claim]) -> Claim | None:
    """Return the writer that no other one follows; None if none has written yet. Raises StoreError if there are two."""
    writers = [claim for claim in claims if claim.follows is not None]
    followed = {name for claim in writers for name in claim.follows or ()}
    newest = [claim for claim in writers if claim.writer not in followed]
    if len(newest) > 1:
        names = ", ".join(claim.writer for claim in newest)
        raise StoreError(f"{store.address}: {run}: is damaged: two writers, {names}, follow each other's past")
    return newest[0] if newest else None


def read_lines_of(store: Store, run: str, claims: Sequence[Claim]) -> list[Line]:
    """Return the lines of a run that count, in order; raises StoreError if one is missing or damaged.

    The last object of the newest writer may be incomplete where a store shows such a thing; it then does not count.
    """
    newest = newest_writer(store, run, claims)
    if newest is None:
        return []
    there: dict[str, set[int]] = {}
    for name, _ in store.list(f"{run}/{TRIALS}"):
        writer, *rest = name.removeprefix(f"{run}/{TRIALS}/").split("/")
        if len(rest) == 1 and rest[0].removesuffix(".json").isdecimal():
            there.setdefault(writer, set()).add(int(rest[0].removesuffix(".json")))
    counts = {**(newest.follows or {}), newest.writer: len(there.get(newest.writer, ()))}
    numbered = [(writer, number) for writer, count in counts.items() for number in range(count)]
    lacking = next(((w, number) for w, number in numbered if number not in there.get(w, ())), None)
    if lacking:
        raise StoreError(f"{store.address}: {_line_name(run, *lacking)} is missing: an object was removed")
    contents = store.get_all(_line_name(run, *one) for one in numbered)
    return _parsed(store, run, numbered, contents, newest.writer)


def _parsed(
    store: Store, run: str, numbered: Sequence[tuple[str, int]], contents: Sequence[bytes], newest: str
) -> list[Line]:
    lines = []
    for place, ((writer, number), content) in enumerate(zip(numbered, contents, strict=True)):
        try:
            row = object_of(content)
            lines.append(
                Line(writer, str(row["line"]), {str(path): str(hash_) for path, hash_ in row["files"].items()})
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            if place == len(numbered) - 1 and writer == newest:
                break
            raise StoreError(f"{store.address}: {_line_name(run, writer, number)} is damaged") from None
    return lines


def _line_name(run: str, writer: str, number: int) -> str:
    return f"{run}/{TRIALS}/{writer}/{number:06d}.json"


def copy_down(store: Store, run: str, folder: Path, *, raw: bool = True) -> Copied:
    """Bring a local run folder up to what the store has; raises StoreError, RunFolderError or WriteError.

    A local folder that has more lines, not sent yet, or that was sent last, stays as it is: it is the truth. One that
    has other lines is refused. ``raw``: also the files of single trials, and the report. The plan is written last:
    without it a folder is none of a run.
    """
    there = store.list(run)
    if not any(name == f"{run}/{PLAN}" for name, _ in there):
        if (folder / PLAN).is_file():
            return Copied(0, 0)  # made here, and not sent yet
        raise StoreError(f"{store.address}: has no run {run}; allowed: URI/<experiment>/<time>-<id>")
    claims = read_claims(store, run)
    lines, newest = read_lines_of(store, run, claims), newest_writer(store, run, claims)
    with writing(folder):
        for name in ("raw", "tables", "figures", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).locked():
        here, remote = recorded_lines(folder), [line.text for line in lines]
        sent_last = newest is not None and newest.writer == _last_writer(folder)
        if here[: len(remote)] == remote and (len(here) > len(remote) or sent_last):
            return Copied(0, 0)
        if remote[: len(here)] != here:
            raise RunFolderError(
                f"{folder}: has trials that {store.address} lacks, and lacks some that are there: the run was resumed "
                "elsewhere before these were sent. Move it away; the run is then copied anew"
            )
        if raw:
            _copy_files(store, run, folder, lines[len(here) :])
        paths = [name.removeprefix(f"{run}/") for name, _ in there]
        files = _copy_rest(store, run, folder, [path for path in paths if raw or path in HEAD], remote)
    return Copied(len(remote) - len(here), files)


def _copy_files(store: Store, run: str, folder: Path, lines: Sequence[Line]) -> None:
    """Copy the files of trials, each compared with its hash."""
    wanted = [(line.writer, path, known) for line in lines for path, known in line.files.items()]
    for start in range(0, len(wanted), 64):  # not all in memory at once
        part = wanted[start : start + 64]
        contents = store.get_all(f"{run}/{TRIALS}/{writer}/{path}" for writer, path, _ in part)
        for (_, path, known), content in zip(part, contents, strict=True):
            if sha256(content) != known:
                raise StoreError(f"{store.address}: {run}: {path} is damaged: its hash is not that of its trial's line")
        _write(folder, {path: content for (_, path, _), content in zip(part, contents, strict=True)})


def _last_writer(folder: Path) -> str:
    """Return the name of the last writer that sent a local folder; '' if none did."""
    try:
        return (folder / WRITER).read_text()
    except FileNotFoundError:
        return ""


def _copy_rest(store: Store, run: str, folder: Path, paths: Sequence[str], lines: Sequence[str]) -> int:
    """Copy those files that are no trial's and write trials.jsonl; the plan last. Return the number of files."""
    wanted = [path for path in paths if path.split("/")[0] not in _OWN and path not in (LINES, PLAN)]
    contents = store.get_all(f"{run}/{path}" for path in wanted)
    _write(folder, dict(zip(wanted, contents, strict=True)))
    text = "".join(f"{line}\n" for line in lines)
    _write(folder, {LINES: text.encode("utf-8", errors="surrogateescape")} if lines else {})
    _write(folder, {PLAN: store.get(f"{run}/{PLAN}")})
    return len(wanted) + 1


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files below the folder; their names come from the store, and may not lead outside."""
    for path in contents:
        if not all(part not in ("", ".", "..") and "\\" not in part and "\0" not in part for part in path.split("/")):
            raise StoreError(f"got an object named {path!r}; allowed: names of files inside a run folder")
        with writing(folder / path):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
    replace_all((folder / path, content) for path, content in contents.items())


def on_this_machine(run: str | Path, local: str | Path) -> Path:
    """Return the folder of a run; that of a URI is copied to <local>/<experiment>/<time>-<id>. Raises StoreError."""
    if not is_uri(str(run)):
        return Path(run)
    if problem := problem_of(str(run)):
        raise StoreError(problem)
    try:
        runs, experiment, name = run_in(str(run))
    except ValueError as error:
        raise StoreError(str(error)) from None
    folder = Path(local) / experiment / name
    copy_down(open_store(runs), f"{experiment}/{name}", folder)
    return folder


def runs_below(store: Store, experiment: str) -> list[str]:
    """Return the runs of an experiment in the store, as <experiment>/<time>-<id>, by name."""
    there = store.list(experiment, recursive=False)
    return [name for name, _ in there if "/" in name]
