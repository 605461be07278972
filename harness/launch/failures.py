"""The outcome of a failed worker group, and which of several failures was its cause."""

from __future__ import annotations

import linecache
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.errors import WorkloadError
from harness.launch.supervision import GroupEnd, Watchdog
from harness.plan.known_errors import UNUSED_PARAMETERS, with_remedy
from harness.plan.rows import Outcome
from harness.plan.trial import TrialResult, WorkerGroup
from harness.system.user_code import STANDARD, is_the_users

COLLATERAL = (
    "closed by peer",
    "connection reset",
    "connection refused",
    "connection was closed",
    "connection was likely closed",
    "broken pipe",
    "pair closure",
    "remote process exited",
    "communicator was aborted",
    "socket timeout",
    "timed out waiting",
    "connect timeout",
    "timed out connecting",
    "wait timeout after",
)
"""Messages of a healthy rank's collective when a peer is gone."""
COLLATERAL_TYPES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
ENDED_FOR_MEMORY = ("low on memory", "NODE_OUT_OF_MEMORY", "memory pressure")
"""Messages of Ray when its memory monitor killed a worker."""
LOADER_KILLED = "killed by signal: Killed"
"""Message of a rank whose loader worker was killed by SIGKILL."""
SCRIPT_KILLED = "the script's process ended (signal 9)"
"""Message of a rank whose script was killed by SIGKILL."""
FATAL = "Fatal Python error"
"""Start of the output of Python's fault handler, which does not run on SIGKILL."""
_DIED = re.compile(r"rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)")
"""torchrun's report of a rank that died."""
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_THREAD = re.compile(r"\n(?=(?:Current thread|Thread) 0x)")
AUTOGRAD = "/torch/autograd/"
WAITING = (
    *("/torch/distributed/", AUTOGRAD, "/torch/nn/parallel/distributed.py"),
    *("/harness/train/ranks.py", "/harness/launch/subgroups.py"),
)
"""Files in which a healthy rank waits for its peers: a collective, or a backward pass that ends in one."""
DISPATCH = "/torch/_ops.py"
"""The file of the call of any operator, a collective as any other."""
OURS = "/harness/"
IDLE = {"_wait_for_ends", "wait_for_turn"}
"""The functions in the stack of a rank that waits for a trial of other ranks (launch/subgroups.py)."""
TRAINS = ("run_script", "run_group")
"""The function in the stack of the training thread: of a script's process, which the rank's waits for, or of a rank."""


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file.rsplit('/', 1)[-1]}:{self.line})"


def primary(failures: Sequence[TrialResult], dead_ranks: Sequence[int] = ()) -> TrialResult:
    """Return the failure that caused the others: the first that does not read like a lost peer.

    If every rank only misses a peer, that peer's process or node is lost. ``dead_ranks``: the ranks that are known to
    have died without a report.
    """
    own = [failure for failure in failures if not _is_collateral(failure, certain=bool(dead_ranks))]
    if own:
        return own[0]
    first = failures[0]
    if not dead_ranks:
        return replace(first, outcome="lost", reason=f"a peer was lost: {first.reason}")
    rank = dead_ranks[0]
    detail = f"The process of rank {rank} terminated without a report. The error of its peer:\n\n{first.detail}"
    return replace(first, outcome="lost", reason=died(rank), error_type=None, error_rank=rank, detail=detail)


def died(rank: int, how: str | None = None) -> str:
    """Return the reason of a trial whose rank's process died; ``how``: its signal or exit code, if known."""
    return f"the process of rank {rank} terminated unexpectedly{f' ({how})' if how else ''}"


def explained(row: TrialResult, watchdog: Watchdog) -> TrialResult:
    """Return the row with the evidence of its rank: whether the host killed it for memory, and its last output."""
    rank = row.error_rank
    facts = {**row.facts, "freed_s": time.time() - watchdog.failed_at} if watchdog.failed_at else row.facts
    if rank is None:
        return replace(row, facts=facts)
    printed = watchdog.printed(rank)
    if row.outcome == "lost" and (last := last_line(printed)):
        row = replace(row, reason=f"{row.reason}; last line of the user's code: {last}")
    was_killed = (row.outcome == "lost" and not _ended_otherwise(row.reason, printed)) or any(
        sign in row.reason for sign in (LOADER_KILLED, SCRIPT_KILLED)
    )
    if was_killed and watchdog.killed_for_memory(rank):
        row = replace(row, outcome="oom", reason=f"the host ran out of memory: {row.reason}")
    detail = f"{row.detail}\n\nlast output of rank {rank}:\n{printed}" if printed else row.detail
    return replace(row, facts=facts, detail=detail)


