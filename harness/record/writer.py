"""The one writer of a run in an object store: its claim, and the objects that it sends.

pyarrow.fs has no conditional write, so the claim is made by two steps that S3, Google Cloud Storage and Azure order:
put an object of one's own, then list all of them. Of two that ask at the same time at least the later one sees the
other, and who sees another gives up; perhaps both do. A killed writer cannot withdraw its claim: it lapses LEASE_S
after its last renewal, by the store's clock, or at once if its process was on this machine and is gone. Claims are
renewed between trials only, so a longer trial lets one lapse, and another command may then resume the run: it states
how many of the earlier writer's lines it follows, and the earlier one, which looks before it sends, stops. What it may
still send between the look and the end of a request does not count. In a store whose listing lags behind (none of the
three) two writers could start; then readers see two of which neither follows the other, and refuse.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from harness.errors import StoreError
from harness.plan.rows import Json
from harness.record import mirror
from harness.record.store import Store
from harness.system.files import PARTIAL, replace_text

LEASE_S, RENEW_S = 300.0, 60.0
SAME_S = 2.0
"""Seconds by which two readings of a process's start may differ, since the clock is adjusted."""
NOT_SENT = ("raw", "logs", "checkpoints")
"""The folders whose files are sent with a trial's line, or not at all."""


class ClaimedError(StoreError):
    """Another writer has the run: its claim lapses in ``left_s`` unless it is renewed."""

    def __init__(self, address: str, claim: mirror.Claim, left_s: float) -> None:
        who = f"pid {claim.holder.get('pid')} on {claim.holder.get('host')}"
        super().__init__(
            f"{address}: another command writes it, or was killed while it did ({who}). If it was killed, its claim "
            f"lapses in {left_s:.0f} s"
        )
        self.claim, self.left_s = claim, left_s


class SupersededError(StoreError):
    """Another command has resumed the run: this one sends no more."""


