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
from harness.record.folder import FOLDERS, RunFolder
from harness.record.lines import by_rank_name, raw_name
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
    """A line of trials.jsonl in the store. ``files``: the hash of each file of the trial, by its path in the folder.

    ``place``: the folder of the store in which the line and its files are.
    """

    place: str
    text: str
    files: Mapping[str, str]


def recorded_lines(folder: Path, start: int = 0) -> list[str]:
    """Return the complete lines of a run folder's trials.jsonl from a byte on, as they stand there."""
    file = folder / LINES
    if not file.exists():
        return []
    with file.open("rb") as content:
        content.seek(start)
        return content.read().decode("utf-8", errors="surrogateescape").split("\n")[:-1]


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


def read_lines_of(store: Store, run: str, newest: Claim | None) -> list[Line]:
    """Return the lines of a run that count, in order, given its newest writer; raises StoreError.

    One that is missing or damaged is an error. The last object of the newest writer may be incomplete where a store
    shows such a thing; it then does not count.
    """
    if newest is None:
        return []
    own = f"{run}/{TRIALS}/{newest.writer}/"
    there = {name for name, _ in store.list(f"{run}/{TRIALS}")}
    sent = sum(name.startswith(own) and name.removeprefix(own).removesuffix(".json").isdecimal() for name in there)
    counts = {**(newest.follows or {}), newest.writer: sent}
    names = [line_name(run, writer, number) for writer, count in counts.items() for number in range(count)]
    if lacking := [name for name in names if name not in there]:
        raise StoreError(f"{store.address}: {lacking[0]} is missing: an object was removed")
    lines = []
    for name, content in zip(names, store.get_all(names), strict=True):
        try:
            row = object_of(content)
            files = {str(path): str(hash_) for path, hash_ in row["files"].items()}
            lines.append(Line(name.rpartition("/")[0], str(row["line"]), files))
        except (ValueError, TypeError, LookupError, AttributeError):
            if name != names[-1] or not sent:
                raise StoreError(f"{store.address}: {name} is damaged") from None
    return lines


def line_name(run: str, writer: str, number: int) -> str:
    return f"{run}/{TRIALS}/{writer}/{number:06d}.json"


def copy_down(store: Store, run: str, folder: Path, *, raw: bool = True) -> None:
    """Bring a local run folder up to what the store has; raises StoreError, RunFolderError or WriteError.

    A local folder that has more lines, not sent yet, or that was sent last, stays as it is: it is the truth. One that
    has other lines is refused. ``raw``: also the files of single trials, and the report. trials.jsonl and the plan are
    written last: without a plan a folder is none of a run.
    """
    there = [name.removeprefix(f"{run}/") for name, _ in store.list(run)]
    if PLAN not in there:
        if (folder / PLAN).is_file():
            return  # made here, and not sent yet
        raise StoreError(f"{store.address}: has no run {run}; allowed: URI/<experiment>/<time>-<id>")
    newest = newest_writer(store, run, read_claims(store, run))
    lines = read_lines_of(store, run, newest)
    with writing(folder):
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).locked():
        here, remote = recorded_lines(folder), [line.text for line in lines]
        last = (folder / WRITER).read_text() if (folder / WRITER).is_file() else ""
        if here[: len(remote)] == remote and (len(here) > len(remote) or (newest and newest.writer == last)):
            return
        if remote[: len(here)] != here:
            raise RunFolderError(
                f"{folder}: has trials that {store.address} lacks, and lacks some that are there: the run was resumed "
                "elsewhere before these were sent. Move it away; the run is then copied anew"
            )
        new = lines[len(here) :] if raw else ()
        wanted = [(f"{line.place}/{path}", path, known) for line in new for path, known in line.files.items()]
        others = [path for path in there if path.split("/")[0] not in _OWN and path not in (LINES, PLAN)]
        wanted += [(f"{run}/{path}", path, "") for path in others if raw or path in HEAD]
        _copy(store, folder, wanted)
        if remote:
            text = "".join(f"{line}\n" for line in remote)
            _write(folder, {LINES: text.encode("utf-8", errors="surrogateescape")})
        _copy(store, folder, [(f"{run}/{PLAN}", PLAN, "")])


def _copy(store: Store, folder: Path, wanted: Sequence[tuple[str, str, str]]) -> None:
    """Copy objects, each given by its name, its path in the folder, and the hash of its content if that is known."""
    for start in range(0, len(wanted), 64):  # not all in memory at once
        part = wanted[start : start + 64]
        contents = store.get_all(name for name, _, _ in part)
        for (name, _, known), content in zip(part, contents, strict=True):
            if known and sha256(content) != known:
                raise StoreError(f"{store.address}: {name} is damaged: its hash is not that of its trial's line")
        _write(folder, {path: content for (_, path, _), content in zip(part, contents, strict=True)})


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