def judged(rows: Iterable[TrialResult], group: WorkerGroup, end: GroupEnd, watchdog: Watchdog) -> list[TrialResult]:
    """Return the rows that the end of a group cost, with the evidence of their ranks and what was measured before."""
    of_trials = (of_its_trial(row, group, end) for row in rows)
    found = (explained(with_unused(row, group, end.stacks), watchdog) for row in of_trials)
    return [despite(lost_if_waiting(row, group), end.measured) for row in found]


def with_unused(row: TrialResult, group: WorkerGroup, stacks: Mapping[int, str]) -> TrialResult:
    """Return the row of a hang of ddp with its remedy if it looks like parameters that one rank alone did not use.

    Their gradients are never there, so that the rank leaves its backward pass while others wait in theirs for it.
    """
    trial = next(trial for trial in group.trials if trial.id == row.trial_id)
    waiting = [frames for frames in training_threads(stacks).values() if _waits(frames)]
    backward = [AUTOGRAD in frames[0].file for frames in waiting]
    beyond = (not inside and in_users_code(frames) is None for inside, frames in zip(backward, waiting, strict=True))
    searches = trial.cell.strategy_options.get("find_unused_parameters")
    if row.outcome != "timeout" or trial.cell.strategy != "ddp" or searches or not (any(backward) and any(beyond)):
        return row
    return replace(row, reason=f"{row.reason}; remedy: {UNUSED_PARAMETERS}")


def of_its_trial(row: TrialResult, group: WorkerGroup, end: GroupEnd) -> TrialResult:
    """Return the row with the trial whose rank failed, of those that ran at once; the driver knows the first of them.

    Of a group that hung, ranks that wait for the end of other trials have not failed.
    """
    finished = {result.trial_id for result in end.finished}
    turn = next((turn for turn in group.turns() if row.trial_id in [trial.id for trial in turn]), ())
    ranks = set(training_threads(end.stacks)) if row.error_rank is None else {row.error_rank}
    left = (trial for trial in turn if trial.id not in finished)
    failed = next((trial for trial in left if ranks and ranks <= {*group.ranks_of(trial)}), None)
    return replace(row, trial_id=failed.id) if failed else row


def lost_if_waiting(row: TrialResult, group: WorkerGroup) -> TrialResult:
    """Return the row as lost if memory ran out for a rank that waited, or beside another trial: it is tried again."""
    trial = next(trial for trial in group.trials if trial.id == row.trial_id)
    if row.outcome != "oom" or row.error_rank is None:
        return row
    if row.error_rank not in group.ranks_of(trial):
        return replace(row, outcome="lost", reason=f"{row.reason}, which waited for this trial")
    if len(group.variants) > 1:
        return replace(row, outcome="lost", reason=f"{row.reason}, beside the processes of other variants")
    return row


def despite(failure: TrialResult, measured: TrialResult | None) -> TrialResult:
    """Return a trial's measurement, if it was complete before the failure, which then costs its explanation alone."""
    if measured is None or measured.trial_id != failure.trial_id:
        return failure
    reason = f"{failure.outcome} after the measurement: {failure.reason}"
    return replace(measured, detail=failure.detail, facts={**measured.facts, "explain_error": reason})


def last_line(printed: str) -> str:
    """Return the innermost line of the user's code in the output of Python's fault handler; empty if there is none."""
    _, found, after = printed.rpartition(FATAL)
    return str(in_users_code(_frames(after) if found else []) or "")


def _ended_otherwise(reason: str, printed: str) -> bool:
    """Return whether a process is known to have ended by something other than SIGKILL, and so not by the kernel."""
    signals = re.findall(r"signal (\d+)", reason)
    return "exit code" in reason or any(number != "9" for number in signals) or FATAL in printed