class Writer:
    """Sends a run folder to a store. ``recorded`` and ``send`` may run in different threads."""

    def __init__(self, store: Store, run: str, folder: Path) -> None:
        self.store, self.run, self.folder = store, run, folder
        self.name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        self._follows: dict[str, int] | None = None
        self._lines: list[str] = []
        self._read = self._followed = self._sent = 0
        self._files: dict[str, tuple[int, int]] = {}
        """What was sent of the files that are no trial's: modification time and size."""
        self._hashes: dict[str, str] = {}
        """Of the files of the next trial that are sent: a slow store may take more than one gap for them."""
        self._claims: set[str] = set()
        self._renewed = -LEASE_S

    # -- the claim --------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Become the writer of the run; raises ClaimedError if another one is, StoreError if the store has more."""
        self._put_claim(released=False)
        try:
            claims = mirror.read_claims(self.store, self.run)
            for claim, left_s in self._alive(claims):
                raise ClaimedError(f"{self.store.address}: {self.run}", claim, left_s)
            newest = mirror.newest_writer(self.store, self.run, claims)
            remote = [line.text for line in mirror.read_lines_of(self.store, self.run, newest)]
            if mirror.recorded_lines(self.folder)[: len(remote)] != remote:
                raise StoreError(
                    f"{self.store.address}: {self.run}: was resumed elsewhere while this command started; repeat it"
                )
            earlier = dict(newest.follows or {}) if newest else {}
            of_newest = {newest.writer: len(remote) - sum(earlier.values())} if newest else {}
            self._follows = {**earlier, **of_newest}
            self._followed = self._sent = len(remote)
            self._claims = {self.name, *(claim.writer for claim in claims)}
            replace_text(self.folder / mirror.WRITER, self.name)
            self._put_claim(released=False)
        except BaseException:
            with suppress(StoreError):  # it lapses, and has written nothing
                self.store.remove(self._claim_name)
            raise
        self.recorded()

    def _alive(self, claims: list[mirror.Claim]) -> Iterator[tuple[mirror.Claim, float]]:
        """Yield other writers' claims, with the time until they lapse: not released, not followed, renewed lately."""
        followed = {name for claim in claims for name in claim.follows or ()}
        own = next((claim.written for claim in claims if claim.writer == self.name), None)
        for claim in claims:
            if claim.writer in followed or claim.writer == self.name or claim.released or _is_gone(claim.holder):
                continue
            age = (own - claim.written).total_seconds() if own and claim.written else 0.0
            if age < LEASE_S:
                yield claim, LEASE_S - age

    def stands(self, refused: ClaimedError) -> bool:
        """Return whether the claim that refused this writer stands; raises ClaimedError once it has been renewed."""
        alive = {claim.writer: claim for claim, _ in self._alive(mirror.read_claims(self.store, self.run))}
        now = alive.get(refused.claim.writer)
        if now and now.written != refused.claim.written:
            raise ClaimedError(f"{self.store.address}: {self.run}", now, LEASE_S)
        return now is not None

    @property
    def _claim_name(self) -> str:
        return f"{self.run}/{mirror.CLAIMS}/{self.name}.json"

    def _put_claim(self, *, released: bool) -> None:
        content = {"holder": _holder(), "released": released, "follows": self._follows}
        self.store.put(self._claim_name, json.dumps(content).encode())
        self._renewed = time.monotonic()

    def _keep_claim(self) -> None:
        """Renew the claim if it is old; raises SupersededError if another writer has followed this one."""
        there = {Path(name).stem for name, _ in self.store.list(f"{self.run}/{mirror.CLAIMS}")}
        new = mirror.read_claims(self.store, self.run) if there - self._claims else ()
        if any(self.name in (claim.follows or ()) for claim in new):
            raise SupersededError(f"{self.store.address}: {self.run}: was resumed by another command")
        if time.monotonic() - self._renewed > RENEW_S:
            self._put_claim(released=False)

    def release(self) -> None:
        """End the claim, so that another command may follow at once; raises StoreError."""
        self._keep_claim()
        self._put_claim(released=True)

    # -- sending ----------------------------------------------------------------------------------------------

    def recorded(self) -> None:
        """Take note of the lines that are on disk now; only these are sent."""
        added = mirror.recorded_lines(self.folder, self._read)  # a run may have thousands of lines
        self._read += sum(len(line.encode("utf-8", errors="surrogateescape")) + 1 for line in added)
        self._lines = [*self._lines, *added]

    @property
    def waiting(self) -> int:
        """The number of recorded trials that are not in the store."""
        return len(self._lines) - self._sent

    def send(self, may: Callable[[], bool], *, everything: bool = False) -> bool:
        """Send what is not in the store yet, in order, each object while ``may()``; return whether all was sent.

        ``everything``: also the files that are no trial's, such as the report. Raises StoreError.
        """
        if not may():
            return False
        self._keep_claim()
        for name, content in self._left(everything=everything):
            if not may():
                return False
            self.store.put(name, content)
        return True

    def _left(self, *, everything: bool) -> Iterator[tuple[str, bytes]]:
        """Yield the objects that are not in the store yet, in order; each counts as sent once the next is asked for.

        The files of a trial come before its line, and all trials before the files that are no trial's.
        """
        while self.waiting:
            line, name = self._lines[self._sent], mirror.line_name(self.run, self.name, self._sent - self._followed)
            for path in mirror.files_of(self.folder, line):
                if path not in self._hashes:
                    content = (self.folder / path).read_bytes()
                    yield f"{self.run}/{mirror.TRIALS}/{self.name}/{path}", content
                    self._hashes[path] = mirror.sha256(content)
            yield name, mirror.line_object(line, self._hashes)
            self._sent, self._hashes = self._sent + 1, {}
        for path in self._others() if everything else mirror.HEAD:
            file = self.folder / path
            state = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None
            if state and self._files.get(path) != state:
                yield f"{self.run}/{path}", file.read_bytes()
                self._files[path] = state

    def _others(self) -> Iterator[str]:
        """Yield the paths of all files that are no trial's; the plan and trials.jsonl last."""
        found = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        paths = [path.relative_to(self.folder).as_posix() for path in found if path.suffix != PARTIAL]
        last = (mirror.LINES, mirror.PLAN)
        apart = (*NOT_SENT, mirror.WRITER, *last)
        yield from (path for path in paths if path.split("/")[0] not in apart and not path.startswith(".lock"))
        yield from last


def _holder() -> Json:
    """Return what identifies this process: another one of the same number, or on another machine, differs."""
    process = psutil.Process()
    return {"host": platform.node(), "machine": _machine(), "pid": process.pid, "started": process.create_time()}


def _machine() -> str:
    """Return what identifies this machine since its start, and the container's own numbering of processes."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return ""


def _is_gone(holder: Json) -> bool:
    """Return whether a claim's process was on this machine and has ended; False if that is not known."""
    here = (platform.node(), _machine())
    if not here[1] or (holder.get("host"), holder.get("machine")) != here:
        return False
    try:
        return abs(psutil.Process(int(holder["pid"])).create_time() - float(holder["started"])) > SAME_S
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, KeyError, ValueError, TypeError):
        return False