def blamed(planned: Sequence[str], finished: Sequence[str], current: str | None, *, connected: bool) -> list[str]:
    """Return the trials to mark as failed when a group died without reporting.

    The current one; between two trials, and once the ranks are connected, the next; before that all; none if all
    have finished.
    """
    if current:
        return [current]
    left = [trial_id for trial_id in planned if trial_id not in set(finished)]
    return left[:1] if finished or connected else left


def from_hang(trial_ids: Sequence[str], stacks: Mapping[int, str]) -> Iterator[TrialResult]:
    """Yield a row for each trial to mark when a group hung; ``stacks``: the stack of each rank."""
    reason = "no step was completed within the time limit (limits.trial); the log holds the stack of each rank"
    rank, place = held_up_by(stacks) or (None, None)
    if place:
        reason += f"; rank {rank} in {place}"
    elif waits := waiting_places(stacks):
        reason += f"; {waits}"
    texts = (f"rank {number}:\n{stack or 'no stack received'}" for number, stack in sorted(stacks.items()))
    detail = f"{reason}\n\n" + "\n\n".join(texts)
    for trial_id in trial_ids:
        yield TrialResult(trial_id, "timeout", reason, error_rank=rank, detail=detail)


def blamed_on(left: Sequence[str], row: TrialResult, finished: Collection[str]) -> list[TrialResult]:
    """Return the row of a failure for the next trial that is ``left`` if its own has a result: it came between two."""
    if row.trial_id not in finished:
        return [row]
    return [replace(row, trial_id=left[0])] if left else []


def from_launch(trial_ids: Sequence[str], error: BaseException) -> Iterator[TrialResult]:
    """Yield a row for each trial to mark when fit() raised without a report from its ranks."""
    row = from_memory_monitor(_classify(error), error)
    yield from (replace(row, trial_id=trial_id) for trial_id in trial_ids)


def from_exit(trial_id: str, code: int | None, output: str, *, came_up: bool) -> TrialResult:
    """Return the row of a trial whose torchrun ended without a report from the ranks; ``output``: their last output.

    ``code`` is the exit code of torchrun; None if it was given up because no rank registered.
    """
    if not came_up:
        what = "none registered with the driver in time" if code is None else f"torchrun ended with exit code {code}"
        return TrialResult(trial_id, "error", f"the worker processes did not start: {what}", detail=output)
    named = _DIED.findall(output)
    if not named:
        return TrialResult(trial_id, "lost", f"torchrun itself terminated (exit code {code})", detail=output)
    rank, status = (int(number) for number in named[-1])  # the last is what torchrun calls the root cause
    means = f"signal {-status}" if status < 0 else f"exit code {status}"
    return TrialResult(trial_id, "lost", died(rank, means), error_rank=rank, detail=output)


def from_memory_monitor(row: TrialResult, error: BaseException | None) -> TrialResult:
    """Return the row of a lost trial, as oom if the error of fit() reports that Ray killed a rank for memory."""
    causes = {
        rank: cause
        for rank, cause in found_dead(error).items()
        if type(cause).__name__ in OUT_OF_MEMORY or any(sign in str(cause) for sign in ENDED_FOR_MEMORY)
    }
    if row.outcome != "lost" or not causes:
        return row
    rank, cause = next(iter(causes.items()))
    reason = f"the host ran out of memory: Ray's memory monitor killed rank {rank}"
    detail = f"{row.detail}\n\nrank {rank}: {type(cause).__name__}: {cause}"
    return replace(row, outcome="oom", reason=reason, error_rank=rank, detail=detail)


def _classify(error: BaseException) -> TrialResult:
    """Return the error of fit() as a row that still lacks its trial."""
    detail = f"{type(error).__name__}: {error}"
    failures: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    ended = found_dead(error)
    named = {**failures, **ended}
    detail += "".join(f"\n\nrank {rank}: {type(cause).__name__}: {cause}" for rank, cause in named.items())
    if not named:
        inner = getattr(error, "controller_failure", None) or error
        kind = type(inner).__name__
        if isinstance(inner, WorkloadError):  # of the user's datasets, which the controller makes
            return TrialResult("", "error", str(inner), error_type=kind, detail=detail)
        reason = f"the worker group did not start or was terminated: {kind}: {str(inner)[:300]}"
        return TrialResult("", "lost", reason, error_type=kind, detail=detail)
    rank, cause = next(iter((ended or named).items()))
    kind = type(cause).__name__
    if ended:
        return TrialResult("", "lost", died(rank, _how(cause)), error_type=kind, error_rank=rank, detail=detail)
    outcome: Outcome = "oom" if kind in OUT_OF_MEMORY else "error"
    reason = with_remedy(f"{kind} on rank {rank}: {' '.join(str(cause).split())[:300]}", str(cause))
    return TrialResult("", outcome, reason, error_type=kind, error_rank=rank, detail=detail)


def _how(cause: BaseException) -> str:
    """Return the exit code or signal that Ray reports of a dead worker, else the type of its error."""
    text = str(cause)
    if code := re.search(r"exit code (-?\d+)", text):
        return f"exit code {code[1]}"
    if signal := re.search(r"\bSIG[A-Z]{3,6}\b(?= received|$)", text):
        return signal[0]
    return type(cause).__name__


def found_dead(error: BaseException | None) -> dict[int, BaseException]:
    """Return why Ray found workers unhealthy, by rank; workers that raised are not among them."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    causes = {rank: getattr(failure, "health_check_failure", None) for rank, failure in failures.items()}
    return {rank: cause for rank, cause in causes.items() if cause is not None}


def _is_collateral(failure: TrialResult, *, certain: bool) -> bool:
    """Return whether a rank only reports a lost peer. ``certain``: one is lost, so any failed collective means that."""
    text = failure.reason.lower()
    collective = failure.error_type in COLLATERAL_TYPES and failure.outcome == "error"
    return collective and (certain or any(sign in text for sign in COLLATERAL))


def _frames(text: str) -> list[Frame]:
    return [Frame(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(text)]


def in_users_code(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame that is neither a library's nor the harness's; None if there is none."""
    return next((f for f in frames if is_the_users(f.file) and not any(part in f.file for part in WAITING)), None)


def training_threads(stacks: Mapping[int, str]) -> dict[int, list[Frame]]:
    """Return the frames of each rank's training thread, innermost first, without the ranks that the trial does not use.

    They are empty if a stack has no such thread.
    """
    found = {}
    for rank, stack in sorted(stacks.items()):
        threads = [_frames(thread) for thread in _THREAD.split("\n" + stack)]
        named = (frames for name in TRAINS for frames in threads if any(frame.name == name for frame in frames))
        frames = next(named, [])
        if not any(frame.name in IDLE for frame in frames):
            found[rank] = frames
    return found


def waiting_places(stacks: Mapping[int, str]) -> str:
    """Return 'waiting for other ranks: rank 0 in loss (own.py:12)': a place in the user's code if there is one."""
    places: dict[str, list[int]] = {}
    for rank, frames in training_threads(stacks).items():
        if _waits(frames):
            callers = (frame for frame in frames if not any(part in frame.file for part in (*WAITING, STANDARD)))
            places.setdefault(str(in_users_code(frames) or next(callers, frames[0])), []).append(rank)
    each = [f"rank {', '.join(map(str, ranks))} in {place}" for place, ranks in list(places.items())[:3]]
    return f"waiting for other ranks: {'; '.join(each)}" if each else ""


def _waits(frames: Sequence[Frame]) -> bool:
    """Return whether the innermost of these frames waits for other ranks: in a collective, or in wait() of a handle."""
    inside = next((frame for frame in frames if DISPATCH not in frame.file), None)
    if inside is None:
        return False
    return any(part in inside.file for part in WAITING) or ".wait()" in linecache.getline(inside.file, inside.line)


def held_up_by(stacks: Mapping[int, str]) -> tuple[int, Frame | None] | None:
    """Return the first rank that does not wait for the others, and its frame; None if there is no such rank.

    The frame is the innermost one of the user's code; without one, that of the harness.
    """
    threads = training_threads(stacks)
    for rank, frames in threads.items():
        if frames and not _waits(frames):
            ours = (frame for frame in frames if OURS in frame.file)
            return rank, in_users_code(frames) or next(ours, frames[0])
    without_stack = [rank for rank, frames in threads.items() if not frames]
    return (without_stack[0], None) if without_stack and len(without_stack) < len(stacks) else None
